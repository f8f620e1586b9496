"""A live input every 100 ms on one partition while another partition of the same process has a large backlog.

Two backlogs, each in place before the processor starts: of many sessions, and of one session that floods its partition.
Told are how long the live inputs waited, how fast the backlog was worked off (what stands behind a flood in its own
partition waits for all of it: inputs / rate), transactions that were not committed, and the resident size of the
processor when a fifth of the backlog was decided and at the end.

    python -m infra.bench.fairness [--backlog N] [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

from infra.bench.backlog import Backlog, names_of
from infra.bench.core import TENANT
from infra.bench.engine import broker, prepared
from infra.bench.live import Resident, living, metrics, ready, say_waits, until
from infra.bench.measures import Measures
from infra.bench.serving import child, watched_processor
from infra.bench.timers import NOT_COMMITTED
from onepen.streams.ports import free_port

PARTITIONS: Final = 4
BUSY, QUIET = 0, 1
LIVE_PER_S: Final = 10.0
READY_S: Final = 120.0
LIMIT_S: Final = 1_800.0
AIM_WAIT_S: Final = 0.5
DECIDED: Final = "onepen_inputs_decided_total"
BACKLOGS: Final = {"many_sessions": (10_000, 10), "one_session": (1, 999_999)}
"""Sessions, and input ids of each."""


def beside(bootstrap: str, prefix: str, kind: str, backlog: int, measures: Measures) -> None:
    settings, (sessions, ids) = prepared(bootstrap, prefix, PARTITIONS), BACKLOGS[kind]
    names = names_of(BUSY, PARTITIONS, sessions)
    Backlog(bootstrap, settings.topics.inputs, TENANT, BUSY, names, ids).put(backlog)
    port = free_port()
    with child(watched_processor, bootstrap, prefix, PARTITIONS, port) as process:
        until(lambda: ready(port), "the processor", READY_S)
        resident, decided = Resident(process.pid or 0), list[float]()

        def over() -> bool:
            resident.look()
            decided.append(metrics(port).get(DECIDED, 0.0))
            return decided[-1] >= backlog

        # The first transaction on a broker that was just started takes a second: that is no wait behind a backlog.
        until(lambda: metrics(port).get(DECIDED, 0.0) > PARTITIONS, "the first decisions", READY_S)
        began, before = time.perf_counter(), metrics(port)[DECIDED]
        with living(bootstrap, settings.topics, PARTITIONS, TENANT + 1, [QUIET], LIVE_PER_S) as feed:
            until(over, f"{backlog} inputs", LIMIT_S, 1.0)
            wall = time.perf_counter() - began
            waits, seen = feed.end(), metrics(port)
    early = next(kib for kib, done in zip(resident.kib, decided, strict=True) if done >= backlog / 5)
    name = f"fairness.{kind}"
    say_waits(measures, f"{name}.live_wait_s", waits, AIM_WAIT_S)
    measures.say(
        f"{name}.backlog_per_s",
        (decided[-1] - before) / wall,
        "inputs/s",
        backlog=backlog,
        seconds=round(wall, 1),
        not_committed=sum(seen[name] for name in NOT_COMMITTED),
        transactions=seen["onepen_transactions_total.committed"],
    )
    mib = max(resident.kib) / 1024
    measures.say(f"{name}.resident_mib", mib, "MiB", baseline=early / 1024, last=round(resident.kib[-1] / 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description="Live inputs beside a backlog on another partition.")
    parser.add_argument("--backlog", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    options = parser.parse_args()
    measures = Measures(options.out)
    with broker() as bootstrap:
        for kind in BACKLOGS:
            beside(bootstrap, kind.replace("_", "-"), kind, options.backlog, measures)


if __name__ == "__main__":
    main()
