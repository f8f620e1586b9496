"""Live inputs at a fixed rate beside whatever else the processor has to do, and how long each waited.

Rule: a wait lasts from the hand-over to the producer to the moment at which a reader of committed records has the
receipt. Each input is a prompt for a session of its own; an abort of it follows at once, so that no offers of these
runs come again and again while nobody claims them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from infra.bench.core import abort_of, input_of
from infra.bench.latency import Eyes, part_of
from infra.bench.measures import Measures, memory_kib
from onepen.schemas import codec
from onepen.schemas.ids import output_key
from onepen.schemas.inputs import Content
from onepen.schemas.partitioning import partition_of
from onepen.schemas.topics import Topics
from onepen.streams.kafka_config import SAFE_WRITES

SEEN_S: Final = 60.0
CONNECT_S: Final = 30.0
LOOK_S: Final = 0.05


class Waits(NamedTuple):
    """Of the inputs that were seen, in seconds."""

    sent: int
    seen: int
    p50: float
    p99: float
    longest: float


def say_waits(measures: Measures, name: str, waits: Waits, aim_s: float) -> None:
    """Three lines: the median, the 99th percentile and the longest."""
    measures.say(f"{name}.p50", waits.p50, "s", sent=waits.sent, seen=waits.seen)
    measures.say(f"{name}.p99", waits.p99, "s", aim=aim_s)
    measures.say(f"{name}.max", waits.longest, "s")


def prompt(tenant_id: int, session_id: str, input_id: str) -> bytes:
    content = Content(data=b"hello")
    return codec.encode(input_of(tenant_id, session_id, input_id, _now_ms(), mode="prompt", content=content))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Live:
    """Sends from a thread of its own, from `start` until `end`, to sessions of the given partitions in turn."""

    def __init__(
        self, bootstrap: str, topics: Topics, partitions: int, tenant_id: int, only: Collection[int], per_s: float
    ) -> None:
        self._eyes = Eyes(bootstrap, topics.receipts)
        self._topic, self._partitions, self._tenant_id = topics.inputs, partitions, tenant_id
        self._producer = Producer({"bootstrap.servers": bootstrap, **SAFE_WRITES, "linger.ms": 0})
        self._places = itertools.cycle(sorted(only))
        self._numbers = itertools.count()
        self._mark = f"{time.time_ns() // 1_000_000:x}"
        self._every_s = 1 / per_s
        self._sent: dict[bytes, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._connect()

    def _connect(self) -> None:
        """One input that is not counted: a new producer has its id after half a second, often."""
        name = self._name(next(self._places))
        self._send(name, prompt(self._tenant_id, name, f"input-{name}"))
        if self._producer.flush(CONNECT_S):
            self._eyes.close()
            raise TimeoutError(f"the first live input was not written within {CONNECT_S:.0f} s")

    def start(self) -> None:
        self._thread.start()

    def _name(self, partition: int) -> str:
        names = (f"live-{self._mark}-{number}" for number in self._numbers)
        return next(name for name in names if partition_of(name.encode(), self._partitions) == partition)

    def _run(self) -> None:
        began = time.perf_counter()
        for number in itertools.count():
            while (left := began + number * self._every_s - time.perf_counter()) > 0:
                if self._stop.wait(min(left, LOOK_S)):
                    return
                self._producer.poll(0)
            name = self._name(next(self._places))
            value = prompt(self._tenant_id, name, f"input-{name}")
            self._sent[output_key(self._tenant_id, name)] = time.perf_counter()
            self._send(name, value)

    def _send(self, name: str, value: bytes) -> None:
        """The prompt, and the abort behind it."""
        partition = partition_of(name.encode(), self._partitions)
        for one in (value, abort_of(self._tenant_id, name, _now_ms())):
            self._producer.produce(self._topic, one, name.encode(), partition)

    @property
    def seen(self) -> int:
        return len(self._eyes.seen.keys() & self._sent.keys())

    def end(self) -> Waits:
        """Nothing more is sent; the waits of all that was, once everything was seen or SEEN_S have passed."""
        self._halt()
        self._producer.flush(10)
        end = time.monotonic() + SEEN_S
        while self.seen < len(self._sent) and time.monotonic() < end:
            time.sleep(LOOK_S)
        seen = self._eyes.seen
        waits = sorted(seen[key] - at for key, at in self._sent.items() if key in seen)
        return Waits(len(self._sent), len(waits), part_of(waits, 0.5), part_of(waits, 0.99), part_of(waits, 1.0))

    def _halt(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def close(self) -> None:
        self._halt()
        self._eyes.close()


@contextmanager
def living(
    bootstrap: str, topics: Topics, partitions: int, tenant_id: int, only: Collection[int], per_s: float
) -> Iterator[Live]:
    """Live inputs while the block runs."""
    with connected(bootstrap, topics, partitions, tenant_id, only, per_s) as feed:
        feed.start()
        yield feed


@contextmanager
def connected(
    bootstrap: str, topics: Topics, partitions: int, tenant_id: int, only: Collection[int], per_s: float
) -> Iterator[Live]:
    """Live inputs from `start` on, for as long as the block runs."""
    feed = Live(bootstrap, topics, partitions, tenant_id, only, per_s)
    try:
        yield feed
    finally:
        feed.close()


class Resident:
    """The resident size of a process, looked at all the time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.kib: list[int] = []

    def look(self) -> None:
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            self.kib.append(memory_kib(self._pid))


def metrics(port: int) -> dict[str, float]:
    """Sums over all labels but the outcome of transactions, which is put behind the name."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except urllib.error.URLError:
        return {}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            outcome = sample.labels.get("outcome")
            name = f"{sample.name}.{outcome}" if outcome else sample.name
            found[name] = found.get(name, 0.0) + sample.value
    return found


def ready(port: int) -> bool:
    """Whether the processor with its metrics on this port decides its partitions."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return b"partitions" in answer.read()
    except OSError:
        return False


def until(condition: Callable[[], bool], what: str, limit_s: float, every_s: float = 0.1) -> None:
    """Look every `every_s` until it holds: others do the work. Raises `TimeoutError`."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(every_s)
