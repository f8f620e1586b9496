"""Committed records of some partitions from given offsets on, with the news of having reached the end.

Rule: read_committed, assigned by hand, no group, no automatic reset: a position that is not kept is an error that
says so, never a silent move.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaError, Message, TopicPartition

from onepen.schemas.errors import Invalid, Retryable
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline
from onepen.streams.settings import Settings
from onepen.streams.topic_ends import ends, partition_counts, watermark_reader

__all__ = ["CursorAhead", "CursorTooOld", "LogTail", "Place"]

log = logging.getLogger("onepen.subscriber")

Place = tuple[str, int]
"""(topic, partition)"""

START_TIMEOUT_MS: Final = 10_000
POLL_S: Final = 0.1


class CursorTooOld(Invalid):
    """What follows the cursor is not kept any more. `earliest` is the first position that is."""

    def __init__(self, message: str, *, earliest: object) -> None:
        super().__init__(message, field="after")
        self.earliest = earliest


class CursorAhead(Invalid):
    """The cursor names something that is not there (yet). `head` is the last position that is."""

    def __init__(self, message: str, *, head: object) -> None:
        super().__init__(message, field="after")
        self.head = head


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a partition was kept when the tail was opened: first offset and end."""

    first: int
    end: int


class LogTail:
    """Open it with `open`; `poll` gives one record at a time. For one thread, also `close`; any may set `stopping`."""

    def __init__(self, settings: Settings, deadline: Deadline | None = None) -> None:
        """`deadline` ends every question to the broker that is still without an answer."""
        self._settings = settings
        self._deadline = deadline
        self.stopping = threading.Event()
        """Who reads is to stop; a wait in `poll` ends in its own time."""
        self._consumer = kafka_clients.consumer(
            settings.kafka_client(
                {
                    "client.id": "onepen-subscriber",
                    "group.id": f"{settings.prefix}.subscriber.{uuid.uuid4().hex}",
                    "enable.auto.commit": False,
                    "enable.auto.offset.store": False,
                    "isolation.level": "read_committed",
                    "auto.offset.reset": "error",
                    "enable.partition.eof": True,
                    "fetch.wait.max.ms": 100,
                    "reconnect.backoff.max.ms": 1_000,
                }
            ),
            logger=log,
        )
        self._closed = False
        self.next_offsets: dict[Place, int] = {}
        self.kept: dict[Place, Kept] = {}
        self._behind: set[Place] = set()

    def count(self, topic: str) -> int:
        """Number of partitions of a topic. Raises `Retryable`."""
        return partition_counts(self._consumer, [topic], self._limit(), self._settings.bootstrap)[topic]

    def open(self, starts: Mapping[Place, int | None]) -> None:
        """Stand at the given offsets (None: the first kept one). Raises `CursorTooOld`, `CursorAhead`, `Retryable`."""
        deadline = self._limit()
        for (topic, partition), start in starts.items():
            kept = Kept(*self._ends(topic, partition, deadline))
            where = f"{topic}[{partition}]"
            if start is not None and start < kept.first:
                raise CursorTooOld(f"after: {where} keeps offsets from {kept.first} on", earliest=kept.first)
            if start is not None and start > kept.end:
                self._check_ahead(topic, partition, start, deadline)
            self.kept[topic, partition] = kept
            self.next_offsets[topic, partition] = kept.first if start is None else start
        self._behind = set(starts)
        self._consumer.assign(
            [TopicPartition(topic, partition, offset) for (topic, partition), offset in self.next_offsets.items()]
        )

    def _limit(self) -> Deadline:
        own = self._deadline
        return Deadline(START_TIMEOUT_MS if own is None else min(START_TIMEOUT_MS, own.remaining_ms()))

    def _check_ahead(self, topic: str, partition: int, start: int, deadline: Deadline) -> None:
        """What an open transaction holds is there already: a reader may wait behind it."""
        reader = watermark_reader(self._settings)
        try:
            end = ends(reader, topic, partition, deadline, self._settings.bootstrap)[1]
        finally:
            reader.close()
        if start > end:
            raise CursorAhead(f"after: {topic}[{partition}] ends at offset {end}", head=end)

    def _ends(self, topic: str, partition: int, deadline: Deadline) -> tuple[int, int]:
        return ends(self._consumer, topic, partition, deadline, self._settings.bootstrap)

    @property
    def caught_up(self) -> bool:
        """True once every partition has been read to an end that was reached after opening."""
        return not self._behind

    def poll(self, timeout_s: float = POLL_S) -> Message | None:
        """The next record, or None when none came in time or an end was reached."""
        message = self._consumer.poll(timeout_s)
        if message is None:
            return None
        error = message.error()
        place = (message.topic() or "", message.partition() or 0)
        if error is None:
            self.next_offsets[place] = (message.offset() or 0) + 1
            return message
        if error.code() == KafkaError._PARTITION_EOF:
            self._behind.discard(place)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            first = self._ends(*place, self._limit())[0]
            raise CursorTooOld(f"after: {place[0]}[{place[1]}] keeps offsets from {first} on", earliest=first)
        elif error.fatal() or error.code() in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._AUTHENTICATION):
            raise Retryable(f"the log cannot be read: {error.str()}")
        else:
            log.info("subscriber: %s", error.str())
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._consumer.close()
