"""Bounds of protocol sections 5 and 12 as far as the log shows them."""

from __future__ import annotations

from onepen.schemas.limits import EVENT_BYTES_MAX, LISTED_MAX, OPEN_BRANCHES_MAX, OPEN_CHILDREN_MAX
from onepen.streams.audit.evidence import Evidence, LoggedEvent, Violation
from onepen.streams.audit.history import CLOSES, OPENS, Branch, branch

LISTS = ("stopped", "voided", "inDoubt", "queued")


def bounded_events(evidence: Evidence) -> list[Violation]:
    """No event is larger than its limit, no run has too much open at once, no terminal event lists too much."""
    found = []
    for events in evidence.by_run.values():
        open_: set[Branch] = set()
        for one in events:
            if len(one.data) > EVENT_BYTES_MAX:
                found.append(Violation("bounds", str(one), f"{len(one.data)} bytes, {EVENT_BYTES_MAX} may be"))
            opened, closed = branch(one, OPENS), branch(one, CLOSES)
            if opened is not None:
                open_.add(opened)
                found += _too_many(one, open_)
            if closed is not None:
                open_.discard(closed)
            if one.event.type == "run.finished":
                found += _listed(one)
    return found


def _too_many(one: LoggedEvent, open_: set[Branch]) -> list[Violation]:
    found = []
    if len(open_) > OPEN_BRANCHES_MAX:
        found.append(Violation("bounds", str(one), f"{len(open_)} branches are open"))
    children = sum(kind == "subtask" for kind, _, _ in open_)
    if children > OPEN_CHILDREN_MAX:
        found.append(Violation("bounds", str(one), f"{children} children are open"))
    return found


def _listed(one: LoggedEvent) -> list[Violation]:
    lists = {name: value for name in LISTS if isinstance(value := one.payload.get(name), list)}
    return [
        Violation("bounds", str(one), f"lists {len(value)} items in {name}")
        for name, value in lists.items()
        if len(value) > LISTED_MAX
    ]
