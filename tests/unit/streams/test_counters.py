"""Counters, statistics and timers as another thread reads them, and the server that shows them."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from onepen.processors.glance import has_run
from onepen.processors.session import STATE_VERSION, Head, Run
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Invalid
from onepen.schemas.statuses import RunStatus
from onepen.streams import watch_extra
from onepen.streams.counters import EngineCounters, Histogram
from onepen.streams.kafka_statistics import StatisticsTexts, read_statistics
from onepen.streams.metric_families import counter, gauge, histogram
from onepen.streams.timer_heap import TimerHeap
from onepen.streams.watch_extra import require_extra
from onepen.streams.watch_server import Verdict, Watched, serving


def test_a_histogram_counts_up_to_each_bound() -> None:
    observed = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 3.0, 99.0):
        observed.observe(value)
    assert observed.cumulative() == [(1.0, 2), (10.0, 3), (float("inf"), 4)]
    assert observed.total == 103.5


def test_statistics_are_taken_by_reference_and_read_later() -> None:
    texts = StatisticsTexts(1_000)
    properties = texts.of("inputs")
    assert properties["statistics.interval.ms"] == 1_000
    assert StatisticsTexts(0).of("inputs") == {}
    properties["stats_cb"](
        '{"rx_bytes": 7, "brokers": {"b": {"rtt": {"avg": 5, "p99": 9}, "new": 1}}, "unknown": [],'
        ' "topics": {"t": {"partitions": {"3": {"hi_offset": 12, "next_offset": 10}, "-1": {}}}}}'
    )
    _, found = texts.latest()["inputs"]
    partition = found.partition("t", 3)
    assert (found.rx_bytes, found.brokers["b"].rtt.p99) == (7, 9)
    assert partition is not None
    assert (partition.hi_offset, partition.next_offset, partition.fetchq_cnt) == (12, 10, 0)
    assert found.partition("t", 4) is None
    assert read_statistics("no json").rx_bytes == 0
    assert read_statistics('{"rx_bytes": "many"}').rx_bytes == 0


def test_timers_that_are_due_are_counted_without_a_look_at_the_others() -> None:
    heap = TimerHeap()
    assert heap.due_count(0, 10) == 0
    for n in range(50):
        heap.arm((1, f"s-{n}"), 1_000 + n)
    assert heap.due_count(5_000, 100) == 0, "the time of the brokers is not known yet"
    heap.clock.seen(1_009, 5_000)
    assert heap.due_count(5_000, 100) == 10
    assert heap.due_count(5_000, 4) == 4
    heap.arm((1, "s-3"), 0)
    heap.arm((1, "s-4"), 9_000)
    assert heap.due_count(5_000, 100) == 8


def test_a_glance_at_a_head_tells_whether_a_run_is_active() -> None:
    def record(head: Head, deadline_ms: int) -> bytes:
        return codec.encode_state(deadline_ms, STATE_VERSION, msgspec.msgpack.encode(head))

    assert msgspec.structs.fields(Head)[6].name == "run"
    run = Run("run-1", 1, next(iter(RunStatus)), 1, 1, "in-1", 1, 3, 0, 0)
    for deadline_ms in (0, 63, 64, 1_700_000_000_000):
        assert has_run(record(Head(now_ms=5, run=run), deadline_ms))
        assert not has_run(record(Head(now_ms=5), deadline_ms))
    for broken in (b"", b"x", record(Head(run=run), 5)[:9]):
        assert not has_run(broken)


class Some(Collector):
    def __init__(self) -> None:
        self.counters = EngineCounters()

    def collect(self) -> Iterator[Metric]:
        yield gauge("g", "A gauge.", {("3",): 1.5}, ("partition",))
        yield counter("c", "A counter.", {(): 2})
        yield histogram("h_seconds", "A histogram.", self.counters.transaction_ms, 1_000)


def test_metrics_without_their_extra_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extra()
    monkeypatch.setattr(watch_extra, "find_spec", lambda name: None)
    with pytest.raises(Invalid, match=r"pip install 'onepen\[prometheus\]'"):
        require_extra()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_server_shows_metrics_and_probes() -> None:
    some = Some()
    some.counters.ended("committed", 30.0)
    good = threading.Event()
    watched = Watched(some, lambda: Verdict(True, "turned"), lambda: Verdict(good.is_set(), "partitions 1, 2"))
    with serving("127.0.0.1", 0, watched) as port:
        status, text = get(port, "/metrics")
        samples = {
            (sample.name, sample.labels.get("le") or sample.labels.get("partition")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert status == 200
        assert (samples["g", "3"], samples["c_total", None]) == (1.5, 2.0)
        assert (samples["h_seconds_bucket", "0.02"], samples["h_seconds_bucket", "0.05"]) == (0.0, 1.0)
        assert (samples["h_seconds_count", None], samples["h_seconds_sum", None]) == (1.0, 0.03)
        assert samples["process_resident_memory_bytes", None] > 0
        assert get(port, "/healthz") == (200, "turned\n")
        assert get(port, "/readyz") == (503, "partitions 1, 2\n")
        good.set()
        assert get(port, "/readyz?verbose")[0] == 200
        assert get(port, "/")[0] == 404
        with pytest.raises(Fatal, match=r"cannot listen on .*ONEPEN_METRICS_PORT"), serving("127.0.0.1", port, watched):
            pass
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")
