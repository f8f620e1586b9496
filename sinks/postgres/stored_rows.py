"""Reading the stored rows that a batch touches, and values on their way between rows and columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from onepen.sinks.postgres.connecting import Connection
from onepen.sinks.postgres.fold import AT_MS_MAX, touched
from onepen.sinks.postgres.named_columns import EPOCH, reading
from onepen.sinks.postgres.queries import sql
from onepen.sinks.postgres.rows import ActionRow, Placed, RunRow, SessionKey, Stored

__all__ = ["at", "columns", "read_stored"]

_run_row = reading(RunRow)
_action_row = reading(ActionRow)


async def read_stored(connection: Connection, records: Sequence[Placed], erased: frozenset[SessionKey]) -> Stored:
    """The rows that `fold` needs. The caller holds the locks of the sessions."""
    runs, actions = touched(records)
    before = Stored(erased=erased)
    if runs:
        for row in await connection.fetch(sql("stored_runs"), runs):
            before.runs[row["run_key"]] = _run_row(row)
    if actions:
        for row in await connection.fetch(sql("stored_actions"), *columns(actions)):
            key = row["tenant_id"], row["session_key"], row["action_name"], row["action_key"]
            before.actions[key] = _action_row(row)
    return before


def columns(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """Rows as the arrays that `unnest` takes."""
    return [list(column) for column in zip(*rows, strict=True)]


def at(ms: int | None) -> datetime | None:
    """A moment of the log as a timestamp; None as well for a number that is no moment."""
    return None if ms is None or not 0 <= ms <= AT_MS_MAX else EPOCH + timedelta(milliseconds=ms)
