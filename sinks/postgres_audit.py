"""One snapshot of the tables for an audit: rows of all tenants, partition by partition, all as of the same moment.

Rule: read only, and independent of the writer. The snapshot stays open until it is closed, so an audit of millions of
rows holds those of one partition at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import asyncpg

from onepen.sinks.postgres_dsn import answering
from onepen.sinks.postgres_outside import ACTIONS, EVENTS, INPUTS, OFFSETS, REFUSED, RUNS, Row, action_row, event_row

__all__ = ["AuditRows", "AuditSnapshot"]

T = TypeVar("T")

CONNECT_S: Final = 15.0
QUERY_S: Final = 600.0

_MS = "(extract(epoch from {0}) * 1000)::bigint as {1}"
_CHECKPOINTS = f"""
select s.tenant_id, s.session_key, c.run_key, c.seq, c.uri, c.digest, c.size_bytes, c.through_seq,
    {_MS.format("c.created_at", "created_at")}
from agent_checkpoints c join agent_sessions s on s.id = c.session_id join agent_runs r on r.run_key = c.run_key
"""
_SUBTASKS = f"""
select s.tenant_id, s.session_key, t.run_key, t.call_id, t.child_session_key, t.child_input_id, t.child_run_key,
    t.status, t.reason, {_MS.format("t.started_at", "started_at")}, {_MS.format("t.ended_at", "ended_at")}
from agent_subtasks t join agent_sessions s on s.id = t.session_id join agent_runs r on r.run_key = t.run_key
"""
_ACTIONS = ACTIONS + " join agent_runs r on r.run_key = a.run_key"


@dataclass(frozen=True)
class AuditRows:
    """Rows that rest on one partition of the log."""

    runs: list[Row]
    events: list[Row]
    inputs: list[Row]
    actions: list[Row]
    refused: list[Row]
    checkpoints: list[Row]
    subtasks: list[Row]


class AuditSnapshot:
    """Begun when it is made; close it. Not for use inside a running loop."""

    def __init__(self, dsn: str) -> None:
        """Raises `Retryable` when nobody answers, and what the driver raises."""
        self._runner = asyncio.Runner()
        try:
            with answering(dsn):
                self._connection: asyncpg.Connection = self._run(
                    asyncpg.connect(dsn, timeout=CONNECT_S, command_timeout=QUERY_S)
                )
            self._transaction = self._connection.transaction(isolation="repeatable_read", readonly=True)
            self._run(self._transaction.start())
            # The snapshot is taken by the first query, not by `begin`.
            self.next_offsets: dict[tuple[str, int], int] = {
                (row[0], row[1]): row[2] for row in self._run(self._connection.fetch(OFFSETS))
            }
        except BaseException:
            self._runner.close()
            raise

    def partition(self, partition: int) -> AuditRows:
        """The rows of one partition."""

        def rows(select: str, column: str) -> list[asyncpg.Record]:
            return self._run(self._connection.fetch(f"{select} where {column} = $1", partition))

        return AuditRows(
            runs=[dict(row) for row in rows(RUNS, "r.input_partition")],
            events=[event_row(row) for row in rows(EVENTS, "e.log_partition")],
            inputs=[dict(row) for row in rows(INPUTS, "i.input_partition")],
            actions=[action_row(row) for row in rows(_ACTIONS, "r.input_partition")],
            refused=[dict(row) for row in rows(REFUSED, "f.record_partition")],
            checkpoints=[dict(row) for row in rows(_CHECKPOINTS, "r.input_partition")],
            subtasks=[dict(row) for row in rows(_SUBTASKS, "r.input_partition")],
        )

    def close(self) -> None:
        """End the snapshot."""
        try:
            self._run(self._connection.close())
        finally:
            self._runner.close()

    def _run(self, question: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(question)
