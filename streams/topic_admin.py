"""The declared topics against a real broker: plan, apply, check, and the refusal to start on a difference.

Rule: `apply` creates what is missing, sets declared settings that differ, and puts the partition settings
(policy record of tenant 0) on each partition of the inputs topic once. It never deletes a topic and never
changes a partition count, because keys would change their partition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Poison, Retryable
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.schemas.policies import PartitionSettings, PolicyRecord
from onepen.schemas.topics import TopicPlan, plan
from onepen.streams import kafka_clients
from onepen.streams.bounded_calls import unless_stopped
from onepen.streams.deadline import Deadline
from onepen.streams.kafka_config import SAFE_WRITES
from onepen.streams.kafka_errors import no_answer
from onepen.streams.settings import Settings

__all__ = ["Difference", "apply", "await_topics", "check", "plan_topics", "require_topics", "settings_record"]

log = logging.getLogger(__name__)

APPLY_TIMEOUT_MS: Final = 30_000
CHECK_TIMEOUT_MS: Final = 15_000
AWAIT_TRY_MS: Final = 5_000
AWAIT_AGAIN_S: Final = 1.0
ADMIN_TIMEOUT_MS: Final = 60_000
POLICY_KEY: Final = b"policy"
SETTINGS_VERSION: Final = 1
SETTINGS_LOOKED_FOR_RECORDS: Final = 2_000
"""`apply` writes the settings right after it creates the topic. Only where an `apply` died in between can
there be records before them, and a second settings record changes nothing; so a bounded look is enough."""

MEND_APPLY: Final = "onepen topics apply"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference from the plan as a sentence, and the command that mends it."""

    topic: str
    sentence: str
    mend: str

    def __str__(self) -> str:
        return f"{self.sentence}; to mend: {self.mend}"


def plan_topics(settings: Settings) -> list[TopicPlan]:
    """The declared topics under these settings. Asks no broker."""
    return plan(settings.topics, settings.partitions, replication=settings.replication, production=settings.production)


def settings_record(settings: Settings) -> PolicyRecord:
    """The partition settings (tenant 0) that `apply` puts on each partition of the inputs topic."""
    body = PartitionSettings(
        version=SETTINGS_VERSION, protocol=PROTOCOL_VERSION, signals_partitions=settings.partitions
    )
    document = msgspec.to_builtins(body)
    document.pop("version", None)
    return PolicyRecord(
        tenant_id=0, version=SETTINGS_VERSION, body=msgspec.json.encode(document, order="deterministic")
    )


def check(settings: Settings, timeout_ms: int = CHECK_TIMEOUT_MS) -> list[Difference]:
    """Differences between plan and broker: missing topics, counts, settings. Changes nothing.

    Raises `Retryable` when the broker does not answer in time.
    """
    deadline = Deadline(timeout_ms)
    admin = _admin(settings)
    counts = _partition_counts(admin, settings, deadline)
    wanted = plan_topics(settings)
    actual = _configs(admin, [topic.name for topic in wanted if topic.name in counts], settings, deadline)
    differences: list[Difference] = []
    for topic in wanted:
        if topic.name not in counts:
            differences.append(Difference(topic.name, f"topic {topic.name} does not exist", MEND_APPLY))
            continue
        if counts[topic.name] != topic.partitions:
            differences.append(_count_difference(topic, counts[topic.name]))
        for name, value in topic.settings.items():
            found = actual[topic.name].get(name)
            if found != value:
                sentence = f"topic {topic.name}: {name} is {found or 'not set'}, the plan says {value}"
                differences.append(Difference(topic.name, sentence, MEND_APPLY))
    return differences


def _count_difference(topic: TopicPlan, found: int) -> Difference:
    return Difference(
        topic.name,
        f"topic {topic.name} has {found} partitions, the plan says {topic.partitions}",
        f"set ONEPEN_PARTITIONS={found}, or take another ONEPEN_PREFIX and run {MEND_APPLY}"
        " (a count is fixed at creation)",
    )


def apply(settings: Settings, timeout_ms: int = APPLY_TIMEOUT_MS) -> list[str]:
    """Make the broker as planned; answers one sentence per thing done (none: all was there). May be repeated.

    Raises `Retryable` when the broker does not answer in time and `Fatal` when it refuses, or when a
    partition count differs.
    """
    deadline = Deadline(timeout_ms)
    admin = _admin(settings)
    wanted = plan_topics(settings)
    done = _create_missing(admin, wanted, settings, deadline)
    counts = _await_topics(admin, wanted, settings, deadline)
    wrong = [_count_difference(t, counts[t.name]) for t in wanted if counts[t.name] != t.partitions]
    if wrong:
        raise Fatal("\n".join(map(str, wrong)))
    done += _mend_settings(admin, settings, deadline)
    written = _write_settings_records(settings, deadline)
    if written:
        done.append(f"put the partition settings on {written} partitions of {settings.topics.inputs}")
    return done


def require_topics(settings: Settings, timeout_ms: int = CHECK_TIMEOUT_MS) -> None:
    """Raise `Fatal`, one line per difference from the plan, or `Retryable` when no answer comes in time."""
    _refuse(check(settings, timeout_ms))


def await_topics(settings: Settings, stop: threading.Event) -> bool:
    """Wait for a broker that answers; False as soon as `stop` is set. Raises `Fatal` as `require_topics` does."""
    while not stop.is_set():
        try:
            differences = unless_stopped(lambda: check(settings, AWAIT_TRY_MS), stop)
        except Retryable as error:
            log.warning("%s; waiting for it", error)
            stop.wait(AWAIT_AGAIN_S)
            continue
        if differences is not None:
            _refuse(differences)
            return True
    return False


def _refuse(differences: list[Difference]) -> None:
    if differences:
        raise Fatal("the topics differ from the plan:\n" + "\n".join(map(str, differences)))


def _admin(settings: Settings) -> AdminClient:
    # The time-out of the socket limits what a creation may take, whatever its own limit is.
    ours = {"socket.timeout.ms": ADMIN_TIMEOUT_MS, "reconnect.backoff.max.ms": 500, "log_level": 0}
    return kafka_clients.admin(settings.kafka_client(ours))


def _partition_counts(admin: AdminClient, settings: Settings, deadline: Deadline) -> dict[str, int]:
    # Asked in short turns: a broker that is just starting refuses connections; one long request would fail.
    while True:
        try:
            found = admin.list_topics(timeout=min(2.0, max(0.2, deadline.remaining_s())))
            return {name: len(topic.partitions) for name, topic in found.topics.items() if topic.error is None}
        except KafkaException as error:
            if deadline.expired:
                raise no_answer(settings.bootstrap, error) from None


def _result(future: Future[Any], settings: Settings, deadline: Deadline) -> Any:
    """The result of an admin request; time-outs are `Retryable`, refusals are `Fatal`."""
    try:
        return future.result(timeout=max(0.5, deadline.remaining_s()))
    except TimeoutError:
        raise no_answer(settings.bootstrap, "time ran out") from None
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if cause.retriable() or cause.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT):
            raise no_answer(settings.bootstrap, cause.str()) from None
        raise


def _configs(admin: AdminClient, names: list[str], settings: Settings, deadline: Deadline) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    while missing := [name for name in names if name not in found]:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in missing]
        answers = admin.describe_configs(resources, request_timeout=max(0.5, deadline.remaining_s()))
        for resource, future in answers.items():
            try:
                entries = _result(future, settings, deadline)
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if cause.code() == KafkaError.UNKNOWN_TOPIC_OR_PART and not deadline.expired:
                    # Of several brokers one may not have heard yet of a topic that another one lists.
                    time.sleep(0.05)
                    continue
                raise Fatal(f"the settings of topic {resource.name} cannot be read: {cause.str()}") from None
            found[resource.name] = {name: entry.value for name, entry in entries.items() if entry.value is not None}
    return found


def _create_missing(admin: AdminClient, wanted: list[TopicPlan], settings: Settings, deadline: Deadline) -> list[str]:
    counts = _partition_counts(admin, settings, deadline)
    missing = [topic for topic in wanted if topic.name not in counts]
    if not missing:
        return []
    new = [
        NewTopic(
            topic.name,
            num_partitions=topic.partitions,
            replication_factor=settings.replication,
            config=dict(topic.settings),
        )
        for topic in missing
    ]
    done = []
    for name, future in admin.create_topics(new, request_timeout=max(0.5, deadline.remaining_s())).items():
        try:
            _result(future, settings, deadline)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # two applies at once
                raise Fatal(f"topic {name} cannot be created: {error.args[0].str()}") from None
        else:
            done.append(f"created {name}")
    return done


def _await_topics(
    admin: AdminClient, wanted: list[TopicPlan], settings: Settings, deadline: Deadline
) -> dict[str, int]:
    """A created topic is listed a moment later; clients that are told too early would fail."""
    while True:
        counts = _partition_counts(admin, settings, deadline)
        if all(counts.get(topic.name) for topic in wanted):
            return counts
        if deadline.expired:
            missing = ", ".join(topic.name for topic in wanted if not counts.get(topic.name))
            raise no_answer(settings.bootstrap, f"the broker does not list {missing}")
        time.sleep(0.05)


def _mend_settings(admin: AdminClient, settings: Settings, deadline: Deadline) -> list[str]:
    wanted = plan_topics(settings)
    actual = _configs(admin, [topic.name for topic in wanted], settings, deadline)
    done = []
    resources = []
    for topic in wanted:
        changes = {n: v for n, v in topic.settings.items() if actual[topic.name].get(n) != v}
        if changes:
            entries = [
                ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in changes.items()
            ]
            resources.append(ConfigResource(ResourceType.TOPIC, topic.name, incremental_configs=entries))
            done.append(f"set {', '.join(f'{n}={v}' for n, v in changes.items())} on {topic.name}")
    if resources:
        for resource, future in admin.incremental_alter_configs(
            resources, request_timeout=max(0.5, deadline.remaining_s())
        ).items():
            try:
                _result(future, settings, deadline)
            except KafkaException as error:
                raise Fatal(f"topic {resource.name} cannot be set: {error.args[0].str()}") from None
    return done


def _write_settings_records(settings: Settings, deadline: Deadline) -> int:
    """Append the partition settings where the inputs topic has none; answers on how many partitions."""
    lacking = list(_partitions_without_settings(settings, deadline))
    if not lacking:
        return 0
    value = codec.encode(settings_record(settings))
    failures: list[str] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failures.append(error.str())

    producer = kafka_clients.producer({**settings.kafka_client({"linger.ms": 0, "log_level": 3}), **SAFE_WRITES})
    for partition in lacking:
        producer.produce(settings.topics.inputs, value, POLICY_KEY, partition=partition, on_delivery=delivered)
    left = producer.flush(max(0.5, deadline.remaining_s()))
    if left or failures:
        raise no_answer(settings.bootstrap, failures[0] if failures else "the partition settings were not acknowledged")
    return len(lacking)


def _partitions_without_settings(settings: Settings, deadline: Deadline) -> Iterator[int]:
    consumer = kafka_clients.consumer(
        settings.kafka_client(
            {
                "group.id": f"{settings.prefix}.topic-admin",
                "enable.auto.commit": False,
                "isolation.level": "read_uncommitted",
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
            }
        )
    )
    topic = settings.topics.inputs
    unread: dict[int, int] = {}  # partition -> last offset to look at
    try:
        for partition in range(settings.partitions):
            low, high = _watermarks(consumer, settings, TopicPartition(topic, partition), deadline)
            if low == high == 0:
                yield partition
            elif low == 0:
                unread[partition] = min(high, SETTINGS_LOOKED_FOR_RECORDS) - 1
        if unread:
            consumer.assign([TopicPartition(topic, partition, 0) for partition in unread])
            yield from _read_without_settings(consumer, settings, unread, deadline)
    finally:
        consumer.close()


def _watermarks(consumer: Consumer, settings: Settings, place: TopicPartition, deadline: Deadline) -> tuple[int, int]:
    while True:
        try:
            answer = consumer.get_watermark_offsets(place, timeout=min(2.0, max(0.2, deadline.remaining_s())))
            found = cast("tuple[int, int] | None", answer)  # None when the time runs out
        except KafkaException as error:  # a partition just created may have no leader for a moment
            if deadline.expired:
                raise no_answer(settings.bootstrap, error) from None
            time.sleep(0.05)
            continue
        if found is not None:
            return found
        if deadline.expired:
            raise no_answer(settings.bootstrap, f"no offsets of {place.topic}/{place.partition}")


def _read_without_settings(
    consumer: Consumer, settings: Settings, unread: dict[int, int], deadline: Deadline
) -> Iterator[int]:
    """Partitions without a settings record among their first records. Empties `unread`."""
    while unread:
        message = consumer.poll(min(0.5, max(0.05, deadline.remaining_s())))
        if message is None:
            if deadline.expired:
                raise no_answer(settings.bootstrap, f"no records of {settings.topics.inputs}")
            continue
        partition, offset, error = message.partition(), message.offset(), message.error()
        if partition is None or partition not in unread:
            continue
        if error is None and _is_settings(message.value()):
            del unread[partition]
        elif (error is None and offset is not None and offset >= unread[partition]) or (
            error is not None and error.code() == KafkaError._PARTITION_EOF
        ):
            del unread[partition]
            yield partition


def _is_settings(value: bytes | None) -> bool:
    try:
        record = codec.decode_inputs(value)
    except Poison:
        return False
    return isinstance(record, PolicyRecord) and record.tenant_id == 0
