"""What always holds of events, in the order of their partition, as named predicates. See `invariants` for its rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import orjson

from onepen.schemas import codec
from onepen.schemas import events as ev
from onepen.schemas.events import Event, chain_hash
from onepen.schemas.limits import LISTED_MAX, ZERO_HASH
from onepen.schemas.statuses import ActionState, RunStatus

Events = Sequence[Event]
_OPENS: Final = {
    ev.MODEL_STARTED: ("model", "turnId"),
    ev.TOOL_STARTED: ("tool", "toolCallId"),
    ev.ACTION_REQUESTED: ("action", "actionKey"),
    ev.APPROVAL_REQUESTED: ("approval", "actionKey"),
    ev.SUBTASK_STARTED: ("subtask", "callId"),
    ev.COMPACTION_STARTED: ("compaction", "compactionId"),
}
_CLOSES: Final = {
    ev.MODEL_FINISHED: ("model", "turnId"),
    ev.TOOL_FINISHED: ("tool", "toolCallId"),
    ev.ACTION_FINISHED: ("action", "actionKey"),
    ev.ACTION_VOIDED: ("action", "actionKey"),
    ev.ACTION_IN_DOUBT: ("action", "actionKey"),
    ev.APPROVAL_ANSWERED: ("approval", "actionKey"),
    ev.APPROVAL_EXPIRED: ("approval", "actionKey"),
    ev.APPROVAL_VOIDED: ("approval", "actionKey"),
    ev.SUBTASK_FINISHED: ("subtask", "callId"),
    ev.COMPACTION_FINISHED: ("compaction", "compactionId"),
    ev.COMPACTION_FAILED: ("compaction", "compactionId"),
}


def _payload(event: Event) -> dict[str, Any]:
    payload: dict[str, Any] = orjson.loads(event.payload)
    return payload


def _branch(event: Event, kind: str, member: str) -> tuple[str, str, str, str]:
    payload = _payload(event)
    return event.run_id, kind, payload[member], payload["name"] if kind in ("action", "approval") else ""


def _by_run(events: Events) -> dict[str, list[Event]]:
    runs: dict[str, list[Event]] = {}
    for event in events:
        runs.setdefault(event.run_id, []).append(event)
    return runs


def seq_has_no_gap(seqs: Sequence[int]) -> bool:
    """Sequences count 1, 2, 3 ..."""
    return list(seqs) == list(range(1, len(seqs) + 1))


def no_gap_in_seq(events: Events) -> bool:
    return all(seq_has_no_gap([event.seq for event in run]) for run in _by_run(events).values())


def at_most_one_run_open(events: Events) -> bool:
    """At every position at most one run per session is between its first and its last event."""
    active: dict[tuple[int, str], str] = {}
    for event in events:
        session = (event.tenant_id, event.session_id)
        if event.type == ev.RUN_STARTED:
            if session in active:
                return False
            active[session] = event.run_id
        elif active.get(session) != event.run_id:
            return False
        if event.type == ev.RUN_FINISHED:
            del active[session]
    return True


def finished_is_last(events: Events) -> bool:
    """A run has one start, first, and at most one end, last."""
    for run in _by_run(events).values():
        kinds = [event.type for event in run]
        if kinds[0] != ev.RUN_STARTED or kinds.count(ev.RUN_STARTED) != 1 or ev.RUN_FINISHED in kinds[:-1]:
            return False
    return True


def runs_count_without_gap(events: Events) -> bool:
    starts: dict[tuple[int, str], list[int]] = {}
    for event in events:
        if event.type == ev.RUN_STARTED:
            starts.setdefault((event.tenant_id, event.session_id), []).append(event.run_no)
    return all(seq_has_no_gap(numbers) for numbers in starts.values())


def generation_never_falls(events: Events) -> bool:
    return all(
        earlier.generation <= later.generation for run in _by_run(events).values() for earlier, later in pairwise(run)
    )


def one_owner_per_generation(events: Events) -> bool:
    grants = Counter((event.run_id, event.generation) for event in events if event.type == ev.RUN_LEASED)
    return all(count == 1 for count in grants.values())


def ends_follow_starts(events: Events) -> bool:
    """A branch opens once and ends once, in this order; a finished run is balanced."""
    open_now: set[tuple[str, str, str, str]] = set()
    for event in events:
        if event.type in _OPENS:
            branch = _branch(event, *_OPENS[event.type])
            if branch in open_now:
                return False
            open_now.add(branch)
        elif event.type in _CLOSES:
            branch = _branch(event, *_CLOSES[event.type])
            if branch not in open_now:
                return False
            open_now.discard(branch)
        elif event.type == ev.RUN_FINISHED and any(branch[0] == event.run_id for branch in open_now):
            return False
    return True


def nothing_starts_in_cancelling(events: Events) -> bool:
    """Behind a cancel no model request, tool, action, child or compaction starts, no steer is applied and nothing is
    permitted."""
    banned = {ev.MODEL_STARTED, ev.TOOL_STARTED, ev.ACTION_REQUESTED, ev.ACTION_PERMITTED, ev.INPUT_APPLIED}
    banned |= {ev.SUBTASK_STARTED, ev.COMPACTION_STARTED}
    banned |= {ev.RUN_LEASED, ev.INPUT_STEERED, ev.APPROVAL_REQUESTED, ev.APPROVAL_ANSWERED}
    cancelled: set[str] = set()
    for event in events:
        if event.type == ev.RUN_CANCEL_REQUESTED:
            cancelled.add(event.run_id)
        elif event.run_id in cancelled and event.type in banned:
            return False
    return True


def a_cancelled_run_ends_cancelled(events: Events) -> bool:
    asked = {event.run_id for event in events if event.type == ev.RUN_CANCEL_REQUESTED}
    return all(
        (event.run_id in asked) == (_payload(event)["terminalStatus"] == RunStatus.CANCELLED)
        for event in events
        if event.type == ev.RUN_FINISHED
    )


def doubt_is_never_silent(events: Events) -> bool:
    """A terminal event names exactly the actions that were permitted and have no recorded end; a retry may name those
    of the runs before it too, which may be settled without an event."""
    doubts: dict[str, set[tuple[str, str]]] = {}
    retries = {event.run_id for event in events if event.type == ev.RUN_STARTED and "retryOf" in _payload(event)}
    for event in events:
        if event.type in (ev.ACTION_IN_DOUBT, ev.ACTION_REQUESTED, ev.ACTION_FINISHED):
            if not _doubt_follows(event, doubts.setdefault(event.run_id, set())):
                return False
        elif event.type == ev.RUN_FINISHED:
            payload = _payload(event)
            expected = doubts.get(event.run_id, set())
            listed = {(each["name"], each["actionKey"]) for each in payload.get("inDoubt", [])}
            if event.run_id in retries:
                if not expected <= listed:
                    return False
                continue
            if payload.get("inDoubtCount", 0) != len(expected):
                return False
            if not listed <= expected or len(listed) != min(len(expected), LISTED_MAX):
                return False
    return True


def _doubt_follows(event: Event, found: set[tuple[str, str]]) -> bool:
    """Take the event into the set of a run's doubts. A repeat ends its doubt by `ok` or `error` only; False when one is
    forgotten because the repeat was not performed."""
    payload = _payload(event)
    key = (payload["name"], payload["actionKey"])
    if event.type == ev.ACTION_IN_DOUBT:
        found.add(key)
    elif event.type == ev.ACTION_FINISHED and payload["status"] == ActionState.NOT_PERFORMED:
        return key not in found
    elif event.type == ev.ACTION_FINISHED or payload.get("resolution") != "repeat":
        found.discard(key)
    return True


def permits_are_short(events: Events) -> bool:
    """A permit names the run and generation it is for, and how long it lasts, which is more than nothing."""
    for event in events:
        if event.type == ev.ACTION_PERMITTED:
            payload = _payload(event)
            if payload["fencing"] != {"runId": event.run_id, "generation": event.generation}:
                return False
            if payload["validMs"] <= 0 or payload["deadlineAt"] != event.at_ms + payload["validMs"]:
                return False
    return True


def time_never_falls(events: Events) -> bool:
    latest: dict[tuple[int, str], int] = {}
    for event in events:
        session = (event.tenant_id, event.session_id)
        if event.at_ms < latest.get(session, 0):
            return False
        latest[session] = event.at_ms
    return True


def causes_are_in_order(events: Events) -> bool:
    """Each event follows from one place of the log; those of one record count their index from 0."""
    before: dict[tuple[int, str], tuple[int, int]] = {}
    for event in events:
        session = (event.tenant_id, event.session_id)
        cause = (event.cause.offset, event.cause.index)
        offset, index = before.get(session, (-1, -1))
        if cause != ((offset, index + 1) if cause[0] == offset else (cause[0], 0)) or cause[0] < offset:
            return False
        before[session] = cause
    return True


EVENTS: Final[tuple[Callable[[Events], bool], ...]] = (
    no_gap_in_seq,
    at_most_one_run_open,
    finished_is_last,
    runs_count_without_gap,
    generation_never_falls,
    one_owner_per_generation,
    ends_follow_starts,
    nothing_starts_in_cancelling,
    a_cancelled_run_ends_cancelled,
    doubt_is_never_silent,
    permits_are_short,
    time_never_falls,
    causes_are_in_order,
)


def chain_verifies(framed: Iterable[bytes], first_prev_hash: bytes = ZERO_HASH) -> bool:
    """The framed events of one session, in order: each carries the hash before it and its own."""
    prev_hash = first_prev_hash
    for data in framed:
        event = codec.decode_as(Event, data)
        if event.prev_hash != prev_hash or event.hash != chain_hash(prev_hash, codec.event_body(data)):
            return False
        prev_hash = event.hash
    return True
