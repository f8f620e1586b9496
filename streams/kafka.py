"""The log on real Kafka: one member of the processors' group with confluent-kafka, all on one thread.

Rule: rebalance callbacks run inside `poll` and `close` only, so they never meet an open transaction. They raise
ownership numbers, assign paused at no position of their own, and tell the listener; everything slow happens elsewhere.
The membership of a batch is taken behind its last `consume` and travels with it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from onepen.schemas.errors import Fatal, Retryable
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline
from onepen.streams.engine_settings import CLASSIC, EngineSettings
from onepen.streams.held_inputs import HeldInputs
from onepen.streams.kafka_config import input_consumer, plain_producer
from onepen.streams.kafka_errors import PASSING, UNREACHABLE
from onepen.streams.kafka_offsets import CommittedOffsets
from onepen.streams.kafka_restore import KafkaRestorer
from onepen.streams.kafka_statistics import StatisticsTexts
from onepen.streams.kafka_transactions import KafkaTransaction, Writers
from onepen.streams.log import Batch, InputsLost, Listener, Member, Output, Record

log = logging.getLogger("onepen.processor.kafka")

INIT_LIMIT_MS: Final = 10_000
"""It is asked for again; between two attempts a processor that is to stop does."""
COMMITTED_LIMIT_MS: Final = 3_000
LEAVE_LIMIT_MS: Final = 2_000
DRAIN_RECORDS: Final = 1_000
DRAIN_S: Final = 0.05
_NO_POSITION: Final = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._NO_OFFSET})


class KafkaLog:
    """See `log.Log`. `topics.inputs` must have `settings.partitions` partitions."""

    def __init__(self, settings: EngineSettings) -> None:
        self.partitions = settings.partitions
        self.transactional_ids = settings.transactional_ids
        self._settings = settings
        self._inputs = settings.topics.inputs
        self._eager = settings.group_protocol == CLASSIC
        self._numbers: dict[int, int] = {}
        self._assigned: set[int] = set()
        self._live: dict[int, int] = {}
        """Started partitions with their current number: only records polled under it are handed out."""
        self._first: dict[int, int] = {}
        self._twice: dict[int, int] = {}
        self._sought: set[int] = set()
        """Partitions that were sought among the records of one call of the consumer."""
        self._held = HeldInputs()
        self._stemmed: dict[int, int] = {}
        """Started partitions of which enough is held, with the offset from which they are to be read on."""
        self._listener: Listener | None = None
        self._fatal: KafkaError | None = None
        self._lost: list[InputsLost] = []
        self._unreachable = 0.0
        self.statistics = StatisticsTexts(settings.statistics_ms)
        self._writers = Writers(settings, self.statistics)
        self.counters = self._writers.counters
        watched = self.statistics.of("inputs") | {"error_cb": self._on_error}
        self._consumer = kafka_clients.consumer(input_consumer(settings) | watched)
        self._offsets = CommittedOffsets(settings)
        self._hints = kafka_clients.producer(plain_producer(settings))
        self._restorer = KafkaRestorer(settings)

    @property
    def restorer(self) -> KafkaRestorer:
        return self._restorer

    # -- membership ------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> None:
        self._listener = listener
        self.renew()
        self._consumer.subscribe(
            [self._inputs], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
        )

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        # Paused, at a position that is never out of range; `start` seeks to the real one. It is asked for here because
        # a logical position (END) is looked up in the background, and a late answer can override that seek: records
        # were skipped in 1 of 16 starts. Pausing outdates what was fetched before it.
        ends = self._restorer.input_ends([tp.partition for tp in assigned])
        where = [TopicPartition(self._inputs, p, offset) for p, offset in ends.items()]
        if self._eager:
            consumer.assign(where)
        else:
            consumer.incremental_assign(where)
        if where:
            consumer.pause(where)
        partitions = [tp.partition for tp in assigned]
        for partition in partitions:
            self._raise_number(partition)
        self._assigned.update(partitions)
        if self._listener is not None:
            self._listener.assigned(partitions)

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        partitions = [tp.partition for tp in revoked]
        for partition in partitions:
            self._raise_number(partition)
        self._assigned.difference_update(partitions)
        if self._listener is not None:
            self._listener.revoked(partitions)
        if self._eager:
            consumer.unassign()
        else:
            consumer.incremental_unassign(revoked)

    def _raise_number(self, partition: int) -> int:
        self._live.pop(partition, None)
        self._stemmed.pop(partition, None)
        number = self._numbers[partition] = self._numbers.get(partition, 0) + 1
        return number

    def number(self, partition: int) -> int:
        return self._numbers[partition] if partition in self._assigned else 0

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fatal = error
        if error.code() in UNREACHABLE:
            self._unreachable = time.monotonic()
        log.info("consumer: %s", error.str())

    # -- reading ---------------------------------------------------------------------------------------------------

    def poll(self, *, records_max: int, bytes_max: int, wait_ms: int) -> Batch:
        self._hints.poll(0)
        # `consume` waits its whole time when there are fewer records than asked for, so `poll` waits for the first.
        first = self._consumer.poll(0 if self._held else wait_ms / 1000)
        self._sought.clear()
        if first is not None:
            self._take_in((first,), self._live)
            self._drain()
        if self._fatal is not None:
            raise Fatal(f"{self._inputs}: the group refuses this member: {self._fatal.str()}")
        if self._lost:
            raise self._lost.pop()
        records = self._held.take(records_max, bytes_max, self._owned)
        self._read_on()
        return Batch(records, self._member() if records else None)

    def _drain(self) -> None:
        """Everything that librdkafka has: what came last may be of a partition for which nothing else is there."""
        end_s = time.monotonic() + DRAIN_S
        while time.monotonic() < end_s:
            # Callbacks may run in the next call as well, between two of its records: tag with the numbers of before.
            live = dict(self._live)
            messages = self._consumer.consume(DRAIN_RECORDS, 0.0)
            self._sought.clear()
            self._take_in(messages, live)
            if len(messages) < DRAIN_RECORDS:
                break

    def _take_in(self, messages: Iterable[Message], live: Mapping[int, int]) -> None:
        hold, stemmed, first = self._held.append, self._stemmed, self._first
        for message in messages:
            if message.error() is not None:
                self._on_message_error(message)
                continue
            partition: Any = message.partition()
            offset: Any = message.offset()
            number = live.get(partition)
            if number is None or (partition in first and not self._expected(partition, offset)) or partition in stemmed:
                continue
            kind, timestamp_ms = message.timestamp()
            headers: Any = message.headers() or ()
            appended = kind == TIMESTAMP_LOG_APPEND_TIME
            record = Record(partition, offset, message.key(), message.value(), headers, timestamp_ms, appended, number)
            if hold(record) and self._owned(record):
                self._stem(record)

    def _stem(self, last: Record) -> None:
        """Read no further for now. What librdkafka has fetched beyond `last` is outdated by the pause."""
        self._stemmed[last.partition] = last.offset + 1
        with contextlib.suppress(KafkaException):
            self._consumer.pause([TopicPartition(self._inputs, last.partition)])

    def _read_on(self) -> None:
        for partition, offset in list(self._stemmed.items()):
            if self._held.low(partition) and self._read_from(TopicPartition(self._inputs, partition, offset)):
                del self._stemmed[partition]

    def _read_from(self, where: TopicPartition) -> bool:
        try:
            self._consumer.seek(where)
            self._consumer.resume([where])
        except KafkaException as error:
            # The assignment is carried out in the background: for a moment there is nothing to be moved.
            log.debug("%s-%d cannot be started yet: %s", self._inputs, where.partition, error.args[0].str())
            return False
        self._first[where.partition] = where.offset
        self._twice.pop(where.partition, None)
        return True

    def _expected(self, partition: int, offset: int) -> bool:
        """The first record after a start is the one asked for, or the same later one twice (what lies between are
        markers and aborted records). Skipping inputs silently would be the worst of all failures."""
        wanted = self._first[partition]
        if partition in self._sought:
            return False  # fetched before the seek
        if offset != wanted and self._twice.get(partition) != offset:
            log.info("%s-%d: %d was asked for and %d came; reading again", self._inputs, partition, wanted, offset)
            self._twice[partition] = offset
            self._sought.add(partition)
            with contextlib.suppress(KafkaException):  # revoked meanwhile, else the next record asks again
                self._consumer.seek(TopicPartition(self._inputs, partition, wanted))
            return False
        del self._first[partition]
        return True

    def _owned(self, record: Record) -> bool:
        """The rule of ownership numbers; tests show what happens without it."""
        return self._live.get(record.partition) == record.number

    def _member(self) -> Member:
        # "CGMDv2:" generation (int32, little endian) group \0 member \0 ...
        raw: bytes = self._consumer.consumer_group_metadata()
        if raw[:7] != b"CGMDv2:":
            raise Fatal("librdkafka's group metadata has an unknown form; this release of it is not supported")
        generation = int.from_bytes(raw[7:11], "little", signed=True)
        member_id = raw[11:].split(b"\0", 2)[1].decode()
        return Member(member_id, generation, raw)

    def _on_message_error(self, message: Message) -> None:
        error, partition = message.error(), message.partition()
        if error is None:
            return
        if error.code() in _NO_POSITION:
            if partition is not None and partition in self._live:
                self._lost.append(InputsLost(partition, self._lost_text(partition, error)))
        elif error.code() in UNREACHABLE:
            self._unreachable = time.monotonic()
        elif error.code() == KafkaError._MAX_POLL_EXCEEDED or error.code() in PASSING:
            log.warning("%s: %s", self._inputs, error.str())
        elif error.fatal() or error.code() == KafkaError._FATAL:
            raise Fatal(f"{self._inputs}: {error.str()}")
        else:
            log.error("%s-%s: %s", self._inputs, partition, error.str())

    def _lost_text(self, partition: int, error: KafkaError) -> str:
        return (
            f"{self._inputs}-{partition}: the next input is not there ({error.str()}); "
            f"to mend: onepen partition mend {partition}"
        )

    def ahead(self, records_max: int) -> Iterable[Record]:
        return self._held.ahead(records_max)

    def put_back(self, records: Sequence[Record]) -> None:
        self._held.put_back(records)

    def start(self, partition: int, offset: int) -> bool:
        if partition not in self._assigned:
            return False
        number = self._raise_number(partition)
        if not self._read_from(TopicPartition(self._inputs, partition, offset)):
            return False
        self._live[partition] = number
        return True

    def hold(self, partition: int) -> None:
        self._raise_number(partition)
        if partition in self._assigned:
            with contextlib.suppress(KafkaException):
                self._consumer.pause([TopicPartition(self._inputs, partition)])

    @property
    def held(self) -> int:
        """Records that were polled and not handed out yet."""
        return len(self._held)

    # -- writing ---------------------------------------------------------------------------------------------------

    def begin(self, records: int) -> KafkaTransaction:
        return self._writers.begin(records)

    def committed(self, partitions: Sequence[int]) -> dict[int, int | None]:
        try:
            return self._offsets.ask(partitions, COMMITTED_LIMIT_MS / 1000)
        except KafkaException as error:
            self._unreachable = time.monotonic()
            raise Retryable(f"committed offsets: {error.args[0].str()}") from error

    def renew(self) -> None:
        try:
            self._writers.open(Deadline(INIT_LIMIT_MS))
        except Retryable:
            self._unreachable = time.monotonic()
            raise

    def append(self, output: Output) -> None:
        try:
            self._hints.produce(
                output.topic,
                output.value,
                output.key,
                output.partition,
                self._on_hint,
                headers=output.headers or [],  # type: ignore[arg-type]
            )
        except BufferError:
            self._unreachable = time.monotonic()

    def _on_hint(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._unreachable = time.monotonic()
            log.warning("a hint was not written: %s", error.str())

    def unreachable_since(self) -> float:
        return self._unreachable

    def close(self, *, leave: bool) -> None:
        if leave and self._fatal is None:
            self._leave()
        self._consumer.close()
        self._hints.flush(1.0)
        self._writers.close()
        self._restorer.close_all()
        self._offsets.close()

    def _leave(self) -> None:
        """A static member keeps its partitions through `close`. Only `unsubscribe` gives them away, and only when its
        revoke callback has run before `close`: measured, 0.05 s instead of the whole session of 6 s."""
        with contextlib.suppress(KafkaException):
            self._consumer.unsubscribe()
            deadline = Deadline(LEAVE_LIMIT_MS)
            while self._assigned and not deadline.expired:
                self._consumer.poll(0.02)
