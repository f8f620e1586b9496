"""What the sink's tables hold, without surrogate ids: two databases with equal dumps hold the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import asyncpg

from onepen.schemas.events import Event
from onepen.sinks.postgres.fold import fold
from onepen.sinks.postgres.migrate import migrate
from onepen.sinks.postgres.rows import Placed
from onepen.sinks.postgres.writer import Slice, Writer
from tests.services import run_coroutine

_QUERIES = {
    "sessions": """select tenant_id, session_key, user_id, title, created_at, updated_at, erased_at
        from agent_sessions""",
    "runs": """select s.session_key, (to_jsonb(r) - 'id' - 'session_id')::text from agent_runs r
        join agent_sessions s on s.id = r.session_id""",
    "events": """select s.session_key, r.run_key, (to_jsonb(e) - 'id' - 'session_id' - 'run_id')::text
        from agent_run_events e join agent_runs r on r.id = e.run_id join agent_sessions s on s.id = e.session_id""",
    "inputs": """select s.session_key, (to_jsonb(i) - 'session_id')::text from agent_inputs i
        join agent_sessions s on s.id = i.session_id""",
    "actions": """select s.session_key, (to_jsonb(a) - 'id' - 'session_id')::text from agent_actions a
        join agent_sessions s on s.id = a.session_id""",
    "checkpoints": """select s.session_key, (to_jsonb(c) - 'id' - 'session_id')::text from agent_checkpoints c
        join agent_sessions s on s.id = c.session_id""",
    "subtasks": """select s.session_key, (to_jsonb(t) - 'session_id')::text from agent_subtasks t
        join agent_sessions s on s.id = t.session_id""",
    "objects": """select s.session_key, (to_jsonb(o) - 'session_id')::text from agent_objects_to_delete o
        join agent_sessions s on s.id = o.session_id""",
    "refused": """select s.session_key, (to_jsonb(f) - 'session_id')::text from agent_refused_reports f
        join agent_sessions s on s.id = f.session_id""",
}


def on_tables(test: Callable[[str], Coroutine[Any, Any, None]], dsn: str) -> None:
    """Migrate the database and run the test's coroutine on it."""

    async def both() -> None:
        await migrate(dsn)
        await test(dsn)

    run_coroutine(both, 60)


@asynccontextmanager
async def writing(dsn: str) -> AsyncIterator[Writer]:
    writer = Writer(dsn)
    try:
        yield writer
    finally:
        await writer.close()


@asynccontextmanager
async def table_locked(dsn: str, table: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Batches that come to this table wait until the block ends. The connection is the one that holds the lock."""
    blocker = await asyncpg.connect(dsn)
    try:
        hold = blocker.transaction()
        await hold.start()
        await blocker.execute(f"lock table {table} in share row exclusive mode")
        yield blocker
        await hold.rollback()
    finally:
        await blocker.close()


async def dump(dsn: str) -> dict[str, list[str]]:
    """Every table's rows as text, sorted."""
    connection = await asyncpg.connect(dsn)
    try:
        return {
            name: sorted(repr(tuple(row)) for row in await connection.fetch(query)) for name, query in _QUERIES.items()
        }
    finally:
        await connection.close()


async def fetchval(dsn: str, query: str, *values: Any) -> Any:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query, *values)
    finally:
        await connection.close()


def placed(partition: int, records: list[tuple[Any, bytes]], first_offset: int = 0) -> list[Placed]:
    return [Placed(partition, first_offset + index, record) for index, (record, _) in enumerate(records)]


async def write_all(
    writer: Writer, topic: str, partition: int, records: list[Placed], *, cuts: tuple[int, ...] = ()
) -> None:
    """Claim the partition and write the records, in one batch or cut at the given indexes."""
    claim = await writer.claim((topic, partition))
    position = claim.next_offset
    edges = [0, *sorted(cuts), len(records)]
    for begin, end in pairwise(edges):
        part = records[begin:end]
        if not part:
            continue
        after = part[-1].offset + 1
        written = await writer.write([Slice(claim.place, claim.epoch, position, after, part)])
        assert written.done == {claim.place}, written
        position = after


__all__ = ["Event", "dump", "fetchval", "fold", "placed", "write_all"]
