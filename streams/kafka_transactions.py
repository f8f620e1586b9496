"""Two transactional producers used in turn, and what is known about how a transaction ended.

Rule: a return value alone is never believed. librdkafka 2.16 repeats EndTxn silently after a disconnect or a time-out,
and the late first copy may end the NEXT transaction of the same producer. So an outcome is certain only when the call
succeeded within its limit and the producer's own log shows no lost connection and no unanswered request since `begin`.
Everything else is `DOUBT`: `renew` replaces both producers under the same ids, which fences every late copy.

Two are used in turn because the coordinator still writes the markers of one transaction while the next begins; the
next begins only after the EndTxn of the previous one was acknowledged, so they never overlap.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from onepen.schemas.errors import Fatal, Retryable
from onepen.streams import failpoints, kafka_clients
from onepen.streams.bounded_calls import BoundedCalls, NotReturned
from onepen.streams.counters import LogCounters
from onepen.streams.deadline import Deadline
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import COMMIT_LIMIT_MS, DoubtLogger, transactional_producer
from onepen.streams.kafka_errors import kafka_exception
from onepen.streams.kafka_statistics import StatisticsTexts
from onepen.streams.log import TX_HEADER, Member, Outcome, Output, TooLarge

log = logging.getLogger("onepen.processor.transactions")

INIT_SLICE_MS: Final = 2_000
FULL_WAIT_S: Final = 0.01
_COMMIT_S: Final = COMMIT_LIMIT_MS / 1000
_HUNG_S: Final = 1.0
_REASONS: Final[Mapping[str, str]] = {"FAIL": "disconnected", "REQTMOUT": "request_timed_out"}


class Writer:
    """One transactional producer with the logger in which its doubts are read."""

    def __init__(
        self, settings: EngineSettings, transactional_id: str, instance: str, statistics: StatisticsTexts
    ) -> None:
        self.transactional_id = transactional_id
        self.stamp = f"{transactional_id}:{instance}"
        self.logger = DoubtLogger(transactional_id)
        watched = statistics.of(transactional_id.rpartition(".")[2])
        self.producer = kafka_clients.producer(
            transactional_producer(settings, transactional_id) | watched, logger=self.logger
        )
        self.count = 0
        self.calls = BoundedCalls(f"tx-{transactional_id.rpartition('.')[2]}")

    def initialise(self, deadline: Deadline) -> None:
        """`init_transactions`: ends what a predecessor left open. Raises `Retryable` when the time is over, and `Fatal`
        when the call does not return: it goes on for ever in the background and would fence a successor."""
        while True:
            limit_s = min(INIT_SLICE_MS, max(1, deadline.remaining_ms())) / 1000
            try:
                self.bounded(limit_s, self.producer.init_transactions)
            except NotReturned as error:
                raise Fatal(f"{self.transactional_id}: init_transactions: {error}; leaving the process") from error
            except KafkaException as error:
                cause = error.args[0]
                if deadline.expired or not cause.retriable():
                    raise Retryable(f"{self.transactional_id}: cannot be initialised: {cause.str()}") from error
            else:
                self.serve()
                return

    def serve(self, wait_s: float = 0.0) -> list[str]:
        """The doubtful lines of the log so far; forwards what is queued, or what comes within the time. Costs 5 µs."""
        try:
            self.producer.poll(wait_s)
        except (KafkaException, SystemError) as error:
            self.logger.lines.append(f"FATAL {kafka_exception(error)}")
        return self.logger.lines

    def bounded(self, limit_s: float, call: Callable[..., Any], *arguments: Any) -> None:
        """`call(*arguments, limit_s)` of the producer, which ends a little behind that limit whatever the library does.
        Raises `KafkaException`, or `NotReturned`: then the producer is left behind as it is."""
        try:
            self.calls.call(lambda: call(*arguments, limit_s), limit_s + _HUNG_S)
        except SystemError as error:
            raise kafka_exception(error) from error

    def drop(self) -> None:
        """Give the producer up without ending its transaction: a successor under the same id does that."""
        self.calls.close()
        with contextlib.suppress(KafkaException):
            # Waiting for the library's own threads would have no limit, and this may be the producer that hangs.
            self.producer.purge(blocking=False)


class KafkaTransaction:
    """See `log.Transaction`."""

    def __init__(self, writer: Writer, inputs: str, records: int, counters: LogCounters) -> None:
        self._writer = writer
        self._counters = counters
        self._inputs = inputs
        self._records = records
        self._index = 0
        self.open = True
        self._failed: KafkaError | None = None
        self._positions: dict[tuple[str, int], int] = {}
        writer.serve()
        writer.logger.lines.clear()
        writer.count += 1
        self._stamp = f"{writer.stamp}:{writer.count}:"
        self._tail = f"/{records}"
        try:
            writer.producer.begin_transaction()
        except KafkaException as error:
            self._failed = error.args[0]

    @property
    def positions(self) -> Mapping[tuple[str, int], int]:
        return self._positions

    def produce(self, outputs: Sequence[Output]) -> None:
        produce, strike = self._writer.producer.produce, failpoints.strike
        for output in outputs:
            if self._failed is not None:
                return
            stamp = (TX_HEADER, f"{self._stamp}{self._index}{self._tail}".encode())
            self._index += 1
            headers = [stamp] if output.headers is None else [*output.headers, stamp]
            callback = self._delivered if output.track else None
            while True:
                try:
                    # By place: names cost a fifth of the call.
                    produce(output.topic, output.value, output.key, output.partition, callback, None, 0, headers)  # type: ignore[arg-type]
                    break
                except BufferError:
                    self._writer.serve(FULL_WAIT_S)
                except KafkaException as error:
                    cause = error.args[0]
                    if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                        raise TooLarge(f"{output.topic}: a record of {len(output.value or b'')} bytes") from error
                    self._failed = cause
                    break
            if strike is not None:
                strike(failpoints.AFTER_PRODUCE)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if error is None and topic is not None and partition is not None and offset is not None:
            self._positions[topic, partition] = offset + 1

    def commit(self, offsets: Mapping[int, int], member: Member) -> Outcome:
        if self._index != self._records and self._failed is None:
            raise ValueError(f"a transaction announced with {self._records} records has {self._index}")
        if not member.valid:
            raise ValueError("a commit needs a member id and a generation")
        if self._failed is not None:
            return self._give_up(self._failed)
        try:
            failed = self._send_offsets(offsets, member)
        except NotReturned as error:
            return self._hung("send_offsets", error)
        if failed is not None:
            return self._give_up(failed)
        failpoints.at(failpoints.AFTER_SEND_OFFSETS)
        self.open = False
        try:
            self._writer.bounded(_COMMIT_S, self._writer.producer.commit_transaction)
        except NotReturned as error:
            return self._hung("commit", error)
        except KafkaException as error:
            cause = error.args[0]
            if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                return self._give_up(cause)
            return self._doubt(f"commit: {cause.str()}", f"commit_{cause.name()}")
        failpoints.at(failpoints.AFTER_COMMIT)
        return self._believe(Outcome.COMMITTED)

    def _send_offsets(self, offsets: Mapping[int, int], member: Member) -> KafkaError | None:
        positions = [TopicPartition(self._inputs, p, offset) for p, offset in offsets.items()]
        deadline = Deadline(COMMIT_LIMIT_MS)
        while True:
            try:
                self._writer.bounded(
                    _COMMIT_S, self._writer.producer.send_offsets_to_transaction, positions, member.raw
                )
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if not cause.retriable() or deadline.expired:
                    return cause
            else:
                return None

    def abort(self) -> Outcome:
        self.open = False
        try:
            self._writer.bounded(_COMMIT_S, self._writer.producer.abort_transaction)
        except NotReturned as error:
            return self._hung("abort", error)
        except KafkaException as error:
            return self._doubt(f"abort: {error.args[0].str()}", f"abort_{error.args[0].name()}")
        return self._believe(Outcome.ABORTED)

    def _give_up(self, cause: KafkaError) -> Outcome:
        log.warning("transaction %s given up: %s", self._stamp, cause.str())
        if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            # Found while the records were delivered: EndTxn was not sent yet.
            self.open = True
            raise TooLarge(cause.str())
        if cause.fatal():
            return self._doubt(cause.str(), cause.name())
        self._counters.aborts[cause.name()] += 1
        return self.abort()

    def _believe(self, outcome: Outcome) -> Outcome:
        lines = self._writer.serve()
        return self._doubt(lines[-1], _REASONS.get(lines[-1].split(" ", 1)[0], "client_error")) if lines else outcome

    def _hung(self, call: str, error: NotReturned) -> Outcome:
        """The producer is left behind as it is; what follows a doubt replaces it."""
        self.open = False
        return self._doubt(f"{call}: {error}", "not_returned")

    def _doubt(self, why: str, reason: str) -> Outcome:
        self._counters.doubts[reason] += 1
        log.warning("transaction %s in doubt: %s", self._stamp, why)
        return Outcome.DOUBT


class Writers:
    """The two producers of a slot."""

    def __init__(self, settings: EngineSettings, statistics: StatisticsTexts) -> None:
        self._statistics = statistics
        self.counters = LogCounters()
        self._settings = settings
        self._started = f"{time.time_ns() // 1_000_000:x}"
        self._instances = 0
        self._turn = 0
        self._writers: list[Writer] = []

    def open(self, deadline: Deadline) -> None:
        """Make and initialise both, in place of those there were. Raises `Retryable`; may be called again."""
        for writer in self._writers:
            writer.drop()
        self._instances += 1
        instance = f"{self._started}.{self._instances}"
        self._writers = [
            Writer(self._settings, tid, instance, self._statistics) for tid in self._settings.transactional_ids
        ]
        # Each waits for its own coordinator; together they take as long as one.
        with ThreadPoolExecutor(max_workers=len(self._writers)) as pool:
            list(pool.map(lambda writer: writer.initialise(deadline), self._writers))

    def begin(self, records: int) -> KafkaTransaction:
        self._turn ^= 1
        return KafkaTransaction(self._writers[self._turn], self._settings.topics.inputs, records, self.counters)

    def serve(self) -> None:
        """Forward the log of idle producers; what it says between transactions casts doubt on nothing."""
        for writer in self._writers:
            writer.serve()

    def close(self) -> None:
        for writer in self._writers:
            writer.drop()
        self._writers = []
