"""Topics against a real broker: apply makes the plan true, check names each difference, start-up refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource  # type: ignore[attr-defined]  # type: ignore[attr-defined]

from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Retryable
from onepen.schemas.policies import PolicyRecord, parse_settings
from onepen.streams import topic_admin
from onepen.streams.settings import Settings, load_settings


@pytest.fixture
def settings(kafka_bootstrap: str, topic_prefix: str, tmp_path: Path) -> Settings:
    return load_settings(bootstrap=kafka_bootstrap, prefix=topic_prefix, partitions=3, data_dir=tmp_path)


def inputs_records(settings: Settings) -> dict[int, list[tuple[bytes | None, bytes | None]]]:
    consumer = Consumer(settings.kafka_client({"group.id": "look", "enable.partition.eof": True}))
    found: dict[int, list[tuple[bytes | None, bytes | None]]] = {p: [] for p in range(settings.partitions)}
    consumer.assign([TopicPartition(settings.topics.inputs, p, 0) for p in found])
    ended = 0
    while ended < settings.partitions:
        message = consumer.poll(10)
        assert message is not None, "the topic can be read within 10 s"
        error = message.error()
        if error is None:
            found[message.partition()].append((message.key(), message.value()))
        elif error.code() == KafkaError._PARTITION_EOF:
            ended += 1
    consumer.close()
    return found


def test_apply_makes_the_plan_true_and_may_be_repeated(settings: Settings) -> None:
    before = topic_admin.check(settings)
    assert {d.topic for d in before} == {plan.name for plan in topic_admin.plan_topics(settings)}
    assert all(d.mend == "onepen topics apply" for d in before)
    assert len(topic_admin.apply(settings)) == 8
    assert topic_admin.check(settings) == []
    assert topic_admin.apply(settings) == []
    topic_admin.require_topics(settings)


def test_each_partition_gets_its_settings_once(settings: Settings) -> None:
    for _ in range(3):
        topic_admin.apply(settings)
    for records in inputs_records(settings).values():
        [(key, value)] = records
        record = codec.decode_inputs(value)
        assert key == b"policy"
        assert isinstance(record, PolicyRecord)
        assert (record.tenant_id, record.version) == (0, 1)
        parsed = parse_settings(record.body, record.version)
        assert (parsed.protocol, parsed.signals_partitions) == (0, settings.partitions)


def test_settings_are_put_where_an_apply_died_before_them(settings: Settings) -> None:
    topic_admin.apply(settings)
    other = load_settings(bootstrap=settings.bootstrap, prefix=settings.prefix + "b", partitions=3)
    admin = topic_admin._admin(other)
    from onepen.streams.deadline import Deadline

    topic_admin._create_missing(admin, topic_admin.plan_topics(other), other, Deadline(30_000))
    done = topic_admin.apply(other)
    assert done == [f"put the partition settings on 3 partitions of {other.topics.inputs}"]
    assert all(len(records) == 1 for records in inputs_records(other).values())


def test_b38_a_count_that_differs_is_refused_and_never_changed(settings: Settings) -> None:
    topic_admin.apply(settings)
    wider = load_settings(bootstrap=settings.bootstrap, prefix=settings.prefix, partitions=4)
    differences = topic_admin.check(wider)
    assert len(differences) == 7
    assert "has 3 partitions, the plan says 4" in differences[0].sentence
    assert "ONEPEN_PARTITIONS=3" in differences[0].mend
    with pytest.raises(Fatal, match="partitions"):
        topic_admin.apply(wider)
    with pytest.raises(Fatal, match="differ from the plan"):
        topic_admin.require_topics(wider)
    assert topic_admin.check(settings) == []


def test_b33_a_setting_that_differs_is_named_and_mended(settings: Settings) -> None:
    topic_admin.apply(settings)
    entry = ConfigEntry("message.timestamp.type", "CreateTime", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("topic", settings.topics.inputs, incremental_configs=[entry])
    admin = AdminClient(settings.kafka_client())
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)
    [difference] = topic_admin.check(settings)
    assert str(difference) == (
        f"topic {settings.topics.inputs}: message.timestamp.type is CreateTime, the plan says LogAppendTime;"
        " to mend: onepen topics apply"
    )
    with pytest.raises(Fatal, match="LogAppendTime"):
        topic_admin.require_topics(settings)
    [done] = topic_admin.apply(settings)
    assert done == f"set message.timestamp.type=LogAppendTime on {settings.topics.inputs}"
    assert topic_admin.check(settings) == []


def test_a_broker_that_does_not_answer_is_no_difference(tmp_path: Path) -> None:
    nowhere = load_settings(bootstrap="127.0.0.1:1", data_dir=tmp_path)
    with pytest.raises(Retryable, match="does not answer"):
        topic_admin.check(nowhere, 500)
