"""How long partitions stand still when their processor is killed, killed for good, or stopped, and when one joins.

Two slots share the partitions of a prefix under a feed of prompts; the first one is struck and comes back, again and
again. Cases: `restart` (SIGKILL, started again after the supervisor's 0.2 s), `away` (SIGKILL, stays away), `stop`
(drained), `join` (the first one comes back to a group that lives). Every other kill meets an open transaction. Parts:

    detect   from the strike to the assignment, at the survivor or the one started again, without `fence`
    start    of `detect`: until the process begins (0.2 s and the imports)
    fence    restart: `init_transactions`; otherwise from the assignment until the committed offsets are stable
    restore  until a reader of committed records sees the first decision in the last of the moved partitions
    total    of the three, the value of the line; the others are [p50, p90, max]
    kept     the longest pause of a partition that was not moved (classic groups: aim 1 s)
    given    the longest pause of a partition of the survivor that was given to the one started again, which happens
             under the consumer protocol while the dead one still counts; 0: none was

    python -m infra.bench.takeover [--trials N] [--lanes N] [--per-s N] [--protocols LIST] [--cases LIST] [--out FILE]

Classic groups are measured on a broker with default settings; the consumer protocol on the embedded one, whose group
session is 6 s (by default brokers wait 45 s, which no client can shorten).
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from infra.bench.engine import prepared
from infra.bench.latency import part_of
from infra.bench.measures import Measures
from infra.bench.takeover_slot import FENCED, KILLED, STABLE
from onepen.schemas.topics import Topics
from onepen.streams.embedded_kafka import EmbeddedKafka, Ports
from onepen.streams.log import TX_HEADER
from onepen.streams.restarts import FIRST_BACKOFF_S
from tests.faults.outside import Feed, prompts
from tests.faults.slot_log import SlotLog

PARTITIONS: Final = 4
SESSIONS: Final = 200
LIMIT_S: Final = 90.0
LOOK_S: Final = 0.05
KEY: Final = "a token key of the benchmark, 32 bytes or more"
AIMS_MS: Final = {"restart": 3_000, "away": 10_000, "stop": 2_000}
CASES: Final = ("restart", "away", "stop")
FIRST, SECOND = "s0", "s1"


class DefaultKafka(EmbeddedKafka):
    """A broker whose groups and transactions have Kafka's own settings."""

    def _settings(self, ports: Ports) -> dict[str, str]:
        ours = ("group.", "transaction.abort.", "transaction.max.")
        return {name: value for name, value in super()._settings(ports).items() if not name.startswith(ours)}


class Seen(NamedTuple):
    at_s: float
    slot: str
    started_ms: int


class Witness:
    """Reads the receipts as a subscriber does, and notes when a record of each partition was seen, and whose it is."""

    def __init__(self, bootstrap: str, topics: Topics) -> None:
        self.seen: dict[int, list[Seen]] = {p: [] for p in range(PARTITIONS)}
        self._stop = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "witness",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        self._consumer.assign([TopicPartition(topics.receipts, p, 0) for p in range(PARTITIONS)])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            first = self._consumer.poll(0.05)
            now_s = time.time()
            for one in [] if first is None else [first, *self._consumer.consume(500, 0.0)]:
                if one.error() is None:
                    stamp = dict(one.headers() or [])[TX_HEADER] or b""
                    tid, started, *_ = stamp.decode().split(":")  # type: ignore[union-attr]
                    seen = Seen(now_s, tid.split(".")[-2], int(started.partition(".")[0], 16))
                    self.seen[one.partition() or 0].append(seen)

    def first(self, partition: int, slot: str, since_s: float, *, started_ms: int = 0) -> float | None:
        """When a decision of this slot was seen for the first time since."""
        for one in reversed_since(self.seen[partition], since_s):
            if one.slot == slot and one.started_ms >= started_ms:
                return one.at_s
        return None

    def longest_pause_ms(self, partition: int, since_s: float, until_s: float) -> float:
        """Between two decisions that were seen, the first one of them from before."""
        times = [one.at_s for one in self.seen[partition] if since_s - 1.0 <= one.at_s <= until_s + 1.0]
        gaps = [after - before for before, after in itertools.pairwise(times) if after > since_s]
        return max(gaps, default=0.0) * 1000

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self._consumer.close()


def reversed_since(found: list[Seen], since_s: float) -> list[Seen]:
    """What was seen since, the oldest first; looked for from the end."""
    place = len(found)
    while place and found[place - 1].at_s > since_s:
        place -= 1
    return found[place:]


class Slot:
    """One slot: one process at a time, started as a supervisor does."""

    def __init__(self, bootstrap: str, prefix: str, protocol: str, slot: str, folder: Path) -> None:
        self.slot, self.log = slot, SlotLog(folder / f"{slot}.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ONEPEN_")},
            "ONEPEN_BOOTSTRAP": bootstrap,
            "ONEPEN_PREFIX": prefix,
            "ONEPEN_PARTITIONS": str(PARTITIONS),
            "ONEPEN_SLOT": slot,
            "ONEPEN_GROUP_PROTOCOL": protocol,
            "ONEPEN_TOKEN_KEY": KEY,
            "ONEPEN_DATA_DIR": str(folder),
        }

    def start(self) -> None:
        self._started_s = time.time()
        with self.log.path.open("ab") as log:
            argv = [sys.executable, "-m", "infra.bench.takeover_slot"]
            self._process = subprocess.Popen(argv, env=self._environment, stderr=log)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def end(self) -> None:
        if not self.ended():
            self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)

    def tail(self) -> str:
        return f"-- {self.slot}\n{self.log.tail(30)}"

    def assigned(self, partition: int, since_s: float) -> float | None:
        """When it was given the partition since."""
        for at, text in self.log.lines(since_s):
            if (match := re.match(r"assigned: \[(.*)\]", text)) and str(partition) in match[1].split(", "):
                return at
        return None

    def owns(self) -> set[int]:
        """What the process that runs was given and not revoked since."""
        return set() if self.ended() else self.log.owns(self._started_s)


class Parts(NamedTuple):
    """Milliseconds."""

    detect: float
    start: float
    fence: float
    restore: float
    total: float
    kept: float
    given: float


class Lane:
    """One prefix with two slots under a feed; its trials follow each other."""

    def __init__(self, bootstrap: str, prefix: str, protocol: str, per_s: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._stack = ExitStack()
        topics = prepared(bootstrap, prefix, PARTITIONS).topics
        self.first = Slot(bootstrap, prefix, protocol, FIRST, folder)
        self.second = Slot(bootstrap, prefix, protocol, SECOND, folder)
        for slot in (self.first, self.second):
            self._stack.callback(slot.end)
            slot.start()
        self.witness = Witness(bootstrap, topics)
        self._stack.callback(self.witness.close)
        feed = Feed(bootstrap, prompts(topics, lambda number: f"s-{number % SESSIONS}"), per_s)
        self._stack.callback(feed.halt)

    def close(self) -> None:
        self._stack.close()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {LIMIT_S:.0f} s: {what}\n{self.first.tail()}\n{self.second.tail()}")
            time.sleep(LOOK_S)

    def settle(self) -> None:
        """Each owns its half and decides in it."""
        now_s = time.time()

        def settled() -> bool:
            shares = [(slot, slot.owns()) for slot in (self.first, self.second)]
            return [len(owned) for _, owned in shares] == [PARTITIONS // 2] * 2 and all(
                self.witness.first(p, slot.slot, now_s) is not None for slot, owned in shares for p in owned
            )

        self._wait(settled, "both slots decide")

    def trial(self, case: str, number: int) -> dict[str, Parts]:
        """One strike and, unless it is started again at once, the return."""
        self.settle()
        moved = self.first.owns()
        kept = set(range(PARTITIONS)) - moved
        at_s = self._strike(case, in_transaction=number % 2 == 0)
        if case == "restart":
            time.sleep(FIRST_BACKOFF_S)
            self.first.start()
            # Classic groups give it what it had; under the consumer protocol it is a new member like any other.
            return {case: self._parts([self.first, self.second], moved, kept, at_s)}
        found = {case: self._parts([self.second], moved, kept, at_s)}
        back_s = time.time()
        self.first.start()

        def shared() -> bool:
            return len(self.first.owns()) == PARTITIONS // 2

        self._wait(shared, "the first one has its half again")
        moves = self.first.owns()
        found["join"] = self._parts([self.first], moves, set(range(PARTITIONS)) - moves, back_s)
        return found

    def _strike(self, case: str, *, in_transaction: bool) -> float:
        at_s = time.time()
        if case == "stop":
            self.first.send(signal.SIGTERM)
            return at_s
        self.first.send(signal.SIGUSR1 if in_transaction else signal.SIGKILL)
        self._wait(self.first.ended, "its end")
        return (self.first.log.said(KILLED, at_s) or at_s) if in_transaction else at_s

    def _parts(self, owners: list[Slot], moved: set[int], kept: set[int], at_s: float) -> Parts:
        """`owners` are given `moved` and go on."""
        starts = self.first in owners

        def seen(partition: int) -> float | None:
            found = [
                self.witness.first(
                    partition, owner.slot, at_s, started_ms=int(at_s * 1000) if owner is self.first else 0
                )
                for owner in owners
            ]
            return min((one for one in found if one is not None), default=None)

        def told(text: str, since_s: float) -> float:
            found = [owner.log.said(text, since_s) for owner in owners]
            return min((one for one in found if one is not None), default=0.0)

        self._wait(lambda: all(seen(p) is not None for p in moved), "decisions in all moved partitions")
        ends_s = max(seen(p) or 0.0 for p in moved)
        assigned = [[owner.assigned(p, at_s) for owner in owners] for p in moved]
        assigned_s = max(min(one for one in times if one is not None) for times in assigned)
        began_s = at_s
        if starts:
            # Under the consumer protocol the other one may have been given all of them before it is up.
            began_s = min(self.first.log.said("processor of slot", at_s) or assigned_s, assigned_s)
            fence_s = max(0.0, min(self.first.log.said(FENCED, at_s) or began_s, assigned_s) - began_s)
        else:
            fence_s = max(max(told(f"{STABLE} {p}", assigned_s) for p in moved) - assigned_s, 0.0)
        detect_s = assigned_s - at_s - (fence_s if starts else 0.0)
        total_s = ends_s - at_s
        # A pause that is not over yet would not be seen.
        self._wait(
            lambda: all(self.witness.seen[p][-1].at_s > ends_s for p in kept), "decisions in all kept partitions"
        )
        pauses = {p: self.witness.longest_pause_ms(p, at_s, ends_s) for p in kept}
        given = {p for p in kept if starts and self.witness.first(p, self.first.slot, at_s) is not None}
        stayed_ms = max((pauses[p] for p in kept - given), default=math.nan)
        given_ms = max((pauses[p] for p in given), default=0.0)
        in_ms = [part * 1000 for part in (detect_s, began_s - at_s, fence_s, total_s - detect_s - fence_s, total_s)]
        return Parts(in_ms[0], in_ms[1], in_ms[2], in_ms[3], in_ms[4], stayed_ms, given_ms)


@contextmanager
def running(kafka: EmbeddedKafka) -> Iterator[str]:
    try:
        yield kafka.start()
    finally:
        kafka.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Milliseconds until a struck processor's partitions go on.")
    parser.add_argument("--trials", type=int, default=20, help="of each case and protocol")
    parser.add_argument("--lanes", type=int, default=2, help="how many pairs of slots at once")
    parser.add_argument("--per-s", type=int, default=100, help="inputs per second and lane")
    parser.add_argument("--protocols", default="classic,consumer")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    options = parser.parse_args()
    measures = Measures(options.out)
    for protocol in options.protocols.split(","):
        with tempfile.TemporaryDirectory(prefix="onepen-bench-") as folder:
            kind = DefaultKafka if protocol == "classic" else EmbeddedKafka
            with running(kind(Path(folder) / "kafka", heap_mb=768)) as bootstrap:
                measure(bootstrap, protocol, options, Path(folder), measures)


def measure(bootstrap: str, protocol: str, options: argparse.Namespace, folder: Path, measures: Measures) -> None:
    cases: list[str] = options.cases.split(",")
    rounds = -(-options.trials // options.lanes)

    def lane(number: int) -> list[tuple[str, Parts]]:
        one = Lane(bootstrap, f"take{number}", protocol, options.per_s, folder / f"lane-{number}")
        try:
            return [found for turn in range(rounds) for case in cases for found in one.trial(case, turn).items()]
        finally:
            one.close()

    with ThreadPoolExecutor(options.lanes) as pool:
        found: dict[str, list[Parts]] = defaultdict(list)
        for results in pool.map(lane, range(options.lanes)):
            for case, parts in results:
                found[case].append(parts)
    measures.calibrate()
    for case, trials in found.items():
        all_parts = {part: spread([getattr(one, part) for one in trials]) for part in Parts._fields}
        p50, p90, most = all_parts.pop("total") or (0, 0, 0)
        more: dict[str, Any] = {"aim": AIMS_MS[case]} if case in AIMS_MS else {}
        measures.say(
            f"takeover.{protocol}.{case}_ms",
            p50,
            "ms",
            p90=p90,
            max=most,
            trials=len(trials),
            per_s=options.per_s * options.lanes,
            **(more | all_parts),
        )


def spread(values: list[float]) -> tuple[int, int, int] | None:
    """p50, p90, max of those that are numbers."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return None
    return round(part_of(ordered, 0.5)), round(part_of(ordered, 0.9)), round(ordered[-1])


if __name__ == "__main__":
    main()
