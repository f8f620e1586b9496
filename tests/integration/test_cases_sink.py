"""Cases that others have met in public whose fault lies with the database, or between it and the log."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import asyncpg
import orjson
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from onepen.schemas import codec
from onepen.schemas.events import Cause, Event, EventDraft
from onepen.sinks.postgres import history
from onepen.sinks.postgres.fold import AT_MS_MAX
from onepen.sinks.postgres.rows import Placed
from onepen.sinks.postgres.writer import Claimed, Slice, Writer
from onepen.streams import feed
from onepen.streams.settings import Settings
from tests.conformance.worlds import wait_for
from tests.event_streams import START_MS
from tests.integration.running_sink import PARTITIONS, RunningSink, count
from tests.services import run_coroutine
from tests.sink_tables import dump, fetchval, on_tables, writing

pytestmark = pytest.mark.integration


def event(session_id: str, run_no: int, seq: int, kind: str, payload: bytes = b"{}", at_ms: int = START_MS) -> Event:
    return sealed(session_id, run_no, seq, kind, payload, at_ms)[0]


def sealed(
    session_id: str, run_no: int, seq: int, kind: str, payload: bytes = b"{}", at_ms: int = START_MS
) -> tuple[Event, bytes]:
    draft = EventDraft(
        tenant_id=1,
        session_id=session_id,
        run_id=f"run-{session_id}-{run_no}",
        run_no=run_no,
        seq=seq,
        type=kind,
        generation=1,
        at_ms=at_ms,
        cause=Cause(0, run_no, seq),
        payload=payload,
    )
    return codec.seal(draft, bytes(32))


def finished(session_id: str, run_no: int) -> Event:
    return event(session_id, run_no, 2, "run.finished", b'{"terminalStatus":"completed"}')


def part(claim: Claimed, *events: Event, first: int = 0) -> Slice:
    records = [Placed(claim.place[1], first + n, record) for n, record in enumerate(events)]
    return Slice(claim.place, claim.epoch, first, first + len(events), records)


async def positions(dsn: str) -> dict[int, int]:
    found = await fetchval(dsn, "select jsonb_object_agg(partition, next_offset) from sink_partitions")
    return {int(partition): offset for partition, offset in orjson.loads(found).items()}


# -- B41, B42: text


def test_b41_nul_is_stored_and_comes_back_with_the_same_digest(fresh_dsn: str) -> None:
    payloads = [
        b'{"inputId":"in-1","content":"a\\u0000b"}',
        b'{"a\\u0000":{"b":["\\u0000"]}}',
        b'{"said":"\\\\u0000 is only mentioned"}',
        b'{"terminalStatus":"completed","output":"\\u0000"}',
    ]
    kinds = ["run.started", "tool.finished", "message.completed", "run.finished"]
    events = [
        event("s", 1, n + 1, kind, payload) for n, (kind, payload) in enumerate(zip(kinds, payloads, strict=True))
    ]

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            claim = await writer.claim(("events", 0))
            assert (await writer.write([part(claim, *events)])).done == {claim.place}
            once = await dump(dsn)
            await set_back(dsn)
            again = await writer.claim(("events", 0))
            assert (await writer.write([part(again, *events)])).done == {again.place}
            assert await dump(dsn) == once, "the replay is a no-op"
        pool = await history.open_pool(dsn)
        assert await history.session_events(pool, 1, "s", (0, 0), limit=10) == events
        await pool.close()
        assert await fetchval(dsn, "select status from agent_runs") == "completed"
        shown = await fetchval(dsn, "select payload->>'said' from agent_run_events where seq = 3")
        assert shown == "\\u0000 is only mentioned"

    on_tables(test, fresh_dsn)


async def set_back(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("update sink_partitions set next_offset = 0")
    await connection.close()


# -- B44: odd times


def test_b44_the_zone_of_a_process_moves_no_time(fresh_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            claim = await writer.claim(("events", 0))
            await writer.write([part(claim, event("s", 1, 1, "run.started"))])
        milliseconds = "(extract(epoch from created_at) * 1000)::bigint"
        assert await fetchval(dsn, f"select {milliseconds} from agent_runs") == START_MS
        pool = await history.open_pool(dsn)
        assert [found.at_ms for found in await history.session_events(pool, 1, "s", (0, 0), limit=10)] == [START_MS]
        await pool.close()

    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        on_tables(test, fresh_dsn)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_b44_an_odd_time_touches_only_its_own_record(fresh_dsn: str) -> None:
    """1970, seconds taken for milliseconds, 2099 and the end of the year 9999; a member names the year 10000."""
    payload = orjson.dumps({"timeoutAt": AT_MS_MAX + 1, "inputId": "in-1"})
    times = (0, 1_790_000_000, 4_070_908_800_000, AT_MS_MAX)
    odd = {f"odd-{n}": event(f"odd-{n}", 1, 1, "run.started", payload, at_ms) for n, at_ms in enumerate(times)}

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            claim = await writer.claim(("events", 0))
            plain = [event("plain", 1, 1, "run.started"), finished("plain", 1)]
            assert (await writer.write([part(claim, *odd.values(), *plain)])).done == {claim.place}
        pool = await history.open_pool(dsn)
        for session_id, written in odd.items():
            found = await history.session_events(pool, 1, session_id, (0, 0), limit=10)
            assert found == [written], "it comes back as it was"
        await pool.close()
        moment = "status || ' ' || (extract(epoch from created_at) * 1000)::bigint"
        query = f"select {moment} from agent_runs where run_key = 'run-plain-1'"
        assert await fetchval(dsn, query) == f"completed {START_MS}"

    on_tables(test, fresh_dsn)


# -- B46: positions and rows


def test_b46_of_a_batch_over_three_partitions_each_keeps_its_own_position(fresh_dsn: str) -> None:
    """One row is refused by the database; the other partitions' rows and positions are stored together."""

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            claims = [await writer.claim(("events", partition)) for partition in range(PARTITIONS)]
            first = [part(claim, event(f"s{n}", 1, 1, "run.started")) for n, claim in enumerate(claims)]
            assert len((await writer.write(first)).done) == PARTITIONS
            second = [
                part(claims[0], event("s0", 2, 1, "run.started"), first=1),  # a second active run
                part(claims[1], finished("s1", 1), event("s1", 2, 1, "run.started"), first=1),
                part(claims[2], finished("s2", 1), first=1),
            ]
            written = await writer.write(second)
            assert written.done == {claims[1].place, claims[2].place}
            assert set(written.parked) == {claims[0].place}
        assert await positions(dsn) == {0: 1, 1: 3, 2: 2}, "exactly what is stored"
        assert await fetchval(dsn, "select count(*) from agent_run_events") == 6

    on_tables(test, fresh_dsn)


@pytest.mark.parametrize("table", ["agent_run_events", "sink_partitions"])
def test_b46_a_writer_that_dies_inside_of_a_batch_leaves_neither_rows_nor_positions(fresh_dsn: str, table: str) -> None:
    async def test(dsn: str) -> None:
        writer, blocker = Writer(dsn), await asyncpg.connect(dsn)
        claims = [await writer.claim(("events", partition)) for partition in range(PARTITIONS)]
        parts = [part(claim, event(f"s{n}", 1, 1, "run.started")) for n, claim in enumerate(claims)]
        hold = blocker.transaction()
        await hold.start()
        await blocker.execute(f"lock table {table} in share row exclusive mode")
        task = asyncio.create_task(writer.write(parts))
        waiting = (
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        async with asyncio.timeout(20):
            while not await fetchval(dsn, waiting):  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await writer.close()
        await hold.rollback()
        await blocker.close()
        assert await positions(dsn) == dict.fromkeys(range(PARTITIONS), 0)
        assert await fetchval(dsn, "select count(*) from agent_run_events") == 0
        async with writing(dsn) as successor:
            taken = [await successor.claim(("events", partition)) for partition in range(PARTITIONS)]
            assert [claim.next_offset for claim in taken] == [0] * PARTITIONS, "it starts from what is stored"
            again = [part(claim, event(f"s{n}", 1, 1, "run.started")) for n, claim in enumerate(taken)]
            assert len((await successor.write(again)).done) == PARTITIONS
        assert await fetchval(dsn, "select count(*) from agent_run_events") == PARTITIONS

    on_tables(test, fresh_dsn)


# -- B48: rows only move forward


def test_b48_a_replay_of_the_first_run_while_the_second_is_active_sets_nothing_back(fresh_dsn: str) -> None:
    story = [event("s", 1, 1, "run.started"), finished("s", 1), event("s", 2, 1, "run.started")]

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            claim = await writer.claim(("events", 0))
            assert (await writer.write([part(claim, *story)])).done == {claim.place}
            once = await dump(dsn)
            for upto in (1, 2, 3):
                await set_back(dsn)
                again = await writer.claim(("events", 0))
                written = await writer.write([part(again, *story[:upto])])
                assert written.done == {again.place}
                assert await dump(dsn) == once, f"{upto} records again"
        query = "select string_agg(status, ',' order by run_no) from agent_runs"
        assert await fetchval(dsn, query) == "completed,running"

    on_tables(test, fresh_dsn)


def test_b48_the_backstop_is_there_and_names_the_one_who_holds_the_place(fresh_dsn: str) -> None:
    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            claim = await writer.claim(("events", 0))
            await writer.write([part(claim, event("s", 1, 1, "run.started"))])
        connection = await asyncpg.connect(dsn)
        with pytest.raises(asyncpg.UniqueViolationError, match="only_one_active_run_per_session"):
            await connection.execute(
                'insert into agent_runs select (jsonb_populate_record(r, \'{"id": 99, "run_key": "other",'
                ' "run_no": 2}\')).* from agent_runs r'
            )
        await connection.close()

    on_tables(test, fresh_dsn)


# -- B39: the log does not reach back to where the tables end


@contextmanager
def locked(dsn: str, table: str) -> Iterator[Callable[[], None]]:
    """Writers of the table wait until the yielded function is called."""
    held, release = threading.Event(), threading.Event()

    async def hold() -> None:
        connection = await asyncpg.connect(dsn)
        async with connection.transaction():
            await connection.execute(f"lock table {table} in share row exclusive mode")
            held.set()
            await asyncio.to_thread(release.wait, 60)
        await connection.close()

    thread = threading.Thread(target=asyncio.run, args=(hold(),))
    thread.start()
    try:
        assert held.wait(30)
        yield release.set
    finally:
        release.set()
        thread.join(30)


def test_b39_events_that_retention_took_before_they_were_stored_are_reported(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = settings.require_dsn()
    producer = Producer(settings.kafka_client())
    for partition in range(PARTITIONS):
        for seq, kind in enumerate(("run.started", "message.completed", "x.note"), start=1):
            data = sealed(f"s{partition}", 1, seq, kind)[1]
            producer.produce(settings.topics.events, data, b"k", partition=partition)
    assert producer.flush(10) == 0
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    for future in admin.delete_records([TopicPartition(settings.topics.events, 0, 2)]).values():
        future.result(10)

    with RunningSink(settings):
        wait_for(lambda: count(dsn, "agent_run_events") == 3 * (PARTITIONS - 1), "the rows of the whole partitions")
        wait_for(lambda: "ALARM" in caplog.text, "the alarm")
    assert f"{settings.topics.events}/0 is parked: the log does not hold offset 0" in caplog.text
    assert count(dsn, "agent_run_events") == 3 * (PARTITIONS - 1), "nothing was skipped in silence"


# -- B54: a slow database and a large backlog


def test_b54_a_slow_database_bounds_what_is_held_and_the_backlog_is_worked_off_without_a_rebalance(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_max, room = 256 * 1024, {"queued.max.messages.kbytes": "256", "max.partition.fetch.bytes": "131072"}
    monkeypatch.setattr(feed, "HELD_BYTES_MAX", held_max)
    monkeypatch.setattr(feed, "PAUSE_AFTER_S", 0.2)
    slow = settings.model_copy(update={"kafka": {**settings.kafka, **room}})
    dsn, per_partition = settings.require_dsn(), 100
    producer = Producer(settings.kafka_client())
    for partition in range(PARTITIONS):
        for seq in range(1, per_partition + 1):
            kind = "run.started" if seq == 1 else "message.completed"
            data = sealed(f"s{partition}", 1, seq, kind, orjson.dumps({"content": "x" * 30_000}))[1]
            producer.produce(settings.topics.events, data, b"k", partition=partition)
            producer.poll(0)
    assert producer.flush(20) == 0
    held: list[int] = []
    turns_while_paused = [0]
    take = feed.Feed._take

    def watched(self: feed.Feed) -> None:
        take(self)
        held.append(self._held_bytes)
        turns_while_paused[0] += self._paused

    monkeypatch.setattr(feed.Feed, "_take", watched)
    with locked(dsn, "agent_sessions") as release, RunningSink(slow):
        wait_for(lambda: turns_while_paused[0] > 5, "that it pauses, and polls on")
        assert count(dsn, "agent_run_events") == 0
        release()
        wait_for(lambda: count(dsn, "agent_run_events") == PARTITIONS * per_partition, "the whole backlog")
    # What is held, what the client has fetched, and what it fetches while that is taken: not the 9 MB of the backlog.
    assert held_max <= max(held) <= held_max + 2 * (256 + PARTITIONS * 128) * 1024
    epochs = run_coroutine(lambda: fetchval(dsn, "select array_agg(distinct epoch) from sink_partitions"))
    assert epochs == [1], "it never left its group"
