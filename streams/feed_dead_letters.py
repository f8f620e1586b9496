"""Dead letters of the feed: records that no row can be made of, kept byte for byte with their place and the reason.

Rule: written with a plain idempotent producer and acknowledged before the position of their batch moves. A crash in
between can write one twice (its headers name the same place), never lose it.
"""

from __future__ import annotations

import logging
from typing import Final

from confluent_kafka import KafkaError, Message, Producer

from onepen.streams import kafka_clients
from onepen.streams.dead_letters import NULL, OFFSET, PARTITION, REASON, TOPIC
from onepen.streams.kafka_config import SAFE_WRITES
from onepen.streams.settings import Settings

__all__ = ["DeadLetters"]

log = logging.getLogger("onepen.sink")

CLOSE_TIMEOUT_S: Final = 2.0

_Letter = tuple[int, bytes | None, bytes | None, list[tuple[str, str | bytes | None]]]


class DeadLetters:
    """Used by one thread. The producer is made with the first letter: most sinks never need one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer: Producer | None = None
        self._unacknowledged: set[int] = set()
        self._failed: list[tuple[int, _Letter]] = []
        self._numbers = 0

    def send(self, message: Message, reason: str) -> None:
        """Hand a record over; `settled` tells when it is safe."""
        partition = int(message.partition() or 0)
        value = message.value()
        headers: list[tuple[str, str | bytes | None]] = [
            (REASON, reason.encode()),
            (TOPIC, str(message.topic()).encode()),
            (PARTITION, str(partition).encode()),
            (OFFSET, str(message.offset()).encode()),
        ]
        if value is None:
            headers.append((NULL, b"1"))
        key = message.key()
        self._numbers += 1
        self._unacknowledged.add(self._numbers)
        self._produce(self._numbers, (partition % self._settings.partitions, key, value, headers))

    def settled(self) -> bool:
        """Whether every letter so far is acknowledged; sends again what failed."""
        if not self._unacknowledged:
            return True
        assert self._producer is not None, "there is a letter, so there is a producer"
        self._producer.poll(0)
        failed, self._failed = self._failed, []
        for number, letter in failed:
            self._produce(number, letter)
        return not self._unacknowledged

    def close(self) -> None:
        """Wait a moment for what is on its way; the rest is sent again after the next start."""
        if self._producer is not None:
            self._producer.flush(CLOSE_TIMEOUT_S)

    def _produce(self, number: int, letter: _Letter) -> None:
        if self._producer is None:
            self._producer = kafka_clients.producer(
                {
                    "linger.ms": 0,
                    "message.max.bytes": 2_000_000,
                    **self._settings.kafka_client(),
                    **SAFE_WRITES,
                },
                logger=log,
            )

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is None:
                self._unacknowledged.discard(number)
            else:
                log.warning("a dead letter was not written and is sent again: %s", error.str())
                self._failed.append((number, letter))

        partition, key, value, headers = letter
        try:
            self._producer.produce(
                self._settings.topics.deadletters,
                value,
                key,
                partition=partition,
                headers=headers,
                on_delivery=delivered,
            )
        except BufferError:
            self._failed.append((number, letter))
