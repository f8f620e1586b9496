"""What whole worlds need of the log in memory and of the engine, each by itself."""

from __future__ import annotations

import pytest

from onepen.schemas.errors import Fatal, Retryable
from onepen.streams.engine import Engine
from onepen.streams.log import Output
from onepen.streams.memory import MemoryLog
from tests.conformance.counting import Counter, CountingCore
from tests.conformance.worlds import PARTITIONS, MemoryWorld


def engine(world: MemoryWorld, slot: str, slept: list[float] | None = None) -> tuple[MemoryLog, Engine[Counter]]:
    def sleep(seconds: float) -> None:
        world.mono_s += seconds
        if slept is not None:
            slept.append(seconds)

    log = world.log(slot)
    made: Engine[Counter] = Engine(
        log, CountingCore(world.topics), world.settings(slot), clock=lambda: world.mono_s, sleep=sleep
    )
    log.subscribe(made)
    return log, made


def turns(world: MemoryWorld, *engines: Engine[Counter], count: int = 8) -> None:
    for _ in range(count):
        for one in engines:
            world.mono_s += 0.01
            one.turn()


def test_a_member_whose_session_ended_loses_everything_and_joins_anew() -> None:
    world = MemoryWorld()
    (first_log, first), (_, second) = engine(world, "s0"), engine(world, "s1")
    turns(world, first, second)
    owned = [p for p in range(PARTITIONS) if first_log.number(p)]
    world.broker.leave(first_log.group, "s0", PARTITIONS)
    world.append(owned[0], b"x", b"s")
    turns(world, second)
    assert [r.value for r in world.stored(world.topics.events, owned[0])] == [b"s 1 0"], "the other one took it over"
    turns(world, first, second)
    assert [p for p in range(PARTITIONS) if first_log.number(p)] == owned, "it is a member again"
    world.append(owned[0], b"x", b"s")
    turns(world, first, second)
    assert [r.value for r in world.stored(world.topics.events, owned[0])] == [b"s 1 0", b"s 2 1"]


def test_a_slot_that_was_taken_is_fatal_for_its_former_process() -> None:
    world = MemoryWorld()
    _, first = engine(world, "s0")
    turns(world, first)
    _, second = engine(world, "s0")
    turns(world, second)
    with pytest.raises(Fatal):
        first.turn()


def test_the_engine_waits_by_the_sleep_it_was_given() -> None:
    world, slept = MemoryWorld(), list[float]()
    log, one = engine(world, "s0", slept)
    turns(world, one)
    world.append(0, b"x", b"s")
    tries = 0

    def unreachable(partitions: object) -> dict[int, int | None]:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise Retryable("not yet", retry_after_ms=250)
        return committed(partitions)  # type: ignore[arg-type]

    committed, log.committed = log.committed, unreachable  # type: ignore[method-assign]
    world.broker.copy_next_end()
    turns(world, one)
    assert slept == [0.25, 0.25]
    assert [r.value for r in world.stored(world.topics.events, 0)] == [b"s 1 0"]


def test_the_stable_offset_and_the_newest_time_follow_the_log() -> None:
    world = MemoryWorld()
    broker, topic = world.broker, world.topics.events
    epoch = broker.initialise("t")
    assert (broker.stable_end(topic, 0), broker.newest_ms(topic, 0)) == (0, 0)
    broker.append(topic, 0, b"k", b"plain")
    broker.write("t", epoch, Output(topic, 0, b"k", b"open"))
    world.now_ms += 5
    broker.append(topic, 0, b"k", b"behind it")
    assert broker.stable_end(topic, 0) == 1
    assert [entry.value for _, entry in broker.visible(topic, 0, 0)] == [b"plain"]
    assert len(broker.visible(topic, 0, 0, committed=False, records_max=2)) == 2
    assert broker.newest_ms(topic, 0) == world.now_ms
    broker.end_transaction("t", epoch, commit=False)
    assert broker.stable_end(topic, 0) == broker.end(topic, 0) == 4
    assert [entry.value for _, entry in broker.visible(topic, 0, 0)] == [b"plain", b"behind it"]
    assert [entry.value for _, entry in broker.visible(topic, 0, 0, records_max=1)] == [b"plain"]
    assert broker.visible(topic, 0, 0, records_max=-2) == []
