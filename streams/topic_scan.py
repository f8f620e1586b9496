"""Streams partitions of one topic from outside, one after another: no group, no state, bounded memory.

Rule: read_committed, in offset order, from a named offset up to an end that was fixed before; standing still (an open
transaction, a broker away) ends in a `Retryable` and never in a short answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError, KafkaException, TopicPartition

from onepen.schemas.errors import Fatal, Retryable
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline
from onepen.streams.kafka_errors import no_answer
from onepen.streams.outside_reader import RawRecord, raw_record
from onepen.streams.settings import Settings
from onepen.streams.topic_ends import ends, partition_counts, watermark_reader

__all__ = ["TopicScan", "stable_end"]

ANSWER_MS: Final = 10_000
STANDS_STILL_S: Final = 30.0
POLL_S: Final = 0.2
BATCH_RECORDS: Final = 500
FETCH_WAIT_MS: Final = 20
"""The news of the end comes with an empty answer, which a broker holds back so long."""
BUFFER_KIB: Final = 8_192


class TopicScan:
    """A reader of one topic; one `read` at a time. A context manager, for one thread."""

    def __init__(self, settings: Settings, topic: str, *, log_append_time: bool = False) -> None:
        """`log_append_time`: a record whose timestamp was not set by the broker is `Fatal`."""
        self.topic = topic
        self._bootstrap = settings.bootstrap
        self._log_append_time = log_append_time
        self._settings = settings
        self._watermarks: Consumer | None = None
        self._consumer = kafka_clients.consumer(
            settings.kafka_client(
                {
                    # Required by the client library; nothing is ever committed under this name.
                    "group.id": f"{settings.prefix}-scan",
                    "enable.auto.commit": False,
                    "enable.auto.offset.store": False,
                    "enable.partition.eof": True,
                    "auto.offset.reset": "error",
                    "isolation.level": "read_committed",
                    "fetch.queue.backoff.ms": 2,
                    "fetch.wait.max.ms": FETCH_WAIT_MS,
                    "queued.max.messages.kbytes": BUFFER_KIB,
                }
            )
        )

    def __enter__(self) -> TopicScan:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        if self._watermarks is not None:
            self._watermarks.close()

    def partitions(self) -> int:
        """How many partitions the topic has. Raises `Retryable` when it does not exist or nobody answers."""
        return partition_counts(self._consumer, [self.topic], Deadline(ANSWER_MS), self._bootstrap)[self.topic]

    def ends(self, partition: int) -> tuple[int, int]:
        """(first kept offset, high watermark): behind all that was written, decided or not. Raises `Retryable`."""
        # Asked by a client of its own: the other one would be told the last stable offset, and an open transaction
        # would go unseen. That one learns the leaders here; else its first read would wait up to a second for them.
        if self._watermarks is None:
            self.partitions()
            self._watermarks = watermark_reader(self._settings)
        return ends(self._watermarks, self.topic, partition, Deadline(ANSWER_MS), self._bootstrap)

    def read(self, partition: int, start: int, end: int) -> Iterator[RawRecord]:
        """Committed records with `start` <= offset < `end`. Raises `Retryable` when it stands still.

        `start` must be kept. Beginning another read ends this one.
        """
        if start >= end:
            return
        self._consumer.assign([TopicPartition(self.topic, partition, start)])
        moved = time.monotonic()
        while True:
            # `consume` alone would wait its whole time unless the batch is full.
            first = self._consumer.poll(POLL_S)
            found = [] if first is None else [first, *self._consumer.consume(BATCH_RECORDS, 0)]
            for message in found:
                error, offset = message.error(), message.offset()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if offset is None or message.partition() != partition:
                    continue
                if offset >= end:
                    # Also the end that a reader of committed records sees, behind markers and aborted records.
                    return
                if error is None:
                    self._check_time(message.timestamp()[0], partition, offset)
                    moved = time.monotonic()
                    yield raw_record(message)
            if not found and time.monotonic() - moved > STANDS_STILL_S:
                raise Retryable(
                    f"{self.topic}-{partition}: not read up to {end} for {STANDS_STILL_S:.0f} s. "
                    "Is a transaction open there, or a broker away?"
                )

    def _check_time(self, kind: int, partition: int, offset: int) -> None:
        if self._log_append_time and kind != TIMESTAMP_LOG_APPEND_TIME:
            raise Fatal(f"{self.topic}-{partition}: the timestamp of record {offset} was not set by the broker")


def stable_end(settings: Settings, topic: str, partition: int) -> int:
    """The last stable offset: what lies below is committed or aborted, what is undecided lies behind it."""
    from confluent_kafka import IsolationLevel
    from confluent_kafka.admin._listoffsets import OffsetSpec

    place = TopicPartition(topic, partition)
    latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    admin = kafka_clients.admin(settings.kafka_client())  # its answers die with it
    asked = admin.list_offsets(
        {place: latest}, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER_MS / 1000
    )
    try:
        offset: int = asked[place].result(ANSWER_MS / 1000 + 1).offset
    except TimeoutError:
        raise no_answer(settings.bootstrap, f"no offset of {topic}-{partition}") from None
    except KafkaException as error:
        raise no_answer(settings.bootstrap, error) from None
    return offset
