"""What people and programs ask of the tables: sessions, runs, inputs, actions; typed, by tenant, in pages.

Rule: every query names the tenant twice: in its condition, and as the setting that row level security reads. Pages go
by key, never by number: a row that comes in between moves nothing. Times are milliseconds of the log.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any, Final

import asyncpg

from onepen.schemas.errors import Invalid
from onepen.schemas.statuses import RunStatus
from onepen.sinks.postgres.history import Pool
from onepen.sinks.postgres.named_columns import EPOCH, reading
from onepen.sinks.postgres.queries import sql
from onepen.sinks.postgres.table_views import (
    ActionView,
    InputView,
    Page,
    RefusedView,
    RunDetail,
    RunView,
    SessionDetail,
    SessionView,
    SubtaskView,
)

__all__ = [
    "ActionView",
    "InputView",
    "Page",
    "RefusedView",
    "RunDetail",
    "RunView",
    "SessionDetail",
    "SessionView",
    "SubtaskView",
    "get_run",
    "get_run_by_number",
    "get_session",
    "inputs_in_limbo",
    "list_inputs",
    "list_runs",
    "list_sessions",
    "show_input",
]

PAGE: Final = 50
LISTED_MAX: Final = 100

_named_session = reading(SessionView, status="last_status", active_run_id="active_run")
_run = reading(RunView)
_action = reading(ActionView, name="action_name")
_subtask = reading(SubtaskView)
_refused = reading(RefusedView, partition="record_partition", offset="record_offset", at_ms="created_at")
_input = reading(InputView, partition="input_partition", offset="input_offset")


async def list_sessions(
    pool: Pool, tenant_id: int, *, limit: int = PAGE, cursor: str | None = None
) -> Page[SessionView]:
    """Sessions of a tenant, the last changed first."""
    at, number = _read_cursor(cursor)
    rows = await _fetch(pool, tenant_id, "list_sessions", at, number, limit + 1)
    return _page(rows, limit, "updated_at", _session)


async def get_session(pool: Pool, tenant_id: int, session_id: str, *, runs: int = 10) -> SessionDetail | None:
    """One session, None when the tables do not have it."""
    rows = await _fetch(pool, tenant_id, "get_session", session_id)
    if not rows:
        return None
    latest = await list_runs(pool, tenant_id, session_id, limit=runs)
    counted = await _fetch(pool, tenant_id, "undisposed_inputs", session_id)
    return SessionDetail(session=_session(rows[0]), runs=latest.items, open_inputs=counted[0]["count"])


async def list_runs(
    pool: Pool,
    tenant_id: int,
    session_id: str | None = None,
    *,
    statuses: Collection[RunStatus] | None = None,
    limit: int = PAGE,
    cursor: str | None = None,
) -> Page[RunView]:
    """Runs of a tenant or of one session, newest first; `statuses`: only those that stand in one of them."""
    at, number = _read_cursor(cursor)
    wanted = None if statuses is None else sorted(statuses)
    rows = await _fetch(pool, tenant_id, "list_runs", session_id, wanted, at, number, limit + 1)
    return _page(rows, limit, "created_at", _run)


async def get_run(pool: Pool, tenant_id: int, run_id: str) -> RunDetail | None:
    """One run by its id, None when the tables do not have it."""
    return await _run_detail(pool, tenant_id, await _fetch(pool, tenant_id, "get_run", run_id))


async def get_run_by_number(pool: Pool, tenant_id: int, session_id: str, run_no: int) -> RunDetail | None:
    """One run by its number in its session, None when the tables do not have it."""
    found = await _fetch(pool, tenant_id, "get_run_by_number", session_id, run_no)
    return await _run_detail(pool, tenant_id, found)


async def show_input(pool: Pool, tenant_id: int, input_id: str, session_id: str | None = None) -> tuple[InputView, ...]:
    """All input records that carried this id, in log order per session: the first, then its repeats."""
    rows = await _fetch(pool, tenant_id, "inputs_by_id", input_id, session_id, LISTED_MAX)
    return tuple(map(_input, rows))


async def list_inputs(
    pool: Pool, tenant_id: int, session_id: str, *, after_offset: int = -1, limit: int = PAGE
) -> tuple[InputView, ...]:
    """Input records of a session in log order; go on with the last one's offset."""
    return tuple(map(_input, await _fetch(pool, tenant_id, "inputs_of_session", session_id, after_offset, limit)))


async def inputs_in_limbo(pool: Pool, tenant_id: int, *, limit: int = LISTED_MAX) -> tuple[InputView, ...]:
    """Conservation: inputs without a disposition in sessions without an active run. Empty when the sink is level."""
    return tuple(map(_input, await _fetch(pool, tenant_id, "inputs_in_limbo", limit)))


async def _fetch(pool: Pool, tenant_id: int, name: str, *values: Any) -> list[asyncpg.Record]:
    async with pool.acquire() as connection, connection.transaction(readonly=True):
        await connection.execute(sql("see_tenant"), str(tenant_id))
        return await connection.fetch(sql(name), tenant_id, *values)


async def _run_detail(pool: Pool, tenant_id: int, rows: list[asyncpg.Record]) -> RunDetail | None:
    if not rows:
        return None
    run = _run(rows[0])
    actions = await _fetch(pool, tenant_id, "actions_of_run", run.run_id, LISTED_MAX)
    refused = await _fetch(pool, tenant_id, "refused_of_run", run.run_id, LISTED_MAX)
    subtasks = await _fetch(pool, tenant_id, "subtasks_of_run", run.run_id, LISTED_MAX)
    return RunDetail(
        run=run,
        actions=tuple(map(_action, actions)),
        refused=tuple(map(_refused, refused)),
        subtasks=tuple(map(_subtask, subtasks)),
    )


def _page(rows: list[asyncpg.Record], limit: int, moment: str, view: Any) -> Page[Any]:
    shown = rows[:limit]
    more = len(rows) > limit and bool(shown)
    return Page(tuple(map(view, shown)), _write_cursor(shown[-1], moment) if more else None)


def _write_cursor(row: asyncpg.Record, moment: str) -> str:
    microseconds = (row[moment] - EPOCH) // timedelta(microseconds=1)
    return f"{microseconds}.{row['id']}"


def _read_cursor(cursor: str | None) -> tuple[datetime | None, int | None]:
    if cursor is None:
        return None, None
    try:
        microseconds, number = (int(part) for part in cursor.split("."))
        return EPOCH + timedelta(microseconds=microseconds), number
    except (ValueError, OverflowError):
        raise Invalid("cursor: not one that a page gave", field="cursor") from None


def _session(row: asyncpg.Record) -> SessionView:
    return _named_session({**row, "runs": row["runs"] or 0})
