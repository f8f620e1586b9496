"""How a run ends, and what an end closes. `run.finished` is the last event of its run and frees the session.

Every end but `completed` closes what is open: model requests and tools end `unknown`, unpermitted actions and approvals
are voided, permitted actions go in doubt. So a finished run is always balanced.
"""

from __future__ import annotations

from typing import Any

import msgspec

from onepen.processors import compaction, erasing, pending, remembering, starting, subtasks
from onepen.processors.session import Action, Branch, Retry, Run
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.limits import ACTION_KEYS_KEPT_MS, ACTION_RESULT_BYTES_MAX, LISTED_MAX
from onepen.schemas.statuses import ActionState, BranchKind, Disposition, Mode, Reason, RunStatus
from onepen.schemas.strict_json import canonical, embed


def close_work(turn: Turn, reason: str) -> None:
    """End what only the holder could end: model requests and tools `unknown`, permitted actions in doubt, a compaction
    failed."""
    for _, branch in list(turn.session.branches.items()):
        if branch.kind is BranchKind.MODEL_REQUEST:
            turn.emit(ev.MODEL_FINISHED, {"turnId": branch.id, "status": "unknown"})
        elif branch.kind is BranchKind.TOOL:
            payload = {"toolCallId": branch.id, "toolName": branch.name, "status": "unknown"}
            turn.emit(ev.TOOL_FINISHED, payload)
        elif branch.kind is BranchKind.ACTION:
            _doubt(turn, branch, reason)
    compaction.close(turn, reason)


def _doubt(turn: Turn, branch: Branch, reason: str) -> None:
    action = turn.session.actions.get(branch.id)
    assert action is not None
    if action.state == ActionState.PERMITTED:
        turn.emit(ev.ACTION_IN_DOUBT, {"actionKey": action.key, "name": action.name, "reason": reason})


def void_unpermitted(turn: Turn, reason: str) -> None:
    """Void every action not yet permitted, its approval first."""
    for _, branch in list(turn.session.branches.items()):
        if branch.kind is BranchKind.APPROVAL:
            void_approval(turn, branch.id, reason)
    for _, branch in list(turn.session.branches.items()):
        if branch.kind is BranchKind.ACTION:
            action = turn.session.actions.get(branch.id)
            assert action is not None
            if action.state in (ActionState.WAITING, ActionState.APPROVED):
                void_action(turn, action, reason)


def void_action(turn: Turn, action: Action, reason: str) -> None:
    """End an action that never got its permit. Where it was asked again because an earlier permit of the same key is
    in doubt, that doubt stands: what may have happened is never forgotten."""
    kind = ev.ACTION_IN_DOUBT if action.repeats_doubt else ev.ACTION_VOIDED
    turn.emit(kind, {"actionKey": action.key, "name": action.name, "reason": reason})


def void_approval(turn: Turn, name: str, reason: str) -> None:
    action = turn.session.actions.get(name)
    assert action is not None
    turn.emit(ev.APPROVAL_VOIDED, {"actionKey": action.key, "name": action.name, "reason": reason})


def close_all(turn: Turn, reason: str) -> None:
    """Close everything; the terminal event then lists what this voided (a cancel lists all since it was decided)."""
    if turn.run.status is not RunStatus.CANCELLING:
        turn.run.voided = ()
    void_unpermitted(turn, reason)
    close_work(turn, reason)
    subtasks.close(turn, "aborted")


def finish(turn: Turn, status: RunStatus, payload: dict[str, Any]) -> None:
    """Write `run.finished`; if something is queued, start the next run in the same turn. Branches must be closed."""
    run = turn.run
    subtasks.close(turn, "detached")
    pending.carry_over(turn)
    listed: dict[str, Any] = {}
    if run.voided and status is not RunStatus.COMPLETED:
        listed["voided"] = _keys(run.voided)
    if run.doubts:
        listed["inDoubt"] = _keys(run.doubts[:LISTED_MAX])
        listed["inDoubtCount"] = len(run.doubts)
    terminal = {**payload, **listed, "terminalStatus": status.value}
    turn.emit(ev.RUN_FINISHED, terminal)
    _tell_parent(turn, run, status, payload)
    _settle_aborts(turn, run)
    _keep_for_retry(turn, run, status, payload)
    _release_input(turn, run)
    _mark_keys(turn, run)
    if turn.session.head.erased:
        erasing.purge(turn)
        return
    record = pending.next_startable(turn)
    if record is not None:
        starting.start_run(turn, record)
        turn.dispose(record.input_id, Disposition.CONSUMED, run_id=turn.run.run_id)


def _tell_parent(turn: Turn, run: Run, status: RunStatus, payload: dict[str, Any]) -> None:
    if run.parent is None:
        return
    value = payload.get("output", payload.get("error"))
    result = None if value is None else canonical(value)
    if result is not None and len(result) > ACTION_RESULT_BYTES_MAX:
        result = None
    turn.tell_parent(run.parent, run.start_input_id, run.run_id, status.value, None, result)


def _keep_for_retry(turn: Turn, run: Run, status: RunStatus, payload: dict[str, Any]) -> None:
    """Keep what a retry would take over, as long as one is accepted."""
    retryable = status is RunStatus.TIMED_OUT or (status is RunStatus.FAILED and _is_true(payload.get("retryable")))
    known = turn.session.ids.get(run.start_input_id)
    if not retryable or known is None or known.input is None:
        return
    until_ms = turn.now_ms + ACTION_KEYS_KEPT_MS
    kept = Retry(run_id=run.run_id, lineage=run.lineage, input=known.input, until_ms=until_ms)
    turn.session.retries.put(starting.LAST, kept)
    remembering.due_at(turn, until_ms + 1)


def _is_true(value: Any) -> bool:
    """`value` comes from a report as the text it was, or from the core as a bool."""
    return value is True or (value is not None and canonical(value) == b"true")


def _keys(pairs: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    return [{"name": name, "actionKey": key} for name, key in pairs]


_AWAIT_END = frozenset((Mode.ABORT, Mode.ERASE))


def _settle_aborts(turn: Turn, run: Run) -> None:
    for input_id in run.aborts:
        turn.dispose(input_id, Disposition.DONE, run_id=run.run_id)
    if run.aborts_overflow:
        for input_id, known in list(turn.session.ids.items()):
            if known.mode in _AWAIT_END and known.disposition is None and known.run_id == run.run_id:
                turn.dispose(input_id, Disposition.DONE, run_id=run.run_id)


def _release_input(turn: Turn, run: Run) -> None:
    known = turn.session.ids.get(run.start_input_id)
    if known is not None:
        turn.session.ids.put(run.start_input_id, msgspec.structs.replace(known, input=None))


def _mark_keys(turn: Turn, run: Run) -> None:
    """Action keys and call ids of the lineage are remembered for a while beyond its last run."""
    forget_ms = turn.now_ms + ACTION_KEYS_KEPT_MS
    if run.action_requests:
        for name, action in list(turn.session.actions.items()):
            if action.lineage == run.lineage:
                turn.session.actions.put(name, msgspec.structs.replace(action, forget_ms=forget_ms))
        remembering.due_at(turn, forget_ms + 1)
    if turn.session.calls.names():
        subtasks.keep_calls(turn, run.lineage, forget_ms)
        remembering.due_at(turn, forget_ms + 1)


def finish_cancelled(turn: Turn, *, forced: bool) -> None:
    """The terminal event as the receipt of the cancel (protocol section 7)."""
    run = turn.run
    queued = [entry.input_id for entry in turn.session.head.pending if entry.if_missed == "queue" or not entry.for_run]
    finish(
        turn,
        RunStatus.CANCELLED,
        {
            "forced": forced,
            "reason": run.cancel_reason or None,
            "by": run.cancel_by,
            "inputId": run.cancel_input_id,
            "stopped": [
                {"branch": kind, "id": branch_id, "name": name, "tookMs": took_ms, "status": status}
                for kind, branch_id, name, took_ms, status in run.stopped
            ],
            "stoppedCount": run.stopped_count,
            "voided": _keys(run.voided),
            "inDoubt": _keys(run.doubts[:LISTED_MAX]),
            "queued": queued[:LISTED_MAX],
            "queuedCount": len(queued),
            "workOutcome": embed("application/json", run.work_outcome) if run.work_outcome else None,
        },
    )


def end_by_force(turn: Turn, status: RunStatus, reason: Reason, payload: dict[str, Any]) -> None:
    """An end that the holder did not ask for: the generation is raised first, then everything open is closed."""
    run = turn.run
    owner, inbox = run.owner, run.inbox
    run.generation += 1
    close_all(turn, reason.value)
    run_id, generation = run.run_id, run.generation
    if status is RunStatus.CANCELLED:
        finish_cancelled(turn, forced=True)
    else:
        finish(turn, status, payload)
    if owner:
        turn.tell(owner, inbox, run_id, generation, status.value, reason)
