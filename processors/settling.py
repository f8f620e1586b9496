"""Actions in doubt after their run: settled by an `answer` or by the evidence of a late report (protocol section 8).

A receipt of kind `action` and the table say so; never an event, since the run has ended.
"""

from __future__ import annotations

from typing import Any

import msgspec

from onepen.processors.actions import ends_permit
from onepen.processors.approvals import meant
from onepen.processors.evolve import no_doubt
from onepen.processors.session import Action, forgotten
from onepen.processors.state_keys import pair
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.ids import id_ok
from onepen.schemas.inputs import Input
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import ActionState, Reason
from onepen.schemas.strict_json import canonical, parse_object
from onepen.schemas.worker_records import Report

OUTCOMES = frozenset((ActionState.OK, ActionState.ERROR, ActionState.NOT_PERFORMED))


def means_doubt(record: Input) -> bool:
    """True for an answer that tells how an action ended (`ok`, `error`, `not_performed`)."""
    return record.decision in OUTCOMES


def by_answer(turn: Turn, record: Input) -> tuple[Reason, dict[str, Any] | None] | None:
    """Settle the action an answer names, or say why not."""
    found = [
        (name, action)
        for name, action in turn.session.actions.items()
        if action.key == record.action_key and record.action_name in (None, action.name) and _after_run(turn, action)
    ]
    found = meant(record, found)
    if len(found) != 1:
        return Reason.UNKNOWN_APPROVAL, None
    name, action = found[0]
    if action.state != ActionState.IN_DOUBT:
        return Reason.ALREADY_ANSWERED, {"state": action.state, "inputId": action.answered_by or None}
    if action.args_digest != record.args_digest:
        return Reason.DIGEST_MISMATCH, None
    assert record.decision is not None
    _settle(turn, name, action, record.decision, {"by": record.user_id, "inputId": record.input_id})
    return None


def _after_run(turn: Turn, action: Action) -> bool:
    run = turn.session.head.run
    return (run is None or action.run_id != run.run_id) and not forgotten(action, turn.now_ms)


def by_evidence(turn: Turn, report: Report) -> None:
    """A refused report of the generation that held the permit tells how its action ended, after the run. That a repeat
    was not performed tells nothing about the attempt it repeats."""
    for event in report.events:
        if event.type != ev.ACTION_FINISHED:
            continue
        payload = parse_object(event.payload)
        if payload is None or not (id_ok(payload.get("name")) and id_ok(payload.get("actionKey"))):
            continue
        name = pair(payload["name"], payload["actionKey"])
        action = turn.session.actions.get(name)
        status = payload.get("status")
        if (
            action is not None
            and isinstance(status, str)
            and status in OUTCOMES
            and action.state == ActionState.IN_DOUBT
            and (action.run_id, action.generation) == (report.run_id, report.generation)
            and ends_permit(payload, action)
            and not (action.repeats_doubt and status == ActionState.NOT_PERFORMED)
            and _after_run(turn, action)
        ):
            _settle(turn, name, action, status, {"workerId": report.worker_id})


def _settle(turn: Turn, name: str, action: Action, status: str, by: dict[str, Any]) -> None:
    settled = msgspec.structs.replace(action, state=ActionState(status), answered_by=by.get("inputId", ""))
    turn.session.actions.put(name, settled)
    run = turn.session.head.run
    if run is not None:
        no_doubt(run, action.name, action.key)
    turn.receipts.append(
        Receipt(
            kind="action",
            tenant_id=turn.session.tenant_id,
            session_id=turn.session.session_id,
            partition=turn.moment.partition,
            offset=turn.moment.offset,
            at_ms=turn.now_ms,
            run_id=action.run_id,
            detail=canonical({"actionKey": action.key, "name": action.name, "status": status, **by}),
        )
    )
