"""The sink on topics and tables of its own: its settings, records as the processor writes them, and how far it is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from onepen.sinks.postgres.migrate import migrate
from onepen.streams import topic_admin
from onepen.streams.feed import run_sink
from onepen.streams.settings import Settings, load_settings
from tests.event_streams import Streams
from tests.services import run_coroutine
from tests.sink_tables import fetchval

PARTITIONS = 3
WAIT_S = 60.0


def settings_on(bootstrap: str, prefix: str, dsn: str, data_dir: Path, **more: Any) -> Settings:
    """Settings of a sink; its topics and tables are there."""
    made = load_settings(
        bootstrap=bootstrap, prefix=prefix, dsn=dsn, partitions=PARTITIONS, slot="t-0", data_dir=data_dir, **more
    )
    topic_admin.apply(made)
    run_coroutine(lambda: migrate(dsn))
    return made


def produce(settings: Settings, streams: Streams) -> None:
    """As the processor does: transactions over both topics, explicit partitions."""
    properties = {"transactional.id": f"{settings.prefix}.x", "transaction.timeout.ms": 10_000}
    producer = Producer(settings.kafka_client(properties))
    producer.init_transactions(30)
    for partition in range(PARTITIONS):
        events, receipts = streams.events[partition], streams.receipts[partition]
        for begin in range(0, max(len(events), len(receipts)), 200):
            producer.begin_transaction()
            for topic, records in ((settings.topics.events, events), (settings.topics.receipts, receipts)):
                for _, data in records[begin : begin + 200]:
                    producer.produce(topic, data, b"k", partition=partition)
                    producer.poll(0)
            producer.commit_transaction(30)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def count(dsn: str, table: str) -> int:
    return int(run_coroutine(lambda: fetchval(dsn, f"select count(*) from {table}")))


def caught_up(settings: Settings) -> bool:
    """Whether the stored positions are at the end of both topics. Behind the last record stands a commit marker."""
    dsn = settings.require_dsn()
    rows = run_coroutine(
        lambda: fetchval(dsn, "select jsonb_object_agg(topic || partition, next_offset) from sink_partitions")
    )
    stored = json.loads(rows or "{}")
    consumer = Consumer(settings.kafka_client({"group.id": "look"}))
    try:
        for topic in (settings.topics.events, settings.topics.receipts):
            for partition in range(PARTITIONS):
                _, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
                if stored.get(f"{topic}{partition}", 0) < high - 1:
                    return False
    finally:
        consumer.close()
    return True


class RunningSink:
    """`run_sink` in a thread of the test."""

    def __init__(self, settings: Settings) -> None:
        self.stop = threading.Event()
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(settings,))
        self._thread.start()

    def _run(self, settings: Settings) -> None:
        try:
            run_sink(settings, self.stop, ready=self.ready.set)
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> RunningSink:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the sink did not stop"
        if self.failure is not None:
            raise self.failure
