"""Thousands of leases that ended during an outage: lost once each, no transaction failed, live inputs in between."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from infra.bench.leased import put_leases
from infra.bench.live import Resident, living, metrics, ready
from infra.bench.timers import NOT_COMMITTED, Losses
from onepen.processors.rules import Keys
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.ports import free_port
from tests.faults.outside import watch
from tests.integration.engine_world import PARTITIONS, EngineWorld

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

LEASES = 5_000
LEASE_MS = 3_000
LIVE_PER_S = 50
WAIT_S = 5.0
"""Of 99 in 100 live inputs; at rest it is a tenth of it. Where everything is slow: a third of the storm."""
GROWTH_KIB = 128 * 1024
"""Decoded sessions are kept, up to a bound; what is due or on its way takes no room."""


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
    storm_s = losses.last - losses.first
    print(waits, f"{storm_s:.1f} s, {resident.kib[0]} to {max(resident.kib)} KiB")
    assert len(losses.of) == LEASES
    assert Counter(losses.of.values()) == {1: LEASES}, "a lease is lost once"
    assert waits.seen == waits.sent > 0
    assert waits.p99 <= max(WAIT_S, storm_s / 3)
    assert {name: seen[name] for name in NOT_COMMITTED} == dict.fromkeys(NOT_COMMITTED, 0.0)
    assert world.aborted_records() == 0
    assert max(resident.kib) - resident.kib[0] < GROWTH_KIB
