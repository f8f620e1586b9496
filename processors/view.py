"""The view of a run for its holder: built from the state by one pure function, so a lost or late one is harmless."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from onepen.processors import pending
from onepen.processors.evolve import branches_of
from onepen.processors.session import Action, Run
from onepen.processors.turn import Turn
from onepen.schemas.inputs import content_bytes
from onepen.schemas.limits import VIEW_CONTENT_BYTES_MAX, VIEW_RESULT_BYTES_MAX
from onepen.schemas.statuses import ActionState, BranchKind
from onepen.schemas.views import ActionView, PendingSteer, RefusedEvent, SubtaskView, View


def build(turn: Turn, run: Run, *, with_contents: bool) -> View:
    """The next view of the active run, addressed to its owner."""
    session = turn.session
    head = session.head
    run.view_no += 1
    view = View(
        tenant_id=session.tenant_id,
        session_id=session.session_id,
        run_id=run.run_id,
        generation=run.generation,
        no=run.view_no,
        status=run.status,
        worker_id=run.owner,
        inbox=run.inbox,
        last_seq=run.seq,
        last_hash=head.last_hash,
        report_no=run.report_no,
        renewal_no=run.renewal_no,
        timeout_at_ms=run.timeout_at_ms or None,
    )
    beside = _beside(turn, run, with_contents)
    return replace(view, **beside) if beside else view


def _beside(turn: Turn, run: Run, with_contents: bool) -> dict[str, Any]:
    """What only some views have. (Python passes more than fifteen arguments by name through a dictionary, which took
    longer than all the rest of a view: so these are no arguments of every view.)"""
    head = turn.session.head
    beside: dict[str, Any] = {}
    if head.pending:
        beside["pending"], beside["contents_complete"] = _steers(turn, with_contents)
    if head.checkpoint is not None:
        beside["checkpoint"] = head.checkpoint
    if run.cancel_reason:
        beside["cancel_reason"] = run.cancel_reason
    if run.asked or run.action_requests:
        beside["actions"] = _actions(turn)
    if run.asked_calls or run.open_children:
        beside["subtasks"] = _subtasks(turn)
    if run.refused:
        beside["refused"] = _refused(run)
    return beside


def _refused(run: Run) -> tuple[RefusedEvent, ...]:
    return tuple([RefusedEvent(no=no, index=index, reason=reason) for no, index, reason in run.refused])


def _steers(turn: Turn, with_contents: bool) -> tuple[tuple[PendingSteer, ...], bool]:
    left_bytes = VIEW_CONTENT_BYTES_MAX if with_contents else 0
    fits = with_contents
    named: list[PendingSteer] = []
    for entry in pending.steers(turn):
        known = turn.session.ids.get(entry.input_id)
        assert known is not None
        assert known.input is not None, "a pending input is kept"
        left_bytes -= content_bytes(known.input.content)
        fits = fits and (left_bytes >= 0 or not named)
        named.append(
            PendingSteer(
                input_id=entry.input_id,
                user_id=known.user_id,
                source=known.source,
                with_content=fits,
                content=known.input.content if fits else None,
            )
        )
    return tuple(named), fits or not named


def _subtasks(turn: Turn) -> tuple[SubtaskView, ...]:
    run, session = turn.run, turn.session
    names = list(run.asked_calls)
    if run.open_children:
        opened = session.branches.items(branches_of(BranchKind.SUBTASK))
        names += [branch.id for _, branch in opened if branch.id not in names]
    left_bytes = VIEW_RESULT_BYTES_MAX
    shown = []
    for name in reversed(names):
        call = session.calls.get(name)
        if call is None:
            continue
        left_bytes -= len(call.result or b"")
        shown.append(
            SubtaskView(
                call_id=call.call_id,
                session_id=call.child_session_id,
                status=call.status or "open",
                run_id=call.child_run_id,
                reason=call.reason,
                result=call.result if left_bytes >= 0 else None,
            )
        )
    return tuple(reversed(shown))


def _actions(turn: Turn) -> tuple[ActionView, ...]:
    run, session = turn.run, turn.session
    names = list(reversed(run.asked))
    if run.open_branches:
        asked = frozenset(names)
        opened = session.branches.items(branches_of(BranchKind.ACTION))
        names += [branch.id for _, branch in opened if branch.id not in asked]
    shown = []
    left_bytes = VIEW_RESULT_BYTES_MAX
    for name in names:
        action = session.actions.get(name)
        if action is not None:
            left_bytes -= len(action.result or b"")
            shown.append(_action(action, with_result=left_bytes >= 0))
    return tuple(shown)


def _action(action: Action, *, with_result: bool) -> ActionView:
    permitted = action.state == ActionState.PERMITTED
    return ActionView(
        action_key=action.key,
        name=action.name,
        args_digest=action.args_digest,
        state=action.state,
        report_no=action.report_no if permitted else 0,
        deadline_ms=action.deadline_ms if permitted else 0,
        valid_ms=action.valid_ms if permitted else 0,
        result=action.result if with_result else None,
        result_bytes=action.result_bytes,
        result_run_id=action.run_id if action.result_seq else "",
        result_seq=action.result_seq,
    )
