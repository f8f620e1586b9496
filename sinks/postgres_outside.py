"""Reads the tables from outside, in one snapshot, for the checks: rows with the callers' texts, times in ms.

Rule: read only, and independent of the writer: it imports nothing of `sinks.postgres`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
import orjson

from onepen.sinks.postgres_dsn import answering

__all__ = [
    "ACTIONS",
    "EVENTS",
    "INPUTS",
    "OFFSETS",
    "REFUSED",
    "RUNS",
    "TableRows",
    "action_row",
    "event_row",
    "read_outcomes",
    "read_rolled_back",
    "read_tables",
]

Row = dict[str, Any]
TIMEOUT_S: Final = 60.0

# The selects end before `where`: of a tenant here, of a partition in postgres_audit.
_MS = "(extract(epoch from {0}) * 1000)::bigint as {1}"


def _ms(alias: str, *columns: str) -> str:
    return ", ".join(_MS.format(f"{alias}.{column}", column) for column in columns)


RUNS: Final = f"""
select s.tenant_id, s.session_key, r.run_key, r.run_no, r.status, r.generation, r.attempt, r.lease_owner,
    r.cancel_reason, r.terminal_status, r.terminal_reason, r.retryable, r.forced, r.input_id,
    r.input_mode, r.input_partition, r.input_offset, r.user_id,
    r.source, r.recovery, r.lineage, r.retry_of, r.parent_session_key, r.parent_run_key, r.parent_call_id,
    r.last_seq, encode(r.last_hash, 'hex') as last_hash,
    {_ms("r", "lease_expires_at", "timeout_at", "cancel_requested_at", "terminal_at", "created_at", "updated_at")}
from agent_runs r join agent_sessions s on s.id = r.session_id
"""
EVENTS: Final = f"""
select s.tenant_id, s.session_key, r.run_key, e.seq, e.event_type, e.payload::text as payload, e.raw, e.generation,
    e.cause_partition, e.cause_offset, e.cause_index, encode(e.prev_hash, 'hex') as prev_hash,
    encode(e.hash, 'hex') as hash, e.log_partition, e.log_offset, {_ms("e", "created_at")}
from agent_run_events e join agent_runs r on r.id = e.run_id join agent_sessions s on s.id = e.session_id
"""
INPUTS: Final = f"""
select i.tenant_id, s.session_key, i.input_partition, i.input_offset, i.input_id, i.mode, i.user_id, i.source,
    i.verdict, i.verdict_reason, i.verdict_run_key, i.disposition, i.disposition_reason, i.disposition_run_key,
    {_ms("i", "verdict_at", "disposition_at")}
from agent_inputs i join agent_sessions s on s.id = i.session_id
"""
ACTIONS: Final = f"""
select s.tenant_id, s.session_key, a.action_name, a.action_key, a.run_key, a.state, a.args_digest, a.generation,
    a.reason, a.result::text as result, a.approval_decision, a.approval_by, a.approval_input_id,
    a.last_run_no, a.last_seq,
    {_ms("a", "requested_at", "permitted_at", "deadline_at", "ended_at")},
    {_ms("a", "approval_requested_at", "approval_expires_at")}
from agent_actions a join agent_sessions s on s.id = a.session_id
"""
REFUSED: Final = f"""
select f.tenant_id, s.session_key, f.record_partition, f.record_offset, f.run_key, f.generation, f.worker_id, f.record,
    f.report_no, f.reason, {_ms("f", "created_at")}
from agent_refused_reports f join agent_sessions s on s.id = f.session_id
"""
_OF_TENANT = " where s.tenant_id = $1 and ($2::text[] is null or s.session_key = any($2)) order by "
OFFSETS: Final = "select topic, partition, next_offset from sink_partitions"
ACTIVE_QUERY: Final = (
    "select count(*) from agent_runs where tenant_id = $1 and status in ('running','compacting','cancelling')"
)
OUTCOMES_QUERY: Final = (
    "select date_trunc('minute', terminal_at) as minute, terminal_status, count(*) from agent_runs "
    "where tenant_id = $1 and terminal_at is not null group by 1, 2 order by 1, 2"
)


@dataclass(frozen=True)
class TableRows:
    """One snapshot: rows of a tenant (of some of its sessions), and what the sink had applied of each topic then."""

    runs: Sequence[Row]
    events: Sequence[Row]
    inputs: Sequence[Row]
    actions: Sequence[Row]
    refused: Sequence[Row]
    next_offsets: dict[tuple[str, int], int]


def event_row(record: asyncpg.Record) -> Row:
    """A row of EVENTS with its payload as it was received."""
    row = dict(record)
    raw = row.pop("raw")
    row["payload"] = orjson.loads(row["payload"] if raw is None else raw)
    return row


def action_row(record: asyncpg.Record) -> Row:
    """A row of ACTIONS with its result as a value."""
    row = dict(record)
    row["result"] = None if row["result"] is None else orjson.loads(row["result"])
    return row


async def _connected(dsn: str) -> asyncpg.Connection[asyncpg.Record]:
    with answering(dsn):
        return await asyncpg.connect(dsn, timeout=TIMEOUT_S, command_timeout=TIMEOUT_S)


async def _tables(dsn: str, tenant_id: int, sessions: Sequence[str] | None) -> TableRows:
    connection = await _connected(dsn)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            some = None if sessions is None else list(sessions)
            return TableRows(
                runs=[dict(r) for r in await connection.fetch(RUNS + _OF_TENANT + "r.id", tenant_id, some)],
                events=[event_row(r) for r in await connection.fetch(EVENTS + _OF_TENANT + "e.id", tenant_id, some)],
                inputs=[dict(r) for r in await connection.fetch(INPUTS + _OF_TENANT + "3, 4", tenant_id, some)],
                actions=[action_row(r) for r in await connection.fetch(ACTIONS + _OF_TENANT + "a.id", tenant_id, some)],
                refused=[dict(r) for r in await connection.fetch(REFUSED + _OF_TENANT + "3, 4", tenant_id, some)],
                next_offsets={(r[0], r[1]): r[2] for r in await connection.fetch(OFFSETS)},
            )
    finally:
        await connection.close()


async def _outcomes(dsn: str, tenant_id: int) -> tuple[int, dict[tuple[int, str], int], dict[tuple[str, int], int]]:
    connection = await _connected(dsn)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            active = await connection.fetchval(ACTIVE_QUERY, tenant_id)
            outcomes = {
                (int(r[0].timestamp() * 1000), r[1]): r[2] for r in await connection.fetch(OUTCOMES_QUERY, tenant_id)
            }
            offsets = {(r[0], r[1]): r[2] for r in await connection.fetch(OFFSETS)}
            return active, outcomes, offsets
    finally:
        await connection.close()


async def _rolled_back(dsn: str) -> int:
    connection = await _connected(dsn)
    try:
        await connection.execute("select pg_stat_force_next_flush(), pg_stat_clear_snapshot()")
        count: int = await connection.fetchval(
            "select xact_rollback from pg_stat_database where datname = current_database()"
        )
        return count
    finally:
        await connection.close()


def read_tables(dsn: str, tenant_id: int, sessions: Sequence[str] | None = None) -> TableRows:
    """The tables of a tenant, or of the named sessions of it, in one snapshot. Not for use inside a running loop."""
    return asyncio.run(_tables(dsn, tenant_id, sessions))


def read_outcomes(dsn: str, tenant_id: int) -> tuple[int, dict[tuple[int, str], int], dict[tuple[str, int], int]]:
    """Active runs, outcomes {(first ms of the minute, status): runs}, and the sink's offsets in the same snapshot."""
    return asyncio.run(_outcomes(dsn, tenant_id))


def read_rolled_back(dsn: str) -> int:
    """Transactions of this database that were rolled back so far, by PostgreSQL's own count."""
    return asyncio.run(_rolled_back(dsn))
