"""Rows of actions from two topics: events of their runs, and receipts that settle what a run left in doubt.

Rule 1: an event at or below a row's (run_no, seq) changes nothing; a request begins the key anew.
Rule 2: of an event and a settlement the one whose input record stands later on the inputs topic holds. Both name that
record, so the row is the same whichever topic is read first, and however often.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from onepen.schemas import events as ev
from onepen.schemas.events import Event
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import ActionState
from onepen.sinks.postgres.members import Payload, int64_of, json_text, shown, text_of
from onepen.sinks.postgres.rows import ActionKey, ActionRow, Changes, Stored

__all__ = ["ACTION_TYPES", "action_key", "fold_action", "fold_settlement"]

ACTION_TYPES: Final = frozenset(
    (
        ev.ACTION_REQUESTED,
        ev.ACTION_PERMITTED,
        ev.ACTION_FINISHED,
        ev.ACTION_VOIDED,
        ev.ACTION_IN_DOUBT,
        ev.APPROVAL_REQUESTED,
        ev.APPROVAL_ANSWERED,
        ev.APPROVAL_EXPIRED,
        ev.APPROVAL_VOIDED,
    )
)


def action_key(record: Event | Receipt, payload: Payload) -> ActionKey | None:
    """The key that an event or a settlement is about; None when its members are no texts."""
    name, key = text_of(payload, "name"), text_of(payload, "actionKey")
    return None if name is None or key is None else (record.tenant_id, record.session_id, name, key)


def fold_action(before: Stored, changes: Changes, event: Event, payload: Payload) -> None:
    """Apply one of `ACTION_TYPES`."""
    key = action_key(event, payload)
    if key is None:
        return
    action = changes.actions.get(key)
    if action is None:
        known = before.actions.get(key)
        action = _new_action(event) if known is None else dataclasses.replace(known)
    if (action.last_run_no, action.last_seq) >= (event.run_no, event.seq):
        return
    if event.type == ev.ACTION_REQUESTED:
        action = _begun_anew(event, action)
    changes.actions[key] = action
    _advance(action, event, payload)
    _show_settlement(action)


def fold_settlement(before: Stored, changes: Changes, receipt: Receipt, payload: Payload) -> None:
    """Apply a receipt of kind `action`, which `check_record` has passed."""
    key = action_key(receipt, payload)
    if key is None:
        return
    action = changes.actions.get(key)
    if action is None:
        known = before.actions.get(key)
        if known is None:
            action = ActionRow(run_key=shown(receipt.run_id) or "", state=ActionState.IN_DOUBT, generation=0)
        else:
            action = dataclasses.replace(known)
    if receipt.offset <= max(action.last_offset, -1 if action.settled_offset is None else action.settled_offset):
        return
    changes.actions[key] = action
    action.settled_state = text_of(payload, "status")
    action.settled_ms, action.settled_offset = receipt.at_ms, receipt.offset
    action.settled_by = int64_of(payload, "by")
    action.settled_input_id = text_of(payload, "inputId")
    action.settled_worker_id = text_of(payload, "workerId")
    _show_settlement(action)


def _new_action(event: Event) -> ActionRow:
    return ActionRow(run_key=event.run_id, state=ActionState.WAITING, generation=event.generation)


def _begun_anew(event: Event, old: ActionRow) -> ActionRow:
    """Nothing of the old row but a settlement that was read ahead of the events it settles."""
    return dataclasses.replace(
        _new_action(event),
        settled_state=old.settled_state,
        settled_ms=old.settled_ms,
        settled_offset=old.settled_offset,
        settled_by=old.settled_by,
        settled_input_id=old.settled_input_id,
        settled_worker_id=old.settled_worker_id,
    )


def _show_settlement(action: ActionRow) -> None:
    """A settlement behind the last event is the action's state; one that an event has overtaken is history."""
    if action.settled_offset is None:
        return
    if action.settled_offset > action.last_offset:
        assert action.settled_state is not None, "a settlement says how the action ended"
        action.state, action.ended_ms = action.settled_state, action.settled_ms
    else:
        action.settled_state = action.settled_ms = action.settled_offset = None
        action.settled_by = action.settled_input_id = action.settled_worker_id = None


def _advance(action: ActionRow, event: Event, payload: Payload) -> None:
    action.last_run_no, action.last_seq, action.last_offset = event.run_no, event.seq, event.cause.offset
    action.run_key, action.generation = event.run_id, event.generation
    match event.type:
        case ev.ACTION_REQUESTED:
            action.requested_ms = event.at_ms
            action.args_digest = text_of(payload, "argsDigest")
        case ev.ACTION_PERMITTED:
            action.state = ActionState.PERMITTED
            action.permitted_ms = event.at_ms
            action.deadline_ms = int64_of(payload, "deadlineAt")
        case ev.ACTION_FINISHED:
            action.state = text_of(payload, "status") or ActionState.ERROR
            action.ended_ms = event.at_ms
            if "result" in payload:
                action.result = json_text(payload["result"])
        case ev.ACTION_VOIDED | ev.ACTION_IN_DOUBT:
            voided = event.type == ev.ACTION_VOIDED
            action.state = ActionState.VOIDED if voided else ActionState.IN_DOUBT
            action.ended_ms = event.at_ms
            action.reason = text_of(payload, "reason")
        case ev.APPROVAL_REQUESTED:
            action.approval_requested_ms = event.at_ms
            action.approval_expires_ms = int64_of(payload, "expiresAt")
        case ev.APPROVAL_ANSWERED:
            action.approval_decision = text_of(payload, "decision")
            action.approval_by = int64_of(payload, "by")
            action.approval_input_id = text_of(payload, "inputId")
            if action.approval_decision == "approve":
                action.state = ActionState.APPROVED
        case _:
            pass  # an approval that expires or is voided is followed by its action's end
