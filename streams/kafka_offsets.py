"""Asks for the group's committed offsets, from outside of the group.

Rule: a client that was not answered is given up. It keeps asking the coordinator that it knows, and one that is
suspended closes no connection; a new client asks the brokers who the coordinator is now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaException, TopicPartition

from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import forwarding_logger, offset_reader

KEPT_S: Final = 2.0


class CommittedOffsets:
    """May be used by several threads."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._consumer, self._made_s = self._make(), time.monotonic()

    def _make(self) -> Consumer:
        return Consumer(offset_reader(self._settings), logger=forwarding_logger())

    def ask(self, partitions: Sequence[int], timeout_s: float) -> dict[int, int | None]:
        """By partition; None where nothing was committed yet. Waits until they are stable. Raises `KafkaException`,
        also when the time is over."""
        consumer = self._consumer
        inputs = self._settings.topics.inputs
        try:
            answers = consumer.committed([TopicPartition(inputs, p) for p in partitions], timeout=timeout_s)
        except KafkaException:
            self._replace(consumer)
            raise
        for answer in answers:
            if answer.error is not None:
                raise KafkaException(answer.error)
        return {answer.partition: None if answer.offset == OFFSET_INVALID else answer.offset for answer in answers}

    def _replace(self, consumer: Consumer) -> None:
        """Also when the offsets are only not stable yet, which looks the same: so not all the time. The old one is
        closed when the last thread that asks it has let go of it."""
        with self._lock:
            if self._consumer is consumer and time.monotonic() - self._made_s > KEPT_S:
                self._consumer, self._made_s = self._make(), time.monotonic()

    def close(self) -> None:
        self._consumer.close()
