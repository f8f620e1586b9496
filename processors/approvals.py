"""Approvals belong to (run, action key, digest), not to a generation: they outlive a takeover.

The first answer in the log decides. An answer permits nothing by itself: the view tells it, the holder asks again.
"""

from __future__ import annotations

from typing import Any

from onepen.processors import clock, ending
from onepen.processors.evolve import branch_name
from onepen.processors.session import Action
from onepen.processors.state_keys import pair
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.inputs import Input
from onepen.schemas.statuses import BranchKind, Reason, RunStatus

APPROVE, DENY = "approve", "deny"
Named = tuple[str, Action]


def answer(turn: Turn, record: Input) -> tuple[Reason, dict[str, Any] | None] | None:
    """Decide an approval by the first answer; returns why not, with what the receipt should name."""
    found = _named(turn, record)
    run = turn.session.head.run
    if run is None:
        return Reason.NO_ACTIVE_RUN, None
    if run.status is RunStatus.CANCELLING:
        return Reason.CANCELLED, None
    mine = meant(
        record, [(name, action) for name, action in found if action.run_id == run.run_id and action.approval_expires_ms]
    )
    if len(mine) != 1:
        return Reason.UNKNOWN_APPROVAL, None
    name, action = mine[0]
    if action.answer:
        return Reason.ALREADY_ANSWERED, {"decision": action.answer, "inputId": action.answered_by}
    if turn.session.branches.get(branch_name(BranchKind.APPROVAL, name)) is None:
        return Reason.UNKNOWN_APPROVAL, None
    if action.args_digest != record.args_digest:
        return Reason.DIGEST_MISMATCH, None
    _decide(turn, record, action)
    return None


def meant(record: Input, found: list[Named]) -> list[Named]:
    """Of several actions with the key of an answer that gives no name: those with its digest. Nothing else tells them
    apart, above all not which of them is open: a late answer to the one would decide the other."""
    if len(found) < 2:
        return found
    return [each for each in found if each[1].args_digest == record.args_digest]


def _named(turn: Turn, record: Input) -> list[Named]:
    """The actions an answer may mean: one when it names name and key, else every one with that key."""
    actions = turn.session.actions
    key = record.action_key or ""
    if record.action_name is not None:
        names = [pair(record.action_name, key)]
    else:
        ending_of_name = pair("", key)
        names = [name for name in actions.names() if name.endswith(ending_of_name)]
    return [(name, action) for name in names if (action := actions.get(name)) is not None]


def _decide(turn: Turn, record: Input, action: Action) -> None:
    approved = record.decision == APPROVE
    timeout_at = clock.timeout_after(turn.run, turn.now_ms, branches_closed=1 if approved else 2, approvals_closed=1)
    naming = {"actionKey": action.key, "name": action.name}
    turn.emit(
        ev.APPROVAL_ANSWERED,
        naming
        | {
            "decision": record.decision,
            "by": record.user_id,
            "source": record.source,
            "inputId": record.input_id,
            "timeoutAt": timeout_at,
        },
    )
    if not approved:
        ending.void_action(turn, action, "denied")
    turn.view_wanted = True


def expire(turn: Turn, name: str) -> bool:
    """The approval's time is over: its action is voided and the run goes on. False when it is not open or not due."""
    action = turn.session.actions.get(name)
    branch = turn.session.branches.get(branch_name(BranchKind.APPROVAL, name))
    if action is None or branch is None or action.approval_expires_ms > turn.now_ms:
        return False
    timeout_at = clock.timeout_after(turn.run, turn.now_ms, branches_closed=2, approvals_closed=1)
    naming = {"actionKey": action.key, "name": action.name}
    turn.emit(ev.APPROVAL_EXPIRED, naming | {"timeoutAt": timeout_at})
    ending.void_action(turn, action, "expired")
    turn.view_wanted = True
    return True
