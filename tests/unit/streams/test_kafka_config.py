"""librdkafka's settings: what exactly-once rests on is set and cannot be changed, the rest passes through."""

from __future__ import annotations

import logging

import pytest

from onepen.schemas.errors import Invalid
from onepen.streams import kafka_config
from onepen.streams.engine_settings import EngineSettings


def settings(protocol: str = "classic", **kafka: str) -> EngineSettings:
    extra = {name.replace("__", "."): value for name, value in kafka.items()}
    return EngineSettings("broker:9092", "p", 4, "host-0", protocol, extra)


@pytest.mark.parametrize("name", sorted(kafka_config.REFUSED))
def test_what_breaks_the_promise_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(Invalid) as refused:
        kafka_config.check_properties({"client.rack": "a", name: "x"})
    assert refused.value.field == name
    assert kafka_config.REFUSED[name] in str(refused.value)


def test_other_properties_reach_the_clients_they_are_for() -> None:
    extra = settings(security__protocol="SSL", compression__type="lz4", fetch__max__bytes="1000000")
    consumer, producer = kafka_config.input_consumer(extra), kafka_config.transactional_producer(extra, "p.s.a")
    assert consumer["security.protocol"] == producer["security.protocol"] == "SSL"
    assert producer["compression.type"] == "lz4"
    assert "compression.type" not in consumer
    assert consumer["fetch.max.bytes"] == "1000000"
    assert "fetch.max.bytes" not in producer


def test_a_slot_is_a_static_member_under_the_classic_protocol_only() -> None:
    classic, consumer = kafka_config.input_consumer(settings()), kafka_config.input_consumer(settings("consumer"))
    assert classic["group.instance.id"] == "host-0"
    assert classic["partition.assignment.strategy"] == "range"
    assert (classic["session.timeout.ms"], classic["heartbeat.interval.ms"]) == (6_000, 500)
    assert consumer["group.protocol"] == "consumer"
    assert not {"group.instance.id", "session.timeout.ms", "heartbeat.interval.ms"} & consumer.keys()
    assert consumer["max.poll.interval.ms"] == kafka_config.CONSUMER_REBALANCE_MS, (
        "or a lost answer holds the group 300 s"
    )
    for properties in (classic, consumer):
        assert properties["auto.offset.reset"] == "error"
        assert properties["enable.auto.commit"] is False
        assert properties["isolation.level"] == "read_committed"
        assert properties["queued.min.messages"] == 2_000


def test_lines_that_speak_of_a_lost_connection_are_doubt() -> None:
    logger = kafka_config.DoubtLogger("p.s.a")
    logger.log(logging.INFO, "%s [%s] %s", "GETPID", "p", "Acquired transactional PID")
    assert logger.lines == []
    logger.log(logging.INFO, "%s [%s] %s", "FAIL", "p", "broker:9092/1: Disconnected (after 11ms in state UP)")
    logger.log(logging.WARNING, "%s [%s] %s", "REQTMOUT", "p", "Timed out EndTxnRequest in flight")
    assert len(logger.lines) == 2
