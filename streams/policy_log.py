"""Policies enter through the log: one record on each partition of inputs; and which ones are in force.

Rule: what became of a policy is read from the topics, never assumed: its record on the state topic says that a
partition took it, a dead letter says that it did not and why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from onepen.processors.state_keys import policy_of
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Retryable, UnknownOutcome
from onepen.schemas.policies import PolicyRecord
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline
from onepen.streams.outside_reader import end_offsets
from onepen.streams.plain_producer import PlainProducer
from onepen.streams.settings import Settings

__all__ = ["PolicyFate", "PolicyInForce", "policies_in_force", "put_policy"]

log = logging.getLogger("onepen.policy")

POLICY_KEY: Final = b"policy"
POLL_S: Final = 0.2
BATCH_RECORDS: Final = 1_000


@dataclass(frozen=True)
class PolicyFate:
    """What became of a policy on each partition: taken, refused (partition -> reason), or not yet known."""

    taken: frozenset[int]
    refused: dict[int, str]
    unknown: frozenset[int]


@dataclass
class PolicyInForce:
    """The newest policy of a tenant on the state topic, and the partitions that have taken it."""

    tenant_id: int
    version: int
    body: bytes
    partitions: set[int] = field(default_factory=set)


def put_policy(settings: Settings, record: PolicyRecord, *, timeout_ms: int) -> PolicyFate:
    """Append the record to every partition of inputs and wait for what becomes of it.

    Raises `UnknownOutcome` when the broker did not acknowledge every copy; putting it again is safe.
    """
    deadline = Deadline(timeout_ms)
    consumer = _consumer(settings)
    try:
        starts = [
            TopicPartition(topic, partition, end)
            for topic in (settings.topics.state, settings.topics.deadletters)
            for partition, end in end_offsets(settings, topic).items()
        ]
        consumer.assign(starts)
        partitions = sorted(end_offsets(settings, settings.topics.inputs))
        offsets = _append(settings, record, partitions, deadline)
        return _await_fate(consumer, settings, record, offsets, deadline)
    except KafkaException as error:
        raise Retryable(f"Kafka at {settings.bootstrap}: {error.args[0].str()}") from None
    finally:
        consumer.close()


def _append(settings: Settings, record: PolicyRecord, partitions: list[int], deadline: Deadline) -> dict[int, int]:
    """Offsets of the copies, by partition."""
    offsets: dict[int, int] = {}
    problems: list[str] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        partition, offset = message.partition(), message.offset()
        if error is not None:
            problems.append(error.str())
        elif partition is not None and offset is not None:
            offsets[partition] = offset

    producer = PlainProducer(settings.kafka_client(), client_id=f"{settings.prefix}-policy")
    value = codec.encode(record)
    for partition in partitions:
        producer.send(settings.topics.inputs, partition, key=POLICY_KEY, value=value, on_delivery=delivered)
    producer.close(max(1_000, deadline.remaining_ms()))
    if len(offsets) < len(partitions):
        reason = problems[0] if problems else "no acknowledgement in time"
        raise UnknownOutcome(
            f"the policy was acknowledged on {len(offsets)} of {len(partitions)} partitions ({reason}); "
            "putting it again is safe"
        )
    return offsets


def _await_fate(
    consumer: Consumer, settings: Settings, record: PolicyRecord, offsets: dict[int, int], deadline: Deadline
) -> PolicyFate:
    taken: set[int] = set()
    refused: dict[int, str] = {}
    wanted = (record.tenant_id, record.version)
    while len(taken | refused.keys()) < len(offsets) and not deadline.expired:
        for message in consumer.consume(BATCH_RECORDS, min(POLL_S, max(0.01, deadline.remaining_s()))):
            partition = message.partition()
            if message.error() is not None or partition is None:
                continue
            if message.topic() == settings.topics.state:
                if policy_of(message.key() or b"") == wanted:
                    taken.add(partition)
            elif (reason := _refusal(message, settings, offsets)) is not None:
                refused[reason[0]] = reason[1]
    unknown = offsets.keys() - taken - refused.keys()
    return PolicyFate(frozenset(taken), refused, frozenset(unknown))


def _refusal(message: Message, settings: Settings, offsets: dict[int, int]) -> tuple[int, str] | None:
    """(partition, reason) when the message is the dead letter of one of our copies."""
    headers = dict(_headers(message))
    try:
        partition, offset = int(headers["onepen-partition"]), int(headers["onepen-offset"])
    except (KeyError, ValueError):
        return None
    if headers.get("onepen-topic") != settings.topics.inputs or offsets.get(partition) != offset:
        return None
    return partition, headers.get("onepen-reason", "no reason given")


def _headers(message: Message) -> Iterator[tuple[str, str]]:
    for header in message.headers() or []:
        yield str(header[0]), _text(header[1])


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def policies_in_force(settings: Settings, *, timeout_ms: int) -> dict[int, PolicyInForce]:
    """The newest policy of each tenant that has one (tenant 0: the partition settings), from the state topic."""
    found: dict[int, PolicyInForce] = {}
    try:
        for message in _committed_records(settings, settings.topics.state, Deadline(timeout_ms)):
            where, value, partition = policy_of(message.key() or b""), message.value(), message.partition()
            if where is None or value is None or partition is None:
                continue
            tenant_id, version = where
            known = found.get(tenant_id)
            if known is None or known.version < version:
                known = found[tenant_id] = PolicyInForce(tenant_id, version, codec.decode_state(value)[2])
            if known.version == version:
                known.partitions.add(partition)
    except KafkaException as error:
        raise Retryable(f"Kafka at {settings.bootstrap}: {error.args[0].str()}") from None
    return found


def _committed_records(settings: Settings, topic: str, deadline: Deadline) -> Iterator[Message]:
    """Every record of a topic up to its present end."""
    ends = end_offsets(settings, topic)
    left = {partition for partition, end in ends.items() if end > 0}
    consumer = _consumer(settings)
    try:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in left])
        while left:
            if deadline.expired:
                raise Retryable(f"{topic} was not read to its end within {deadline.timeout_ms} ms")
            for message in consumer.consume(BATCH_RECORDS, POLL_S):
                error = message.error()
                if error is None:
                    yield message
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise Fatal(f"{topic}: {error.str()}")
            for place in consumer.position([TopicPartition(topic, partition) for partition in left]):
                if place.offset >= ends[place.partition]:
                    left.discard(place.partition)
    finally:
        consumer.close()


def _consumer(settings: Settings) -> Consumer:
    return kafka_clients.consumer(
        settings.kafka_client(
            {
                # Required by the client library; nothing is ever committed under this name.
                "group.id": f"{settings.prefix}-policy-log",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "fetch.queue.backoff.ms": 2,
                "reconnect.backoff.max.ms": 1_000,
            }
        ),
        logger=log,
    )
