"""Why a transaction was not committed is counted by the name of the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer

from onepen.streams import topic_admin
from onepen.streams.deadline import Deadline
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import input_consumer, transactional_producer
from onepen.streams.kafka_statistics import StatisticsTexts
from onepen.streams.kafka_transactions import Writers
from onepen.streams.log import Member, Outcome, Output
from onepen.streams.settings import load_settings
from tests.conformance.worlds import wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(kafka_bootstrap: str, topic_prefix: str, tmp_path: Path) -> EngineSettings:
    made = load_settings(bootstrap=kafka_bootstrap, prefix=topic_prefix, partitions=4, slot="s0", data_dir=tmp_path)
    topic_admin.apply(made)
    return EngineSettings.from_settings(made)


@pytest.fixture
def member(settings: EngineSettings) -> Iterator[Member]:
    consumer = Consumer(input_consumer(settings))
    consumer.subscribe([settings.topics.inputs])
    wait_for(lambda: consumer.poll(0.2) is None and consumer.assignment(), "an assignment")
    raw = consumer.consumer_group_metadata()
    member_id = raw[11:].split(b"\0", 2)[1].decode()
    yield Member(member_id, int.from_bytes(raw[7:11], "little", signed=True), raw)
    consumer.close()


def test_a_fence_is_a_doubt_and_a_stale_member_an_abort(settings: EngineSettings, member: Member) -> None:
    statistics = StatisticsTexts(100)
    writers = Writers(settings, statistics)
    writers.open(Deadline(60_000))

    def write(commit_as: Member, *, fenced: bool = False) -> Outcome:
        transaction = writers.begin(1)
        transaction.produce([Output(settings.topics.state, 0, b"k", b"v", None, True)])
        if fenced:
            for name in settings.transactional_ids:
                Producer(transactional_producer(settings, name)).init_transactions(30)
        return transaction.commit({0: 0}, commit_as)

    assert write(member) is Outcome.COMMITTED
    assert (dict(writers.counters.aborts), dict(writers.counters.doubts)) == ({}, {})
    stale = Member(member.member_id, member.generation + 7, member.raw[:7] + b"\x63" + member.raw[8:])
    assert write(stale) is Outcome.ABORTED
    assert dict(writers.counters.aborts) == {"ILLEGAL_GENERATION": 1}
    assert write(member, fenced=True) is Outcome.DOUBT
    assert dict(writers.counters.doubts) == {"_FENCED": 1}
    writers.open(Deadline(60_000))
    assert write(member) is Outcome.COMMITTED, "made anew under the same ids"
    wait_for(lambda: writers.serve() is None and {"a", "b"} <= statistics.latest().keys(), "statistics of both")
    writers.close()
