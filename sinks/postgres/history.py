"""History from the tables: events as the log had them, and how far the tables reach.

The seam with the log: read `next_offset` of the session's partition **first**, then page through `session_events`,
then tail the log from that offset and drop what is at or below the last (run_no, seq). So nothing is missing and
nothing stands twice, however far the sink got in between.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import asyncpg

from onepen.schemas.events import Cause, Event
from onepen.sinks.postgres.connecting import SERVER_SETTINGS
from onepen.sinks.postgres.payloads import received
from onepen.sinks.postgres.queries import sql

__all__ = ["Cursor", "Pool", "next_offset", "open_pool", "run_events", "session_events"]

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

Cursor = tuple[int, int]
"""(run_no, seq) of the last event that is known; (0, 0) is the beginning."""

PAGE_MAX: Final = 1_000
POOL_MAX: Final = 4


async def open_pool(dsn: str, *, application_name: str = "onepen-reader", size_max: int = POOL_MAX) -> Pool:
    """A small pool for readers; close it with `await pool.close()`."""
    return await asyncpg.create_pool(
        dsn,
        min_size=0,
        max_size=size_max,
        timeout=10,
        command_timeout=30,
        server_settings={**SERVER_SETTINGS, "application_name": application_name},
    )


async def next_offset(pool: Pool, topic: str, partition: int) -> int:
    """Everything of the partition below this offset is in the tables; 0 when the sink has not seen it yet."""
    async with pool.acquire() as connection:
        row = await connection.fetchrow(sql("read_partition"), topic, partition)
    return 0 if row is None else int(row["next_offset"])


async def session_events(
    pool: Pool, tenant_id: int, session_id: str, after: Cursor = (0, 0), *, limit: int = PAGE_MAX
) -> list[Event]:
    """Events of the session behind `after` in order of (run_no, seq), at most `limit`; fewer mean there are no more."""
    async with pool.acquire() as connection, connection.transaction(readonly=True):
        await connection.execute(sql("see_tenant"), str(tenant_id))
        rows = await connection.fetch(sql("session_events"), tenant_id, session_id, *after, limit)
    return [event_of(row) for row in rows]


async def run_events(
    pool: Pool, tenant_id: int, run_id: str, after_seq: int = 0, *, limit: int = PAGE_MAX
) -> list[Event]:
    """Events of one run behind `after_seq` in order, at most `limit`; fewer mean there are no more."""
    async with pool.acquire() as connection, connection.transaction(readonly=True):
        await connection.execute(sql("see_tenant"), str(tenant_id))
        rows = await connection.fetch(sql("run_events"), tenant_id, run_id, after_seq, limit)
    return [event_of(row) for row in rows]


def event_of(row: asyncpg.Record) -> Event:
    """The event as the log had it, payload byte for byte."""
    return Event(
        tenant_id=row["tenant_id"],
        session_id=row["session_key"],
        run_id=row["run_key"],
        run_no=row["run_no"],
        seq=row["seq"],
        type=row["event_type"],
        generation=row["generation"],
        at_ms=round(row["created_at"].timestamp() * 1000),
        cause=Cause(row["cause_partition"], row["cause_offset"], row["cause_index"]),
        payload=received(row["payload"], row["raw"]),
        prev_hash=row["prev_hash"],
        hash=row["hash"],
    )
