"""Erase: what a session held is dropped as soon as no run is active. What stays: run counter, last hash, the erased
mark and the ids whose time is not over. The session id is never used again.
"""

from __future__ import annotations

import msgspec

from onepen.processors.turn import Turn


def purge(turn: Turn) -> None:
    """Drop every record of the session but the head and the remembered ids, which keep no content."""
    session = turn.session
    head = session.head
    for parts in (session.actions, session.calls, session.retries):
        for name in parts.names():
            parts.drop(name)
    for input_id, known in list(session.ids.items()):
        if known.input is not None:
            session.ids.put(input_id, msgspec.structs.replace(known, input=None))
    head.last = None
    head.checkpoint = None
    head.pending = ()
