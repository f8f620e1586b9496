"""Apply one event to the state of its session. Total, and strict: an illegal step is a bug and raises `AssertionError`.

Everything that events say about a run changes here and nowhere else, so folding the log rebuilds it. What the log does
not say (renewals, report numbers, the pending list, remembered ids) is kept by the modules that decide about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from onepen.processors.session import Action, Branch, LastRun, Run, Session, forgotten
from onepen.processors.state_keys import escaped, pair
from onepen.processors.transitions import legal
from onepen.schemas import events as ev
from onepen.schemas.events import EventDraft
from onepen.schemas.limits import ACTION_RESULT_BYTES_MAX, LISTED_MAX
from onepen.schemas.statuses import ActionState, BranchKind, RunStatus
from onepen.schemas.strict_json import canonical
from onepen.schemas.views import Checkpoint

Payload = dict[str, Any]
# A member of an enum costs a look-up of its own; what every event asks for has a name here.
_CANCELLING = RunStatus.CANCELLING
_APPROVAL, _SUBTASK = BranchKind.APPROVAL, BranchKind.SUBTASK


def evolve(session: Session, event: EventDraft, payload: Payload) -> None:
    """Apply `event` (whose payload is `payload`) to the working copy `session`."""
    kind = event.type
    if kind == ev.RUN_STARTED:
        _started(session, event, payload)
        return
    run, seq, generation = session.head.run, event.seq, event.generation
    assert run is not None, "an event without an active run"
    assert run.run_id == event.run_id, "an event of a run that is not active"
    assert seq == run.seq + 1, "sequence with a gap"
    assert generation >= run.generation, "a generation never falls"
    run.seq, run.generation = seq, generation
    handler = _HANDLERS.get(kind)
    if handler is not None:
        handler(session, run, event, payload)


def branch_name(kind: BranchKind, branch_id: str) -> str:
    """Name of a branch among the session's open branches."""
    return branches_of(kind) + escaped(branch_id)


def branches_of(kind: BranchKind) -> str:
    """What the names of all open branches of a kind begin with."""
    return kind + "/"


def _started(session: Session, event: EventDraft, payload: Payload) -> None:
    head = session.head
    assert head.run is None, "one active run per session"
    assert event.run_no == head.run_no + 1, "runs count from 1 without gap"
    assert event.seq == 1, "sequences count from 1"
    head.run_no = event.run_no
    head.run = Run(
        run_id=event.run_id,
        run_no=event.run_no,
        status=RunStatus.RUNNING,
        generation=event.generation,
        seq=1,
        start_input_id=payload["inputId"],
        policy_version=payload["policyVersion"],
        max_attempts=payload["maxAttempts"],
        timeout_at_ms=payload["timeoutAt"],
        started_ms=event.at_ms,
        lineage=payload["lineage"],
        recovery=payload["recovery"],
        user_id=payload["userId"],
        doubts=_doubts_of(session, event.run_id, payload["lineage"]),
    )


def _doubts_of(session: Session, run_id: str, lineage: str) -> tuple[tuple[str, str], ...]:
    """Actions of earlier runs of the lineage that are in doubt still."""
    if lineage == run_id:
        return ()
    return tuple(
        (action.name, action.key)
        for _, action in session.actions.items()
        if action.lineage == lineage and action.state == ActionState.IN_DOUBT
    )


def _move(run: Run, status: RunStatus) -> None:
    assert legal(run.status, status), f"illegal move {run.status} -> {status}"
    run.status = status


def _leased(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    assert not run.owner, "a lease has one owner"
    run.owner = payload["workerId"]
    run.inbox = payload["inbox"]
    run.lease_expires_ms = payload["leaseExpiresAt"]
    run.lease_ms = run.lease_expires_ms - event.at_ms
    run.had_owner = True
    run.offer_expires_ms = 0
    run.offers_unclaimed = 0


def _lease_ended(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    if run.status is RunStatus.CANCELLING:
        run.handed_back = (run.owner, run.generation)
    run.owner = ""
    run.lease_expires_ms = 0
    if event.type == ev.RUN_LEASE_LOST:
        run.losses += 1


def _cancel_requested(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    _move(run, RunStatus.CANCELLING)
    run.cancel_ms = event.at_ms
    run.cancel_deadline_ms = payload["cancelDeadlineAt"]
    run.cancel_reason = payload["reason"] or ""
    run.cancel_by = payload["by"]
    run.cancel_input_id = payload["inputId"]
    run.cancel_scope = payload["scope"]
    run.voided = ()
    run.offer_expires_ms = 0


def _finished(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    status = RunStatus(payload["terminalStatus"])
    _move(run, status)
    assert run.open_branches == 0, "a finished run is balanced"
    owner, generation = run.handed_back or (run.owner, run.generation)
    session.head.last = LastRun(run.run_id, run.run_no, status, generation, run.report_no, owner, run.refused_records)
    session.head.run = None


def _open(session: Session, run: Run, kind: BranchKind, branch_id: str, name: str, at_ms: int) -> None:
    branch = Branch(kind=kind, id=branch_id, name=name, started_ms=at_ms)
    before = session.branches.swap(branch_name(kind, branch_id), branch)
    assert before is None, "a branch opens once"
    run.open_branches += 1
    if kind is _APPROVAL:
        run.open_approvals += 1
    elif kind is _SUBTASK:
        run.open_children += 1


def _close(session: Session, run: Run, kind: BranchKind, branch_id: str, at_ms: int, status: str) -> None:
    branch = session.branches.swap(branch_name(kind, branch_id), None)
    assert branch is not None, "only an open branch ends"
    run.open_branches -= 1
    if kind is _APPROVAL:
        run.open_approvals -= 1
    elif kind is _SUBTASK:
        run.open_children -= 1
    if run.status is _CANCELLING:
        run.stopped_count += 1
        if len(run.stopped) < LISTED_MAX:
            took_ms = max(0, at_ms - run.cancel_ms)
            run.stopped = (*run.stopped, (kind, branch_id, branch.name, took_ms, status))


def _model_started(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    _open(session, run, BranchKind.MODEL_REQUEST, payload["turnId"], "", event.at_ms)


def _model_finished(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    _close(session, run, BranchKind.MODEL_REQUEST, payload["turnId"], event.at_ms, payload["status"])


def _tool_started(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    _open(session, run, BranchKind.TOOL, payload["toolCallId"], payload["toolName"], event.at_ms)
    limit = payload.get("progressRenewals")
    if limit is not None:
        run.idle_limits = (*run.idle_limits, (payload["toolCallId"], limit))


def _tool_finished(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    _close(session, run, BranchKind.TOOL, payload["toolCallId"], event.at_ms, payload["status"])
    if run.idle_limits:
        run.idle_limits = tuple(own for own in run.idle_limits if own[0] != payload["toolCallId"])


def _action(session: Session, payload: Payload) -> tuple[str, Action]:
    name = pair(payload["name"], payload["actionKey"])
    action = session.actions.get(name)
    assert action is not None, "an action was requested before anything else happens to it"
    return name, action


def _action_requested(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    name = pair(payload["name"], payload["actionKey"])
    before = session.actions.get(name)
    repeats_doubt = (
        before is not None
        and before.state == ActionState.IN_DOUBT
        and not forgotten(before, event.at_ms)
        and payload.get("resolution") == "repeat"
    )
    # Of a doubt that is repeated stays what its evidence is told by, until the repeat has a permit of its own.
    doubted = before if before is not None and repeats_doubt and before.run_id == run.run_id else None
    session.actions.put(
        name,
        Action(
            name=payload["name"],
            key=payload["actionKey"],
            args_digest=payload["argsDigest"],
            state=ActionState.WAITING,
            run_id=run.run_id,
            requested_ms=event.at_ms,
            lineage=run.lineage,
            honours_keys=bool(payload.get("honoursKeys", False)) or repeats_doubt,
            generation=0 if doubted is None else doubted.generation,
            report_no=0 if doubted is None else doubted.report_no,
            repeats_doubt=repeats_doubt,
        ),
    )
    run.action_requests += 1
    _open(session, run, BranchKind.ACTION, name, payload["name"], event.at_ms)
    if not repeats_doubt:
        no_doubt(run, payload["name"], payload["actionKey"])


def no_doubt(run: Run, name: str, key: str) -> None:
    """The action is in doubt no more."""
    if run.doubts:
        run.doubts = tuple(doubt for doubt in run.doubts if doubt != (name, key))


def _action_permitted(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    name, action = _action(session, payload)
    assert run.status is not RunStatus.CANCELLING, "nothing is permitted after a cancel"
    assert action.state in (ActionState.WAITING, ActionState.APPROVED), "one permit per request"
    session.actions.put(
        name,
        msgspec.structs.replace(
            action,
            state=ActionState.PERMITTED,
            report_no=payload["reportNo"],
            deadline_ms=payload["deadlineAt"],
            valid_ms=payload["validMs"],
            generation=run.generation,
        ),
    )


def _action_finished(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    name, action = _action(session, payload)
    assert action.state == ActionState.PERMITTED, "an effect needs its permit"
    result = canonical(payload["result"]) if "result" in payload else b""
    ended = ActionState(payload["status"])
    session.actions.put(
        name,
        msgspec.structs.replace(
            action,
            state=ended,
            result=result if 0 < len(result) <= ACTION_RESULT_BYTES_MAX else None,
            result_bytes=len(result),
            result_seq=event.seq,
            report_no=0,
        ),
    )
    _close(session, run, BranchKind.ACTION, name, event.at_ms, ended)
    no_doubt(run, action.name, action.key)


def _action_voided(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    name, action = _action(session, payload)
    assert action.state in (ActionState.WAITING, ActionState.APPROVED), "only an unpermitted action is void"
    session.actions.put(name, msgspec.structs.replace(action, state=ActionState.VOIDED))
    _close(session, run, BranchKind.ACTION, name, event.at_ms, ActionState.VOIDED)
    run.voided = (*run.voided, (action.name, action.key))[-LISTED_MAX:]


def _action_in_doubt(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    name, action = _action(session, payload)
    assert action.state == ActionState.PERMITTED or action.repeats_doubt, "only a permitted action can be in doubt"
    session.actions.put(name, msgspec.structs.replace(action, state=ActionState.IN_DOUBT))
    _close(session, run, BranchKind.ACTION, name, event.at_ms, ActionState.IN_DOUBT)
    if (action.name, action.key) not in run.doubts:
        run.doubts = (*run.doubts, (action.name, action.key))


def _subtask_started(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    _open(session, run, BranchKind.SUBTASK, payload["callId"], payload["sessionId"], event.at_ms)


def _subtask_finished(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    _close(session, run, BranchKind.SUBTASK, payload["callId"], event.at_ms, payload["status"])
    _end_wait(run, payload)


def _compaction_started(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    _move(run, RunStatus.COMPACTING)
    run.compaction_id = payload["compactionId"]
    run.compaction_deadline_ms = payload["deadlineAt"]
    _open(session, run, BranchKind.COMPACTION, payload["compactionId"], "", event.at_ms)


def _compaction_ended(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    if run.status is RunStatus.COMPACTING:
        _move(run, RunStatus.RUNNING)
    run.compaction_id = ""
    run.compaction_deadline_ms = 0
    _close(session, run, BranchKind.COMPACTION, payload["compactionId"], event.at_ms, event.type.rpartition("_")[2])
    if event.type == ev.COMPACTION_FINISHED:
        pointer = payload["checkpoint"]
        session.head.checkpoint = Checkpoint(
            uri=pointer["uri"],
            digest=pointer["digest"],
            size_bytes=pointer["bytes"],
            run_id=run.run_id,
            run_no=run.run_no,
            through_seq=pointer["throughSeq"],
        )


def _end_wait(run: Run, payload: Payload) -> None:
    """The event that ends a wait for a person or a child carries the new deadline (none: the run goes on waiting)."""
    if payload.get("timeoutAt") is not None and run.waiting_left_ms >= 0:
        run.timeout_at_ms = payload["timeoutAt"]
        run.waiting_left_ms = -1


def _approval_requested(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    name, action = _action(session, payload)
    session.actions.put(name, msgspec.structs.replace(action, approval_expires_ms=payload["expiresAt"]))
    _open(session, run, BranchKind.APPROVAL, name, payload["name"], event.at_ms)


def _approval_ended(session: Session, run: Run, event: EventDraft, payload: Payload) -> None:
    name, action = _action(session, payload)
    status = event.type.rpartition(".")[2]
    if event.type == ev.APPROVAL_ANSWERED:
        status = payload["decision"]
        state = ActionState.APPROVED if status == "approve" else action.state
        session.actions.put(
            name, msgspec.structs.replace(action, state=state, answer=status, answered_by=payload["inputId"])
        )
    _close(session, run, BranchKind.APPROVAL, name, event.at_ms, status)
    _end_wait(run, payload)


_HANDLERS: dict[str, Callable[[Session, Run, EventDraft, Payload], None]] = {
    ev.RUN_LEASED: _leased,
    ev.RUN_LEASE_LOST: _lease_ended,
    ev.RUN_RELEASED: _lease_ended,
    ev.RUN_CANCEL_REQUESTED: _cancel_requested,
    ev.RUN_FINISHED: _finished,
    ev.MODEL_STARTED: _model_started,
    ev.MODEL_FINISHED: _model_finished,
    ev.TOOL_STARTED: _tool_started,
    ev.TOOL_FINISHED: _tool_finished,
    ev.ACTION_REQUESTED: _action_requested,
    ev.ACTION_PERMITTED: _action_permitted,
    ev.ACTION_FINISHED: _action_finished,
    ev.ACTION_VOIDED: _action_voided,
    ev.ACTION_IN_DOUBT: _action_in_doubt,
    ev.SUBTASK_STARTED: _subtask_started,
    ev.SUBTASK_FINISHED: _subtask_finished,
    ev.COMPACTION_STARTED: _compaction_started,
    ev.COMPACTION_FINISHED: _compaction_ended,
    ev.COMPACTION_FAILED: _compaction_ended,
    ev.APPROVAL_REQUESTED: _approval_requested,
    ev.APPROVAL_ANSWERED: _approval_ended,
    ev.APPROVAL_EXPIRED: _approval_ended,
    ev.APPROVAL_VOIDED: _approval_ended,
}
