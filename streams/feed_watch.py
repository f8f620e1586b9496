"""What a running sink shows: metrics for Prometheus, whether it lives, whether it is ready.

Rule: as for the processor: read on the thread that asks, from plain numbers and copies; no ids in labels.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from onepen.streams.feed import Feed
from onepen.streams.kafka_statistics import Statistics
from onepen.streams.metric_families import counter, gauge, histogram
from onepen.streams.settings import Settings
from onepen.streams.watch_server import Verdict, Watched, serving

__all__ = ["FeedWatch", "watching"]

ALIVE_S: Final = 30.0


class FeedWatch(Collector):
    """Of one feed. Its methods may be called on any thread while the feed runs."""

    def __init__(self, feed: Feed, settings: Settings) -> None:
        self._feed = feed
        self._kinds = {settings.topics.events: "events", settings.topics.receipts: "receipts"}
        self._begun_s = time.monotonic()

    def healthy(self) -> Verdict:
        """The loop has turned lately: it goes on while the database is away."""
        still_s = time.monotonic() - (self._feed.counters.turned_s or self._begun_s)
        return Verdict(still_s < ALIVE_S, f"the loop turned {still_s:.1f} s ago")

    def ready(self) -> Verdict:
        """It is a member of the group, and every partition that it owns is read."""
        counters, places = self._feed.counters, self._feed.places()
        parked = sorted(place for place, (_, parked) in places.items() if parked)
        if counters.assigned < 0:
            return Verdict(False, "not a member of the group yet")
        if parked:
            return Verdict(False, f"parked: {', '.join(f'{topic}-{partition}' for topic, partition in parked)}")
        if len(places) < counters.assigned:
            return Verdict(False, f"{counters.assigned - len(places)} partitions are not claimed yet")
        return Verdict(True, f"{len(places)} partitions" if places else "standby")

    def collect(self) -> Iterator[Metric]:
        counters, places = self._feed.counters, self._feed.places()
        turned_s = counters.turned_s
        still_s = time.monotonic() - turned_s if turned_s else 0.0
        yield gauge("onepen_loop_idle_seconds", "Time since the loop last turned.", {(): still_s})
        yield counter("onepen_sink_records", "Records in the tables, with their position.", {(): counters.records})
        yield histogram("onepen_sink_batch_seconds", "Time of a batch.", counters.batch_ms, 1_000)
        yield histogram("onepen_sink_batch_records", "Records of a batch.", counters.batch_records)
        yield counter("onepen_sink_fenced", "Batches refused: another owner has written.", {(): counters.fenced})
        letters = {(reason,): float(count) for reason, count in dict(counters.dead_letters).items()}
        yield counter("onepen_dead_letters", "Records set aside.", letters, ("reason",))
        parked = sum(parked for _, parked in places.values())
        states = {("running",): len(places) - parked, ("parked",): parked,
                  ("unclaimed",): max(0, counters.assigned - len(places))}  # fmt: skip
        yield gauge("onepen_partitions", "Partitions of this process by state.", states, ("state",))
        _, told = self._feed.statistics.latest().get("sink", (0.0, Statistics()))
        idle = not self._feed.busy
        lag: dict[tuple[str, str], float] = {}
        for (topic, partition), (position, _) in places.items():
            found = told.partition(topic, partition)
            if found is not None and found.hi_offset >= 0:
                # Behind the last record there may be markers of transactions, which are never handed out.
                done = idle and found.fetchq_cnt == 0 and found.next_offset >= found.hi_offset
                lag[self._kinds[topic], str(partition)] = 0.0 if done else float(max(0, found.hi_offset - position))
        yield gauge("onepen_sink_lag_records", "Records not handed to the tables.", lag, ("topic", "partition"))

    def describe(self) -> Iterable[Metric]:
        return ()


@contextmanager
def watching(settings: Settings, feed: Feed) -> Iterator[None]:
    """Answer on the settings' metrics port while the block runs; does nothing without one. Raises `Fatal`."""
    if settings.metrics_port is None:
        yield
        return
    watch = FeedWatch(feed, settings)
    with serving(settings.metrics_host, settings.metrics_port, Watched(watch, watch.healthy, watch.ready)):
        yield
