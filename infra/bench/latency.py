"""From produce to visible for a read_committed reader, beside a plain transactional echo, at fixed rates.

Every other input is a prompt for a session of its own; seen is its receipt. The next one aborts its run, which nobody
would claim. The two ways are measured in turns, three times each, so that what else the machine does meets both. A rate
that cannot be kept is said (`kept` below 1), not hidden.

    python -m infra.bench.latency [--rates 20,500,5000] [--seconds N] [--out FILE]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition

from infra.bench.core import TENANT, abort_of, prompt_of
from infra.bench.engine import broker, prepared
from infra.bench.measures import Measures
from infra.bench.serving import child, plain, processor
from onepen.schemas.ids import output_key
from onepen.schemas.partitioning import partition_of

PARTITIONS: Final = 4
TURNS: Final = 3
GRID_S: Final = 0.002
"""The feed sends what is due so often: to wake up for each input would take half a core from what is measured."""
READY_S: Final = 60.0
DRAIN_S: Final = 20.0
AIMS_MS: Final = {500: (20, 150)}


class Way(NamedTuple):
    """Where inputs go in, where what is seen comes out, and under which key."""

    inputs: str
    outputs: str
    out_key: Callable[[str], bytes]


class Eyes:
    """Reads a topic as its subscribers do, and notes when each key was seen first."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.seen: dict[bytes, float] = {}
        self._stop = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "eyes",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
            }
        )
        ends = [
            TopicPartition(topic, p, self._consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1])
            for p in range(PARTITIONS)
        ]
        self._consumer.assign(ends)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            first = self._consumer.poll(0.05)
            found = [] if first is None else [first, *self._consumer.consume(1_000, 0.0)]
            now = time.perf_counter()
            for message in found:
                key = message.key()
                if message.error() is None and key is not None:
                    self.seen.setdefault(key, now)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self._consumer.close()


@contextmanager
def looking(bootstrap: str, topic: str) -> Iterator[Eyes]:
    eyes = Eyes(bootstrap, topic)
    try:
        yield eyes
    finally:
        eyes.close()


def run(bootstrap: str, way: Way, rate: int, seconds: float, mark: str) -> tuple[list[float], float]:
    """Latencies in ms in order of size, and the share of the inputs that was seen in time."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "enable.idempotence": True})
    sent: dict[str, float] = {}
    with looking(bootstrap, way.outputs) as eyes:
        began = time.perf_counter()
        for number in range(int(rate * seconds)):
            due = began + number / rate
            while (left := due - time.perf_counter()) > 0:
                producer.poll(0)
                time.sleep(max(left, GRID_S))
            now_ms, again = time.time_ns() // 1_000_000, number % 2
            name = f"{mark}-{number - again}"
            value = abort_of(TENANT, name, now_ms) if again else prompt_of(name, now_ms)
            sent.setdefault(name, time.perf_counter())
            producer.produce(way.inputs, value, name.encode(), partition_of(name.encode(), PARTITIONS))
        producer.flush(DRAIN_S)
        end = time.monotonic() + DRAIN_S
        while len(eyes.seen) < len(sent) and time.monotonic() < end:
            time.sleep(0.05)
        seen = eyes.seen
    keys = {name: way.out_key(name) for name in sent}
    found = sorted((seen[key] - sent[name]) * 1000 for name, key in keys.items() if key in seen)
    return found, len(found) / len(sent)


def ready(bootstrap: str, way: Way, mark: str) -> None:
    """Until something comes out: whoever is measured has started by then."""
    end = time.monotonic() + READY_S
    while not run(bootstrap, way, 5, 0.4, f"{mark}-{time.monotonic_ns()}")[0]:
        if time.monotonic() > end:
            raise TimeoutError(f"nothing came out of {way.outputs} within {READY_S:.0f} s")


def part_of(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(len(times) * share))] if times else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description="Milliseconds from produce to visible.")
    parser.add_argument("--rates", default="20,500,5000")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    options = parser.parse_args()
    measures = Measures(options.out)
    with broker() as bootstrap:
        ours = prepared(bootstrap, "bench", PARTITIONS).topics
        theirs = prepared(bootstrap, "plain", PARTITIONS).topics
        ways = {
            "engine": Way(ours.inputs, ours.receipts, lambda name: output_key(TENANT, name)),
            "plain": Way(theirs.inputs, theirs.receipts, str.encode),
        }
        with child(processor, bootstrap, "bench", PARTITIONS), child(plain, bootstrap, theirs.inputs, theirs.receipts):
            for name, way in ways.items():
                ready(bootstrap, way, f"ready-{name}")
            for rate in map(int, options.rates.split(",")):
                compare(bootstrap, ways, rate, options.seconds, measures)


def compare(bootstrap: str, ways: dict[str, Way], rate: int, seconds: float, measures: Measures) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS):
        for name, way in ways.items():
            found, share = run(bootstrap, way, rate, seconds, f"{name}-{rate}-{turn}")
            times[name] += found
            kept[name].append(share)
        measures.calibrate()
    for name in ways:
        times[name].sort()
    aims = AIMS_MS.get(rate)
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        aim = {} if aims is None else {"aim": aims[0] if label == "p50" else aims[1]}
        measures.say(
            f"engine.latency_ms.{rate}.{label}",
            part_of(times["engine"], share),
            "ms",
            baseline=part_of(times["plain"], share),
            kept=round(min(kept["engine"]), 3),
            inputs=len(times["engine"]),
            **aim,
        )


if __name__ == "__main__":
    main()
