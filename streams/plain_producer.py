"""The plain idempotent producer of clients and workers: explicit partitions, own poll thread, no transactions.

Rule: `send` never waits for the broker. What became of a record arrives in its callback, on the poll thread;
a record whose callback reports an error may or may not have been written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message

from onepen.schemas.errors import Invalid, Retryable
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline
from onepen.streams.kafka_config import SAFE_WRITES

log = logging.getLogger("onepen.producer")

Headers = list[tuple[str, str | bytes | None]]
OnDelivery = Callable[[KafkaError | None, Message], None]

POLL_S: Final = 0.1
FULL_WAIT_MS: Final = 2_000
FULL_STEP_S: Final = 0.005
DEFAULTS: Final[Mapping[str, Any]] = {
    "linger.ms": 1,
    "message.max.bytes": 1_000_000,
    "delivery.timeout.ms": 30_000,
    "socket.keepalive.enable": True,
    "reconnect.backoff.max.ms": 1_000,
}


class PlainProducer:
    """Thread-safe. Records handed over by one thread to one partition are written in that order."""

    def __init__(self, properties: Mapping[str, Any], *, client_id: str) -> None:
        """`properties`: librdkafka properties with the addresses; they win over the defaults, not `SAFE_WRITES`."""
        self._producer = kafka_clients.producer(
            {**DEFAULTS, "client.id": client_id, **properties, **SAFE_WRITES}, logger=log
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name=f"{client_id}-poll", daemon=True)
        self._thread.start()

    def send(
        self,
        topic: str,
        partition: int,
        *,
        key: bytes,
        value: bytes,
        headers: Headers | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Hand one record over. Raises `Retryable` (queue full) or `Invalid` (too large): nothing was sent."""
        deadline = Deadline(FULL_WAIT_MS)
        while True:
            try:
                self._producer.produce(
                    topic,
                    partition=partition,
                    key=key,
                    value=value,
                    headers=headers or [],
                    on_delivery=on_delivery,
                )
                return
            except BufferError:
                if deadline.expired:
                    raise Retryable("the producer's queue is full; is the broker reachable?") from None
                time.sleep(FULL_STEP_S)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
                    sentence = f"content: the record of {len(value)} bytes is too large"
                    raise Invalid(sentence, field="content") from None
                raise Retryable(f"not sent: {error.args[0].str()}") from None

    def flush(self, timeout_ms: int) -> int:
        """Wait until all records handed over have their callback; answers how many have not."""
        left: int = self._producer.flush(timeout_ms / 1000)
        return left

    def close(self, timeout_ms: int) -> int:
        """Flush, then end the poll thread. Answers how many records are still without their callback."""
        left = self.flush(timeout_ms)
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(1.0)
        return left

    def _poll(self) -> None:
        while not self._stop.is_set():
            try:
                self._producer.poll(POLL_S)
            except Exception:  # a callback raised; it must not end the thread that serves all others
                log.exception("a delivery callback failed")
