"""Reads whole topics from outside, for the checks and demonstrations: no group, no state, nothing of the pipeline.

Rule: what is returned was on the broker, in offset order per partition, from the asked offsets up to the end as it
stood when the call began. `read_committed` also waits until no open transaction hides part of that range.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from onepen.schemas.errors import Retryable
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline
from onepen.streams.settings import Settings
from onepen.streams.topic_ends import ends, partition_counts, watermark_reader

__all__ = ["Follower", "Isolation", "RawRecord", "end_offsets", "raw_record", "read_topic"]

Isolation = Literal["read_committed", "read_uncommitted"]
log = logging.getLogger("onepen.reader")

ANSWER_MS: Final = 10_000
BATCH_RECORDS: Final = 2_000


class RawRecord(NamedTuple):
    """One record as it stands on the broker."""

    partition: int
    offset: int
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def _consumer(settings: Settings, isolation: Isolation) -> Consumer:
    return kafka_clients.consumer(
        settings.kafka_client(
            {
                # Required by the client library; nothing is ever committed under this name.
                "group.id": f"{settings.prefix}-outside",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "isolation.level": isolation,
                "fetch.queue.backoff.ms": 2,
                "reconnect.backoff.max.ms": 1_000,
            }
        ),
        logger=log,
    )


def end_offsets(settings: Settings, topic: str) -> dict[int, int]:
    """The high watermark of each partition: where a reader that starts now misses nothing that comes later.

    Raises `Retryable` when the broker does not answer, or has no such topic.
    """
    bootstrap, consumer = settings.bootstrap, watermark_reader(settings)
    try:
        count = partition_counts(consumer, [topic], Deadline(ANSWER_MS), bootstrap)[topic]
        return {p: ends(consumer, topic, p, Deadline(ANSWER_MS), bootstrap)[1] for p in range(count)}
    finally:
        consumer.close()


def read_topic(
    settings: Settings,
    topic: str,
    start: Mapping[int, int] | None = None,
    *,
    isolation: Isolation = "read_committed",
    timeout_ms: int = 60_000,
) -> list[RawRecord]:
    """All records from `start` (partition -> offset; missing: the beginning) to the end. Raises `Retryable` after
    `timeout_ms`, which is what a transaction that stays open leads to."""
    until = end_offsets(settings, topic)
    begin = {p: (start or {}).get(p, OFFSET_BEGINNING) for p in until}
    missing = {p for p, end in until.items() if end > 0 and begin[p] < end}
    if not missing:
        return []
    consumer = _consumer(settings, isolation)
    records: list[RawRecord] = []
    try:
        # It learns the leaders by that; else its first read would wait up to a second for them.
        partition_counts(consumer, [topic], Deadline(ANSWER_MS), settings.bootstrap)
        consumer.assign([TopicPartition(topic, p, begin[p]) for p in missing])
        last_moment = time.monotonic() + timeout_ms / 1000
        while missing:
            if time.monotonic() > last_moment:
                raise Retryable(f"{topic}: partitions {sorted(missing)} not read to their end in {timeout_ms} ms")
            for message in consumer.consume(BATCH_RECORDS, 0.2):
                _take(message, until, missing, records)
    finally:
        consumer.close()
    records.sort(key=lambda r: (r.partition, r.offset))
    return records


def _take(message: Message, until: Mapping[int, int], missing: set[int], records: list[RawRecord]) -> None:
    partition, offset = message.partition(), message.offset()
    error = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)
    if partition is None or offset is None:
        return
    if error is not None:
        # The end that a reader of this isolation sees; control records count, so it reaches the high watermark.
        if offset >= until[partition]:
            missing.discard(partition)
        return
    if offset < until[partition]:
        records.append(raw_record(message))


def raw_record(message: Message) -> RawRecord:
    """A message without error as a `RawRecord`."""
    headers = tuple(cast(list[tuple[str, bytes | None]], message.headers() or []))
    return RawRecord(
        cast(int, message.partition()),
        cast(int, message.offset()),
        message.timestamp()[1],
        message.key(),
        message.value(),
        headers,
    )


class Follower:
    """Reads committed records of some topics as they come, from given offsets on. Not shared between threads."""

    def __init__(self, settings: Settings, start: Mapping[str, Mapping[int, int]]) -> None:
        """`start`: topic -> partition -> offset, as `end_offsets` names them."""
        self._consumer = _consumer(settings, "read_committed")
        self._consumer.assign(
            [TopicPartition(topic, p, offset) for topic, offsets in start.items() for p, offset in offsets.items()]
        )

    def poll(self, timeout_s: float) -> list[tuple[str, RawRecord]]:
        """What has come, waiting `timeout_s` for the first record. Raises `KafkaException` when reading fails."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        found = []
        for message in (first, *self._consumer.consume(BATCH_RECORDS, 0)):
            error = message.error()
            if error is None:
                found.append((str(message.topic()), raw_record(message)))
            elif error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
        return found

    def close(self) -> None:
        """Leave nothing behind; further calls are errors."""
        self._consumer.close()
