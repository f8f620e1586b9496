"""The one pending list of a session: ordered by log position, each entry for run R (a steer) or for the next run."""

from __future__ import annotations

import msgspec

from onepen.processors.session import Entry
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.inputs import Input, content_bytes
from onepen.schemas.limits import PENDING_BYTES_MAX
from onepen.schemas.policies import Policy
from onepen.schemas.statuses import Disposition, IfMissed, Reason


def has_room(turn: Turn, policy: Policy, record: Input) -> bool:
    """True while the list is within its bounds with `record` in it."""
    entries = turn.session.head.pending
    size_bytes = sum(entry.size_bytes for entry in entries) + content_bytes(record.content)
    return len(entries) < policy.pending_max and size_bytes <= PENDING_BYTES_MAX


def append(turn: Turn, policy: Policy, record: Input, *, for_run: str = "", front: bool = False) -> None:
    """Put `record` at the end of the list, or (an interrupt) in front of everything but earlier interrupts.

    Its id must be remembered with the input kept.
    """
    ttl_ms = record.ttl_ms if record.ttl_ms is not None else policy.queued_ttl_ms
    entry = Entry(
        input_id=record.input_id,
        for_run=for_run,
        size_bytes=content_bytes(record.content),
        if_missed=record.if_missed or policy.if_missed,
        expires_ms=0 if ttl_ms is None else turn.now_ms + ttl_ms,
        front=front,
    )
    before = turn.session.head.pending
    place = sum(other.front for other in before) if front else len(before)
    turn.session.head.pending = (*before[:place], entry, *before[place:])


def remove(turn: Turn, input_id: str) -> Entry | None:
    """Take an entry out of the list; None when it is not in it."""
    head = turn.session.head
    for entry in head.pending:
        if entry.input_id == input_id:
            head.pending = tuple(other for other in head.pending if other is not entry)
            return entry
    return None


def steers(turn: Turn) -> tuple[Entry, ...]:
    """Steers pending for the active run, in order."""
    run = turn.session.head.run
    return () if run is None else tuple(e for e in turn.session.head.pending if e.for_run == run.run_id)


def discard_all(turn: Turn) -> None:
    """Discard queued inputs and pending steers with reason `aborted` (an abort with scope `run_and_queue`)."""
    entries, turn.session.head.pending = turn.session.head.pending, ()
    for entry in entries:
        turn.dispose(entry.input_id, Disposition.DISCARDED, reason=Reason.ABORTED)


def expire(turn: Turn, input_id: str) -> bool:
    """Let one entry whose time is over expire; False when there is none such."""
    for entry in turn.session.head.pending:
        if entry.input_id == input_id and entry.expires_ms and entry.expires_ms <= turn.now_ms:
            remove(turn, input_id)
            turn.dispose(input_id, Disposition.EXPIRED)
            return True
    return False


def carry_over(turn: Turn) -> None:
    """When the run ends, in whatever way, its pending steers go by their `if_missed`; nothing is stranded."""
    for entry in steers(turn):
        if entry.if_missed == IfMissed.QUEUE:
            turn.emit(ev.INPUT_CARRIED_OVER, {"inputId": entry.input_id})
            turn.session.head.pending = tuple(
                msgspec.structs.replace(e, for_run="") if e is entry else e for e in turn.session.head.pending
            )
        else:
            remove(turn, entry.input_id)
            turn.dispose(entry.input_id, Disposition.DISCARDED, reason=Reason.MISSED)


def next_startable(turn: Turn) -> Input | None:
    """Take the first entry that may start a run; entries whose time is over expire on the way."""
    while turn.session.head.pending:
        entry = turn.session.head.pending[0]
        if expire(turn, entry.input_id):
            continue
        remove(turn, entry.input_id)
        known = turn.session.ids.get(entry.input_id)
        assert known is not None
        assert known.input is not None, "a pending input is kept"
        return known.input
    return None


def is_pending(turn: Turn, input_id: str) -> bool:
    return any(entry.input_id == input_id for entry in turn.session.head.pending)
