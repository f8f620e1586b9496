"""Worker records: who may write. Ownership is the generation and, within it, the worker id of the granted claim.

Checks in one order: inbox, form, run, token, generation, owner. What fails is refused with a receipt, answered to its
own inbox and kept as evidence; it never enters the run. What comes from the holder, nearly all there is, has the ids
that were in order when the lease was granted: only the form of others' records is looked at.
"""

from __future__ import annotations

from typing import Any

import msgspec

from onepen.processors import leases, reports, settling
from onepen.processors.turn import Turn
from onepen.schemas.ids import id_ok
from onepen.schemas.limits import ACTION_RESULT_BYTES_MAX, REFUSED_RECEIPTS_PER_GENERATION
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import Reason
from onepen.schemas.strict_json import canonical, embed, well_formed
from onepen.schemas.worker_records import Claim, Release, Renew, Report, WorkerRecord


def judge(turn: Turn, record: WorkerRecord) -> None:
    """Apply a worker record, or refuse it."""
    if not 0 <= record.inbox < turn.rules.settings.signals_partitions:
        _evidence(turn, record, Reason.NO_INBOX)
        return
    reason = _no_right(turn, record)
    if not (reason is None and isinstance(record, _OF_THE_HOLDER) and record.no >= 1) and not _form_ok(record):
        _evidence(turn, record, Reason.INVALID)
        return
    if reason is None:
        reason = reports.report(turn, record) if isinstance(record, Report) else _of_the_lease(turn, record)
    elif isinstance(record, Report) and _repeated_final(turn, record):
        turn.notify(record, _kind(record), Reason.RECORDED, record.no)
        return
    if reason is not None:
        _evidence(turn, record, reason)
        if isinstance(record, Report) and reason not in _NO_EVIDENCE:
            settling.by_evidence(turn, record)
        run = turn.session.head.run
        awaited = run.report_no if reason is Reason.REPORT_GAP and run is not None else 0
        turn.notify(record, _kind(record), reason, awaited)
    elif turn.refused_events and isinstance(record, Report):
        _evidence(turn, record, Reason(turn.refused_events[0][1]), turn.refused_events)


_NO_EVIDENCE = frozenset((Reason.UNKNOWN_RUN, Reason.BAD_TOKEN, Reason.INVALID))


def _kind(record: WorkerRecord) -> str:
    return type(record).__name__.lower()


_OF_THE_HOLDER = (Report, Renew)
"""Records that only the holder has the right to send. They are numbered from 1."""


def _form_ok(record: WorkerRecord) -> bool:
    if record.generation < 1 or (isinstance(record, _OF_THE_HOLDER) and record.no < 1):
        return False
    return id_ok(record.worker_id) and id_ok(record.run_id)


def _repeated_final(turn: Turn, record: Report) -> bool:
    """A final report sent again after its run has ended, or while only children keep the run from its end (by which
    its sender has lost the right to write): it is recorded, and the worker may forget it."""
    run, last = turn.session.head.run, turn.session.head.last
    if run is not None and run.run_id == record.run_id:
        by, report_no = run.handed_back, run.report_no
    elif last is not None and last.run_id == record.run_id:
        by, report_no = (last.owner, last.generation), last.report_no
    else:
        return False
    return (
        by is not None
        and by == (record.worker_id, record.generation)
        and record.no <= report_no
        and _token_ok(turn, record)
    )


def _token_ok(turn: Turn, record: WorkerRecord) -> bool:
    return turn.rules.keys.valid(record.token, record.tenant_id, record.session_id, record.run_id, record.generation)


def _no_right(turn: Turn, record: WorkerRecord) -> Reason | None:
    head = turn.session.head
    run, run_id = head.run, record.run_id
    if run is None or run.run_id != run_id:
        if head.last is None or head.last.run_id != run_id:
            return Reason.UNKNOWN_RUN
        return Reason.RUN_ENDED if _token_ok(turn, record) else Reason.BAD_TOKEN
    if not _token_ok(turn, record):
        return Reason.BAD_TOKEN
    if record.generation != run.generation:
        return Reason.STALE_GENERATION
    if run.owner and run.owner == record.worker_id and run.inbox == record.inbox:
        return None
    if isinstance(record, Claim) or (isinstance(record, Release) and record.reason == leases.NO_ROOM):
        return None
    return Reason.NOT_OWNER


def _of_the_lease(turn: Turn, record: Claim | Renew | Release) -> Reason | None:
    match record:
        case Renew():
            return leases.renew(turn, record)
        case Claim():
            return leases.claim(turn, record)
        case Release():
            return leases.release(turn, record)


def _evidence(turn: Turn, record: WorkerRecord, reason: Reason, refused: tuple[tuple[int, str], ...] = ()) -> None:
    """The receipt of a refusal, bounded: the first per generation are written, the rest are counted."""
    if not _counted(turn, record):
        return
    detail: dict[str, Any] = {}
    if isinstance(record, Report):
        detail = _report_evidence(record, refused)
    turn.receipts.append(
        Receipt(
            kind="worker",
            tenant_id=record.tenant_id,
            session_id=record.session_id,
            partition=turn.moment.partition,
            offset=turn.moment.offset,
            at_ms=turn.now_ms,
            reason=reason,
            run_id=record.run_id[:128],
            generation=record.generation,
            worker_id=record.worker_id[:128],
            record=_kind(record),
            report_no=record.no if isinstance(record, Report) else None,
            detail=canonical(detail) if detail else None,
        )
    )


def _counted(turn: Turn, record: WorkerRecord) -> bool:
    """Count a refusal; False beyond the bound."""
    head = turn.session.head
    run = head.run
    if head.erased and run is None:
        head.refused_records += 1
        return False
    if run is not None and run.run_id == record.run_id:
        run.refused_records += 1
        return run.refused_records <= REFUSED_RECEIPTS_PER_GENERATION
    if head.last is not None:
        count = head.last.refused_records + 1
        head.last = msgspec.structs.replace(head.last, refused_records=count)
        return count <= REFUSED_RECEIPTS_PER_GENERATION
    head.refused_records += 1
    return head.refused_records <= REFUSED_RECEIPTS_PER_GENERATION


def _report_evidence(record: Report, refused: tuple[tuple[int, str], ...]) -> dict[str, Any]:
    """What a refused report said, as far as it fits: late results are evidence even when they change nothing."""
    left_bytes = ACTION_RESULT_BYTES_MAX
    shown = []
    for event in record.events[:100]:
        entry: dict[str, Any] = {"type": event.type[:128]}
        if len(event.payload) <= left_bytes and well_formed(event.payload):
            left_bytes -= len(event.payload)
            entry["payload"] = embed("application/json", event.payload)
        shown.append(entry)
    detail: dict[str, Any] = {"events": shown}
    if refused:
        detail["refused"] = [{"index": index, "reason": reason} for index, reason in refused]
    return detail
