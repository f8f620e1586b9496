"""Thousands of leases that ended during an outage: lost once each, no transaction failed, live inputs in between."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from infra.bench.leased import put_leases
from infra.bench.live import Resident, living, metrics, ready
from infra.bench.timers import NOT_COMMITTED, Losses
from onepen.processors.rules import Keys
from onepen.schemas import codec
from onepen.schemas.events import RUN_LEASE_LOST, Event
from onepen.streams.engine import TIMERS_AWAITED
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.outside_reader import read_topic
from onepen.streams.ports import free_port
from onepen.streams.settings import Settings
from tests.faults.outside import watch
from tests.integration.engine_world import PARTITIONS, EngineWorld

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

LEASES = 5_000
LEASE_MS = 3_000
LIVE_PER_S = 200
BEHIND = 2 * TIMERS_AWAITED // PARTITIONS
"""So many timers of its partition a live input waits for at most, and as many again where a slow one is repeated."""
assert BEHIND < LEASES // PARTITIONS // 4, "or waiting for all of them would not show"
GROWTH_KIB = 128 * 1024
"""Decoded sessions are kept, up to a bound; what is due or on its way takes no room."""


def waited_for(settings: Settings) -> list[int]:
    """Of each live input between the first timer of its partition and the last one: how many of those that stand before
    it in the log were decided after it was there."""
    lost_at_ms: dict[tuple[int, int], int] = {}
    for record in read_topic(settings, settings.topics.events):
        event = codec.decode_as(Event, record.value)
        if event.type == RUN_LEASE_LOST:
            lost_at_ms[event.cause.partition, event.cause.offset] = record.at_ms
    behind = []
    for record in read_topic(settings, settings.topics.inputs):
        timers = {offset: at_ms for (partition, offset), at_ms in lost_at_ms.items() if partition == record.partition}
        if (record.key or b"").startswith(b"live-") and min(timers) < record.offset < max(timers):
            behind.append(sum(at_ms > record.at_ms for offset, at_ms in timers.items() if offset < record.offset))
    return behind


def test_leases_that_ended_in_an_outage(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, port = world.settings("s0"), free_port()
    monkeypatch.setenv("ONEPEN_METRICS_PORT", str(port))
    keys = Keys(settings.token_key_name, settings.require_token_key())
    names = [f"leased-{number}" for number in range(LEASES)]
    put_leases(EngineSettings.from_settings(settings), keys, 1, names, LEASE_MS)
    losses = Losses(world.bootstrap, world.topics, PARTITIONS)
    with world.process("s0") as process:
        watch(lambda: ready(port), "a processor", 60)
        resident = Resident(process.pid)

        def over() -> bool:
            resident.look()
            return losses.read() >= LEASES

        with living(world.bootstrap, world.topics, PARTITIONS, 2, range(PARTITIONS), LIVE_PER_S) as live:
            watch(over, f"{LEASES} leases lost", 120)
            waits = live.end()
        seen = metrics(port)
        # In order: a kill may meet the transaction of the last live abort, which then counts as one that failed.
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    losses.read()
    losses.close()
    behind = waited_for(settings)
    storm_s = losses.last - losses.first
    print(waits, f"{storm_s:.1f} s, {resident.kib[0]} to {max(resident.kib)} KiB")
    print(f"{len(behind)} live inputs between the timers, waiting for at most {max(behind, default=0)}")
    assert len(losses.of) == LEASES
    assert Counter(losses.of.values()) == {1: LEASES}, "a lease is lost once"
    assert waits.seen == waits.sent > 0
    assert behind, "no live input met the storm"
    assert max(behind) <= BEHIND
    assert {name: seen[name] for name in NOT_COMMITTED} == dict.fromkeys(NOT_COMMITTED, 0.0)
    assert world.aborted_records() == 0
    assert max(resident.kib) - resident.kib[0] < GROWTH_KIB
