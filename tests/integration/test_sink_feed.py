"""The sink as a whole: real topics, real tables, faults in between; the tables equal the log, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from onepen.schemas import codec
from onepen.schemas.events import EventDraft
from onepen.sinks.embedded_postgres import EmbeddedPostgres
from onepen.sinks.postgres.migrate import migrate
from onepen.sinks.postgres.writer import Writer
from onepen.streams.settings import Settings
from tests.event_streams import Generator, Streams
from tests.freezing import freeze_when
from tests.integration.running_sink import (
    PARTITIONS,
    WAIT_S,
    RunningSink,
    caught_up,
    count,
    produce,
    settings_on,
    wait_until,
)
from tests.seeds import drawn_seed
from tests.services import execute, fresh_database, run_coroutine
from tests.sink_tables import dump, fetchval, placed, write_all

FREEZES_MAX = 100


@pytest.fixture
def expected(streams: Streams, postgres_dsn: str) -> Iterator[dict[str, list[str]]]:
    """What an independent writing of the same streams in single batches leaves, at the offsets of a clean log."""
    with fresh_database(postgres_dsn) as dsn:

        async def write() -> dict[str, list[str]]:
            await migrate(dsn)
            writer = Writer(dsn)
            for topic, by_partition in (("e", streams.events), ("r", streams.receipts)):
                for partition, records in by_partition.items():
                    if records:
                        await write_all(writer, topic, partition, placed(partition, list(records)))
            await writer.close()
            return await dump(dsn)

        yield without_offsets(run_coroutine(write))


def without_offsets(tables: dict[str, list[str]]) -> dict[str, list[str]]:
    """Transaction markers take offsets too: where a record stands on its topic depends on how it was produced."""
    return {name: sorted(re.sub(r'"log_offset": \d+', "", row) for row in rows) for name, rows in tables.items()}


@pytest.fixture
def streams() -> Streams:
    return Generator(5, partitions=PARTITIONS, sessions=12).make(120)


def test_tables_equal_the_log(settings: Settings, streams: Streams, expected: dict[str, list[str]]) -> None:
    dsn = settings.require_dsn()
    with RunningSink(settings) as sink:
        wait_until(sink.ready.is_set, "ready")
        produce(settings, streams)
        wait_until(lambda: caught_up(settings), "all rows")
    assert without_offsets(run_coroutine(lambda: dump(dsn))) == expected


def test_a_second_start_goes_on_where_the_tables_are(settings: Settings, streams: Streams) -> None:
    dsn = settings.require_dsn()
    produce(settings, streams)
    with RunningSink(settings):
        wait_until(lambda: caught_up(settings), "all rows")
    before = run_coroutine(lambda: dump(dsn))
    epochs = run_coroutine(lambda: fetchval(dsn, "select sum(epoch) from sink_partitions"))
    with RunningSink(settings) as sink:
        wait_until(sink.ready.is_set, "ready")
    assert run_coroutine(lambda: dump(dsn)) == before
    assert run_coroutine(lambda: fetchval(dsn, "select sum(epoch) from sink_partitions")) == epochs + 2 * PARTITIONS


def test_a_partition_that_somebody_else_claimed_is_claimed_again_while_it_is_assigned(
    settings: Settings, streams: Streams, expected: dict[str, list[str]]
) -> None:
    dsn = settings.require_dsn()

    async def claim() -> None:
        thief = Writer(dsn)
        await thief.claim((settings.topics.events, 0))
        await thief.close()

    with RunningSink(settings) as sink:
        wait_until(sink.ready.is_set, "ready")
        run_coroutine(claim)
        produce(settings, streams)
        wait_until(lambda: caught_up(settings), "all rows")
    epoch = "select epoch from sink_partitions where topic = $1 and partition = 0"
    assert run_coroutine(lambda: fetchval(dsn, epoch, settings.topics.events)) == 3
    assert without_offsets(run_coroutine(lambda: dump(dsn))) == expected


def test_b48_a_parked_partition_does_not_hold_the_others(
    settings: Settings, streams: Streams, caplog: pytest.LogCaptureFixture
) -> None:
    """The log holds two active runs of one session: an alarm that names both, and the other partitions go on."""
    dsn = settings.require_dsn()
    first = Generator(1, partitions=1, sessions=1).make(1).events[0][0][0]
    drafts = [msgspec.structs.replace(first, run_id=f"run-{n}", run_no=n, session_id="bad") for n in (1, 2)]
    producer = Producer(settings.kafka_client())
    for event in drafts:
        draft = EventDraft(**{name: getattr(event, name) for name in EventDraft.__struct_fields__})
        producer.produce(settings.topics.events, codec.seal(draft, bytes(32))[1], b"k", partition=0)
    producer.flush(10)
    produce(settings, streams)
    with RunningSink(settings):
        elsewhere = sum(len(records) for partition, records in streams.events.items() if partition != 0)
        wait_until(lambda: count(dsn, "agent_run_events") == elsewhere, "the other partitions' rows")
    assert "ALARM" in caplog.text
    assert "run-1" in caplog.text
    assert "run-2" in caplog.text
    position = "select next_offset from sink_partitions where topic = $1 and partition = 0"
    assert run_coroutine(lambda: fetchval(dsn, position, settings.topics.events)) == 0


def read_dead_letters(settings: Settings, wanted: int) -> list[tuple[bytes | None, dict[str, bytes]]]:
    consumer = Consumer(settings.kafka_client({"group.id": "look", "auto.offset.reset": "earliest"}))
    consumer.assign([TopicPartition(settings.topics.deadletters, p, 0) for p in range(PARTITIONS)])
    found: list[tuple[bytes | None, dict[str, bytes]]] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < wanted and time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append((message.value(), dict(message.headers() or [])))
    consumer.close()
    return found


def test_b40_what_cannot_be_decoded_is_a_dead_letter_and_the_next_record_is_taken(
    settings: Settings, streams: Streams
) -> None:
    producer = Producer(settings.kafka_client())
    for partition, garbage in ((0, b"garbage"), (1, None), (2, b"\x00\x00\x00\x00\x01junk")):
        producer.produce(settings.topics.events, garbage, b"key", partition=partition)
    producer.flush(10)
    produce(settings, streams)
    with RunningSink(settings):
        wait_until(lambda: caught_up(settings), "all rows")
    letters = read_dead_letters(settings, 3)
    assert sorted((value or b"", h["onepen-reason"], h["onepen-offset"]) for value, h in letters) == [
        (b"", b"null_value", b"0"),
        (b"\x00\x00\x00\x00\x01junk", letters_reason(letters, b"\x00\x00\x00\x00\x01junk"), b"0"),
        (b"garbage", b"no_frame", b"0"),
    ]
    null = next(h for value, h in letters if value is None)
    assert null["onepen-null"] == b"1"
    assert null["onepen-topic"] == settings.topics.events.encode()


def letters_reason(letters: list[tuple[bytes | None, dict[str, bytes]]], value: bytes) -> bytes:
    reason = next(h["onepen-reason"] for v, h in letters if v == value)
    assert reason in (b"undecodable", b"unexpected_record", b"trailing_bytes")
    return reason


SINK_PROCESS = """
import json, sys, threading, signal
from onepen.streams.feed import run_sink
from onepen.streams.settings import load_settings
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
run_sink(load_settings(**json.loads(sys.stdin.readline())), stop)
"""


def start_process(settings: Settings, tmp_path: Path) -> subprocess.Popen[str]:
    fields = {
        "bootstrap": settings.bootstrap,
        "prefix": settings.prefix,
        "partitions": PARTITIONS,
        "slot": settings.slot,
    }
    fields |= {"dsn": settings.require_dsn(), "data_dir": str(tmp_path)}
    with (tmp_path / "sink.log").open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SINK_PROCESS],
            stdin=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(fields) + "\n")
    process.stdin.close()
    return process


def rolled_back(dsn: str) -> int:
    return int(
        run_coroutine(
            lambda: fetchval(dsn, "select xact_rollback from pg_stat_database where datname = current_database()")
        )
    )


def test_b46_killed_in_the_middle_of_a_batch(
    settings: Settings, streams: Streams, expected: dict[str, list[str]], tmp_path: Path
) -> None:
    """A lock holds the sink inside of its transaction, so that the kill hits a batch for certain."""
    dsn = settings.require_dsn()
    produce(settings, streams)
    before = rolled_back(dsn)
    with Lock(dsn, "agent_sessions"):
        process = start_process(settings, tmp_path)
        try:
            wait_until(lambda: waiting_for_lock(dsn), "the sink waits inside of its batch")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        end_orphans(dsn)
        wait_until(lambda: not waiting_for_lock(dsn), "its backend has ended")
    wait_until(lambda: rolled_back(dsn) > before, "the batch is counted as rolled back")
    assert count(dsn, "agent_run_events") == 0
    assert run_coroutine(lambda: fetchval(dsn, "select max(next_offset) from sink_partitions")) == 0
    with RunningSink(settings):
        wait_until(lambda: caught_up(settings), "all rows")
    assert without_offsets(run_coroutine(lambda: dump(dsn))) == expected


def in_parts(streams: Streams, count: int) -> list[Streams]:
    """The same records, in so many pieces one behind the other."""

    def part(records: list[Any], number: int) -> list[Any]:
        return records[len(records) * number // count : len(records) * (number + 1) // count]

    return [
        Streams(
            streams.partitions,
            {p: part(records, number) for p, records in streams.events.items()},
            {p: part(records, number) for p, records in streams.receipts.items()},
        )
        for number in range(count)
    ]


def epochs(dsn: str) -> int:
    return int(run_coroutine(lambda: fetchval(dsn, "select coalesce(sum(epoch), 0) from sink_partitions")))


def in_a_batch(dsn: str) -> bool:
    stands = f"{OF_THE_SINK} and state = 'idle in transaction'"
    return bool(run_coroutine(lambda: fetchval(dsn, f"select count(*) from pg_stat_activity where {stands}")))


@pytest.mark.long
def test_b46_killed_at_any_moment(
    settings: Settings, streams: Streams, expected: dict[str, list[str]], tmp_path: Path
) -> None:
    """Kills in the middle of batches, wherever those are just then: nothing lost, nothing twice."""
    dsn, rng = settings.require_dsn(), random.Random(drawn_seed())
    parts = in_parts(streams, 8)
    hits = 0
    while parts and hits < 4:
        before, rolled = epochs(dsn), rolled_back(dsn)
        process = start_process(settings, tmp_path)
        producing = threading.Thread(target=produce, args=(settings, parts.pop(0)))
        try:
            wait_until(lambda before=before: epochs(dsn) >= before + 2 * PARTITIONS, "partitions are claimed")  # type: ignore[misc]
            producing.start()
            caught = freeze_when(lambda: in_a_batch(dsn), process.send_signal, FREEZES_MAX, 0.01, rng)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        producing.join()
        if caught:
            wait_until(lambda rolled=rolled: rolled_back(dsn) > rolled, "the batch is counted as rolled back")  # type: ignore[misc]
            hits += 1
    assert hits > 0, "no kill hit a batch"
    for part in parts:
        produce(settings, part)
    with RunningSink(settings):
        wait_until(lambda: caught_up(settings), "all rows")
    assert without_offsets(run_coroutine(lambda: dump(dsn))) == expected


class Lock:
    """Holds an exclusive lock on a table in a connection of its own."""

    def __init__(self, dsn: str, table: str) -> None:
        self._go, self._held = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(dsn, table))

    def _hold(self, dsn: str, table: str) -> None:
        async def hold() -> None:
            connection = await asyncpg.connect(dsn)
            async with connection.transaction():
                await connection.execute(f"lock table {table} in share row exclusive mode")
                self._held.set()
                await asyncio.to_thread(self._go.wait, 60)
            await connection.close()

        try:
            asyncio.run(hold())
        except Exception as error:
            if not self._held.is_set():
                raise
            print(f"the lock went with its connection: {error!r}")

    def __enter__(self) -> None:
        self._thread.start()
        assert self._held.wait(30)

    def __exit__(self, *_: Any) -> None:
        self._go.set()
        self._thread.join(30)


OF_THE_SINK = "datname = current_database() and application_name like 'onepen-sink%'"
SINKS_WAITING = f"{OF_THE_SINK} and wait_event_type = 'Lock'"


def waiting_for_lock(dsn: str) -> bool:
    return bool(run_coroutine(lambda: fetchval(dsn, f"select count(*) from pg_stat_activity where {SINKS_WAITING}")))


def end_orphans(dsn: str) -> None:
    """As the server does by itself once it notices that the client is gone."""
    execute(dsn, f"select pg_terminate_backend(pid) from pg_stat_activity where {SINKS_WAITING}")


def lose_connections(dsn: str, wanted: int) -> None:
    """Terminate so many connections of the sink, one after the other, each waiting inside of a batch."""
    end = f"select array_agg(pid) from pg_stat_activity where {SINKS_WAITING} and pg_terminate_backend(pid)"
    ended: set[int] = set()

    def enough() -> bool:
        ended.update(run_coroutine(lambda: fetchval(dsn, end)) or ())
        return len(ended) >= wanted

    wait_until(enough, f"{wanted} connections are lost")


def test_connections_killed_again_and_again(
    settings: Settings, streams: Streams, expected: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """A lock holds each batch until it has lost some connections."""
    dsn = settings.require_dsn()
    with RunningSink(settings) as sink:
        wait_until(sink.ready.is_set, "ready")
        for part in in_parts(streams, 3):
            with Lock(dsn, "agent_sessions"):
                produce(settings, part)
                lose_connections(dsn, 3)
                assert not caught_up(settings)
            wait_until(lambda: caught_up(settings), "all rows")
    assert caplog.text.count("PostgreSQL: ") >= 3
    assert without_offsets(run_coroutine(lambda: dump(dsn))) == expected


def test_a_restart_of_the_database_is_waited_out(
    kafka_bootstrap: str,
    topic_prefix: str,
    streams: Streams,
    expected: dict[str, list[str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is killed in the middle of a batch, when a part of the rows is there."""
    server = EmbeddedPostgres(tmp_path / "pg")
    dsn = server.start()
    first, rest = in_parts(streams, 2)
    try:
        settings = settings_on(kafka_bootstrap, topic_prefix, dsn, tmp_path)
        with RunningSink(settings) as sink:
            wait_until(sink.ready.is_set, "ready")
            produce(settings, first)
            wait_until(lambda: caught_up(settings), "the first rows")
            with Lock(dsn, "agent_sessions"):
                produce(settings, rest)
                wait_until(lambda: waiting_for_lock(dsn), "the sink waits inside of its batch")
                assert count(dsn, "agent_run_events") == len(list(first.all_events()))
                server.kill()
            wait_until(lambda: "PostgreSQL: " in caplog.text, "the sink has met the outage")
            assert server.start() == dsn, "the server came back at another address"
            wait_until(lambda: caught_up(settings), "all rows")
        assert without_offsets(run_coroutine(lambda: dump(dsn))) == expected
    finally:
        server.stop()
