"""A dead processor's transaction is open: who has nothing to do with it does not wait for its end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from onepen.schemas.topics import Topics
from onepen.streams import kafka_restore
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import SAFE_WRITES
from onepen.streams.kafka_offsets import CommittedOffsets
from onepen.streams.kafka_restore import KafkaRestorer
from tests.conformance.worlds import create_topics, delete_topics, wait_for

pytestmark = pytest.mark.integration
PARTITIONS = 12
FREE = (10, 11)
HELD = tuple(p for p in range(PARTITIONS) if p not in FREE)
LONG_S = 30.0
OPEN_MS = 120_000
"""Longer than what comes before its end may take; the broker of the tests allows it."""


class Dead:
    """Has committed offset 1 of all partitions, and has offset 2 of the held ones in an open transaction."""

    def __init__(self, settings: EngineSettings) -> None:
        self._inputs = settings.topics.inputs
        bootstrap = {"bootstrap.servers": settings.bootstrap}
        # Of no member, as the group is empty.
        self._group = Consumer(bootstrap | {"group.id": settings.group}).consumer_group_metadata()
        properties = {"transactional.id": f"{settings.prefix}.dead", "transaction.timeout.ms": OPEN_MS, **SAFE_WRITES}
        self._producer = Producer(bootstrap | properties)
        self._producer.init_transactions(20)
        self._write(range(PARTITIONS), 1)
        self._producer.commit_transaction(20)
        self._write(HELD, 2)

    def _write(self, partitions: range | tuple[int, ...], offset: int) -> None:
        self._producer.begin_transaction()
        places = [TopicPartition(self._inputs, p, offset) for p in partitions]
        self._producer.send_offsets_to_transaction(places, self._group, 20)

    def end(self) -> None:
        self._producer.commit_transaction(20)


@pytest.fixture
def settings(kafka_bootstrap: str, topic_prefix: str) -> Iterator[EngineSettings]:
    topics = Topics(topic_prefix)
    create_topics(kafka_bootstrap, topics, PARTITIONS)
    yield EngineSettings(kafka_bootstrap, topic_prefix, PARTITIONS, "s0")
    delete_topics(kafka_bootstrap, topics)


def test_a_question_that_waits_does_not_hold_another_one(settings: EngineSettings) -> None:
    dead, offsets = Dead(settings), CommittedOffsets(settings)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(offsets.ask, [HELD[0]], LONG_S)
        wait_for(lambda: not offsets._idle, "it is being asked", LONG_S)
        for _ in range(20):  # one of these at least comes behind it
            assert offsets.ask([FREE[0]], LONG_S) == {FREE[0]: 1}
        assert not waits.done(), "the others were answered while it waited"
        dead.end()
        assert waits.result(LONG_S) == {HELD[0]: 2}
    offsets.close()


def test_partitions_of_no_transaction_are_surveyed_beside_many_that_wait(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More wait than there are threads that ask, in the end for longer than this test does.
    monkeypatch.setattr(kafka_restore, "ASK_S", 3 * LONG_S)
    dead, restorer = Dead(settings), KafkaRestorer(settings)
    for partition in range(PARTITIONS):
        restorer.open(partition, 0)
    wait_for(lambda: all(restorer.survey(p) for p in FREE), "the free ones are known", LONG_S)
    assert [restorer.survey(p) for p in HELD] == [None] * len(HELD), "the transaction is still open"
    dead.end()
    wait_for(lambda: all(restorer.survey(p) for p in range(PARTITIONS)), "all are known", LONG_S)
    surveys = [restorer.survey(p) for p in range(PARTITIONS)]
    assert [survey and survey.committed for survey in surveys] == [1 if p in FREE else 2 for p in range(PARTITIONS)]
    restorer.close_all()
