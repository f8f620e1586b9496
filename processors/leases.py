"""Leases and generations: claim, renew, release, and the loss of a lease as one step (protocol section 6)."""

from __future__ import annotations

from onepen.processors import clock, ending, starting
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.statuses import Reason, Recovery, RunStatus
from onepen.schemas.worker_records import Claim, Release, Renew

# A member of an enum costs a look-up of its own; what every record asks for has a name here.
_RUNNING, _CANCELLING = RunStatus.RUNNING, RunStatus.CANCELLING
SHUTDOWN, NO_ROOM = "shutdown", "no_room"


def claim(turn: Turn, record: Claim) -> Reason | None:
    """Grant the lease, or answer why not. The owner's claim sent again is answered as before."""
    run = turn.run
    if run.owner:
        if run.owner == record.worker_id and run.inbox == record.inbox:
            turn.view_wanted = turn.contents_wanted = True
            return None
        return Reason.ALREADY_OWNED
    if run.status is not _RUNNING:
        return Reason.NOT_RUNNING
    turn.emit(
        ev.RUN_LEASED,
        {
            "workerId": record.worker_id,
            "inbox": record.inbox,
            "attempt": run.losses + 1,
            "leaseExpiresAt": turn.now_ms + turn.run_policy.lease_ms,
        },
    )
    turn.view_wanted = turn.contents_wanted = True
    return None


def renew(turn: Turn, record: Renew) -> Reason | None:
    """Extend the lease of the owner; a renewal seen before is only answered."""
    run = turn.run
    if record.no > run.renewal_no:
        run.renewal_no = record.no
        run.lease_expires_ms = turn.now_ms + turn.run_policy.lease_ms
        if _stalled(turn, record):
            payload = {"reason": Reason.STALLED.value, "retryable": True}
            ending.end_by_force(turn, RunStatus.TIMED_OUT, Reason.STALLED, payload)
            return None
    turn.view_wanted = True
    turn.contents_wanted = turn.contents_wanted or record.want_contents
    return None


def _stalled(turn: Turn, record: Renew) -> bool:
    """Count a renewal without a report; True when there were too many in a row. Those sent while suspended, and those
    that find the run only waiting for a person or a child, do not count; an open tool may declare its own limit."""
    run = turn.run
    if run.status is _CANCELLING or record.suspended or clock.waits(run):
        return False
    run.idle_renewals += 1
    limit = turn.run_policy.progress_renewals
    if run.idle_limits:
        limit = max(limit, *[own for _, own in run.idle_limits])
    return run.idle_renewals >= limit


def release(turn: Turn, record: Release) -> Reason | None:
    """`no_room`: the offer stays open and does not count as unclaimed. `shutdown`: the lease ends, no attempt lost."""
    run = turn.run
    if record.reason == NO_ROOM:
        if run.owner:
            return Reason.ALREADY_OWNED
        run.offer_had_no_room = True
        return None
    if record.reason != SHUTDOWN:
        return Reason.INVALID
    end_lease(turn, Reason.RELEASED, ev.RUN_RELEASED)
    return None


def lose(turn: Turn) -> None:
    """The lease has ended by the log's time: a timer was consumed."""
    end_lease(turn, Reason.LEASE_LOST, ev.RUN_LEASE_LOST)


def end_lease(turn: Turn, reason: Reason, event_type: str) -> None:
    run = turn.run
    if run.status is RunStatus.CANCELLING:
        ending.end_by_force(turn, RunStatus.CANCELLED, Reason.FORCED, {})
        return
    owner, inbox = run.owner, run.inbox
    run.generation += 1
    ending.close_work(turn, reason.value)
    turn.emit(event_type, {"workerId": owner, "attempt": run.losses + 1, "reason": reason.value})
    if run.losses >= run.max_attempts or run.recovery == Recovery.FAIL:
        ending.close_all(turn, "worker_lost")
        run_id, generation = run.run_id, run.generation
        ending.finish(turn, RunStatus.FAILED, {"retryable": True, "reason": "worker_lost"})
        turn.tell(owner, inbox, run_id, generation, RunStatus.FAILED, reason)
        return
    starting.publish_offer(turn)
    turn.tell(owner, inbox, run.run_id, run.generation, run.status.value, reason)


def offer_ended(turn: Turn) -> None:
    """An offer nobody claimed: the next one, under the next generation; after too many in a row there is no worker."""
    run = turn.run
    run.offers_unclaimed += not run.offer_had_no_room
    if run.offers_unclaimed >= turn.run_policy.no_worker_offers:
        payload = {"reason": Reason.NO_WORKER.value, "retryable": True}
        ending.end_by_force(turn, RunStatus.TIMED_OUT, Reason.NO_WORKER, payload)
        return
    starting.next_offer(turn)
