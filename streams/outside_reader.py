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
from onepen.streams.kafka_errors import no_answer
from onepen.streams.settings import Settings

__all__ = ["Follower", "Isolation", "RawRecord", "end_offsets", "raw_record", "read_topic"]

Isolation = Literal["read_committed", "read_uncommitted"]
log = logging.getLogger("onepen.reader")

ANSWER_TIMEOUT_S: Final = 10.0
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


def _partitions(consumer: Consumer, settings: Settings, topic: str) -> list[int]:
    try:
        found = consumer.list_topics(topic, timeout=ANSWER_TIMEOUT_S).topics[topic]
    except KafkaException as error:
        raise no_answer(settings.bootstrap, error) from None
    if found.error is not None:
        raise Retryable(f"topic {topic}: {found.error}")
    return sorted(found.partitions)


def _ends(consumer: Consumer, settings: Settings, topic: str) -> dict[int, int]:
    ends = {}
    for partition in _partitions(consumer, settings, topic):
        try:
            marks = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=ANSWER_TIMEOUT_S)
        except KafkaException as error:
            raise no_answer(settings.bootstrap, error) from None
        if marks is None:
            raise no_answer(settings.bootstrap, f"no end of {topic}-{partition} in {ANSWER_TIMEOUT_S:.0f} s")
        ends[partition] = marks[1]
    return ends


def end_offsets(settings: Settings, topic: str) -> dict[int, int]:
    """The high watermark of each partition: where a reader that starts now misses nothing that comes later.

    Raises `Retryable` when the broker does not answer, or has no such topic.
    """
    consumer = _consumer(settings, "read_uncommitted")
    try:
        return _ends(consumer, settings, topic)
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
    consumer = _consumer(settings, isolation)
    records: list[RawRecord] = []
    try:
        ends = _ends(consumer, settings, topic)
        begin = {p: (start or {}).get(p, OFFSET_BEGINNING) for p in ends}
        missing = {p for p, end in ends.items() if end > 0 and begin[p] < end}
        if not missing:
            return []
        consumer.assign([TopicPartition(topic, p, begin[p]) for p in missing])
        last_moment = time.monotonic() + timeout_ms / 1000
        while missing:
            if time.monotonic() > last_moment:
                raise Retryable(f"{topic}: partitions {sorted(missing)} not read to their end in {timeout_ms} ms")
            for message in consumer.consume(BATCH_RECORDS, 0.2):
                _take(message, ends, missing, records)
    finally:
        consumer.close()
    records.sort(key=lambda r: (r.partition, r.offset))
    return records


def _take(message: Message, ends: Mapping[int, int], missing: set[int], records: list[RawRecord]) -> None:
    partition, offset = message.partition(), message.offset()
    error = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)
    if partition is None or offset is None:
        return
    if error is not None:
        # The end that a reader of this isolation sees; control records count, so it reaches the high watermark.
        if offset >= ends[partition]:
            missing.discard(partition)
        return
    if offset < ends[partition]:
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
