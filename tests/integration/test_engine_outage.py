"""The broker killed, and frozen, under an open transaction: every input is decided once, in order, and none is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter as Tally
from collections.abc import Iterator
from pathlib import Path

import pytest

from onepen.schemas.errors import Fatal
from onepen.streams import failpoints
from onepen.streams.counters import LogCounters
from onepen.streams.embedded_kafka import EmbeddedKafka
from onepen.streams.engine import Engine
from onepen.streams.kafka import KafkaLog
from tests.conformance.counting import Counter, CountingCore
from tests.conformance.worlds import PARTITIONS, KafkaWorld
from tests.faults.outside import Feed, counting_inputs, watch

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

INPUTS_PER_S = 300
LIMIT_S = 120


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    kafka = EmbeddedKafka(tmp_path / "kafka")
    kafka.start()
    try:
        yield kafka
    finally:
        kafka.stop()


class Processor:
    """An engine that is started again when it leaves, as the supervisor does with the process."""

    def __init__(self, world: KafkaWorld) -> None:
        self._world = world
        self._stop = threading.Event()
        self._before = 0
        self._engine: Engine[Counter] | None = None
        self._counted: list[LogCounters] = []
        self.starts = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def decided(self) -> int:
        return self._before + (self._engine.decided if self._engine else 0)

    @property
    def failures(self) -> dict[str, int]:
        """Transactions that were not committed, or not for certain, by reason."""
        found: Tally[str] = Tally()
        for counters in list(self._counted):
            found.update(counters.aborts)
            found.update(counters.doubts)
        return dict(found)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.starts += 1
            log = KafkaLog(self._world.settings("s0"))
            self._counted.append(log.counters)
            engine = Engine(log, CountingCore(self._world.topics), self._world.settings("s0"))
            self._engine = engine
            try:
                engine.run(self._stop)
            except Fatal as error:
                print(f"left: {error}")
            finally:
                self._engine = None
                self._before += engine.decided
                log.close(leave=self._stop.is_set())

    def end(self) -> None:
        self._stop.set()
        self._thread.join(180)
        assert not self._thread.is_alive()


class Held:
    """The next transaction of this process stands still, with its records handed over, until it is let go."""

    def __init__(self) -> None:
        self._there, self._go = threading.Event(), threading.Event()

    def __enter__(self) -> Held:
        failpoints.strike = self._at
        assert self._there.wait(LIMIT_S), "no transaction begins"
        return self

    def _at(self, point: str) -> None:
        if point == failpoints.BEFORE_COMMIT:
            self._there.set()
            self._go.wait(LIMIT_S)

    def let_go(self) -> None:
        self._go.set()

    def __exit__(self, *_: object) -> None:
        failpoints.strike = None
        self._go.set()


def strike(kafka: EmbeddedKafka, how: str, processor: Processor) -> None:
    """The broker is struck under a transaction, goes on, and the processor has met it."""
    before = sum(processor.failures.values())

    def met() -> bool:
        return sum(processor.failures.values()) > before

    with Held() as held:
        if how == "kill":
            kafka.kill()
            held.let_go()
            kafka.start()
        else:
            pid = kafka.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            held.let_go()
            try:
                watch(met, "an unanswered commit", LIMIT_S)
            finally:
                os.kill(pid, signal.SIGCONT)
    watch(met, f"a transaction that failed by {how}", LIMIT_S)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_broker_that_dies_or_freezes(kafka: EmbeddedKafka, topic_prefix: str, protocol: str) -> None:
    world = KafkaWorld(kafka.bootstrap, topic_prefix, protocol)
    processor = Processor(world)
    feed = Feed(world.bootstrap, counting_inputs(world.topics), INPUTS_PER_S)
    try:
        watch(lambda: processor.decided > 300, "a first part", LIMIT_S)
        for how in ("kill", "freeze", "kill"):
            strike(kafka, how, processor)
            goal = processor.decided + 300
            watch(lambda goal=goal: processor.decided > goal, f"work after {how}", LIMIT_S)  # type: ignore[misc]
        feed.end()
        watch(lambda: events_whole(world, feed.sent), f"{feed.sent} events", LIMIT_S)
    finally:
        # Both, whatever failed: a thread left behind would work on, and print into other tests.
        feed.halt()
        processor.end()
    print(f"{feed.sent} inputs, {processor.starts} starts of the processor, {processor.failures}")


def events_whole(world: KafkaWorld, inputs: int) -> bool:
    """Counted without gap or repeat, session by session: a repeat or a loss shows in the next count."""
    found = 0
    for partition in range(PARTITIONS):
        counts: dict[bytes, int] = {}
        offsets: list[int] = []
        for record in world.stored(world.topics.events, partition):
            session, count, offset = (record.value or b"").split()
            counts[session] = counts.get(session, 0) + 1
            assert int(count) == counts[session], f"{session!r} at input {offset!r}"
            offsets.append(int(offset))
        assert offsets == sorted(set(offsets))
        found += len(offsets)
    assert found <= inputs
    return found == inputs
