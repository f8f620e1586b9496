"""The first batch of a new producer is refused by a broker that was just made leader, the second one is accepted.

With more than one request under way librdkafka takes the first for written: acknowledged, and lost
(infra/decisions/0009). The producers of onepen have one.
"""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, Message, Producer

from onepen.schemas.topics import Topics
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import plain_producer, transactional_producer
from onepen.streams.plain_producer import PlainProducer
from tests.conformance.worlds import create_topics, stored
from tests.faults.wire import PRODUCE, Fault, Verdict, Wire, once
from tests.services import fresh_topic_prefix

RECORDS = 8
ONE_EACH = {"batch.num.messages": 1, "linger.ms": 0}
MANY = {"max.in.flight.requests.per.connection": 5}


class World:
    """A topic of one partition; the first Produce of `client_id` meets a broker that does not know yet."""

    def __init__(self, bootstrap: str, wire: Wire) -> None:
        self.bootstrap, self.topics = bootstrap, Topics(fresh_topic_prefix())
        self.engine = EngineSettings(wire.bootstrap, self.topics.prefix, 1, "s0")
        create_topics(bootstrap, self.topics, 1)
        wire.plan(self.topics.prefix, once(PRODUCE, Verdict(Fault.NOT_LEADER)))
        self.acknowledged: list[bytes] = []

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        assert error is None, error.str()
        self.acknowledged.append(message.value() or b"")

    def written(self) -> list[bytes]:
        return [record.value or b"" for record in stored(self.bootstrap, self.topics.events, 1)[0]]


@pytest.fixture
def world(wired: tuple[str, Wire]) -> World:
    return World(*wired)


WANTED = [b"%d" % n for n in range(RECORDS)]


def produce(world: World, producer: Producer) -> None:
    for value in WANTED:
        producer.produce(world.topics.events, value, b"k", 0, world.delivered)
    assert producer.flush(20) == 0


def transact(world: World, properties: dict[str, object]) -> None:
    producer = Producer({**properties, **ONE_EACH})
    producer.init_transactions(20)
    producer.begin_transaction()
    produce(world, producer)
    producer.commit_transaction(20)


def test_clients_and_workers_lose_nothing(world: World) -> None:
    properties = {"bootstrap.servers": world.engine.bootstrap, **ONE_EACH, **MANY}
    producer = PlainProducer(properties, client_id=f"{world.topics.prefix}.s0")
    for value in WANTED:
        producer.send(world.topics.events, 0, key=b"k", value=value, on_delivery=world.delivered)
    assert producer.close(20_000) == 0
    assert world.written() == world.acknowledged == WANTED


def test_hints_lose_nothing(world: World) -> None:
    produce(world, Producer({**plain_producer(world.engine), **ONE_EACH}))
    assert world.written() == world.acknowledged == WANTED


def test_a_transaction_loses_nothing(world: World) -> None:
    transact(world, transactional_producer(world.engine, f"{world.topics.prefix}.s0.a"))
    assert world.written() == world.acknowledged == WANTED


def test_with_more_under_way_what_is_acknowledged_is_lost(world: World) -> None:
    """What the others are kept from. Should this fail, librdkafka or the broker has mended it, and the limit may go."""
    produce(world, Producer({**plain_producer(world.engine), **ONE_EACH, **MANY}))
    assert world.acknowledged == WANTED
    assert world.written() == WANTED[1:]


def test_with_more_under_way_a_committed_transaction_lacks_it(world: World) -> None:
    transact(world, transactional_producer(world.engine, f"{world.topics.prefix}.s0.a") | MANY)
    assert world.acknowledged == WANTED
    assert world.written() == WANTED[1:]
