"""Deadlines as records: which are armed, which have passed, and what a consumed timer does.

A timer is judged by the state it meets: same run, same generation, deadline really passed by `now`. Otherwise it leaves
no trace, so late, repeated and foreign timers are harmless.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from onepen.processors import approvals, cancellation, compaction, ending, leases, pending, remembering
from onepen.processors.evolve import branches_of
from onepen.processors.session import Run, Session
from onepen.processors.turn import Turn
from onepen.schemas.statuses import BranchKind, Reason, RunStatus, TimerKind
from onepen.schemas.timers import Timer

# A member of an enum costs a look-up of its own; what every record asks for has a name here.
_CANCELLING, _APPROVED = RunStatus.CANCELLING, BranchKind.APPROVAL
_OFFER, _LEASE, _RUN, _CANCEL = TimerKind.OFFER, TimerKind.LEASE, TimerKind.RUN, TimerKind.CANCEL
_APPROVAL, _COMPACTION, _QUEUED, _FORGET = (
    TimerKind.APPROVAL,
    TimerKind.COMPACTION,
    TimerKind.QUEUED,
    TimerKind.FORGET,
)


class Due(msgspec.Struct, frozen=True):
    """A timer to append. `length_ms` is the full length of an offer or lease, 0 for every other kind: the owner lets
    so much more time pass after it published an offer, took the partition over, or last failed to reach the broker."""

    timer: Timer
    length_ms: int


class _Armed(NamedTuple):
    """A deadline before anybody asks for its timer; every record asks for the earliest deadline of its session."""

    deadline_ms: int
    kind: TimerKind
    subject: str = ""
    length_ms: int = 0


def next_deadline_ms(session: Session) -> int:
    """The earliest armed deadline, 0 when nothing is armed."""
    return min([one.deadline_ms for one in _armed(session)], default=0)


def due(session: Session, now_ms: int) -> tuple[Due, ...]:
    """Every armed deadline that has passed at `now_ms`."""
    return tuple(_due(session, one) for one in _armed(session) if one.deadline_ms <= now_ms)


def armed(session: Session) -> Iterator[Due]:
    """All armed deadlines of a session."""
    for one in _armed(session):
        yield _due(session, one)


def _armed(session: Session) -> list[_Armed]:
    head = session.head
    found = [] if head.run is None else _of_run(session, head.run)
    for entry in head.pending:
        if entry.expires_ms:
            found.append(_Armed(entry.expires_ms, _QUEUED, entry.input_id))
    if head.next_forget_ms:
        found.append(_Armed(head.next_forget_ms + remembering.FORGET_SLACK_MS, _FORGET))
    return found


def _of_run(session: Session, run: Run) -> list[_Armed]:
    found = []
    if run.status is _CANCELLING:
        found.append(_Armed(run.cancel_deadline_ms, _CANCEL))
    elif run.timeout_at_ms:
        found.append(_Armed(run.timeout_at_ms, _RUN))
    if run.owner:
        found.append(_Armed(run.lease_expires_ms, _LEASE, "", run.lease_ms))
    elif run.offer_expires_ms:
        found.append(_Armed(run.offer_expires_ms, _OFFER, "", run.offer_ms))
    if run.compaction_deadline_ms:
        found.append(_Armed(run.compaction_deadline_ms, _COMPACTION, run.compaction_id))
    if run.open_approvals:
        for _, branch in session.branches.items(branches_of(_APPROVED)):
            action = session.actions.get(branch.id)
            assert action is not None
            found.append(_Armed(action.approval_expires_ms, _APPROVAL, branch.id))
    return found


def _due(session: Session, one: _Armed) -> Due:
    run = session.head.run
    if one.kind is _QUEUED or one.kind is _FORGET:
        run = None
    timer = Timer(
        tenant_id=session.tenant_id,
        session_id=session.session_id,
        kind=one.kind,
        run_id="" if run is None else run.run_id,
        generation=0 if run is None else run.generation,
        subject=one.subject,
        deadline_ms=one.deadline_ms,
    )
    return Due(timer, one.length_ms)


def consume(turn: Turn, timer: Timer) -> None:
    """Judge a timer record by the state it meets."""
    if timer.kind == TimerKind.QUEUED:
        if pending.expire(turn, timer.subject):
            turn.view_wanted = True
        return
    if timer.kind == TimerKind.FORGET:
        remembering.forget(turn)
        return
    run = turn.session.head.run
    if run is None or run.run_id != timer.run_id or run.generation != timer.generation:
        return
    _fire(turn, run, timer)


def _fire(turn: Turn, run: Run, timer: Timer) -> None:
    now_ms = turn.now_ms
    match timer.kind:
        case TimerKind.OFFER if not run.owner and 0 < run.offer_expires_ms <= now_ms:
            leases.offer_ended(turn)
        case TimerKind.LEASE if run.owner and run.lease_expires_ms <= now_ms:
            leases.lose(turn)
        case TimerKind.RUN if run.status is not RunStatus.CANCELLING and 0 < run.timeout_at_ms <= now_ms:
            payload = {"reason": "deadline", "retryable": True}
            ending.end_by_force(turn, RunStatus.TIMED_OUT, Reason.TIMED_OUT, payload)
        case TimerKind.CANCEL if run.status is RunStatus.CANCELLING and run.cancel_deadline_ms <= now_ms:
            cancellation.deadline_passed(turn)
        case TimerKind.COMPACTION if run.compaction_id == timer.subject and 0 < run.compaction_deadline_ms <= now_ms:
            compaction.deadline_passed(turn)
        case TimerKind.APPROVAL:
            approvals.expire(turn, timer.subject)
        case _:
            return
