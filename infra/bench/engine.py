"""How many inputs one processor decides per second on a real broker, beside a plain pass-through of the same bytes.

The mix of `infra.bench.core`, in the order in which an engine meets it: the n-th inputs of all sessions, then the next.
All inputs stand in the topic before the clock starts; it runs from the first decided input to the last commit. One
process, its own broker on the same machine. What each part costs is measured around the calls of the engine, in a
run of its own.

    python -m infra.bench.engine [--sessions N] [--partitions N] [--out FILE] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from infra.bench.core import KEYS, inputs_of
from infra.bench.measures import Measures
from infra.bench.raw import Sizes, pass_through
from infra.bench.writing import Written, write_all
from onepen.processors.session import Session
from onepen.schemas.partitioning import partition_of
from onepen.streams.core import SessionCore
from onepen.streams.embedded_kafka import EmbeddedKafka
from onepen.streams.engine import Engine
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka import KafkaLog
from onepen.streams.kafka_transactions import KafkaTransaction
from onepen.streams.log import TX_HEADER, Batch, Member, Outcome, Output, Record
from onepen.streams.processor import patient_collector
from onepen.streams.settings import Settings
from onepen.streams.topic_admin import apply

AIM_PER_S: Final = 15_000
AIM_RATIO: Final = 0.2
LIMIT_S: Final = 600.0
RAW_ROUNDS: Final = 5
SAMPLE: Final = 2_000
KINDS: Final = 11
STAMP_BYTES: Final = len(f"{TX_HEADER}bench.s0.a:19a0b1c2d3e.1:12:1234/20000")
"""Of the header of a record; the pass-through writes as many bytes more of value instead, which is cheaper."""

R = TypeVar("R")


class Costs:
    """Nanoseconds by part, and a sample of the sizes of what was written."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = defaultdict(int)
        self.records = 0
        self.bytes = 0
        self.sizes: list[tuple[str, int, int]] = []

    def of(self, part: str, call: Callable[[], R]) -> R:
        before = time.perf_counter_ns()
        try:
            return call()
        finally:
            self.ns[part] += time.perf_counter_ns() - before

    def wrote(self, outputs: Sequence[Output]) -> None:
        self.records += len(outputs)
        for output in outputs:
            self.bytes += len(output.value or b"")
        # Spread over the whole run, since the n-th inputs of all sessions come together.
        step = max(1, len(outputs) // 20)
        self.sizes += [(o.topic, len(o.key or b""), len(o.value or b"") + STAMP_BYTES) for o in outputs[::step]]


class MeasuredCore(SessionCore):
    def __init__(self, costs: Costs, settings: EngineSettings) -> None:
        super().__init__(KEYS, settings.topics, settings.partitions)
        self._costs = costs

    def read(self, record: Record) -> Any:
        return self._costs.of("decode", lambda: super(MeasuredCore, self).read(record))

    def decide(
        self, rules: Any, session: Session, command: Any, record: Record, out: list[Output]
    ) -> tuple[Session, bool]:
        return self._costs.of(
            "decide_encode", lambda: super(MeasuredCore, self).decide(rules, session, command, record, out)
        )

    def changes(self, session: Session) -> tuple[dict[bytes, bytes | None], int]:
        return self._costs.of("state", lambda: super(MeasuredCore, self).changes(session))


class MeasuredTransaction:
    """See `log.Transaction`."""

    def __init__(self, costs: Costs, inner: KafkaTransaction) -> None:
        self._costs, self._inner = costs, inner

    @property
    def positions(self) -> Mapping[tuple[str, int], int]:
        return self._inner.positions

    @property
    def open(self) -> bool:
        return self._inner.open

    def produce(self, outputs: Sequence[Output]) -> None:
        self._costs.wrote(outputs)
        self._costs.of("produce", lambda: self._inner.produce(outputs))

    def commit(self, offsets: Mapping[int, int], member: Member) -> Outcome:
        return self._costs.of("commit", lambda: self._inner.commit(offsets, member))

    def abort(self) -> Outcome:
        return self._inner.abort()


class MeasuredLog(KafkaLog):
    def __init__(self, costs: Costs, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._costs = costs

    def poll(self, *, records_max: int, bytes_max: int, wait_ms: int) -> Batch:
        return self._costs.of(
            "poll",
            lambda: super(MeasuredLog, self).poll(records_max=records_max, bytes_max=bytes_max, wait_ms=wait_ms),
        )

    def begin(self, records: int) -> MeasuredTransaction:  # type: ignore[override]
        return MeasuredTransaction(self._costs, super().begin(records))


def fill(bootstrap: str, topic: str, partitions: int, sessions: int) -> int:
    """Put the inputs of all sessions into the topic; how many there are."""
    now_ms = time.time_ns() // 1_000_000
    names = [f"session-{number}" for number in range(sessions)]
    runs = [(name.encode(), [data for _, data in inputs_of(name, now_ms)]) for name in names]
    return write_all(
        bootstrap,
        (Written(topic, key, data[step], partition_of(key, partitions)) for step in range(KINDS) for key, data in runs),
    )


@contextmanager
def engine_of(settings: EngineSettings, costs: Costs | None = None) -> Iterator[Engine[Session]]:
    """An engine that has joined its group, as in a processor; its parts are measured where there are `costs`."""
    log = KafkaLog(settings) if costs is None else MeasuredLog(costs, settings)
    plain_core = SessionCore(KEYS, settings.topics, settings.partitions)
    engine = Engine(log, plain_core if costs is None else MeasuredCore(costs, settings), settings)
    try:
        with patient_collector():
            log.subscribe(engine)
            yield engine
    finally:
        log.close(leave=True)


class Took(NamedTuple):
    """From the first decided input to the last commit, for all inputs."""

    wall_s: float
    cpu_s: float


def decide_all(engine: Engine[Session], total: int, started: Callable[[], None] = lambda: None) -> Took:
    """Turn the engine until all inputs are decided; `started` is called with the clock."""
    deadline = time.monotonic() + LIMIT_S
    until(lambda: engine.decided > 0, engine, deadline)
    started()
    first, began, cpu_s = engine.decided, time.perf_counter(), time.process_time()
    until(lambda: engine.decided >= total, engine, deadline)
    share = total / (total - first)
    return Took((time.perf_counter() - began) * share, (time.process_time() - cpu_s) * share)


def until(condition: Callable[[], bool], engine: Engine[Session], deadline_s: float) -> None:
    """Turn the engine until it holds. Raises `TimeoutError`, or `RuntimeError` for a partition that stands still."""
    while not condition():
        engine.turn()
        if stopped := engine.view().stopped:
            raise RuntimeError(str(stopped))
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"only {engine.decided} inputs were decided in {LIMIT_S:.0f} s")


@contextmanager
def broker() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="onepen-bench-") as folder:
        kafka = EmbeddedKafka(Path(folder) / "kafka", heap_mb=1_024)
        try:
            yield kafka.start()
        finally:
            kafka.stop()


def prepared(bootstrap: str, prefix: str, partitions: int) -> EngineSettings:
    """The topics of a prefix, as `onepen up` makes them."""
    apply(Settings(bootstrap=bootstrap, prefix=prefix, partitions=partitions), 60_000)
    return EngineSettings(bootstrap, prefix, partitions, "s0")


def main() -> None:
    parser = argparse.ArgumentParser(description="Inputs per second of one processor on a real broker.")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    parser.add_argument("--profile", action="store_true", help="say where the time goes as well")
    options = parser.parse_args()
    measures = Measures(options.out)
    costs, profile = Costs(), cProfile.Profile() if options.profile else None

    def started() -> None:
        costs.ns.clear()
        if profile is not None:
            profile.enable()

    with broker() as bootstrap:
        # The parts in a run of their own: to measure around every call slows it down by a tenth. It comes first, so
        # that neither the engine nor the pass-through meets a broker that was just started.
        settings = prepared(bootstrap, "parts", options.partitions)
        total = fill(bootstrap, settings.topics.inputs, options.partitions, options.sessions)
        with engine_of(settings, costs) as engine:
            decide_all(engine, total, started)
            if profile is not None:
                profile.disable()
        measures.calibrate()
        settings = prepared(bootstrap, "bench", options.partitions)
        fill(bootstrap, settings.topics.inputs, options.partitions, options.sessions)
        with engine_of(settings) as engine:
            wall, cpu = decide_all(engine, total)
            transactions = engine.counters.outcomes[Outcome.COMMITTED.value]
        measures.calibrate()
        sizes: Sizes = costs.sizes[:: max(1, len(costs.sizes) // SAMPLE)]
        batch = round(total / transactions)
        # Less than a second each: one alone says little.
        inputs, per_input = settings.topics.inputs, costs.records / total
        rounds = [
            pass_through(bootstrap, inputs, total, batch, per_input, sizes, name=f"raw{number}")
            for number in range(RAW_ROUNDS)
        ]
    raw = statistics.median(rounds)
    measures.say("raw.pass_through_per_s", raw, "inputs/s", inputs=total, rounds=[round(rate) for rate in rounds])
    measures.say(
        "engine.inputs_per_s",
        total / wall,
        "inputs/s",
        baseline=raw,
        per_cpu_s=round(total / cpu),
        aim=AIM_PER_S,
        aim_ratio=AIM_RATIO,
        records_out=round(costs.records / total, 2),
        bytes_out=round(costs.bytes / total),
        transactions=transactions,
    )
    for part, ns in sorted(costs.ns.items()):
        measures.say(f"engine.{part}_us", ns / 1000 / total, "us")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
