"""A sink that is frozen or lost in the middle of a COPY: the next owner goes on, and the others are never held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from onepen.sinks.postgres import writer as writer_module
from onepen.sinks.postgres.connecting import connect
from onepen.sinks.postgres.queries import sql
from onepen.sinks.postgres.writer import Claimed, Slice
from onepen.streams.settings import Settings
from onepen.streams.writer_thread import WriterThread
from tests.event_streams import Generator
from tests.integration.running_sink import PARTITIONS, RunningSink, caught_up, produce, wait_until
from tests.integration.test_sink_writer import batch, event, forget, lock_waiters, login
from tests.services import run_coroutine
from tests.sink_tables import fetchval, on_tables, table_locked, writing

pytestmark = pytest.mark.integration

WAIT_S = 25


@asynccontextmanager
async def frozen_batch(dsn: str, claim: Claimed, application_name: str = "onepen-sink x") -> AsyncIterator[None]:
    """A batch as the writer begins it, that stands still inside of its COPY. In the end its connection is cut."""
    thaw = asyncio.Event()

    async def rows() -> AsyncIterator[tuple[Any, ...]]:
        await thaw.wait()
        return
        yield ()

    connection = await connect(dsn, application_name=application_name)
    await connection.execute(sql("staging_table"))
    await connection.transaction().start()
    place = [[part] for part in (*claim.place, claim.epoch, claim.next_offset, claim.next_offset + 1)]
    assert len(await connection.fetch(sql("advance_partitions"), *place)) == 1
    copying = asyncio.create_task(connection.copy_records_to_table("staged_events", records=rows()))
    try:
        async with asyncio.timeout(WAIT_S):
            while await in_copy(dsn) < 1:  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.02)
        yield
    finally:
        thaw.set()
        await asyncio.gather(copying, return_exceptions=True)
        connection.terminate()


async def in_copy(dsn: str) -> int:
    query = "select count(*) from pg_stat_activity where wait_event = 'ClientRead' and query like 'COPY%'"
    return int(await fetchval(dsn, query))


def test_b46_the_next_owner_ends_one_that_is_frozen_inside_of_a_copy(
    fresh_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "FROZEN_S", 0.2, raising=False)

    async def test(dsn: str) -> None:
        sink = await login(dsn, "onepen_sink")
        try:
            async with writing(sink) as old, writing(sink) as new:
                stale = await old.claim(("events", 0))
                async with frozen_batch(sink, stale), asyncio.timeout(WAIT_S):
                    current = await new.claim(("events", 0))
                assert (current.epoch, current.next_offset) == (stale.epoch + 1, stale.next_offset)
                written = await old.write([Slice(stale.place, stale.epoch, 0, 1, [])])
                assert written.fenced == {stale.place}
                assert await fetchval(dsn, "select next_offset from sink_partitions") == 0
                written = await new.write([Slice(current.place, current.epoch, 0, 1, [])])
                assert written.done == {current.place}
        finally:
            await forget(dsn, sink)

    on_tables(test, fresh_dsn)


@pytest.mark.parametrize(("frozen_s", "name"), [(3_600.0, "onepen-sink x"), (0.0, "psql")])
def test_nobody_else_is_ended(fresh_dsn: str, monkeypatch: pytest.MonkeyPatch, frozen_s: float, name: str) -> None:
    """One that has not been silent for long, and a person's session."""
    monkeypatch.setattr(writer_module, "FROZEN_S", frozen_s)

    async def test(dsn: str) -> None:
        async with writing(dsn) as old, writing(dsn) as new:
            stale = await old.claim(("events", 0))
            async with frozen_batch(dsn, stale, name):
                assert await new.claim_free([stale.place, ("events", 1)]) == [Claimed(("events", 1), 1, 0)]
                assert await in_copy(dsn) == 1

    on_tables(test, fresh_dsn)


def test_a_batch_at_work_is_not_ended_however_long(fresh_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FROZEN_S", 0.0)

    async def test(dsn: str) -> None:
        async with writing(dsn) as old, writing(dsn) as new:
            claim = await old.claim(("events", 0))
            async with table_locked(dsn, "agent_runs"):
                writing_task = asyncio.create_task(old.write([batch(claim, event("s", 1, 1, "run.started"))]))
                await lock_waiters(dsn, 1)
                assert await new.claim_free([claim.place]) == []
            assert (await writing_task).done == {claim.place}
            assert (await new.claim(claim.place)).next_offset == 1

    on_tables(test, fresh_dsn)


def test_a_claim_that_waits_holds_up_no_other_partition(fresh_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "LOCK_WAIT_S", 3_600.0, raising=False)
    held, other, third = ("events", 0), ("events", 1), ("events", 2)

    async def test(dsn: str) -> None:
        async with writing(dsn) as old:
            stale = await old.claim(held)
        with WriterThread(dsn, application_name="onepen-sink y") as thread:
            (mine,) = await asyncio.wrap_future(thread.claim([other]))
            async with frozen_batch(dsn, stale):
                claims = asyncio.wrap_future(thread.claim([held, third]))
                await lock_waiters(dsn, 1)
                async with asyncio.timeout(WAIT_S):
                    written = await asyncio.wrap_future(thread.write([Slice(other, mine.epoch, 0, 1, [])]))
                assert written.done == {other}
                assert not claims.done()
            assert [claim.place for claim in await claims] == [held, third]

    on_tables(test, fresh_dsn)


def test_a_running_sink_reads_the_other_partitions_and_asks_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "FROZEN_S", 3_600.0)
    produce(settings, Generator(6, partitions=PARTITIONS, sessions=20).make(40))
    dsn, held = settings.require_dsn(), (settings.topics.events, 0)
    written = "select count(*) from sink_partitions where next_offset > 0"

    async def test() -> None:
        async with writing(dsn) as old:
            stale = await old.claim(held)
        async with frozen_batch(dsn, stale):
            with RunningSink(settings) as sink:
                others = 2 * PARTITIONS - 1
                await asyncio.to_thread(
                    wait_until, lambda: run_coroutine(lambda: fetchval(dsn, written)) == others, "the others"
                )
                assert not sink.ready.is_set()
                monkeypatch.setattr(writer_module, "FROZEN_S", 0.2)
                await asyncio.to_thread(wait_until, lambda: caught_up(settings), "all rows")
                assert await asyncio.to_thread(sink.ready.wait, WAIT_S)

    run_coroutine(test, 150)


def test_the_server_notices_that_the_host_of_a_writer_is_lost(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            await writer.claim(("events", 0))
            connection = await writer._connected()
            assert await connection.fetchval("show tcp_keepalives_idle") == "10"
            if connection.get_server_version().major >= 17:
                assert await connection.fetchval("show transaction_timeout") == "90min"

    on_tables(test, fresh_dsn)
