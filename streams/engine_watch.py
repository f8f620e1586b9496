"""What a running processor shows: metrics for Prometheus, whether it lives, whether it is ready.

Rule: everything is read, on the thread that asks, from plain numbers and from copies that the engine hands out; nothing
is asked of a broker. Labels are partitions, states, clients and reasons, never ids of sessions, runs or workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from onepen.streams.engine import Engine
from onepen.streams.engine_view import View
from onepen.streams.kafka import KafkaLog
from onepen.streams.kafka_statistics import Statistics
from onepen.streams.metric_families import Values, counter, gauge, histogram
from onepen.streams.settings import Settings
from onepen.streams.store import PartitionStore
from onepen.streams.watch_server import Verdict, Watched, serving

__all__ = ["EngineWatch", "watching"]

ALIVE_S: Final = 75.0
"""A turn may insist for 60 s on an answer of the brokers, and leaves the process by itself after that."""
DUE_MAX: Final = 100_000
"""More timers that are due are not counted: so many are an alarm in any case."""


class EngineWatch(Collector):
    """Of one engine on one log. Its methods may be called on any thread while the engine runs."""

    def __init__(self, engine: Engine[Any], log_: KafkaLog, inputs: str) -> None:
        self._engine, self._log, self._inputs = engine, log_, inputs
        self._begun_s = time.monotonic()
        self._caught_up_ms: dict[int, int] = {}
        """Broker time at which a partition was last seen without a backlog."""

    # -- probes ----------------------------------------------------------------------------------------------------

    def healthy(self) -> Verdict:
        """The loop has turned lately."""
        turned_s = self._engine.counters.turned_s or self._begun_s
        still_s = time.monotonic() - turned_s
        return Verdict(still_s < ALIVE_S, f"the loop turned {still_s:.1f} s ago")

    def ready(self) -> Verdict:
        """It is a member of the group, and every partition that it owns is being decided."""
        view = self._engine.view()
        if not self._engine.counters.assignments:
            return Verdict(False, "not a member of the group yet")
        if view.stopped:
            return Verdict(False, f"partitions stand still: {_listed(view.stopped)}")
        if view.recovering or view.starting:
            reading = [one.partition for one in view.recovering] + [store.partition for store in view.starting]
            return Verdict(False, f"the state of partitions is being read: {_listed(reading)}")
        return Verdict(True, f"partitions {_listed(s.partition for s in view.running)}" if view.running else "standby")

    # -- metrics ---------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        view = self._engine.view()
        statistics = self._log.statistics.latest()
        yield from self._loop()
        yield from self._transactions()
        yield from self._partitions(view)
        yield from self._lag(view, statistics)
        yield from self._recovery(view)
        yield from _clients(statistics)

    def describe(self) -> Iterable[Metric]:
        return ()

    def _loop(self) -> Iterator[Metric]:
        counters = self._engine.counters
        turned_s = counters.turned_s
        still_s = time.monotonic() - turned_s if turned_s else 0.0
        yield gauge("onepen_loop_idle_seconds", "Time since the loop last turned.", {(): still_s})
        yield counter("onepen_inputs_decided", "Inputs decided and committed.", {(): self._engine.decided})
        letters = {(reason,): float(count) for reason, count in dict(counters.dead_letters).items()}
        yield counter("onepen_dead_letters", "Inputs set aside, repeats after an abort included.", letters, ("reason",))
        yield counter("onepen_timers_appended", "Timers written to the inputs topic.", {(): counters.timers})
        yield counter("onepen_assignments", "Assignments of partitions.", {(): counters.assignments})
        yield counter("onepen_revocations", "Revocations of partitions.", {(): counters.revocations})

    def _transactions(self) -> Iterator[Metric]:
        counters, log_ = self._engine.counters, self._log.counters
        outcomes = {(name,): float(counters.outcomes[name]) for name in ("committed", "aborted", "doubt")}
        yield counter("onepen_transactions", "Transactions by what was told of their end.", outcomes, ("outcome",))
        causes = {("aborted", reason): float(count) for reason, count in dict(log_.aborts).items()}
        causes |= {("doubt", reason): float(count) for reason, count in dict(log_.doubts).items()}
        yield counter(
            "onepen_transaction_failures", "Why transactions were not committed.", causes, ("outcome", "reason")
        )
        yield histogram("onepen_transaction_seconds", "From encoding to its end.", counters.transaction_ms, 1_000)
        yield histogram("onepen_transaction_inputs", "Inputs in a transaction.", counters.transaction_inputs)
        yield histogram("onepen_transaction_records", "Records written in one.", counters.transaction_outputs)

    def _partitions(self, view: View[Any]) -> Iterator[Metric]:
        mono_ms = time.monotonic() * 1_000
        stores = view.running
        states = {
            ("running",): float(len(stores)),
            ("starting",): float(len(view.starting)),
            ("recovering",): float(len(view.recovering)),
            ("parked",): float(len(view.parked)),
            ("stopped",): float(len(view.stopped)),
        }
        yield gauge("onepen_partitions", "Partitions of this process by state.", states, ("state",))
        stopped = {_label(partition): 1.0 for partition in view.stopped}
        yield gauge("onepen_partition_stopped", "Partitions that need a person.", stopped, ("partition",))
        yield _of(stores, "onepen_sessions", "Sessions known.", lambda store: store.sessions)
        yield _of(stores, "onepen_runs_active", "Sessions with an active run.", lambda store: len(store.active))
        yield _of(stores, "onepen_timers_armed", "Sessions with a deadline.", lambda store: len(store.timers))
        yield _of(
            stores, "onepen_timers_due", "Sessions whose deadline has passed.",
            lambda store: store.timers.due_count(mono_ms, DUE_MAX),
        )  # fmt: skip

    def _lag(self, view: View[Any], statistics: Mapping[str, tuple[float, Statistics]]) -> Iterator[Metric]:
        """Of partitions whose end the brokers have told. The time is at most so much: since the newest decided record,
        or since the backlog was last seen to be gone."""
        records: dict[tuple[str, ...], float] = {}
        seconds: dict[tuple[str, ...], float] = {}
        mono_ms = time.monotonic() * 1_000
        idle = not self._log.held and not self._engine.counters.in_flight
        _, told = statistics.get("inputs", (0.0, Statistics()))
        for store in view.running:
            found = told.partition(self._inputs, store.partition)
            if found is None or found.hi_offset < 0:
                continue
            label, now_ms = _label(store.partition), store.timers.clock.now_ms(mono_ms)
            # What lies behind the last record may be markers of transactions: nothing is left to be fetched then.
            if idle and found.fetchq_cnt == 0 and found.next_offset >= found.hi_offset:
                records[label] = 0.0
            else:
                records[label] = float(max(0, found.hi_offset - store.next_offset))
            if not records[label]:
                self._caught_up_ms[store.partition] = now_ms
            since_ms = max(store.timers.consumed_record_ms, self._caught_up_ms.get(store.partition, 0))
            seconds[label] = max(0.0, (now_ms - since_ms) / 1_000) if records[label] and since_ms and now_ms else 0.0
        yield gauge("onepen_lag_records", "Inputs that are not decided yet.", records, ("partition",))
        yield gauge("onepen_lag_seconds", "How long the oldest of them may have waited.", seconds, ("partition",))

    def _recovery(self, view: View[Any]) -> Iterator[Metric]:
        counters = self._engine.counters
        told = [one for one in view.recovering if one.target]
        progress = {_label(one.partition): min(1.0, one.position / one.target) for one in told}
        left = {_label(one.partition): float(max(0, one.target - one.position)) for one in told}
        yield gauge("onepen_recovery_progress", "Read part of the state, 0 to 1.", progress, ("partition",))
        yield gauge("onepen_recovery_left_offsets", "Offsets of the state not read yet.", left, ("partition",))
        yield counter("onepen_recovery_records", "State records read by recoveries.", {(): counters.restored})
        yield histogram("onepen_recovery_seconds", "Time of a recovery.", counters.recovery_ms, 1_000)


@contextmanager
def watching(settings: Settings, engine: Engine[Any], log_: KafkaLog) -> Iterator[None]:
    """Answer on the settings' metrics port while the block runs; does nothing without one. Raises `Fatal`."""
    if settings.metrics_port is None:
        yield
        return
    watch = EngineWatch(engine, log_, settings.topics.inputs)
    with serving(settings.metrics_host, settings.metrics_port, Watched(watch, watch.healthy, watch.ready)):
        yield


def _label(partition: int) -> tuple[str, ...]:
    return (str(partition),)


def _listed(partitions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(partitions)))


def _of(stores: Iterable[PartitionStore[Any]], name: str, text: str, of: Any) -> Metric:
    return gauge(name, text, {_label(store.partition): float(of(store)) for store in stores}, ("partition",))


def _clients(statistics: Mapping[str, tuple[float, Statistics]]) -> Iterator[Metric]:
    """A few of librdkafka's statistics. `inputs` is the consumer, `a` and `b` are the transactional producers."""
    told = {(client,): found for client, (_, found) in statistics.items()}
    clients = ("client",)

    def each(of: Any) -> Values:
        return {label: float(of(found)) for label, found in told.items()}

    def brokers(of: Any) -> Values:
        return each(lambda found: sum(of(broker) for broker in found.brokers.values()))

    def slowest(of: Any) -> Values:
        return each(lambda found: max((of(broker) for broker in found.brokers.values()), default=0) / 1e6)

    yield counter("onepen_kafka_sent_bytes", "Bytes sent to brokers.", each(lambda f: f.tx_bytes), clients)
    yield counter("onepen_kafka_received_bytes", "Bytes received.", each(lambda f: f.rx_bytes), clients)
    yield gauge("onepen_kafka_queued_records", "Records in producer queues.", each(lambda f: f.msg_cnt), clients)
    yield gauge(
        "onepen_kafka_round_trip_seconds", "Mean, of the slowest broker.", slowest(lambda b: b.rtt.avg), clients
    )
    yield gauge(
        "onepen_kafka_round_trip_p99_seconds", "99th percentile, of the slowest.", slowest(lambda b: b.rtt.p99), clients
    )
    yield counter(
        "onepen_kafka_request_timeouts", "Requests without answer.", brokers(lambda b: b.req_timeouts), clients
    )
    yield counter("onepen_kafka_disconnects", "Lost connections.", brokers(lambda b: b.disconnects), clients)
    yield counter("onepen_kafka_errors", "Failed sends and receives.", brokers(lambda b: b.txerrs + b.rxerrs), clients)
