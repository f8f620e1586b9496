"""Where a topic ends for those who look from outside: behind what an open transaction holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from onepen.schemas.errors import Retryable
from onepen.streams import topic_scan
from onepen.streams.deadline import Deadline
from onepen.streams.log_tail import CursorAhead, LogTail
from onepen.streams.outside_reader import end_offsets, read_topic
from onepen.streams.settings import Settings
from onepen.streams.topic_scan import TopicScan, stable_end
from tests.conformance.worlds import create_topics

pytestmark = pytest.mark.integration
WAIT_MS = 60_000


@pytest.fixture
def settings(kafka_bootstrap: str, topic_prefix: str, tmp_path: Path) -> Settings:
    made = Settings(bootstrap=kafka_bootstrap, prefix=topic_prefix, partitions=1, data_dir=tmp_path)
    create_topics(kafka_bootstrap, made.topics, made.partitions)
    return made


@pytest.fixture
def producer(settings: Settings) -> Producer:
    """One that has committed the record at offset 0 and holds the one at offset 2 in an open transaction."""
    made = Producer(settings.kafka_client({"transactional.id": settings.prefix, "transaction.timeout.ms": 15_000}))
    made.init_transactions(30)
    for value in (b"committed", b"undecided"):
        made.begin_transaction()
        made.produce(settings.topics.events, value, partition=0)
        made.flush(30)
        if value == b"committed":
            made.commit_transaction(30)
    return made


@pytest.mark.parametrize(
    ("end", "read"), [(Producer.commit_transaction, [0, 2]), (Producer.abort_transaction, [0])], ids=["commit", "abort"]
)
def test_an_open_transaction_is_never_a_short_answer(
    settings: Settings,
    producer: Producer,
    end: Callable[[Producer, float], None],
    read: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = settings.topics.events
    monkeypatch.setattr(topic_scan, "STANDS_STILL_S", 0.5)
    with TopicScan(settings, topic) as scan:
        assert (scan.ends(0), end_offsets(settings, topic), stable_end(settings, topic, 0)) == ((0, 3), {0: 3}, 2)
        with pytest.raises(Retryable, match="not read up to 3"):
            list(scan.read(0, *scan.ends(0)))
        with pytest.raises(Retryable, match="not read to their end"):
            read_topic(settings, topic, timeout_ms=500)
        end(producer, 30)
        monkeypatch.setattr(topic_scan, "STANDS_STILL_S", WAIT_MS / 1000)
        assert [record.offset for record in scan.read(0, *scan.ends(0))] == read
        assert [record.offset for record in read_topic(settings, topic, timeout_ms=WAIT_MS)] == read


def test_a_reader_may_begin_behind_what_an_open_transaction_holds(settings: Settings, producer: Producer) -> None:
    """An end that was asked for with `end_offsets` is a place to begin at, also while a transaction is open."""
    place = (settings.topics.events, 0)
    tail = LogTail(settings)
    try:
        with pytest.raises(CursorAhead, match="ends at offset 3"):
            tail.open({place: 4})
        tail.open({place: end_offsets(settings, place[0])[0]})
        producer.commit_transaction(30)
        producer.begin_transaction()
        producer.produce(place[0], b"later", partition=0)
        producer.commit_transaction(30)
        deadline, message = Deadline(WAIT_MS), None
        while message is None and not deadline.expired:
            message = tail.poll()
        assert message is not None
        assert message.value() == b"later"
    finally:
        tail.close()
