"""Reduce a batch of decoded records to the rows it changes. Pure: no clock, no I/O, no driver.

Rule 1: folding a log in one batch or in any cut of it gives the same rows; each step starts from the stored rows.
Rule 2: rows only move forward. An event at or below a row's (run, seq) changes nothing of that row.
Rule 3: foreign members of a payload are taken only when they have the declared type; they never fail the batch.
Rule 4: of an erased session no record makes a row, but for the receipts of its erase inputs; events still tell which
objects are to be deleted, and every record that there may be some which no event tells of. So nothing comes back, and
it does not matter what was there before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from onepen.schemas import events as ev
from onepen.schemas.errors import Poison
from onepen.schemas.events import Event
from onepen.schemas.ids import ID_CHARS_MAX, id_ok
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import ACTIVE, TERMINAL, RunStatus
from onepen.sinks.postgres.fold_actions import ACTION_TYPES, action_key, fold_action, fold_settlement
from onepen.sinks.postgres.members import (
    Payload,
    boolean_of,
    int32_of,
    int64_of,
    json_text,
    member_of,
    shown,
    text_of,
)
from onepen.sinks.postgres.object_uris import ALL_OBJECTS, object_uri
from onepen.sinks.postgres.payloads import check_writable, parsed, stored
from onepen.sinks.postgres.rows import (
    ActionKey,
    Changes,
    CheckpointRow,
    EventRow,
    InputRow,
    Placed,
    RefusedRow,
    RunRow,
    SessionKey,
    Stored,
    SubtaskRow,
)
from onepen.sinks.postgres.sessions import is_erase

__all__ = ["AT_MS_MAX", "check_record", "fold", "touched"]

AT_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999, the last moment that both sides can say."""

RECEIPT_KINDS: Final = frozenset(("input", "worker", "action", "notice"))

# Events of ours that may move the run's deadline; a worker's event with a member of that name moves nothing.
_DEADLINE_TYPES: Final = frozenset(
    (ev.RUN_STARTED, ev.APPROVAL_ANSWERED, ev.APPROVAL_EXPIRED, ev.APPROVAL_VOIDED, ev.SUBTASK_FINISHED)
)


def check_record(record: Event | Receipt) -> None:
    """Raise `Poison` for a decoded record that no row can be made of: it is dead-lettered, the next one is taken.

    Whatever the fold or a text column would refuse is refused here, so that no record parks its partition.
    """
    if not id_ok(record.session_id):
        raise Poison("invalid_id", "session_id")
    if not 0 <= record.at_ms <= AT_MS_MAX:
        raise Poison("invalid_time", str(record.at_ms))
    if isinstance(record, Event):
        _check_event(record)
    else:
        _check_receipt(record)


def _check_event(event: Event) -> None:
    if not id_ok(event.run_id):
        raise Poison("invalid_id", "run_id")
    if not id_ok(event.type):
        raise Poison("invalid_type", event.type[:ID_CHARS_MAX])
    payload = parsed(event.payload)
    if not isinstance(payload, dict):
        raise Poison("payload_not_json", "not an object")
    check_writable(event.payload, payload)
    if event.type == ev.RUN_FINISHED and text_of(payload, "terminalStatus") not in TERMINAL:
        raise Poison("unknown_status", str(payload.get("terminalStatus")))
    if event.seq < 1 or event.run_no < 1:
        raise Poison("no_sequence", f"run {event.run_no} seq {event.seq}")


def _check_receipt(receipt: Receipt) -> None:
    if receipt.kind not in RECEIPT_KINDS:
        raise Poison("unknown_kind", receipt.kind)
    detail = None if receipt.detail is None else parsed(receipt.detail)
    if receipt.detail is not None:
        check_writable(receipt.detail, detail)
    if receipt.kind == "action" and not (
        isinstance(detail, dict) and all(isinstance(detail.get(name), str) for name in ("name", "actionKey", "status"))
    ):
        raise Poison("settles_nothing", "name, actionKey or status is missing")


def touched(records: Iterable[Placed]) -> tuple[list[str], list[ActionKey]]:
    """Keys of the stored rows that `fold` must be given: runs and actions, in key order."""
    runs: set[str] = set()
    actions: set[ActionKey | None] = set()
    for placed in records:
        record = placed.record
        if isinstance(record, Event):
            runs.add(record.run_id)
            if record.type in ACTION_TYPES:
                actions.add(action_key(record, parsed(record.payload)))
        elif record.kind == "action":
            actions.add(action_key(record, _detail(record)))
    return sorted(runs), sorted(key for key in actions if key is not None)


def fold(before: Stored, records: Iterable[Placed]) -> Changes:
    """The changes of a batch that `check_record` has passed, in log order per partition. `before` is not changed."""
    changes = Changes()
    for placed in records:
        record = placed.record
        session = record.tenant_id, record.session_id
        if session in before.erased:
            _fold_erased(changes, session, record)
        elif isinstance(record, Event):
            _fold_event(before, changes, placed, record)
        else:
            _fold_receipt(before, changes, record)
    return changes


def _fold_erased(changes: Changes, session: SessionKey, record: Event | Receipt) -> None:
    changes.objects.add((*session, ALL_OBJECTS))
    if isinstance(record, Event):
        uri = object_uri(record.type, parsed(record.payload))
        if uri is not None:
            changes.objects.add((*session, uri))
    elif is_erase(record):
        _fold_input(changes, record)


def _fold_event(before: Stored, changes: Changes, placed: Placed, event: Event) -> None:
    value = parsed(event.payload)
    text, raw = stored(event.payload, value)
    changes.events.append(EventRow(event, placed.partition, placed.offset, text, raw))
    run = changes.runs.get(event.run_id)
    if run is None:
        known = before.runs.get(event.run_id)
        if known is not None and known.last_seq >= event.seq:
            return
        run = _new_run(event) if known is None else dataclasses.replace(known)
    elif run.last_seq >= event.seq:
        return
    changes.runs[event.run_id] = run
    _advance_run(run, event, value)
    if event.type in ACTION_TYPES:
        fold_action(before, changes, event, value)
    elif event.type in (ev.SUBTASK_STARTED, ev.SUBTASK_FINISHED):
        _fold_subtask(changes, event, value)
    elif event.type == ev.COMPACTION_FINISHED:
        changes.checkpoints.append(_checkpoint(event, value))


def _new_run(event: Event) -> RunRow:
    return RunRow(
        tenant_id=event.tenant_id,
        session_key=event.session_id,
        run_key=event.run_id,
        run_no=event.run_no,
        status=RunStatus.RUNNING,
        generation=event.generation,
        created_ms=event.at_ms,
        updated_ms=event.at_ms,
    )


def _advance_run(run: RunRow, event: Event, payload: Payload) -> None:
    run.last_seq = event.seq
    run.last_hash = event.hash
    run.generation = max(run.generation, event.generation)
    run.updated_ms = max(run.updated_ms, event.at_ms)
    if event.type in _DEADLINE_TYPES and "timeoutAt" in payload:
        run.timeout_ms = int64_of(payload, "timeoutAt")
    match event.type:
        case ev.RUN_STARTED:
            _begin_run(run, payload)
        case ev.RUN_LEASED:
            run.lease_owner = text_of(payload, "workerId")
            run.lease_expires_ms = int64_of(payload, "leaseExpiresAt")
            run.attempt = int32_of(payload, "attempt") or run.attempt
        case ev.RUN_LEASE_LOST | ev.RUN_RELEASED:
            run.lease_owner = run.lease_expires_ms = None
        case ev.RUN_CANCEL_REQUESTED:
            run.status = RunStatus.CANCELLING
            run.cancel_requested_ms = event.at_ms
            run.cancel_reason = text_of(payload, "reason")
        case ev.RUN_FINISHED:
            _finish_run(run, event, payload)
        case ev.COMPACTION_STARTED if run.status in ACTIVE and run.status != RunStatus.CANCELLING:
            run.status = RunStatus.COMPACTING
        case ev.COMPACTION_FINISHED | ev.COMPACTION_FAILED if run.status == RunStatus.COMPACTING:
            run.status = RunStatus.RUNNING
        case _:
            pass


def _begin_run(run: RunRow, payload: Payload) -> None:
    run.input_id = text_of(payload, "inputId")
    run.input_mode = text_of(payload, "inputMode")
    run.user_id = int64_of(payload, "userId")
    run.source = text_of(payload, "source")
    position = member_of(payload, "inputPosition")
    run.input_partition = int32_of(position, "partition")
    run.input_offset = int64_of(position, "offset")
    run.recovery = text_of(payload, "recovery")
    run.lineage = text_of(payload, "lineage")
    run.retry_of = text_of(payload, "retryOf")
    parent = member_of(payload, "parent")
    run.parent_session_key = text_of(parent, "sessionId")
    run.parent_run_key = text_of(parent, "runId")
    run.parent_call_id = text_of(parent, "callId")


def _finish_run(run: RunRow, event: Event, payload: Payload) -> None:
    run.status = run.terminal_status = str(payload["terminalStatus"])
    run.terminal_ms = event.at_ms
    run.terminal_reason = text_of(payload, "reason")
    run.retryable = boolean_of(payload, "retryable")
    run.forced = boolean_of(payload, "forced")
    run.lease_owner = run.lease_expires_ms = None


def _fold_subtask(changes: Changes, event: Event, payload: Payload) -> None:
    """Start and end fill columns of their own, so neither has to know the row that the other one made."""
    call_id = text_of(payload, "callId")
    if not id_ok(call_id):
        return
    assert call_id is not None
    key = event.tenant_id, event.session_id, event.run_id, call_id
    row = changes.subtasks.setdefault(key, SubtaskRow())
    if event.type == ev.SUBTASK_STARTED:
        row.child_session_key = text_of(payload, "sessionId")
        row.child_input_id = text_of(payload, "inputId")
        row.started_ms = event.at_ms
        return
    row.child_run_key = text_of(payload, "runId")
    row.status = text_of(payload, "status")
    row.reason = text_of(payload, "reason")
    row.result = json_text(payload["result"]) if "result" in payload else None
    row.ended_ms = event.at_ms


def _checkpoint(event: Event, payload: Payload) -> CheckpointRow:
    pointer = member_of(payload, "checkpoint")
    return CheckpointRow(
        tenant_id=event.tenant_id,
        session_key=event.session_id,
        run_key=event.run_id,
        run_no=event.run_no,
        seq=event.seq,
        uri=text_of(pointer, "uri"),
        digest=text_of(pointer, "digest"),
        size_bytes=int64_of(pointer, "bytes"),
        through_seq=int64_of(pointer, "throughSeq"),
        created_ms=event.at_ms,
    )


def _fold_receipt(before: Stored, changes: Changes, receipt: Receipt) -> None:
    if receipt.kind == "input":
        _fold_input(changes, receipt)
    elif receipt.kind == "action":
        fold_settlement(before, changes, receipt, _detail(receipt))
    else:
        changes.refused.setdefault((receipt.partition, receipt.offset), _refused(receipt))


def _detail(receipt: Receipt) -> Payload:
    value = None if receipt.detail is None else parsed(receipt.detail)
    return value if isinstance(value, dict) else {}


def _detail_text(receipt: Receipt) -> str | None:
    return None if receipt.detail is None else stored(receipt.detail, parsed(receipt.detail))[0]


def _fold_input(changes: Changes, receipt: Receipt) -> None:
    place, detail = (receipt.partition, receipt.offset), _detail_text(receipt)
    row = changes.inputs.get(place)
    if row is None:
        row = changes.inputs[place] = InputRow(receipt.tenant_id, receipt.session_id)
    row.input_id = _first(row.input_id, receipt.input_id)
    row.mode = _first(row.mode, receipt.mode)
    row.source = _first(row.source, receipt.source)
    row.user_id = receipt.user_id if row.user_id is None else row.user_id
    if receipt.verdict is not None and row.verdict is None:
        row.verdict, row.verdict_reason = shown(receipt.verdict), shown(receipt.reason)
        row.verdict_run_key, row.verdict_detail, row.verdict_ms = shown(receipt.run_id), detail, receipt.at_ms
    if receipt.disposition is not None and row.disposition is None:
        row.disposition, row.disposition_reason = shown(receipt.disposition), shown(receipt.reason)
        row.disposition_run_key, row.disposition_detail = shown(receipt.run_id), detail
        row.disposition_ms = receipt.at_ms


def _refused(receipt: Receipt) -> RefusedRow:
    return RefusedRow(
        tenant_id=receipt.tenant_id,
        session_key=receipt.session_id,
        run_key=shown(receipt.run_id),
        generation=receipt.generation,
        worker_id=shown(receipt.worker_id),
        record=receipt.kind if receipt.kind == "notice" else shown(receipt.record),
        report_no=receipt.report_no,
        reason=shown(receipt.reason),
        detail=_detail_text(receipt),
        input_id=shown(receipt.input_id),
        created_ms=receipt.at_ms,
    )


def _first(old: str | None, new: str | None) -> str | None:
    return old if old is not None else shown(new)
