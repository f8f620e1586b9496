"""The writer on a real PostgreSQL: fencing, replay, order of runs, unknown commits, odd text, roles, migrations."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Invalid, Retryable
from onepen.schemas.events import Cause, Event, EventDraft
from onepen.schemas.statuses import ACTIVE, TERMINAL, RunStatus
from onepen.sinks.postgres import history, migrate, readers
from onepen.sinks.postgres.connecting import Consequence, consequence
from onepen.sinks.postgres.rows import Placed
from onepen.sinks.postgres.writer import Slice, Writer
from tests.event_streams import START_MS, Generator, Streams
from tests.services import run_coroutine
from tests.sink_tables import dump, fetchval, on_tables, placed, table_locked, write_all, writing


async def write_streams(writer: Writer, streams: Streams, cuts: tuple[int, ...] = ()) -> None:
    for topic, by_partition in (("events", streams.events), ("receipts", streams.receipts)):
        for partition, records in by_partition.items():
            await write_all(writer, topic, partition, placed(partition, list(records)), cuts=cuts)


def event(session: str, run_no: int, seq: int, kind: str, payload: bytes = b"{}") -> Event:
    draft = EventDraft(
        tenant_id=1,
        session_id=session,
        run_id=f"run-{session}-{run_no}",
        run_no=run_no,
        seq=seq,
        type=kind,
        generation=1,
        at_ms=START_MS + 10 * run_no + seq,
        cause=Cause(0, run_no, seq),
        payload=payload,
    )
    return codec.seal(draft, bytes(32))[0]


def finished(session: str, run_no: int, seq: int = 2) -> Event:
    return event(session, run_no, seq, "run.finished", b'{"terminalStatus":"completed"}')


def batch(claim: Any, *events: Event, first: int = 0) -> Slice:
    records = [Placed(claim.place[1], first + n, record) for n, record in enumerate(events)]
    return Slice(claim.place, claim.epoch, first, first + len(events), records)


# -- migrations


def test_migrations_are_applied_once(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        said: list[str] = []
        assert await migrate.migrate(dsn, said.append) == []
        assert said == []
        assert await fetchval(dsn, "select count(*) from schema_migrations") == len(migrate.migrations())

    on_tables(test, fresh_dsn)


def test_two_runners_at_once(fresh_dsn: str) -> None:
    async def both() -> list[list[str]]:
        return await asyncio.gather(migrate.migrate(fresh_dsn), migrate.migrate(fresh_dsn))

    names = [f"{m.version:04}_{m.name}" for m in migrate.migrations()]
    assert sorted(run_coroutine(both)) == [[], names]


def test_an_edited_migration_is_refused(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        steps = migrate.migrations()
        edited = dataclasses.replace(steps[0], sql=steps[0].sql + "-- edited\n")
        with pytest.raises(Fatal, match="0001_tables was changed"):
            await migrate.migrate(dsn, steps=[edited, *steps[1:]])

    on_tables(test, fresh_dsn)


def test_a_newer_database_is_refused_and_an_older_one_not_written(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        newer = migrate.Migration(len(migrate.migrations()) + 1, "later", "create table later (a int);\n\n")
        assert await migrate.migrate(dsn, steps=[*migrate.migrations(), newer]) == [f"{newer.version:04}_later"]
        with pytest.raises(Fatal, match="upgrade onepen"):
            await migrate.migrate(dsn)
        async with writing(dsn) as writer:
            with pytest.raises(Fatal, match="upgrade onepen"):
                await writer.claim(("events", 0))

    on_tables(test, fresh_dsn)


def test_a_failing_migration_leaves_nothing(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        sql = "create table half (a int);\n\nselect 1 / 0;\n\n"
        bad = migrate.Migration(len(migrate.migrations()) + 1, "bad", sql)
        with pytest.raises(asyncpg.DivisionByZeroError):
            await migrate.migrate(dsn, steps=[*migrate.migrations(), bad])
        assert await fetchval(dsn, "select to_regclass('half')") is None

    on_tables(test, fresh_dsn)


def test_a_lock_that_somebody_keeps_is_not_waited_for_without_end(
    fresh_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_WAIT_S", 1)

    async def test() -> None:
        other = await asyncpg.connect(fresh_dsn)
        try:
            await other.execute("select pg_advisory_lock($1)", migrate.ADVISORY_LOCK)
            with pytest.raises(Retryable, match="another migration"):
                await migrate.migrate(fresh_dsn)
        finally:
            await other.close()
        assert await migrate.migrate(fresh_dsn) != []

    run_coroutine(test)


def test_the_writer_says_that_migrations_are_missing(fresh_dsn: str) -> None:
    async def test() -> None:
        async with writing(fresh_dsn) as writer:
            with pytest.raises(Fatal, match="lacks migrations"):
                await writer.claim(("events", 0))

    run_coroutine(test)


def test_the_indexes_and_the_comment_stand_as_declared(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        only = await fetchval(
            dsn, "select indexdef from pg_indexes where indexname = 'only_one_active_run_per_session'"
        )
        assert "UNIQUE" in only
        assert "(session_id) WHERE" in only
        for name in ("active_run_timeout_idx", "session_run_history_idx"):
            assert await fetchval(dsn, "select to_regclass($1) is not null", name)
        comment = await fetchval(
            dsn,
            "select col_description('agent_runs'::regclass, attnum) from pg_attribute"
            " where attrelid = 'agent_runs'::regclass and attname = 'lease_expires_at'",
        )
        assert "grant" in comment

    on_tables(test, fresh_dsn)


# -- fencing and positions


def test_b46_a_stale_epoch_changes_nothing(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        async with writing(dsn) as old, writing(dsn) as new:
            stale = await old.claim(("events", 0))
            current = await new.claim(("events", 0))
            assert (stale.epoch + 1, stale.next_offset) == (current.epoch, current.next_offset)
            written = await old.write([batch(stale, event("s", 1, 1, "run.started"))])
            assert (written.fenced, written.done) == ({stale.place}, set())
            assert await fetchval(dsn, "select count(*) from agent_run_events") == 0
            assert await fetchval(dsn, "select next_offset from sink_partitions") == 0
            written = await new.write([batch(current, event("s", 1, 1, "run.started"))])
            assert written.done == {current.place}
            assert await fetchval(dsn, "select next_offset from sink_partitions") == 1

    on_tables(test, fresh_dsn)


def test_one_fenced_partition_does_not_hold_the_others(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        async with writing(dsn) as writer, writing(dsn) as thief:
            mine = await writer.claim(("events", 0))
            lost = await writer.claim(("events", 1))
            await thief.claim(("events", 1))
            parts = [batch(mine, event("s", 1, 1, "run.started")), batch(lost, event("t", 1, 1, "run.started"))]
            written = await writer.write(parts)
            assert (written.done, written.fenced) == ({mine.place}, {lost.place})
            assert await fetchval(dsn, "select count(*) from agent_runs") == 1

    on_tables(test, fresh_dsn)


def test_b46_a_claim_waits_for_the_batch_that_is_being_written(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        async with writing(dsn) as old, writing(dsn) as new:
            claim = await old.claim(("events", 0))
            async with table_locked(dsn, "agent_runs"):
                writing_task = asyncio.create_task(old.write([batch(claim, event("s", 1, 1, "run.started"))]))
                await lock_waiters(dsn, 1)
                taking = asyncio.create_task(new.claim(("events", 0)))
                await lock_waiters(dsn, 2)
            assert (await writing_task).done == {claim.place}
            assert (await taking).next_offset == 1

    on_tables(test, fresh_dsn)


async def lock_waiters(dsn: str, wanted: int) -> None:
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    async with asyncio.timeout(20):
        while await fetchval(dsn, query) < wanted:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_b48_any_cut_and_a_replay_leave_the_tables_identical(fresh_dsn: str, postgres_dsn: str, seed: int) -> None:
    from tests.services import fresh_database

    streams = Generator(seed).make(40)

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            await write_streams(writer, streams)
            once = await dump(dsn)
            connection = await asyncpg.connect(dsn)
            await connection.execute("update sink_partitions set next_offset = 0")
            await connection.close()
            await write_streams(writer, streams, cuts=(7, 8, 90))
            assert await dump(dsn) == once
        with fresh_database(postgres_dsn) as other:
            await migrate.migrate(other)
            async with writing(other) as writer:
                await write_streams(writer, streams, cuts=tuple(range(0, 2000, 13)))
            assert await dump(other) == once
        assert all(once[name] for name in ("sessions", "runs", "events", "inputs", "actions", "refused"))

    on_tables(test, fresh_dsn)


def test_receipts_may_come_before_events_and_behind(fresh_dsn: str, postgres_dsn: str) -> None:
    from tests.services import fresh_database

    streams = Generator(9).make(20)

    async def both(writer: Writer, first: str) -> None:
        sources = {"events": streams.events, "receipts": streams.receipts}
        for topic in sorted(sources, key=lambda name: name != first):
            for partition, records in sources[topic].items():
                await write_all(writer, topic, partition, placed(partition, list(records)))

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            await both(writer, "events")
        with fresh_database(postgres_dsn) as other:
            await migrate.migrate(other)
            async with writing(other) as writer:
                await both(writer, "receipts")
            assert await dump(other) == await dump(dsn)

    on_tables(test, fresh_dsn)


# -- the one active run


def test_b48_one_run_leaves_while_the_next_enters_in_one_batch(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            claim = await writer.claim(("events", 0))
            await writer.write([batch(claim, event("s", 1, 1, "run.started"))])
            events = [
                finished("s", 1),
                event("s", 2, 1, "run.started"),
                finished("s", 2),
                event("s", 3, 1, "run.started"),
            ]
            written = await writer.write([batch(claim, *events, first=1)])
            assert written.done == {claim.place}
            query = "select string_agg(status, ',' order by run_no) from agent_runs"
            assert await fetchval(dsn, query) == "completed,completed,running"

    on_tables(test, fresh_dsn)


def test_b48_two_active_runs_park_their_partition_and_name_both(
    fresh_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            bad = await writer.claim(("events", 0))
            good = await writer.claim(("events", 1))
            await writer.write([batch(bad, event("s", 1, 1, "run.started"))])
            parts = [
                batch(bad, event("s", 2, 1, "run.started"), first=1),
                batch(good, event("t", 1, 1, "run.started")),
            ]
            written = await writer.write(parts)
            assert written.done == {good.place}
            reason = written.parked[bad.place]
            assert "run-s-1" in reason
            assert "run-s-2" in reason
            assert await fetchval(dsn, "select next_offset from sink_partitions where partition = 0") == 1
            assert await fetchval(dsn, "select count(*) from agent_run_events") == 2

    on_tables(test, fresh_dsn)
    assert "ALARM" in caplog.text


# -- text and bytes


def test_b41_every_event_comes_back_byte_for_byte(fresh_dsn: str) -> None:
    streams = Generator(3).make(60)

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            await write_streams(writer, streams, cuts=(50,))
        pool = await history.open_pool(dsn)
        wanted: dict[tuple[int, str], list[Event]] = {}
        for record in streams.all_events():
            wanted.setdefault((record.tenant_id, record.session_id), []).append(record)
        for (tenant_id, session_id), events in wanted.items():
            found: list[Event] = []
            after = (0, 0)
            while page := await history.session_events(pool, tenant_id, session_id, after, limit=17):
                found += page
                after = page[-1].run_no, page[-1].seq
            assert found == events
            one = events[0].run_id
            assert await history.run_events(pool, tenant_id, one) == [e for e in events if e.run_id == one]
        assert await history.next_offset(pool, "events", 0) == len(streams.events[0])
        assert await history.next_offset(pool, "events", 99) == 0
        await pool.close()
        assert await fetchval(dsn, "select count(*) from agent_run_events where payload::text like '%\ufffd%'") > 0
        assert await fetchval(dsn, "select count(*) from agent_run_events where raw is null") > 0

    on_tables(test, fresh_dsn)


# -- readers and roles


def test_readers_page_by_key(fresh_dsn: str) -> None:
    streams = Generator(4, sessions=8).make(40)

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            await write_streams(writer, streams)
        pool = await history.open_pool(dsn)
        runs: list[readers.RunView] = []
        cursor = None
        while True:
            page = await readers.list_runs(pool, 1, limit=3, cursor=cursor)
            runs += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        assert (
            len({r.run_id for r in runs})
            == len(runs)
            == await fetchval(dsn, "select count(*) from agent_runs where tenant_id = 1")
        )
        for statuses in ([RunStatus.FAILED], ACTIVE, TERMINAL):
            page = await readers.list_runs(pool, 1, statuses=statuses, limit=1_000)
            assert page.items == tuple(run for run in runs if run.status in statuses)
        assert await readers.list_runs(pool, 1, statuses=[]) == readers.Page((), None)
        assert {run.status for run in runs} > {RunStatus.FAILED}
        first = await readers.list_sessions(pool, 1, limit=3)
        rest = await readers.list_sessions(pool, 1, limit=100, cursor=first.next_cursor)
        assert len(first.items) + len(rest.items) == 4
        detail = await readers.get_session(pool, 1, first.items[0].session_id)
        assert detail is not None
        assert detail.session == first.items[0]
        assert detail.runs[0].run_no == detail.session.runs
        shown = await readers.get_run(pool, 1, runs[0].run_id)
        assert shown is not None
        assert shown.run == runs[0]
        assert shown == await readers.get_run_by_number(pool, 1, runs[0].session_id, runs[0].run_no)
        assert await readers.get_run(pool, 2, runs[0].run_id) is None
        inputs = await readers.show_input(pool, 1, "in-1")
        assert {i.verdict for i in inputs} == {"started"}
        listed = await readers.list_inputs(pool, 1, first.items[0].session_id, limit=1000)
        assert [i.offset for i in listed] == sorted(i.offset for i in listed)
        assert await readers.inputs_in_limbo(pool, 1) == ()
        with pytest.raises(Invalid):
            await readers.list_runs(pool, 1, cursor="garbage")
        await pool.close()

    on_tables(test, fresh_dsn)


async def login(dsn: str, role: str) -> str:
    """A login user that is a member of the group role."""
    user, password = f"u_{urlsplit(dsn).path[1:]}_{role[-6:]}", "secret-of-a-test"
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"create role {user} login password '{password}' in role {role}")
    await connection.close()
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{parts.hostname}:{parts.port}"))


async def forget(dsn: str, *logins: str) -> None:
    connection = await asyncpg.connect(dsn)
    for one in logins:
        await connection.execute(f"drop owned by {urlsplit(one).username}")
        await connection.execute(f"drop role {urlsplit(one).username}")
    await connection.close()


def test_roles_have_the_rights_they_need_and_no_others(fresh_dsn: str) -> None:
    streams = Generator(4).make(20)

    async def test(dsn: str) -> None:
        sink, reader = await login(dsn, "onepen_sink"), await login(dsn, "onepen_reader")
        try:
            async with writing(sink) as writer:
                await write_streams(writer, streams)
            connection = await asyncpg.connect(reader)
            for table in ("agent_sessions", "agent_runs", "agent_run_events", "agent_inputs", "agent_actions"):
                assert await connection.fetchval(f"select count(*) from {table}") == 0, "no tenant is set"
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(f"update {table} set tenant_id = 1")
            async with connection.transaction():
                await connection.execute("select set_config('onepen.tenant_id', '2', true)")
                assert await connection.fetchval("select array_agg(distinct tenant_id) from agent_runs") == [2]
            await connection.close()
            pool = await history.open_pool(reader)
            assert len((await readers.list_sessions(pool, 2)).items) == 3
            await pool.close()
            connection = await asyncpg.connect(sink)
            for forbidden in (
                "delete from agent_sessions",
                "update schema_migrations set checksum = ''",
                "drop table agent_runs",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(forbidden)
            await connection.close()
        finally:
            await forget(dsn, sink, reader)

    on_tables(test, fresh_dsn)


# -- connections


class CutAtCommit:
    """A proxy that lets a COMMIT reach the server, waits for the answer, and cuts the line instead of passing it."""

    def __init__(self, dsn: str) -> None:
        self._target = urlsplit(dsn)
        self.armed = False
        self.cuts = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        cut = asyncio.Event()

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, to_server: bool) -> None:
            while data := await source.read(65536):
                if to_server and self.armed and b"COMMIT" in data:
                    self.armed = False
                    self.cuts += 1
                    cut.set()
                if cut.is_set() and not to_server:
                    break
                sink.write(data)
                await sink.drain()
            for end in (up_writer, writer):
                end.close()

        await asyncio.gather(
            pump(reader, up_writer, to_server=True), pump(up_reader, writer, to_server=False), return_exceptions=True
        )

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        user = f"{self._target.username}:{self._target.password}"
        try:
            yield urlunsplit(self._target._replace(netloc=f"{user}@127.0.0.1:{port}", query="sslmode=disable"))
        finally:
            server.close()


def test_b46_a_commit_whose_answer_is_lost_is_not_written_twice(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        proxy = CutAtCommit(dsn)
        async with proxy.serve() as through, writing(through) as writer:
            claim = await writer.claim(("events", 0))
            proxy.armed = True
            written = await writer.write([batch(claim, event("s", 1, 1, "run.started"))])
            assert proxy.cuts == 1
            assert written.done == {claim.place}
            assert await fetchval(dsn, "select count(*) from agent_run_events") == 1
            written = await writer.write([batch(claim, finished("s", 1), first=1)])
            assert written.done == {claim.place}
            assert await fetchval(dsn, "select next_offset from sink_partitions") == 2

    on_tables(test, fresh_dsn)


@pytest.mark.parametrize("table", ["agent_sessions", "agent_run_events", "agent_runs"])
def test_a_backend_terminated_inside_of_a_batch(fresh_dsn: str, table: str) -> None:
    async def test(dsn: str) -> None:
        outages: list[str | None] = []
        writer = Writer(dsn, outage=outages.append)
        try:
            claim = await writer.claim(("events", 0))
            async with table_locked(dsn, table) as blocker:
                task = asyncio.create_task(writer.write([batch(claim, event("s", 1, 1, "run.started"))]))
                await lock_waiters(dsn, 1)
                await blocker.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and wait_event_type = 'Lock'"
                )
            assert (await task).done == {claim.place}
            assert await fetchval(dsn, "select count(*) from agent_run_events") == 1
            assert outages[-1] is None
            assert "waiting" in str(outages[0])
        finally:
            await writer.close()

    on_tables(test, fresh_dsn)


def test_a_server_that_is_not_there_is_waited_for(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        nowhere = urlunsplit(urlsplit(dsn)._replace(netloc="u:p@127.0.0.1:1"))
        lost = asyncio.Event()
        writer = Writer(nowhere, outage=lambda sentence: lost.set() if sentence else None)
        task = asyncio.create_task(writer.claim(("events", 0)))
        async with asyncio.timeout(20):
            await lost.wait()
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await writer.close()

    on_tables(test, fresh_dsn)


def test_a_wrong_password_stops_at_once(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        parts = urlsplit(dsn)
        wrong = urlunsplit(parts._replace(netloc=f"{parts.username}:wrong@{parts.hostname}:{parts.port}"))
        async with writing(wrong) as writer:
            with pytest.raises(Fatal, match="password"):
                await writer.claim(("events", 0))

    on_tables(test, fresh_dsn)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (asyncpg.UniqueViolationError("x"), Consequence.DATA),
        (asyncpg.NumericValueOutOfRangeError("x"), Consequence.DATA),
        (OverflowError("x"), Consequence.DATA),
        (asyncpg.ProgramLimitExceededError("x"), Consequence.DATA),
        (asyncpg.AdminShutdownError("x"), Consequence.PASSES),
        (asyncpg.CannotConnectNowError("x"), Consequence.PASSES),
        (asyncpg.DeadlockDetectedError("x"), Consequence.PASSES),
        (asyncpg.LockNotAvailableError("x"), Consequence.PASSES),
        (asyncpg.ReadOnlySQLTransactionError("x"), Consequence.PASSES),
        (asyncpg.DiskFullError("x"), Consequence.PASSES),
        (asyncpg.ConnectionDoesNotExistError("x"), Consequence.PASSES),
        (ConnectionRefusedError("x"), Consequence.PASSES),
        (TimeoutError("x"), Consequence.PASSES),
        (asyncpg.UndefinedTableError("x"), Consequence.STOP),
        (asyncpg.InsufficientPrivilegeError("x"), Consequence.STOP),
        (KeyError("x"), Consequence.STOP),
    ],
)
def test_what_an_error_means(error: BaseException, meaning: Consequence) -> None:
    assert consequence(error) is meaning
