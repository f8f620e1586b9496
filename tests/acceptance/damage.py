"""Damaged copies of evidence from the real pipeline; what exactly is in it does not matter here."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from onepen.demo.checks import Evidence, LoggedEvent, Tables
from onepen.schemas import codec
from onepen.schemas.events import EventDraft


def copy(evidence: Evidence, **changes: Any) -> Evidence:
    """A new piece of evidence with empty caches."""
    fields = {f.name: getattr(evidence, f.name) for f in dataclasses.fields(Evidence)}
    return Evidence(**(fields | changes))


def damaged(evidence: Evidence) -> Iterator[tuple[str, int, Evidence]]:
    """(what was done, the number of the question that must turn red, the copy)."""
    events, tables = list(evidence.events), evidence.tables
    assert tables is not None
    at = len(events) // 2
    yield "an event dropped", 2, copy(evidence, events=events[:at] + events[at + 1 :])
    yield "an event doubled", 2, copy(evidence, events=[*events[:at], events[at], *events[at:]])
    yield "two events swapped", 2, copy(evidence, events=_swapped(events, at))
    yield "a second active run", 1, copy(evidence, events=_second_run(events))
    yield "half a chain", 2, copy(evidence, events=_half_forged(events))
    yield "a receipt dropped", 3, copy(evidence, receipts=list(evidence.receipts)[1:])
    off = [dict(tables.runs[0], last_seq=tables.runs[0]["last_seq"] + 1), *tables.runs[1:]]
    yield "a row off by one", 8, copy(evidence, tables=dataclasses.replace(tables, runs=off))
    yield "a row missing", 8, copy(evidence, tables=dataclasses.replace(tables, events=list(tables.events)[1:]))
    yield "no tables", 8, copy(evidence, tables=Tables())


def _swapped(events: list[LoggedEvent], at: int) -> list[LoggedEvent]:
    """Two neighbours of one session exchanged."""
    made = list(events)
    at = next(i for i in range(at, len(made) - 1) if made[i].session == made[i + 1].session)
    made[at], made[at + 1] = made[at + 1], made[at]
    return made


def _second_run(events: list[LoggedEvent]) -> list[LoggedEvent]:
    """The second run of a session begins before its first one ends."""
    second = next(e for e in events if e.event.type == "run.started" and e.event.run_no == 2)
    end = next(e for e in events if e.session == second.session and e.event.type == "run.finished")
    made = [e for e in events if e is not second]
    made.insert(made.index(end), second)
    return made


def _half_forged(events: list[LoggedEvent]) -> list[LoggedEvent]:
    """From the middle on each session's events are chained anew, as a forger without the first half would."""
    half, last = len(events) // 2, dict[object, bytes]()
    made = list(events[:half])
    for one in events[half:]:
        draft = EventDraft(**{name: getattr(one.event, name) for name in EventDraft.__struct_fields__})
        event, data = codec.seal(draft, last.get(one.session, bytes(32)))
        last[one.session] = event.hash
        made.append(LoggedEvent(one.partition, one.offset, data, event))
    return made
