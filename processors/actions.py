"""The action gate: the table of keys (protocol section 8). An intent is durable before its effect; a permit is short.

| state of the key                      | same digest                                   | other digest   |
|---------------------------------------|-----------------------------------------------|----------------|
| unknown, voided, ended not_performed  | permit (or approval first)                    | the same       |
| waiting for approval                  | joined to it                                  | key_conflict   |
| approved                              | permit                                        | key_conflict   |
| permitted, no end yet                 | in_flight                                     | key_conflict   |
| in doubt                              | permit with a resolution, else in_doubt       | key_conflict   |
| ended ok, error                       | no permit: the first result                   | key_conflict   |
"""

from __future__ import annotations

from typing import Any

from onepen.processors.session import Action, forgotten
from onepen.processors.state_keys import pair
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.ids import id_ok
from onepen.schemas.limits import LISTED_MAX, OPEN_BRANCHES_MAX
from onepen.schemas.statuses import ActionState, Reason

_ASKED_KEPT = 32
Payload = dict[str, Any]
_FREE = frozenset((ActionState.VOIDED, ActionState.NOT_PERFORMED))
RECONCILED, REPEAT = "reconciled_not_performed", "repeat"


def requested(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    """Permit the action, ask for approval first, or answer why not."""
    if not _well_formed(payload):
        return Reason.INVALID
    name = pair(payload["name"], payload["actionKey"])
    action = turn.session.actions.get(name)
    if action is None or action.state in _FREE or forgotten(action, turn.now_ms):
        return _name_in_doubt(turn, action, payload) or _open(turn, payload, raw, no)
    if action.args_digest != payload["argsDigest"]:
        return Reason.KEY_CONFLICT
    match ActionState(action.state):
        case ActionState.WAITING:
            return None
        case ActionState.APPROVED:
            blocked = None if action.repeats_doubt else _name_in_doubt(turn, action, payload)
            return blocked or _permit(turn, payload, no)
        case ActionState.PERMITTED:
            return Reason.IN_FLIGHT
        case ActionState.IN_DOUBT:
            return _resolve(turn, action, payload, raw, no)
        case _:
            _answer_later(turn, name)
            return Reason.ALREADY_ENDED


def _well_formed(payload: Payload) -> bool:
    return (
        id_ok(payload.get("actionKey"))
        and id_ok(payload.get("name"))
        and id_ok(payload.get("argsDigest"))
        and isinstance(payload.get("approval", False), bool)
        and isinstance(payload.get("honoursKeys", False), bool)
        and payload.get("resolution") in (None, RECONCILED, REPEAT)
    )


def _answer_later(turn: Turn, name: str) -> None:
    run = turn.run
    run.asked = (*(n for n in run.asked if n != name), name)[-_ASKED_KEPT:]


def _resolve(turn: Turn, action: Action, payload: Payload, raw: bytes, no: int) -> Reason | None:
    resolution = payload.get("resolution")
    if resolution == RECONCILED or (resolution == REPEAT and action.honours_keys):
        return _open(turn, payload, raw, no)
    _answer_later(turn, pair(action.name, action.key))
    return Reason.IN_DOUBT


def _name_in_doubt(turn: Turn, action: Action | None, payload: Payload) -> Reason | None:
    """While an action of a name is in doubt no other key of that name is permitted. (A key that is in doubt itself may
    be resolved all the same: of two in doubt neither could ever be, otherwise.)"""
    doubts = turn.run.doubts
    if not doubts:
        return None
    who = (payload["name"], payload["actionKey"])
    if any(doubt[0] == who[0] and doubt != who for doubt in doubts):
        return Reason.IN_DOUBT
    return Reason.IN_DOUBT if len(doubts) >= LISTED_MAX and who not in doubts else None


def _open(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    """Open the key: the intent first, then the permit or the request for approval."""
    run = turn.run
    asks = payload.get("approval", False) or payload["name"] in turn.run_policy.approval_actions
    if run.open_branches + (2 if asks else 1) > OPEN_BRANCHES_MAX:
        return Reason.TOO_MANY_BRANCHES
    if not asks and _permit_until(turn) <= turn.now_ms:
        return Reason.LEASE_EXPIRED
    turn.emit(ev.ACTION_REQUESTED, payload, raw)
    if not asks:
        return _permit(turn, payload, no)
    expires_ms = turn.now_ms + turn.run_policy.approval_ms
    turn.emit(ev.APPROVAL_REQUESTED, _naming(payload) | {"expiresAt": expires_ms})
    return None


def _naming(payload: Payload) -> Payload:
    return {"actionKey": payload["actionKey"], "name": payload["name"], "argsDigest": payload["argsDigest"]}


def _permit_until(turn: Turn) -> int:
    """When a permit given now ends: never later than the lease or the run's deadline."""
    run, now_ms = turn.run, turn.now_ms
    run_ends_ms = run.timeout_at_ms if run.waiting_left_ms < 0 else now_ms + run.waiting_left_ms
    return min(now_ms + turn.run_policy.permit_ms, run.lease_expires_ms, run_ends_ms)


def _permit(turn: Turn, payload: Payload, no: int) -> Reason | None:
    """A permit never outlives the lease or the run's deadline; after it the action may no longer begin."""
    run = turn.run
    deadline_ms = _permit_until(turn)
    if deadline_ms <= turn.now_ms:
        return Reason.LEASE_EXPIRED
    turn.resume_clock()
    turn.emit(
        ev.ACTION_PERMITTED,
        _naming(payload)
        | {
            "deadlineAt": deadline_ms,
            "validMs": deadline_ms - turn.now_ms,
            "fencing": {"runId": run.run_id, "generation": run.generation},
            "reportNo": no,
        },
    )
    return None


def finished(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    """The end of a permitted action. An end without an open permit is refused, and so is one that names another request
    (`reportNo`) than the permitted one: two calls of one key would end each other's effect."""
    ends = (ActionState.OK, ActionState.ERROR, ActionState.NOT_PERFORMED)
    if not (id_ok(payload.get("actionKey")) and id_ok(payload.get("name")) and payload.get("status") in ends):
        return Reason.INVALID
    action = turn.session.actions.get(pair(payload["name"], payload["actionKey"]))
    open_here = action is not None and action.state == ActionState.PERMITTED and action.run_id == turn.run.run_id
    if action is None or not open_here or not ends_permit(payload, action):
        return Reason.NOT_OPEN
    if action.repeats_doubt and payload["status"] == ActionState.NOT_PERFORMED:
        # Only the repeat did not take place; what was in doubt before it is so still.
        told = {"error": payload["error"]} if "error" in payload else {}
        naming = {"actionKey": action.key, "name": action.name, "reason": "not_performed"}
        turn.emit(ev.ACTION_IN_DOUBT, naming | told)
    else:
        turn.emit(ev.ACTION_FINISHED, payload, raw)
    return None


def ends_permit(payload: Payload, action: Action) -> bool:
    """Whether an end belongs to the permit of `action`; one that names no request belongs to whatever is permitted."""
    no = payload.get("reportNo")
    return no is None or (type(no) is int and no == action.report_no)
