"""Delete the objects of erased sessions, after the batch that erased them was committed.

Rule: a row of `agent_objects_to_delete` goes only when its object is gone, so a crash in between repeats the deletion
and loses none. Whatever cannot be deleted now is left for the next sweep; what never will is marked, for a person.
A session's folder is swept again until STRAGGLERS_S after the erase: a client or a worker that knows nothing of it yet
may still store an object.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

import asyncpg

from onepen.sinks.objects import ObjectRefused, Objects
from onepen.sinks.postgres.connecting import Connection, connect
from onepen.sinks.postgres.object_uris import ALL_OBJECTS
from onepen.sinks.postgres.queries import sql

__all__ = ["Swept", "sweep_objects"]

log = logging.getLogger(__name__)

PAGE: Final = 100
STRAGGLERS_S: Final = 3_600.0


@dataclass(slots=True)
class Swept:
    """Objects that are gone, that were refused for good, and that are left for the next sweep."""

    gone: int = 0
    refused: int = 0
    left: int = 0


async def sweep_objects(dsn: str, objects: Objects, *, application_name: str = "onepen-objects") -> Swept:
    """One pass over all objects to delete, on a connection of its own. Raises what the database raises."""
    connection = await connect(dsn, application_name=application_name)
    try:
        swept = Swept()
        after: tuple[int, bytes] = 0, b""
        while rows := await connection.fetch(sql("objects_to_delete"), *after, PAGE, STRAGGLERS_S):
            for row in rows:
                await _delete(connection, objects, row, swept)
            after = rows[-1]["session_id"], rows[-1]["uri_sha256"]
        return swept
    finally:
        await connection.close(timeout=2)


async def _delete(connection: Connection, objects: Objects, row: asyncpg.Record, swept: Swept) -> None:
    key, session = (row["session_id"], row["uri_sha256"]), (row["tenant_id"], row["session_key"])
    whole = row["uri"] == ALL_OBJECTS
    try:
        if whole:
            await asyncio.to_thread(objects.delete_all, *session)
        else:
            await asyncio.to_thread(objects.delete, *session, row["uri"])
    except ObjectRefused as refusal:
        log.warning("object of erased session %d of tenant %d is kept: %s", key[0], row["tenant_id"], refusal)
        await connection.execute(sql("object_is_refused"), *key, str(refusal))
        swept.refused += 1
    except OSError as error:
        log.warning("object of erased session %d cannot be deleted now: %s", key[0], error.strerror)
        swept.left += 1
    else:
        if whole and not row["is_last"]:
            swept.left += 1
            return
        await connection.execute(sql("object_is_gone"), *key)
        swept.gone += 1
