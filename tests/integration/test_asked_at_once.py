"""Many threads ask a new client for offsets at once; without taking turns such a process dies now and then (0011)."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import KafkaException, TopicPartition

from onepen.schemas.topics import Topics
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.topic_offsets import LATEST, TopicOffsets
from tests.conformance.worlds import PARTITIONS, create_topics, wait_for

pytestmark = pytest.mark.integration
THREADS = 16


def answered(settings: EngineSettings) -> bool:
    topics = (settings.topics.inputs, settings.topics.state)
    places = [TopicPartition(topic, partition) for topic in topics for partition in range(PARTITIONS)]
    with contextlib.suppress(KafkaException, TimeoutError):
        return len(TopicOffsets(settings, topics).ask(dict.fromkeys(places, LATEST), 2.0)) == len(places)
    return False


def test_all_are_answered(kafka_bootstrap: str, topic_prefix: str) -> None:
    topics = Topics(topic_prefix)
    create_topics(kafka_bootstrap, topics, PARTITIONS)
    settings = EngineSettings(kafka_bootstrap, topic_prefix, PARTITIONS, "s0")
    wait_for(lambda: answered(settings), "leaders of the topics just made")
    for _ in range(5):
        offsets = TopicOffsets(settings, (topics.inputs, topics.state))
        together = threading.Barrier(THREADS)

        def ask(number: int, offsets: TopicOffsets = offsets, together: threading.Barrier = together) -> int:
            together.wait(20)
            place = TopicPartition((topics.inputs, topics.state)[number % 2], number % PARTITIONS)
            return int(offsets.ask({place: LATEST}, 10.0)[place].offset)

        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(ask, range(THREADS))) == [0] * THREADS
