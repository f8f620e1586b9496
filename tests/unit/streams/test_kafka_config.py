"""librdkafka's settings: what exactly-once rests on is set and cannot be changed, the rest passes through."""

from __future__ import annotations

import json
import logging

import pytest

from onepen.schemas.errors import Invalid
from onepen.streams import kafka_config
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.settings import load_settings


def settings(protocol: str = "classic", **kafka: str) -> EngineSettings:
    extra = {name.replace("__", "."): value for name, value in kafka.items()}
    return EngineSettings("broker:9092", "p", 4, "host-0", protocol, extra)


ALL = {**kafka_config.REFUSED, **kafka_config.REFUSED_IN_TRANSACTIONS}


@pytest.mark.parametrize("name", sorted(ALL))
def test_what_breaks_the_promise_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(Invalid) as refused:
        kafka_config.check_properties({"client.rack": "a", name: "x"})
    assert refused.value.field == name
    assert ALL[name] in str(refused.value)


@pytest.mark.parametrize("name", sorted(kafka_config.REFUSED))
def test_no_process_takes_what_breaks_a_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPEN_KAFKA", json.dumps({"client.rack": "a", name: "x"}))
    with pytest.raises(Invalid) as refused:
        load_settings()
    assert str(refused.value) == f"ONEPEN_KAFKA: {name} cannot be set: {kafka_config.REFUSED[name]}"


@pytest.mark.parametrize("name", sorted(kafka_config.REFUSED_IN_TRANSACTIONS))
def test_who_writes_no_transactions_may_tune(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPEN_KAFKA", json.dumps({name: "1"}))
    assert load_settings().kafka_client()[name] == "1"


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
