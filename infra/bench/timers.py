"""Many leases that ended in one minute of an outage, worked off by one processor while live inputs go on.

The state is written first (`infra.bench.leased`); then the processor starts, waits one length of a lease, as it must,
and loses them. Told are the time from there to the last one, transactions that were not committed, and how long live
inputs waited meanwhile.

    python -m infra.bench.timers [--leases N] [--lease-ms N] [--live-per-s N] [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from infra.bench.core import KEYS, TENANT
from infra.bench.engine import broker, prepared
from infra.bench.leased import put_leases
from infra.bench.live import Resident, connected, metrics, ready, say_waits, until
from infra.bench.measures import Measures
from infra.bench.serving import child, watched_processor
from onepen.schemas import codec
from onepen.schemas.events import RUN_LEASE_LOST, Event
from onepen.schemas.topics import Topics
from onepen.streams.ports import free_port

PARTITIONS: Final = 4
READY_S: Final = 120.0
LIMIT_S: Final = 600.0
NOT_COMMITTED: Final = ("onepen_transactions_total.aborted", "onepen_transactions_total.doubt")
AIM_WAIT_S: Final = 0.5


class Losses:
    """Which runs have lost their lease, and how often, as a reader of committed events sees it; `read` reads on."""

    def __init__(self, bootstrap: str, topics: Topics, partitions: int) -> None:
        self.of: Counter[str] = Counter()
        self.first = self.last = 0.0
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "losses",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        self._consumer.assign([TopicPartition(topics.events, partition, 0) for partition in range(partitions)])

    def read(self) -> int:
        """How many runs."""
        while messages := self._consumer.consume(2_000, 0.02):
            for one in messages:
                if one.error() is None and RUN_LEASE_LOST.encode() in (value := one.value() or b""):
                    event = codec.decode_as(Event, value)
                    self.of[event.run_id] += event.type == RUN_LEASE_LOST
            now = time.perf_counter()
            if self.of:
                self.first, self.last = self.first or now, now
        return len(self.of)

    def close(self) -> None:
        self._consumer.close()


def storm(bootstrap: str, prefix: str, leases: int, lease_ms: int, live_per_s: float, measures: Measures) -> None:
    settings = prepared(bootstrap, prefix, PARTITIONS)
    began = time.perf_counter()
    put_leases(settings, KEYS, TENANT, [f"leased-{number}" for number in range(leases)], lease_ms)
    put_s, port = time.perf_counter() - began, free_port()
    losses = Losses(bootstrap, settings.topics, PARTITIONS)
    with (
        connected(bootstrap, settings.topics, PARTITIONS, TENANT + 1, range(PARTITIONS), live_per_s) as feed,
        child(watched_processor, bootstrap, prefix, PARTITIONS, port) as process,
    ):
        until(lambda: ready(port), "the processor", READY_S)
        resident = Resident(process.pid or 0)

        def over() -> bool:
            resident.look()
            return losses.read() >= leases

        feed.start()
        until(over, f"{leases} leases lost", LIMIT_S)
        waits = feed.end()
        seen = metrics(port)
    losses.read()
    if set(losses.of.values()) != {1} or len(losses.of) != leases:
        raise AssertionError(f"not once each: {Counter(losses.of.values())}")
    wall = losses.last - losses.first
    measures.say(
        "timers.lost_per_s",
        leases / wall,
        "leases/s",
        leases=leases,
        seconds=round(wall, 1),
        put_s=round(put_s, 1),
        not_committed=sum(seen[name] for name in NOT_COMMITTED),
        transactions=seen["onepen_transactions_total.committed"],
        appended=seen["onepen_timers_appended_total"],
    )
    say_waits(measures, "timers.live_wait_s", waits, AIM_WAIT_S)
    first, last = resident.kib[0] / 1024, resident.kib[-1] / 1024
    measures.say("timers.resident_mib", max(resident.kib) / 1024, "MiB", baseline=first, last=round(last))


def main() -> None:
    parser = argparse.ArgumentParser(description="Leases that ended in an outage, worked off beside live inputs.")
    parser.add_argument("--leases", type=int, default=100_000)
    parser.add_argument("--lease-ms", type=int, default=30_000)
    parser.add_argument("--live-per-s", type=float, default=50.0)
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    options = parser.parse_args()
    measures = Measures(options.out)
    with broker() as bootstrap:
        storm(bootstrap, "timers", options.leases, options.lease_ms, options.live_per_s, measures)


if __name__ == "__main__":
    main()
