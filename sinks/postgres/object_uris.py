"""Which objects belong to a session: those that its own events point to.

Contents of inputs that started a run or were applied to one, and checkpoints. Content that a run hands over to a child
(`subtask.started`) belongs to the child's session. Objects that no event points to (of inputs that were refused, or
discarded before they were used) are found by where they lie: in the session's folder, see `ALL_OBJECTS`.
"""

from __future__ import annotations

from typing import Final

from onepen.schemas import events as ev
from onepen.sinks.postgres.members import Payload, member_of
from onepen.sinks.postgres.payloads import NUL

__all__ = ["ALL_OBJECTS", "POINTING_TYPES", "object_uri"]

_POINTERS: Final = {
    ev.RUN_STARTED: "pointer",
    ev.INPUT_APPLIED: "pointer",
    ev.COMPACTION_FINISHED: "checkpoint",
}

ALL_OBJECTS: Final = "*"
"""In the place of a URI: whatever lies in the folder of the session."""

POINTING_TYPES: Final = tuple(_POINTERS)


def object_uri(event_type: str, payload: Payload) -> str | None:
    """The URI that an event points to; None when it points to nothing (or to what no object can be called)."""
    name = _POINTERS.get(event_type)
    uri = None if name is None else member_of(payload, name).get("uri")
    return uri if isinstance(uri, str) and uri and NUL not in uri else None
