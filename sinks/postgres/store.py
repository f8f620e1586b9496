"""Execute the changes of one batch inside the caller's transaction: read what is touched, fold, write.

Order: sessions (their locks keep the writer of the other topic away), rows of erased sessions, events, runs that left
the active set, runs that are in it, then inputs, actions, subtasks, checkpoints, refused reports and objects to delete;
within each statement in key order, so that two writers never wait for each other in a circle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import asyncpg

from onepen.schemas.errors import OnepenError
from onepen.sinks.postgres.connecting import Connection
from onepen.sinks.postgres.erasure import erase_rows
from onepen.sinks.postgres.fold import fold
from onepen.sinks.postgres.queries import sql
from onepen.sinks.postgres.rows import Changes, EventRow, Placed, RunRow, SessionKey, SessionRow
from onepen.sinks.postgres.sessions import session_rows
from onepen.sinks.postgres.stored_rows import at, columns, read_stored

__all__ = ["TwoActiveRuns", "store"]

ONE_ACTIVE: Final = "only_one_active_run_per_session"

SessionIds = dict[SessionKey, int]


class TwoActiveRuns(OnepenError):
    """The backstop index fired: the log holds two active runs of one session. Never a branch of the program."""

    def __init__(self, session_id: int, session: SessionKey, entering: Sequence[str]) -> None:
        super().__init__(f"{ONE_ACTIVE}: session {session[0]}/{session[1]}")
        self.session_id = session_id
        self.session = session
        self.entering = tuple(entering)


async def store(connection: Connection, records: Sequence[Placed]) -> Changes:
    """Write a batch; answers what it changed. The caller holds the transaction and its partitions' rows."""
    touched = session_rows(records)
    sessions, erased = await _put_sessions(connection, touched)
    before = await read_stored(connection, records, erased)
    changes = fold(before, records)
    erased_now = [sessions[key] for key, row in touched.items() if row.erased_ms is not None]
    if erased_now:
        changes.objects |= await erase_rows(connection, erased_now)
    await _give_ids(connection, changes)
    events = [_event_tuple(row, before.runs, changes, sessions) for row in changes.events]
    await _append_events(connection, events)
    left = [run for run in changes.runs.values() if not run.active]
    present = [run for run in changes.runs.values() if run.active]
    await _put_runs(connection, left, sessions)
    await _put_runs(connection, present, sessions)
    await _put(connection, "put_inputs", _input_tuples(changes, sessions))
    await _put(connection, "put_actions", _action_tuples(changes, sessions))
    await _put(connection, "put_subtasks", _subtask_tuples(changes, sessions))
    await _put(connection, "put_checkpoints", _checkpoint_tuples(changes, sessions))
    await _put(connection, "put_refused_reports", _refused_tuples(changes, sessions))
    await _put(connection, "put_objects_to_delete", _object_tuples(changes, sessions))
    return changes


async def _put(connection: Connection, statement: str, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        await connection.execute(sql(statement), *columns(rows))


async def _put_sessions(
    connection: Connection, touched: dict[SessionKey, SessionRow]
) -> tuple[SessionIds, frozenset[SessionKey]]:
    """Ids of the sessions, and which of them are erased, by this batch or before."""
    if not touched:
        return {}, frozenset()
    rows = [
        (tenant_id, key, at(s.created_ms), at(s.updated_ms), s.user_id, s.title, at(s.erased_ms))
        for (tenant_id, key), s in sorted(touched.items(), key=itemgetter(0))
    ]
    found = await connection.fetch(sql("put_sessions"), *columns(rows))
    ids = {(row["tenant_id"], row["session_key"]): row["id"] for row in found}
    return ids, frozenset((row["tenant_id"], row["session_key"]) for row in found if row["erased"])


async def _give_ids(connection: Connection, changes: Changes) -> None:
    """Ids of new runs are drawn before their rows are written, because their events come first."""
    new = [run for run in changes.runs.values() if run.id is None]
    if new:
        drawn = await connection.fetch(sql("new_run_ids"), len(new))
        for run, row in zip(new, drawn, strict=True):
            run.id = row["id"]


async def _append_events(connection: Connection, rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    rows.sort(key=itemgetter(0, 1, 3))
    await connection.copy_records_to_table("staged_events", records=rows)
    await connection.execute(sql("append_events"))


def _event_tuple(
    row: EventRow, stored_runs: dict[str, RunRow], changes: Changes, sessions: SessionIds
) -> tuple[Any, ...]:
    event = row.event
    run = changes.runs.get(event.run_id) or stored_runs[event.run_id]
    return (
        sessions[event.tenant_id, event.session_id],
        run.id,
        event.tenant_id,
        event.seq,
        event.type,
        row.payload,
        row.raw,
        event.generation,
        event.cause.partition,
        event.cause.offset,
        event.cause.index,
        event.prev_hash,
        event.hash,
        row.partition,
        row.offset,
        at(event.at_ms),
    )


async def _put_runs(connection: Connection, runs: list[RunRow], sessions: SessionIds) -> None:
    rows = [_run_tuple(run, sessions[run.tenant_id, run.session_key]) for run in runs]
    rows.sort(key=itemgetter(1, 4))
    try:
        await _put(connection, "put_runs", rows)
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name != ONE_ACTIVE:
            raise
        raise _two_active(runs, sessions, error) from error


def _two_active(runs: list[RunRow], sessions: SessionIds, error: asyncpg.UniqueViolationError) -> TwoActiveRuns:
    detail = error.detail or ""  # Key (session_id)=(17) already exists.
    named = {number: key for key, number in sessions.items() if f"=({number})" in detail}
    session_id, session = next(iter(named.items()), (0, (0, "?")))
    entering = [run.run_key for run in runs if (run.tenant_id, run.session_key) == session]
    return TwoActiveRuns(session_id, session, entering)


def _run_tuple(run: RunRow, session_id: int) -> tuple[Any, ...]:
    return (
        run.id,
        session_id,
        run.tenant_id,
        run.run_key,
        run.run_no,
        str(run.status),
        run.generation,
        run.attempt,
        run.lease_owner,
        at(run.lease_expires_ms),
        at(run.timeout_ms),
        at(run.cancel_requested_ms),
        run.cancel_reason,
        run.terminal_status,
        at(run.terminal_ms),
        run.terminal_reason,
        run.retryable,
        run.forced,
        run.input_id,
        run.input_mode,
        run.input_partition,
        run.input_offset,
        run.user_id,
        run.source,
        run.last_seq,
        run.last_hash,
        at(run.created_ms),
        at(run.updated_ms),
        run.recovery,
        run.lineage,
        run.retry_of,
        run.parent_session_key,
        run.parent_run_key,
        run.parent_call_id,
    )


def _input_tuples(changes: Changes, sessions: SessionIds) -> list[tuple[Any, ...]]:
    return [
        (
            partition,
            offset,
            sessions[row.tenant_id, row.session_key],
            row.tenant_id,
            row.input_id,
            row.mode,
            row.user_id,
            row.source,
            row.verdict,
            row.verdict_reason,
            row.verdict_run_key,
            row.verdict_detail,
            at(row.verdict_ms),
            row.disposition,
            row.disposition_reason,
            row.disposition_run_key,
            row.disposition_detail,
            at(row.disposition_ms),
        )
        for (partition, offset), row in sorted(changes.inputs.items(), key=itemgetter(0))
    ]


def _action_tuples(changes: Changes, sessions: SessionIds) -> list[tuple[Any, ...]]:
    return [
        (
            sessions[key[:2]],
            key[0],
            key[2],
            key[3],
            row.run_key,
            str(row.state),
            row.args_digest,
            row.generation,
            at(row.requested_ms),
            at(row.permitted_ms),
            at(row.deadline_ms),
            at(row.ended_ms),
            row.reason,
            at(row.approval_requested_ms),
            at(row.approval_expires_ms),
            row.approval_decision,
            row.approval_by,
            row.approval_input_id,
            row.result,
            row.last_run_no,
            row.last_seq,
            row.last_offset,
            row.settled_state,
            at(row.settled_ms),
            row.settled_offset,
            row.settled_by,
            row.settled_input_id,
            row.settled_worker_id,
        )
        for key, row in sorted(changes.actions.items(), key=itemgetter(0))
    ]


def _subtask_tuples(changes: Changes, sessions: SessionIds) -> list[tuple[Any, ...]]:
    return [
        (
            sessions[key[:2]],
            key[0],
            key[2],
            key[3],
            row.child_session_key,
            row.child_input_id,
            row.child_run_key,
            row.status,
            row.reason,
            row.result,
            at(row.started_ms),
            at(row.ended_ms),
        )
        for key, row in sorted(changes.subtasks.items(), key=itemgetter(0))
    ]


def _checkpoint_tuples(changes: Changes, sessions: SessionIds) -> list[tuple[Any, ...]]:
    rows = [
        (
            sessions[row.tenant_id, row.session_key],
            row.tenant_id,
            row.run_key,
            row.run_no,
            row.seq,
            row.uri,
            row.digest,
            row.size_bytes,
            row.through_seq,
            at(row.created_ms),
        )
        for row in changes.checkpoints
    ]
    rows.sort(key=itemgetter(0, 3, 4))
    return rows


def _refused_tuples(changes: Changes, sessions: SessionIds) -> list[tuple[Any, ...]]:
    return [
        (
            partition,
            offset,
            sessions[row.tenant_id, row.session_key],
            row.tenant_id,
            row.run_key,
            row.generation,
            row.worker_id,
            row.record,
            row.report_no,
            row.reason,
            row.detail,
            row.input_id,
            at(row.created_ms),
        )
        for (partition, offset), row in sorted(changes.refused.items(), key=itemgetter(0))
    ]


def _object_tuples(changes: Changes, sessions: SessionIds) -> list[tuple[Any, ...]]:
    rows = [
        (sessions[tenant_id, session_key], tenant_id, hashlib.sha256(uri.encode()).digest(), uri)
        for tenant_id, session_key, uri in changes.objects
    ]
    rows.sort(key=itemgetter(0, 2))
    return rows
