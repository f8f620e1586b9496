"""Partition counts and ends of topics, asked of the broker with a deadline.

Rule: where a topic ends depends on who asks. A reader of committed records is told the last stable offset, which an
open transaction holds; who has to see that one is open asks through a `watermark_reader`.
"""

from __future__ import annotations

from confluent_kafka import Consumer, KafkaException, TopicPartition

from onepen.schemas.errors import Retryable
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline
from onepen.streams.kafka_errors import no_answer
from onepen.streams.settings import Settings

__all__ = ["ends", "partition_counts", "watermark_reader"]


def watermark_reader(settings: Settings) -> Consumer:
    """A consumer to ask for high watermarks with `ends`, and for nothing else. Close it."""
    return kafka_clients.consumer(
        settings.kafka_client(
            {
                # Required by the client library; nothing is ever committed under this name.
                "group.id": f"{settings.prefix}-ends",
                "enable.auto.commit": False,
                "isolation.level": "read_uncommitted",
            }
        )
    )


def partition_counts(consumer: Consumer, topics: list[str], deadline: Deadline, bootstrap: str) -> dict[str, int]:
    """Partition counts by topic. Raises `Retryable`, saying what mends it or who at `bootstrap` did not answer."""
    counts: dict[str, int] = {}
    for topic in topics:
        try:
            found = consumer.list_topics(topic, timeout=_timeout_s(deadline)).topics[topic]
        except KafkaException as error:
            raise no_answer(bootstrap, error) from None
        if found.error is not None or not found.partitions:
            raise Retryable(f"topic {topic} does not exist; to mend: onepen topics apply")
        counts[topic] = len(found.partitions)
    return counts


def ends(consumer: Consumer, topic: str, partition: int, deadline: Deadline, bootstrap: str) -> tuple[int, int]:
    """(first kept offset, end). The end is the last stable offset when `consumer` reads committed records, and the high
    watermark, the next record's offset, when it does not (`watermark_reader`). Raises `Retryable`."""
    try:
        found = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=_timeout_s(deadline))
    except KafkaException as error:
        raise no_answer(bootstrap, error) from None
    if found is None:
        raise no_answer(bootstrap, f"no offsets of {topic}[{partition}]")
    return found[0], found[1]


def _timeout_s(deadline: Deadline) -> float:
    """The library cuts off parts of a millisecond. When it says that time is over, the deadline has to say so, too."""
    return (deadline.remaining_ms() + 1) / 1000
