"""Take the rows of erased sessions out of the tables, inside of the batch that says so.

Rule: of an erased session only its own row and those of its erase inputs remain. Before its events go, they tell which
objects they point to. Doing it again finds nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onepen.sinks.postgres.connecting import Connection
from onepen.sinks.postgres.object_uris import POINTING_TYPES, object_uri
from onepen.sinks.postgres.payloads import parsed, received
from onepen.sinks.postgres.queries import sql

__all__ = ["erase_rows"]

STATEMENTS: Final = (
    "erase_events",
    "erase_runs",
    "erase_actions",
    "erase_subtasks",
    "erase_checkpoints",
    "erase_refused_reports",
    "erase_inputs",
)
TIMEOUT_S: Final = 600.0
"""A session may hold millions of events."""


async def erase_rows(connection: Connection, session_ids: Sequence[int]) -> set[tuple[int, str, str]]:
    """Delete the rows of these sessions; answers (tenant_id, session_key, uri) of the objects that they pointed to."""
    ids = sorted(session_ids)
    rows = await connection.fetch(sql("pointing_events"), ids, list(POINTING_TYPES), timeout=TIMEOUT_S)
    found = set()
    for row in rows:
        uri = object_uri(row["event_type"], parsed(received(row["payload"], row["raw"])))
        if uri is not None:
            found.add((row["tenant_id"], row["session_key"], uri))
    for name in STATEMENTS:
        await connection.execute(sql(name), ids, timeout=TIMEOUT_S)
    return found
