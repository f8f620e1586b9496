"""Lag, recovery and readiness as they are reckoned from what the engine and librdkafka tell."""

from __future__ import annotations

import json
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from onepen.schemas.topics import Topics
from onepen.streams.counters import EngineCounters, LogCounters
from onepen.streams.engine_view import View
from onepen.streams.engine_watch import ALIVE_S, EngineWatch
from onepen.streams.kafka_statistics import StatisticsTexts
from onepen.streams.recovery import Progress
from onepen.streams.store import PartitionStore
from tests.conformance.counting import CountingCore

TOPICS = Topics("t")


class Bench:
    """An engine that stands where the test puts it."""

    def __init__(self) -> None:
        self.texts = StatisticsTexts(1_000)
        self.take = self.texts.of("inputs")["stats_cb"]
        self.counters = EngineCounters()
        self.store: PartitionStore[Any] = PartitionStore(3, CountingCore(TOPICS))
        self.view_ = View((self.store,), (), (), (), {})
        self.log = SimpleNamespace(statistics=self.texts, counters=LogCounters(), held=0)
        engine = SimpleNamespace(counters=self.counters, decided=5, view=lambda: self.view_)
        self.watch = EngineWatch(engine, self.log, TOPICS.inputs)  # type: ignore[arg-type]

    def told(self, hi: int, fetched: int, queued: int = 0) -> None:
        partition = {"hi_offset": hi, "next_offset": fetched, "fetchq_cnt": queued}
        self.take(json.dumps({"topics": {TOPICS.inputs: {"partitions": {"3": partition}}}}))

    def value(self, name: str, **labels: str) -> float | None:
        for family in self.watch.collect():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_lag_is_what_the_broker_has_and_nobody_decided(bench: Bench) -> None:
    assert bench.value("onepen_lag_records", partition="3") is None, "nobody has told the end yet"
    bench.store.next_offset = 40
    bench.told(hi=100, fetched=70, queued=10)
    assert bench.value("onepen_lag_records", partition="3") == 60
    bench.told(hi=100, fetched=100)
    bench.log.held = 60
    assert bench.value("onepen_lag_records", partition="3") == 60, "fetched is not decided"
    bench.log.held, bench.counters.in_flight = 0, 60
    assert bench.value("onepen_lag_records", partition="3") == 60, "written is not committed"
    bench.store.next_offset, bench.counters.in_flight = 99, 0
    assert bench.value("onepen_lag_records", partition="3") == 0, "behind the last record stands a marker"


def test_lag_in_seconds_counts_from_the_newest_decided_record(bench: Bench) -> None:
    mono_ms = time.monotonic() * 1_000
    bench.store.timers.consumed(1_000_000, mono_ms - 9_000)
    bench.store.next_offset = 40
    bench.told(hi=100, fetched=70, queued=10)
    assert bench.value("onepen_lag_seconds", partition="3") == pytest.approx(9, abs=2)
    bench.told(hi=40, fetched=40)
    assert bench.value("onepen_lag_seconds", partition="3") == 0
    bench.told(hi=41, fetched=41, queued=1)
    assert bench.value("onepen_lag_seconds", partition="3") == pytest.approx(0, abs=2), "it was idle, not late"


def test_recovery_and_failures(bench: Bench) -> None:
    bench.view_ = View((), (), (), (Progress(1, 25, 100, 0.0), Progress(2, 7, 0, 0.0)), {})
    assert bench.value("onepen_recovery_progress", partition="1") == 0.25
    assert bench.value("onepen_recovery_left_offsets", partition="1") == 75
    assert bench.value("onepen_recovery_progress", partition="2") is None, "its end is not known yet"
    bench.log.counters.doubts = Counter(disconnected=2)
    bench.log.counters.aborts = Counter(ILLEGAL_GENERATION=1)
    failures = "onepen_transaction_failures_total"
    assert bench.value(failures, outcome="doubt", reason="disconnected") == 2
    assert bench.value(failures, outcome="aborted", reason="ILLEGAL_GENERATION") == 1


def test_ready_and_healthy(bench: Bench) -> None:
    assert bench.watch.ready().why == "not a member of the group yet"
    bench.counters.assignments = 1
    assert bench.watch.ready() == bench.watch.ready().__class__(True, "partitions 3")
    bench.view_ = View((), (), (), (), {})
    assert (bench.watch.ready().good, bench.watch.ready().why) == (True, "standby")
    for view, why in (
        (View((bench.store,), (), (), (), {1: "torn"}), "partitions stand still: 1"),
        (View((bench.store,), (), (), (Progress(2, 0, 0, 0.0),), {}), "the state of partitions is being read: 2"),
        (View((), (bench.store,), (), (), {}), "the state of partitions is being read: 3"),
    ):
        bench.view_ = view
        assert (bench.watch.ready().good, bench.watch.ready().why) == (False, why)
    assert bench.watch.healthy().good, "it has just begun"
    bench.counters.turned_s = time.monotonic() - ALIVE_S - 1
    assert not bench.watch.healthy().good
