"""Whether it matters to a processor how many sessions it knows: the same traffic beside a thousand, a hundred thousand
and a million of them.

The state is that of `infra.bench.recovery`, put on the broker and read by a new process. Then ten thousand runs of the
mix of `infra.bench.core` are decided from a backlog, a thousand side by side, each run of the next session of those
known, evenly spread. The baseline of a line is the smallest number of sessions: a ratio of one is right.

    python -m infra.bench.sessions [--known 1000,100000,1000000] [--runs N] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from infra.bench.core import TENANT, inputs_of
from infra.bench.engine import LIMIT_S, Took, broker, decide_all, engine_of, prepared, until
from infra.bench.measures import Measures, memory_kib
from infra.bench.recovery import fill, in_child
from infra.bench.writing import Written, write_all
from onepen.schemas.partitioning import partition_of
from onepen.streams.engine import Engine
from onepen.streams.engine_settings import EngineSettings

PARTITIONS: Final = 4
SIDE_BY_SIDE: Final = 1_000


class Spread(NamedTuple):
    """Which runs there are: so many, spread evenly over so many known sessions."""

    known: int
    runs: int

    def run(self, number: int) -> tuple[str, int]:
        """(session, run number) of the n-th run; the model of the state has had one run already."""
        there = min(self.known, self.runs)
        return f"session-{number % there * (self.known // there):07d}", 2 + number // there

    def sessions(self) -> dict[str, int]:
        """The last run number of each session that runs."""
        return dict(self.run(number) for number in range(self.runs))


def inputs(topic: str, spread: Spread) -> Iterator[Written]:
    now_ms = time.time_ns() // 1_000_000
    for first in range(0, spread.runs, SIDE_BY_SIDE):
        runs = [spread.run(number) for number in range(first, min(first + SIDE_BY_SIDE, spread.runs))]
        several = [(session.encode(), inputs_of(session, now_ms, ordinal)) for session, ordinal in runs]
        for one_each in zip(*(found for _, found in several), strict=True):
            for (key, _), (_, data) in zip(several, one_each, strict=True):
                yield Written(topic, key, data, partition_of(key, PARTITIONS))


def work_off(settings: EngineSettings, total: int, spread: Spread) -> tuple[Took, float]:
    """What a new processor took, and its resident size in MB; every run has to have completed. Runs in a process of
    its own."""
    with engine_of(settings) as engine:
        until(lambda: len(engine.view().running) == PARTITIONS, engine, time.monotonic() + LIMIT_S)
        took = decide_all(engine, total)
        memory_mb = memory_kib(os.getpid()) / 1024
        _check(engine, spread)
        return took, memory_mb


def _check(engine: Engine[Any], spread: Spread) -> None:
    stores = {store.partition: store for store in engine.view().running}
    for session, ordinal in spread.sessions().items():
        head = stores[partition_of(session.encode(), PARTITIONS)].load((TENANT, session)).session.head
        assert head.last is not None, session
        assert (head.last.status, head.last.run_no) == ("completed", ordinal), (session, ordinal, head.last)


def decided(bootstrap: str, prefix: str, spread: Spread, recent: float) -> tuple[int, Took, float]:
    """How many inputs there were, and what `work_off` tells."""
    settings = prepared(bootstrap, prefix, PARTITIONS)
    fill(settings, spread.known, recent)
    total = write_all(bootstrap, inputs(settings.topics.inputs, spread))
    return total, *in_child(work_off, settings, total, spread)


def main() -> None:
    parser = argparse.ArgumentParser(description="The same traffic beside more and more known sessions.")
    parser.add_argument("--known", default="1000,100000,1000000")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--recent", type=float, default=0.1, help="share of the known with a run of today")
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    options = parser.parse_args()
    measures = Measures(options.out)
    least: float | None = None
    several = [int(known) for known in options.known.split(",")]
    with broker() as bootstrap:
        # The first one meets a broker that was just started: it is not told.
        decided(bootstrap, "first", Spread(several[0], options.runs), options.recent)
        for known in several:
            measures.calibrate()
            total, took, memory_mb = decided(bootstrap, f"known{known}", Spread(known, options.runs), options.recent)
            measures.calibrate()
            least = least or total / took.wall_s
            measures.say(
                f"engine.sessions.{known}",
                total / took.wall_s,
                "inputs/s",
                baseline=least,
                cpu_us_per_input=round(took.cpu_s / total * 1e6, 1),
                memory_mb=round(memory_mb),
                inputs=total,
            )


if __name__ == "__main__":
    main()
