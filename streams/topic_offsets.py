"""Offsets of whole topics, asked of the brokers one request at a time.

librdkafka 2.16 looks up the leaders for such a request on the caller's thread and, when the metadata of another request
arrives meanwhile, goes on with what its own thread has already freed: a process died of that in about one of two
thousand starts (infra/decisions/0011). So a client is asked by one thread at a time, and knows the leaders before the
first question.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from onepen.streams import kafka_clients
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import admin_client

LATEST: Final[OffsetSpec] = OffsetSpec.latest()  # type: ignore[no-untyped-call]
EARLIEST: Final[OffsetSpec] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
NEWEST: Final[OffsetSpec] = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]


class TopicOffsets:
    """May be asked on any thread; who comes second waits."""

    def __init__(self, settings: EngineSettings, topics: Sequence[str]) -> None:
        """`topics`: those that will be asked about."""
        self._settings, self._topics = settings, tuple(topics)
        self._lock = threading.Lock()
        self._admin: AdminClient | None = None

    def ask(self, specs: Mapping[TopicPartition, OffsetSpec], limit_s: float) -> dict[TopicPartition, Any]:
        """Offset and timestamp of each place; the latest is the high watermark, not the last stable offset.

        Raises `KafkaException` or `TimeoutError` when one of them is not known. `limit_s` is the limit of each wait:
        for its turn, for the metadata of each topic when the client is new, and for the answer (one second more).
        """
        if not self._lock.acquire(timeout=limit_s):
            raise TimeoutError("others are still being answered")
        try:
            if self._admin is None:
                self._admin = self._new(limit_s)
            return _list(self._admin, specs, limit_s)
        except (KafkaException, TimeoutError):
            # A client keeps the leader epochs it has learnt: after a broker restart it is refused for ever.
            self._admin = None
            raise
        finally:
            self._lock.release()

    def _new(self, limit_s: float) -> AdminClient:
        admin = kafka_clients.admin(admin_client(self._settings))
        for topic in self._topics:
            admin.list_topics(topic, timeout=limit_s)
        return admin


def _list(admin: AdminClient, specs: Mapping[TopicPartition, OffsetSpec], limit_s: float) -> dict[TopicPartition, Any]:
    asked = admin.list_offsets(dict(specs), isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=limit_s)
    found = {place: future.result(limit_s + 1) for place, future in asked.items()}
    for place, answer in found.items():
        # While a leader is replaced librdkafka reports partitions it was told nothing about, without an error.
        if answer.offset == OFFSET_INVALID:
            raise TimeoutError(f"{place.topic}-{place.partition}: no offset in the answer")
    return found
