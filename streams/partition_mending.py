"""A partition whose committed offset and partition record disagree: looked at from outside, and mended by the record.

Rule: the state is the truth. Its partition record was written in the same transaction as the decisions, so the group's
offset is set to what the record says and never the other way round. It is done only while no processor is a member of
the group (the broker refuses it otherwise), and only when the log holds no decision that the state does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from onepen.processors.state_keys import PARTITION_KEY
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Fenced, Poison, Retryable
from onepen.schemas.events import Event
from onepen.schemas.receipts import Receipt
from onepen.streams import kafka_clients
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import SAFE_WRITES, offset_reader
from onepen.streams.kafka_errors import no_answer
from onepen.streams.partition_mark import read_mark
from onepen.streams.settings import Settings
from onepen.streams.store import Mark
from onepen.streams.topic_scan import TopicScan

__all__ = ["Findings", "members", "mend", "survey"]

ANSWER_S: Final = 10.0
TAIL_OFFSETS: Final = 5_000
"""Decisions that the state does not know would be the last ones of their partition."""


@dataclass(frozen=True, slots=True)
class Findings:
    """One partition as it stands. `unknown_decisions`: events and receipts of inputs that the state has not decided.

    `verdict`: `agree`, `fresh` (nothing was ever decided), `offset_missing` (the group's offset expired, which is no
    loss), `torn`, `inputs_lost`, `state_lost`, `other_topic`, `other_count`.
    """

    partition: int
    mark: Mark | None
    committed: int | None
    inputs_start: int
    inputs_end: int
    unknown_decisions: int
    partitions: int

    @property
    def verdict(self) -> str:
        mark = self.mark
        if mark is None:
            return "fresh" if self.committed is None else "state_lost"
        if mark.partitions != self.partitions:
            return "other_count"
        if mark.next_input_offset > self.inputs_end:
            return "other_topic"
        if mark.next_input_offset < self.inputs_start:
            return "inputs_lost"
        if self.committed is None:
            return "offset_missing"
        return "agree" if self.committed == mark.next_input_offset else "torn"

    def sentence(self) -> str:
        """What is the matter, and what mends it."""
        mark, command = self.mark, f"onepen partition mend {self.partition}"
        begin = mark.next_input_offset if mark is not None else 0
        match self.verdict:
            case "agree":
                return "partition record and committed offset agree; nothing to mend"
            case "fresh":
                return "nothing was ever decided here; nothing to mend"
            case "offset_missing":
                return "the group has no offset; the processor begins by the partition record; nothing to mend"
            case "torn" if self.unknown_decisions:
                return (
                    f"the log holds {self.unknown_decisions} decisions from input {begin} on that the state does not "
                    "know: deciding those inputs again would repeat them; look with: onepen audit"
                )
            case "torn":
                again = (self.committed or 0) - begin
                what = f"inputs {begin} to {begin + again - 1} will be decided" if again > 0 else (
                    f"inputs {begin + again} to {begin - 1} are decided already and will not be decided again"
                )  # fmt: skip
                return f"torn transaction: the committed offset is to be {begin}; {what}; to mend: {command} --yes"
            case "inputs_lost":
                return (
                    f"inputs {begin} to {self.inputs_start - 1} are gone and were never decided; to go on without "
                    f"them: {command} --skip-lost --yes"
                )
            case "state_lost":
                return (
                    "the state has no partition record although inputs are committed: the state topic was emptied; "
                    "offsets do not mend that: take another ONEPEN_PREFIX, or restore the state topic"
                )
            case "other_topic":
                return "the inputs end before the next one: the inputs topic was made anew; take another ONEPEN_PREFIX"
            case _:
                counted = mark.partitions if mark is not None else 0
                return f"the state was written for {counted} partitions; set ONEPEN_PARTITIONS={counted}"

    @property
    def target(self) -> int | None:
        """The offset to be committed by `mend`; None: mending offsets would be wrong, or nothing is to be mended."""
        if self.mark is not None and self.verdict == "torn" and not self.unknown_decisions:
            return self.mark.next_input_offset
        return None

    def row(self) -> dict[str, Any]:
        """As JSON members."""
        mark = self.mark
        return {
            "partition": self.partition,
            "verdict": self.verdict,
            "recordOffset": None if mark is None else mark.next_input_offset,
            "committedOffset": self.committed,
            "inputsStart": self.inputs_start,
            "inputsEnd": self.inputs_end,
            "writerSlot": None if mark is None else mark.slot,
            "unknownDecisions": self.unknown_decisions,
        }


def survey(settings: Settings, partitions: list[int] | None = None) -> Iterator[Findings]:
    """What is the matter with each of the partitions (None: all). Changes nothing.

    Raises `Retryable` when the brokers do not answer or a transaction is open there, `Fatal` for what this release
    cannot read or a partition that does not exist.
    """
    topics = settings.topics
    with TopicScan(settings, topics.state) as state, TopicScan(settings, topics.inputs) as inputs:
        count = inputs.partitions()
        wanted = list(range(count)) if partitions is None else partitions
        for partition in wanted:
            if not 0 <= partition < count:
                raise Fatal(f"partition {partition} of {topics.inputs} does not exist: it has {count}")
        committed = _committed(settings, wanted)
        for partition in wanted:
            mark = read_mark(state, partition)
            first, end = inputs.ends(partition)
            agreed = mark is None or committed[partition] in (None, mark.next_input_offset)
            unknown = 0 if mark is None or agreed else _unknown_decisions(settings, partition, mark.next_input_offset)
            yield Findings(partition, mark, committed[partition], first, end, unknown, settings.partitions)


def _committed(settings: Settings, partitions: list[int]) -> dict[int, int | None]:
    """The group's offsets, stable."""
    consumer = kafka_clients.consumer(offset_reader(EngineSettings.from_settings(settings)))
    try:
        asked = [TopicPartition(settings.topics.inputs, partition) for partition in partitions]
        answers = consumer.committed(asked, timeout=ANSWER_S)
    except KafkaException as error:
        raise no_answer(settings.bootstrap, error) from None
    finally:
        consumer.close()
    found: dict[int, int | None] = {}
    for answer in answers:
        if answer.error is not None:
            raise Retryable(f"the committed offset of partition {answer.partition}: {answer.error.str()}")
        found[answer.partition] = None if answer.offset == OFFSET_INVALID else answer.offset
    return found


def _unknown_decisions(settings: Settings, partition: int, begin: int) -> int:
    count = 0
    for topic in (settings.topics.events, settings.topics.receipts):
        with TopicScan(settings, topic) as scan:
            first, end = scan.ends(partition)
            for record in scan.read(partition, max(first, end - TAIL_OFFSETS), end):
                count += _cause(record.value, partition) >= begin
    return count


def _cause(value: bytes | None, partition: int) -> int:
    """Offset of the input that a decision came from; -1 when it names none of this partition."""
    try:
        record = codec.decode(value)
    except Poison:
        return -1
    if isinstance(record, Event) and record.cause.partition == partition:
        return record.cause.offset
    if isinstance(record, Receipt) and record.partition == partition:
        return record.offset
    return -1


# -- mending -----------------------------------------------------------------------------------------------------------


def members(settings: Settings) -> list[str]:
    """Who is a member of the processors' group now: slots, or client ids where there are no slots."""
    group = EngineSettings.from_settings(settings).group
    admin = kafka_clients.admin(settings.kafka_client())  # its answers die with it
    try:
        found = admin.describe_consumer_groups([group], request_timeout=ANSWER_S)[group].result(ANSWER_S + 1)
    except (KafkaException, TimeoutError) as error:
        raise _not_done(settings, error) from None
    return sorted(member.group_instance_id or member.client_id for member in found.members)


def mend(settings: Settings, partition: int, *, skip_lost: bool = False) -> Findings:
    """Set the committed offset to the partition record's next input; what was found before.

    `skip_lost`: where inputs are gone, begin behind them, in the record first and then in the offset. Raises `Fenced`
    when a processor is a member of the group, `Fatal` when offsets do not mend it, `Retryable` without an answer.
    """
    owners = members(settings)
    if owners:
        raise Fenced(
            f"processors are members of the group ({', '.join(owners)}): end them with `onepen processor drain`, or "
            "wait 6 s after their end, and mend then"
        )
    found = next(survey(settings, [partition]))
    target = found.target
    if found.verdict == "inputs_lost" and skip_lost and found.mark is not None:
        target = found.inputs_start
        _write_mark(settings, partition, msgspec.structs.replace(found.mark, next_input_offset=target))
    if target is None:
        raise Fatal(f"partition {partition}: {found.sentence()}")
    _commit(settings, partition, target)
    return found


def _write_mark(settings: Settings, partition: int, mark: Mark) -> None:
    failures: list[KafkaError] = []
    producer = kafka_clients.producer({**settings.kafka_client({"linger.ms": 0}), **SAFE_WRITES})

    def delivered(error: KafkaError | None, _: object) -> None:
        if error is not None:
            failures.append(error)

    producer.produce(settings.topics.state, mark.encode(), PARTITION_KEY, partition, delivered)
    if producer.flush(ANSWER_S) or failures:
        why = failures[0].str() if failures else "no acknowledgement"
        raise Retryable(f"the partition record was not written ({why}); the same command may be given again")


def _commit(settings: Settings, partition: int, offset: int) -> None:
    group = EngineSettings.from_settings(settings).group
    admin = kafka_clients.admin(settings.kafka_client())
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(settings.topics.inputs, partition, offset)])
    try:
        done = admin.alter_consumer_group_offsets([wanted], request_timeout=ANSWER_S)[group].result(ANSWER_S + 1)
    except (KafkaException, TimeoutError) as error:
        raise _refused(settings, error) from None
    for one in done.topic_partitions:
        if one.error is not None:
            raise _refused(settings, KafkaException(one.error))


def _refused(settings: Settings, error: Exception) -> Exception:
    code = error.args[0].code() if isinstance(error, KafkaException) else None
    if code in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP, KafkaError.REBALANCE_IN_PROGRESS):
        return Fenced("a processor has joined the group meanwhile; nothing was changed")
    return _not_done(settings, error)


def _not_done(settings: Settings, error: Exception) -> Retryable:
    told = error.args[0].str() if isinstance(error, KafkaException) else "no answer in time"
    return Retryable(
        f"Kafka at {settings.bootstrap}: {told}; nothing was changed, or the same command may be given again"
    )
