"""Asks for the group's committed offsets, from outside of the group.

Rules: a client has one question at a time. A question about an offset that is not stable waits, confluent-kafka 2.16
lets the calls of one consumer take turns (one that waits for a broker for 1 s keeps the next one for 1 s), and
librdkafka asks again for all partitions of a question while one of them is not stable: partitions that had nothing to
do with a dead processor's open transaction stood still until it was ended. (An admin client would tell them apart, but
dies of a coordinator that has moved: librdkafka issue 5040.)

A client that was not answered for a while is given up. It keeps asking the coordinator that it knows, and one that is
suspended closes no connection; a new client asks the brokers who the coordinator is now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from confluent_kafka import OFFSET_INVALID, KafkaException, TopicPartition

from onepen.streams import kafka_clients
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import offset_reader

SILENT_S: Final = 1.0
TURN_S: Final = 0.02
"""So long a question waits for a client that is connected. The answer to another one takes a millisecond or two, unless
it waits; to connect a new client takes 50."""
STABLE_AGAIN_MS: Final = 100
"""librdkafka asks again while an offset is not stable, first after 100 ms, then after ever longer, up to a second."""


class _Client:
    def __init__(self, settings: EngineSettings) -> None:
        properties = offset_reader(settings)
        properties.setdefault("retry.backoff.max.ms", STABLE_AGAIN_MS)
        self.consumer = kafka_clients.consumer(properties)
        self.silent_since_s: float | None = None


class CommittedOffsets:
    """May be used by several threads."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._returned = threading.Condition()
        self._closed = False
        self._idle = [_Client(settings)]

    def ask(self, partitions: Sequence[int], timeout_s: float) -> dict[int, int | None]:
        """By partition; None where nothing was committed yet. Waits until all of them are stable. Raises
        `KafkaException`, also when the time is over."""
        client, asked_s = self._take(), time.monotonic()
        places = [TopicPartition(self._settings.topics.inputs, p) for p in partitions]
        try:
            answers = client.consumer.committed(places, timeout=timeout_s)
        except KafkaException:
            self._unanswered(client, asked_s)
            raise
        self._answered(client)
        for answer in answers:
            if answer.error is not None:
                raise KafkaException(answer.error)
        return {answer.partition: None if answer.offset == OFFSET_INVALID else answer.offset for answer in answers}

    def _take(self) -> _Client:
        with self._returned:
            if self._returned.wait_for(lambda: self._idle, TURN_S):
                return self._idle.pop()
        return _Client(self._settings)

    def _answered(self, client: _Client) -> None:
        """The one that was answered last stays; what others were needed for is over, or is asked with a new one."""
        client.silent_since_s = None
        with self._returned:
            others, self._idle = self._idle, [] if self._closed else [client]
            self._returned.notify()
        del others  # ended here, not under the lock

    def _unanswered(self, client: _Client, asked_s: float) -> None:
        """Also when an offset is only not stable yet, which looks the same. It may be about to be connected, too."""
        if client.silent_since_s is None:
            client.silent_since_s = asked_s
        with self._returned:
            if not self._closed and time.monotonic() - client.silent_since_s < SILENT_S:
                self._idle.append(client)
                self._returned.notify()

    def close(self) -> None:
        """A client that is being asked ends when its question does."""
        with self._returned:
            self._closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.consumer.close()
