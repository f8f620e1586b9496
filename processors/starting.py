"""Starting a run, and offering it to the workers: an offer is a lease without an owner."""

from __future__ import annotations

from typing import Any

import msgspec

from onepen.processors import subtasks
from onepen.processors.turn import Turn, content_members
from onepen.schemas import events as ev
from onepen.schemas import ids
from onepen.schemas.inputs import Input
from onepen.schemas.offers import Offer

LAST = "last"
"""Name of the one retry record of a session."""


def start_run(turn: Turn, record: Input, *, lineage: str | None = None) -> None:
    """Start the next run with `record`, whose id must be remembered with the input kept; publish the first offer.

    `lineage`: the run is a retry and takes over the action keys of that lineage.
    """
    known = turn.session.ids.get(record.input_id)
    assert known is not None
    policy = turn.rules.policy(record.tenant_id)
    timeout_ms = policy.run_timeout_ms if record.timeout_ms is None else record.timeout_ms
    payload: dict[str, Any] = {
        "inputMode": record.mode,
        "tenantId": record.tenant_id,
        "inputId": record.input_id,
        "source": record.source,
        "userId": record.user_id,
        "policyVersion": policy.version,
        "timeoutAt": turn.now_ms + timeout_ms,
        "maxAttempts": policy.max_attempts if record.max_attempts is None else record.max_attempts,
        "inputPosition": {"partition": known.partition, "offset": known.offset},
        "recovery": record.recovery or policy.recovery,
        "lineage": lineage or ids.run_id(record.tenant_id, record.session_id, turn.session.head.run_no + 1),
    }
    if record.retry_of is not None:
        payload["retryOf"] = record.retry_of
    if record.parent is not None:
        payload["parent"] = {
            "sessionId": record.parent.session_id,
            "runId": record.parent.run_id,
            "callId": record.parent.call_id,
            "depth": len(record.parent.ancestors),
        }
    turn.start(payload | content_members(record.content), ev.RUN_STARTED)
    turn.run.parent = record.parent
    turn.session.retries.drop(LAST)
    if lineage is not None:
        _revive_keys(turn, lineage)
    publish_offer(turn)


def _revive_keys(turn: Turn, lineage: str) -> None:
    """Action keys and call ids are remembered while a run of their lineage is active."""
    for name, action in list(turn.session.actions.items()):
        if action.lineage == lineage:
            turn.session.actions.put(name, msgspec.structs.replace(action, forget_ms=0))
    subtasks.keep_calls(turn, lineage, 0)
    turn.run.action_requests += 1


def next_offer(turn: Turn) -> None:
    """Raise the generation and offer the run again."""
    turn.run.generation += 1
    publish_offer(turn)


def publish_offer(turn: Turn) -> None:
    """Offer the run under its current generation. Unclaimed ones in a row make the next one last longer."""
    run, session, policy = turn.run, turn.session, turn.run_policy
    reset_generation(turn)
    length_ms = min(policy.offer_ms << min(run.offers_unclaimed, 16), policy.offer_max_ms)
    run.offer_ms = length_ms
    run.offer_expires_ms = turn.now_ms + length_ms
    run.offer_had_no_room = False
    run.offer_ordinal += 1
    known = session.ids.get(run.start_input_id)
    assert known is not None
    assert known.input is not None, "the input that starts a run is kept while it is active"
    record = known.input
    turn.offers.append(
        Offer(
            tenant_id=session.tenant_id,
            session_id=session.session_id,
            run_id=run.run_id,
            run_no=run.run_no,
            generation=run.generation,
            token=turn.rules.keys.token(session.tenant_id, session.session_id, run.run_id, run.generation),
            input_id=record.input_id,
            user_id=record.user_id,
            source=record.source,
            mode=record.mode,
            content=record.content,
            last_seq=run.seq,
            last_hash=session.head.last_hash,
            had_owner=run.had_owner,
            attempt=run.losses + 1,
            ordinal=run.offer_ordinal,
            hops=0,
            at_ms=turn.now_ms,
            expires_at_ms=run.offer_expires_ms,
            lease_ms=policy.lease_ms,
            renew_ms=policy.renew_ms,
            permit_ms=policy.permit_ms,
            recovery=run.recovery,
            lineage=run.lineage,
        )
    )


def reset_generation(turn: Turn) -> None:
    """What is counted per generation begins anew."""
    run = turn.run
    run.report_no = run.renewal_no = run.view_no = run.refused_records = 0
    run.report_digests = ()
    run.refused = ()
    run.asked = ()
    run.asked_calls = ()
    run.idle_renewals = 0
