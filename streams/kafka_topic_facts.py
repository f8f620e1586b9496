"""What a local archive must agree with, asked of the brokers: which topic the state topic is, how long deletions stay
in it, and where it ends. Nobody is kept waiting for an answer that does not come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final

from confluent_kafka import KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from onepen.streams import kafka_clients
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import admin_client
from onepen.streams.local_archive import StateTopic
from onepen.streams.topic_offsets import LATEST, TopicOffsets

log = logging.getLogger("onepen.processor.archive")

ASK_S: Final = 3.0
ATTEMPTS: Final = 10
AGAIN_S: Final = 0.5
ASK_AT_THE_END_S: Final = 1.0
"""A processor that is stopped waits for it."""


class KafkaTopicFacts:
    """See `local_archive.TopicFacts`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._state = settings.topics.state

    def state_topic(self) -> Future[StateTopic | None]:
        answer: Future[StateTopic | None] = Future()
        threading.Thread(target=self._ask_topic, args=(answer,), name="state-topic", daemon=True).start()
        return answer

    def _ask_topic(self, answer: Future[StateTopic | None]) -> None:
        found: StateTopic | None = None
        try:
            for attempt in range(ATTEMPTS):
                time.sleep(AGAIN_S if attempt else 0)
                found = self._topic()
                if found is not None:
                    break
        finally:
            answer.set_result(found)

    def _topic(self) -> StateTopic | None:
        try:
            admin = kafka_clients.admin(admin_client(self._settings))
            resource = ConfigResource(ResourceType.TOPIC, self._state)
            described = admin.describe_topics(TopicCollection([self._state]), request_timeout=ASK_S)
            configured = admin.describe_configs([resource], request_timeout=ASK_S)
            topic = described[self._state].result(ASK_S + 1)
            kept = configured[resource].result(ASK_S + 1)["delete.retention.ms"].value
            return StateTopic(str(topic.topic_id), int(kept))
        except (KafkaException, TimeoutError, KeyError, TypeError, ValueError) as error:
            log.info("%s: what it is is not known, so no local archive can be used: %s", self._state, error)
            return None

    def state_ends(self, partitions: Sequence[int]) -> Mapping[int, int]:
        places = [TopicPartition(self._state, partition) for partition in partitions]
        try:
            found = TopicOffsets(self._settings, (self._state,)).ask(dict.fromkeys(places, LATEST), ASK_AT_THE_END_S)
            return {place.partition: answer.offset for place, answer in found.items()}
        except (KafkaException, TimeoutError) as error:
            log.info("%s: its ends are not known, so no local archive can be written: %s", self._state, error)
            return {}
