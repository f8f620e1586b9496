"""Cancel is a barrier (protocol section 7): `cancelled` is written only when everything it has to reach has ended."""

from __future__ import annotations

from onepen.processors import ending, pending, subtasks
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.inputs import Input
from onepen.schemas.limits import CHILD_CANCEL_AHEAD_MS
from onepen.schemas.statuses import ActionState, BranchKind, Reason, RunStatus, Scope

_ABORTS_LISTED = 32


def await_end(turn: Turn, record: Input) -> None:
    """The input gets its final disposition when the run has ended."""
    run = turn.run
    if len(run.aborts) < _ABORTS_LISTED:
        run.aborts = (*run.aborts, record.input_id)
    else:
        run.aborts_overflow = True


def request(turn: Turn, record: Input, *, reason: str | None = None, with_queue: bool = False) -> None:
    """Cancel the active run because of `record`; a second one changes nothing but may widen the scope.

    `reason` stands for the record's own, `with_queue` for the scope `run_and_queue`.
    """
    run = turn.run
    scope = Scope.RUN_AND_QUEUE if with_queue or record.scope == Scope.RUN_AND_QUEUE else Scope.RUN
    if run.status is RunStatus.CANCELLING:
        if scope == Scope.RUN_AND_QUEUE:
            pending.discard_all(turn)
            turn.view_wanted = True
        return
    turn.emit(
        ev.RUN_CANCEL_REQUESTED,
        {
            "reason": reason or record.reason,
            "by": record.user_id,
            "source": record.source,
            "inputId": record.input_id,
            "scope": scope.value,
            "cancelDeadlineAt": _deadline_ms(turn, record),
        },
    )
    ending.void_unpermitted(turn, "cancelled")
    subtasks.abort_children(turn, "cancelled")
    if scope == Scope.RUN_AND_QUEUE:
        pending.discard_all(turn)
    if not run.owner:
        run.generation += 1
        finish_if_quiet(turn)
        return
    turn.view_wanted = True


def _deadline_ms(turn: Turn, record: Input) -> int:
    """A child's deadline lies 5 s before its parent's, but never before the end of its own open permits, nor is it
    shorter than half of its policy's."""
    own_ms = turn.run_policy.cancel_ms
    if record.parent is None or not record.parent.cancel_deadline_ms:
        return turn.now_ms + own_ms
    permits = [
        action.deadline_ms
        for _, branch in turn.session.branches.items()
        if branch.kind is BranchKind.ACTION
        and (action := turn.session.actions.get(branch.id)) is not None
        and action.state == ActionState.PERMITTED
    ]
    wanted = min(turn.now_ms + own_ms, record.parent.cancel_deadline_ms - CHILD_CANCEL_AHEAD_MS)
    return max(wanted, turn.now_ms + own_ms // 2, *permits)


def finish_if_quiet(turn: Turn) -> None:
    """End a cancelling run that has no holder and nothing open."""
    run = turn.session.head.run
    if run is not None and run.status is RunStatus.CANCELLING and not run.owner and not run.open_branches:
        ending.finish_cancelled(turn, forced=False)


def deadline_passed(turn: Turn) -> None:
    """The holder did not confirm in time: raise the generation, close what is open, say so."""
    ending.end_by_force(turn, RunStatus.CANCELLED, Reason.FORCED, {})
