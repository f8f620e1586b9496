"""Reports of the holder: numbered, decided once, their events judged one by one (protocol section 6.7).

Each arm either appends an event or returns why not. In `cancelling` only ends, messages, `x.` events and the final
report are accepted; the table below says which event is which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from onepen.processors import actions, compaction, ending, pending, subtasks
from onepen.processors.evolve import branch_name
from onepen.processors.session import Run
from onepen.processors.turn import Turn, content_members
from onepen.schemas import events as ev
from onepen.schemas.ids import id_ok
from onepen.schemas.inputs import JSON
from onepen.schemas.limits import (
    ACTION_RESULT_BYTES_MAX,
    OPEN_BRANCHES_MAX,
    PROGRESS_RENEWALS_MAX,
    RECORD_BYTES_MAX,
    REFUSED_REPORTS_KEPT,
    REPORT_EVENTS_MAX,
)
from onepen.schemas.statuses import BranchKind, Disposition, Reason, RunStatus
from onepen.schemas.strict_json import canonical, embed, members_unchanged, parse_object
from onepen.schemas.worker_records import Report, ReportEvent, report_digest

_DIGESTS_KEPT = 16
# A member of an enum costs a look-up of its own; what every record asks for has a name here.
_CANCELLING = RunStatus.CANCELLING
Payload = dict[str, Any]
Arm = Callable[[Turn, Payload, bytes, int], Reason | None]


def report(turn: Turn, record: Report) -> Reason | None:
    """Judge a report of the holder. A number decided before changes nothing: the current view answers."""
    run, no = turn.run, record.no
    if no > run.report_no + 1:
        return Reason.REPORT_GAP
    digest = report_digest(record)
    if no <= run.report_no:
        kept = dict(run.report_digests).get(no)
        if kept is not None and kept != digest:
            return Reason.REPORT_CONFLICT
        turn.view_wanted = True
        return None
    if not _size_ok(record):
        return Reason.INVALID
    run.report_no = no
    run.idle_renewals = 0
    run.report_digests = (*run.report_digests, (no, digest))[-_DIGESTS_KEPT:]
    turn.view_wanted = True
    head = turn.session.head
    refused: list[tuple[int, str]] = []
    for index, event in enumerate(record.events):
        over = head.run is not run or not run.owner
        reason = Reason.RUN_ENDED if over else _judge(turn, run, event, no)
        if reason is not None:
            refused.append((index, reason.value))
    if refused:
        _keep_refused(turn, record, run, refused)
    return None


def _size_ok(record: Report) -> bool:
    """A report has 1-100 events and fits a record; what it says becomes events, so its size is checked before use."""
    events = record.events
    if not 1 <= len(events) <= REPORT_EVENTS_MAX:
        return False
    size_bytes = 0
    for event in events:
        size_bytes += len(event.payload)
    return size_bytes <= RECORD_BYTES_MAX


def _keep_refused(turn: Turn, record: Report, run: Run, refused: list[tuple[int, str]]) -> None:
    kept = (*run.refused, *((record.no, index, reason) for index, reason in refused))
    run.refused = kept[-REFUSED_REPORTS_KEPT:]
    turn.refused_events = tuple(refused)


def _judge(turn: Turn, run: Run, event: ReportEvent, no: int) -> Reason | None:
    kind, raw = event.type, event.payload
    arm = _ARMS.get(kind)
    if arm is None:
        if not kind.startswith(ev.WORKER_PREFIX) or not id_ok(kind):
            return Reason.UNKNOWN_TYPE
        arm = _plain(kind)
    if run.status is _CANCELLING and kind in _STARTS:
        return Reason.RUN_CANCELLING
    payload = parse_object(raw)
    if payload is None:
        return Reason.INVALID
    return arm(turn, payload, raw, no)


def _plain(event_type: str) -> Arm:
    def arm(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
        turn.emit(event_type, payload, raw)
        return None

    return arm


def _start(event_type: str, kind: BranchKind, id_member: str, name_member: str | None) -> Arm:
    def arm(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
        branch_id = payload.get(id_member)
        if not id_ok(branch_id) or (name_member is not None and not id_ok(payload.get(name_member))):
            return Reason.INVALID
        open_branches = turn.run.open_branches
        if open_branches and turn.session.branches.get(branch_name(kind, branch_id)) is not None:
            return Reason.ALREADY_OPEN
        if open_branches >= OPEN_BRANCHES_MAX:
            return Reason.TOO_MANY_BRANCHES
        own_limit = payload.get("progressRenewals")
        if own_limit is not None and not (type(own_limit) is int and 1 <= own_limit <= PROGRESS_RENEWALS_MAX):
            return Reason.INVALID
        turn.emit(event_type, payload, raw)
        return None

    return arm


def _end(event_type: str, kind: BranchKind, id_member: str, statuses: frozenset[str]) -> Arm:
    def arm(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
        branch_id, status = payload.get(id_member), payload.get("status")
        if not id_ok(branch_id) or not isinstance(status, str) or status not in statuses:
            return Reason.INVALID
        if turn.session.branches.get(branch_name(kind, branch_id)) is None:
            return Reason.NOT_OPEN
        turn.emit(event_type, payload, raw)
        return None

    return arm


def _applied(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    """The worker uses a steer: only now, and in the order of the log, it is consumed. Not while compacting."""
    if turn.run.status is RunStatus.COMPACTING:
        return Reason.COMPACTING
    steers = pending.steers(turn)
    input_id = payload.get("inputId")
    if not any(entry.input_id == input_id for entry in steers):
        return Reason.UNKNOWN_STEER
    if steers[0].input_id != input_id:
        return Reason.OUT_OF_ORDER
    known = turn.session.ids.get(steers[0].input_id)
    assert known is not None
    assert known.input is not None
    record = known.input
    members = {"inputId": record.input_id, "source": record.source, "userId": record.user_id}
    turn.emit(ev.INPUT_APPLIED, members | content_members(record.content))
    pending.remove(turn, record.input_id)
    turn.dispose(record.input_id, Disposition.CONSUMED, run_id=turn.run.run_id)
    settled = turn.session.ids.get(record.input_id)
    assert settled is not None
    turn.session.ids.put(record.input_id, msgspec.structs.replace(settled, input=None))
    return None


def _finished(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    """The final report, answered at once as `recorded`: there is no view of a run that has ended."""
    run = turn.run
    owner, inbox, run_id, generation = run.owner, run.inbox, run.run_id, run.generation
    refused, ended = _finish(turn, payload, raw)
    if ended is not None:
        turn.tell(owner, inbox, run_id, generation, ended.value, Reason.RECORDED, "report", no)
    return refused


def _finish(turn: Turn, payload: Payload, raw: bytes) -> tuple[Reason | None, RunStatus | None]:
    """In `cancelling` the status is `cancelled` and what the worker says is kept, to the byte, as its outcome."""
    status = payload.get("terminalStatus")
    if status not in ("completed", "failed", "cancelled"):
        return Reason.INVALID, None
    run = turn.run
    if run.status is RunStatus.CANCELLING:
        run.work_outcome = raw
        ending.close_work(turn, "cancelled")
        if run.open_branches:
            _hand_back(turn, payload, raw)
            return None, RunStatus.CANCELLING
        ending.finish_cancelled(turn, forced=False)
        return None, RunStatus.CANCELLED
    if status == "cancelled" or payload.keys() & _OURS or not isinstance(payload.get("retryable", False), bool):
        return Reason.INVALID, None
    members = members_unchanged(raw)
    if status == "completed":
        if run.open_branches > run.open_children:
            return Reason.STILL_OPEN, None
        ending.finish(turn, RunStatus.COMPLETED, members)
        return None, RunStatus.COMPLETED
    ending.close_all(turn, "failed")
    ending.finish(turn, RunStatus.FAILED, {"retryable": False} | members)
    return None, RunStatus.FAILED


def _hand_back(turn: Turn, payload: Payload, raw: bytes) -> None:
    """Only children are left: the holder is done, the run waits for them or for the cancel deadline. The outcome
    stands in this event; the head, which every record rewrites, keeps it only when it is small."""
    run = turn.run
    members = {"workerId": run.owner, "attempt": run.losses + 1, "reason": Reason.RECORDED.value}
    turn.emit(ev.RUN_RELEASED, members | {"workOutcome": embed(JSON, raw)})
    if len(raw) > ACTION_RESULT_BYTES_MAX:
        run.work_outcome = canonical({"terminalStatus": payload["terminalStatus"], "eventSeq": run.seq})
    run.generation += 1


_OURS = frozenset(
    (
        "forced",
        "inDoubt",
        "inDoubtCount",
        "queued",
        "queuedCount",
        "stopped",
        "stoppedCount",
        "voided",
        "workOutcome",
    )
)
"""Members of a terminal event that only the processor writes: a worker cannot claim them."""


_MODEL_ENDS = frozenset(("ok", "error", "aborted", "unknown"))
_TOOL_ENDS = frozenset(("ok", "error", "cancelled", "unknown"))

_ARMS: dict[str, Arm] = {
    ev.MODEL_STARTED: _start(ev.MODEL_STARTED, BranchKind.MODEL_REQUEST, "turnId", None),
    ev.MODEL_FINISHED: _end(ev.MODEL_FINISHED, BranchKind.MODEL_REQUEST, "turnId", _MODEL_ENDS),
    ev.MESSAGE_COMPLETED: _plain(ev.MESSAGE_COMPLETED),
    ev.TOOL_STARTED: _start(ev.TOOL_STARTED, BranchKind.TOOL, "toolCallId", "toolName"),
    ev.TOOL_FINISHED: _end(ev.TOOL_FINISHED, BranchKind.TOOL, "toolCallId", _TOOL_ENDS),
    ev.ACTION_REQUESTED: actions.requested,
    ev.ACTION_FINISHED: actions.finished,
    ev.SUBTASK_STARTED: subtasks.started,
    ev.COMPACTION_STARTED: compaction.started,
    ev.COMPACTION_FINISHED: compaction.finished,
    ev.COMPACTION_FAILED: compaction.failed,
    ev.INPUT_APPLIED: _applied,
    ev.RUN_FINISHED: _finished,
}
_STARTS = frozenset(
    (
        ev.MODEL_STARTED,
        ev.TOOL_STARTED,
        ev.ACTION_REQUESTED,
        ev.INPUT_APPLIED,
        ev.SUBTASK_STARTED,
        ev.COMPACTION_STARTED,
    )
)
