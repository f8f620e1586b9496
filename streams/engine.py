"""The transactional processor: inputs in, decisions out, each batch in one Kafka transaction with its offsets.

Rule: written against `log.py` only, on one thread. Nothing of a batch is visible, in memory or in the log, before its
transaction is committed. There are three kinds of error and no others: retry the same call (`Retryable`); abort, roll
back and read again (an outcome that is not COMMITTED); leave the process (`Fatal`). A `Fatal` that concerns one
partition stops that partition and says so again and again, while the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from onepen.schemas.errors import Fatal, Poison, Retryable
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.streams import failpoints
from onepen.streams.batch_size import BatchSize, Limits
from onepen.streams.core import Core, DueTimer, SessionKey
from onepen.streams.counters import EngineCounters
from onepen.streams.dead_letters import dead_letter
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.engine_view import View
from onepen.streams.local_archive import LocalArchives
from onepen.streams.log import InputsLost, Log, Member, Outcome, Output, Record, TooLarge, Transaction
from onepen.streams.recovery import Recovery
from onepen.streams.store import MARK_FORMAT, Mark, PartitionStage, PartitionStore

log = logging.getLogger("onepen.processor")

S = TypeVar("S")
T = TypeVar("T")
Position = tuple[int, int]

INSIST_MS: Final = 60_000
NO_COMMIT_MS: Final = 60_000
FAILURES_APART_MS: Final = 20_000
"""Between two transactions that were not committed: nothing was tried meanwhile, so they are not one outage."""
NO_START_MS: Final = 15_000
PARKED_MS: Final = 600_000
ALARM_AGAIN_MS: Final = 60_000
TIMERS_PER_TURN: Final = 250
TIMERS_AWAITED: Final = 500
"""So many timers of all partitions are on their way at most, and no more than two batches hold: what arrives meanwhile
waits behind these only."""
LOOK_RECORDS: Final = 8
"""Between two looks at the clock."""
AHEAD_RECORDS: Final = 2_000
"""Read before their turn at most: some ms, which the brokers need for the records of a large transaction."""
WAIT_MS: Final = 50
WAIT_RECOVERING_MS: Final = 2


class Stop(Protocol):
    def is_set(self) -> bool: ...


class Engine(Generic[S]):
    """Runs on one `Log`. `run` until `stop`; `turn` is one round of the loop, for those who drive it themselves."""

    def __init__(
        self,
        log_: Log,
        core: Core[S],
        settings: EngineSettings,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        archives: LocalArchives | None = None,
    ) -> None:
        self._log = log_
        self._core = core
        self._settings = settings
        self._topics = settings.topics
        self._limits = limits or Limits()
        self._clock = clock
        self._sleep = sleep
        self.counters = EngineCounters()
        self._recovery = Recovery(log_, core, self._mono_ms, self.counters, archives)
        self._running: dict[int, PartitionStore[S]] = {}
        self._whole: dict[int, PartitionStore[S]] = {}
        self._parked: dict[int, PartitionStore[S]] = {}
        self._stopped: dict[int, str] = {}
        self._alarmed_ms = 0.0
        self._suspect: Position | None = None
        self._condemned: Position | None = None
        self._doubted_ms = 0.0
        self._careful = 0
        self._size = BatchSize(self._limits)
        self._failing_since_ms: float | None = None
        self._failed_ms = 0.0
        self._stop: Stop | None = None
        self.decided = 0

    def _mono_ms(self) -> float:
        return self._clock() * 1000

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self, stop: Stop) -> None:
        """Raises `Fatal` when the process has to be left; the log is to be closed by the caller in every case."""
        self._stop = stop
        self._insist(lambda: self._log.subscribe(self))
        while not stop.is_set():
            self.turn()

    def turn(self) -> None:
        """One batch: read, decide on copies, write everything in one transaction, publish when it is committed."""
        self.counters.turned_s = self._clock()
        self._recover()
        try:
            batch = self._log.poll(
                records_max=1 if self._careful else self._size.records,
                bytes_max=self._limits.bytes,
                wait_ms=self._wait_ms(),
            )
        except InputsLost as error:
            return self._stop_partition(error.partition, str(error))
        if batch.records and batch.member is not None:
            failpoints.at(failpoints.AFTER_POLL)
            stages = self._decide(batch.records)
            if stages:
                failpoints.at(failpoints.AFTER_DECIDE)
                began_ms = self._mono_ms()
                self.counters.in_flight = sum(stage.records for stage in stages.values())
                written = self._write(stages, batch.member)
                self.counters.ended(written[0].value, self._mono_ms() - began_ms)
                self._finish(stages, written)
                self.counters.in_flight = 0
        self._fire_timers()
        self._remind()

    def view(self) -> View[S]:
        """May be called on any thread."""
        return View(
            tuple(self._running.values()),
            tuple(self._whole.values()),
            tuple(self._parked.values()),
            self._recovery.progress(),
            dict(self._stopped),
        )

    def _wait_ms(self) -> int:
        if self._recovery or self._whole:
            return 0 if self._recovery.busy else WAIT_RECOVERING_MS
        mono_ms = self._mono_ms()
        wakes = [
            wake
            for store in self._running.values()
            if (wake := store.timers.next_wake_in_ms(mono_ms)) is not None
            and (wake > 0 or self._timers_room(store, mono_ms) > 0)
        ]
        return min([WAIT_MS, *wakes])

    def _decide(self, records: Sequence[Record]) -> dict[int, PartitionStage[S]]:
        """Decide a batch on staged copies; what exceeds the time goes back to the log."""
        self._careful = max(0, self._careful - 1)
        stages: dict[int, PartitionStage[S]] = {}
        # The reading of a state has a slice in every turn, so turns are short meanwhile.
        end_ms = self._mono_ms() + self._limits.work_ms / (3 if self._recovery else 1)
        for index, record in enumerate(records):
            store = self._running.get(record.partition)
            if store is None or record.offset < store.next_offset:
                continue
            stage = stages.get(record.partition)
            if stage is None:
                stage = PartitionStage(store)
            try:
                self._decide_one(stage, record)
            except Fatal as error:
                self._stop_partition(record.partition, f"input {record.offset}: {error}")
                continue
            except Exception as error:
                if not self._judge_culprit(stage, record, error):
                    self._log.put_back(records[index:])
                    break
            stage.took(record)
            stages[record.partition] = stage
            if index % LOOK_RECORDS == 0 and self._mono_ms() >= end_ms and index + 1 < len(records):
                self._log.put_back(records[index + 1 :])
                self._size.was_cut(index + 1)
                break
        return stages

    def _decide_one(self, stage: PartitionStage[S], record: Record) -> None:
        """Everything that follows from one record, into the stage. An exception leaves nothing of it there."""
        if not record.log_append_time:
            raise Fatal("its timestamp was not set by the broker; the inputs topic must have LogAppendTime")
        core = self._core
        if self._condemned is not None and self._condemned == (record.partition, record.offset):
            stage.outputs.append(self._dead_letter(record, "internal_error"))
            return
        try:
            command = core.read(record) if record.command is None else record.command
            key = core.session_key(command)
            if key is None:
                stage.rules, policies = core.admit(stage.rules, command)
                stage.policies |= policies
            else:
                loaded = stage.load(key)
                session, offered = core.decide(stage.rules, loaded.session, command, record, stage.outputs)
                stage.put(key, session, loaded, offered=offered)
        except Poison as poison:
            log.warning("input %d-%d: dead letter: %s", record.partition, record.offset, poison)
            stage.outputs.append(self._dead_letter(record, poison.reason))

    def _judge_culprit(self, stage: PartitionStage[S], record: Record, bug: Exception) -> bool:
        """A bug was met. First: what precedes is committed and the record tried again alone, from its bytes; then it is
        dead-lettered, with an alarm. True when it was."""
        where = (record.partition, record.offset)
        if self._suspect != where:
            self._suspect = where
            self._careful = 1
            record.command = None
            stage.store.forget_decoded()
            log.error("input %d-%d could not be decided; it is tried again alone", *where, exc_info=bug)
            return False
        self._suspect = None
        log.error("ALARM internal_error: input %d-%d cannot be decided and is dead-lettered", *where, exc_info=bug)
        stage.outputs.append(self._dead_letter(record, "internal_error"))
        return True

    def _dead_letter(self, record: Record, reason: str) -> Output:
        self.counters.dead_letters[reason] += 1
        return dead_letter(record, reason, self._topics, self._settings.partitions)

    def _write(self, stages: dict[int, PartitionStage[S]], member: Member) -> tuple[Outcome, Transaction | None]:
        """Outputs, changed state, partition records and offsets in one transaction."""
        if not member.valid:
            log.warning("no commit without a member id and a generation: %s", member)
            return Outcome.ABORTED, None
        try:
            outputs: list[Output] = []
            for stage in stages.values():
                outputs += stage.write(self._core, self._topics.state, self._mark(stage.next_offset))
        except Exception:
            log.exception("a batch could not be encoded")
            return self._single_out(stages), None
        self.counters.transaction_outputs.observe(len(outputs))
        transaction = self._log.begin(len(outputs))
        try:
            transaction.produce(outputs)
            self._read_ahead(min(AHEAD_RECORDS, len(outputs) // 4))
            failpoints.at(failpoints.BEFORE_COMMIT)
            return transaction.commit({p: s.next_offset for p, s in stages.items()}, member), transaction
        except TooLarge as error:
            log.warning("%s", error)
            outcome = self._single_out(stages)
            return transaction.abort() if transaction.open else outcome, transaction

    def _read_ahead(self, records_max: int) -> None:
        """Read what comes next while the brokers take what was produced. Whatever is wrong with a record is met again
        in its turn, where it counts."""
        read = self._core.read
        for record in self._log.ahead(records_max):
            if record.command is None:
                try:
                    record.command = read(record)
                except Exception:
                    continue

    def _single_out(self, stages: dict[int, PartitionStage[S]]) -> Outcome:
        """Nothing was written because of one input, whichever it is: inputs are taken one at a time until it is found,
        and that one is dead-lettered, with an alarm."""
        first = next(iter(stages.values()))
        if len(stages) == 1 and first.records == 1:
            self._condemned = (first.store.partition, first.next_offset - 1)
            log.error("ALARM internal_error: what follows from input %d-%d cannot be written", *self._condemned)
            self._careful = 1
        elif not self._careful:
            self._careful = sum(stage.records for stage in stages.values())
        return Outcome.ABORTED

    def _mark(self, next_offset: int) -> Mark:
        return Mark(
            format=MARK_FORMAT,
            next_input_offset=next_offset,
            protocol=PROTOCOL_VERSION,
            partitions=self._settings.partitions,
            slot=self._settings.slot,
            transactional_ids=self._log.transactional_ids,
        )

    # -- outcomes --------------------------------------------------------------------------------------------------

    def _finish(self, stages: dict[int, PartitionStage[S]], written: tuple[Outcome, Transaction | None]) -> None:
        """Publish what was committed; otherwise learn from the brokers what became of it."""
        outcome, transaction = written
        mono_ms = self._mono_ms()
        if outcome is Outcome.COMMITTED and transaction is not None:
            self._failing_since_ms = None
            self._size.was_committed(sum(stage.records for stage in stages.values()))
            failpoints.at(failpoints.BEFORE_PUBLISH)
            for partition, stage in stages.items():
                self.decided += stage.next_offset - stage.store.next_offset
                position = transaction.positions.get((self._topics.state, partition))
                stage.store.timers.consumed(stage.newest_ms, mono_ms)
                stage.store.publish(stage, position, mono_ms)
            return
        self._size.was_refused()
        end_ms = mono_ms + INSIST_MS
        if self._failing_since_ms is None or mono_ms - self._failed_ms > FAILURES_APART_MS:
            self._failing_since_ms = mono_ms
        elif mono_ms - self._failing_since_ms > NO_COMMIT_MS:
            raise Fatal(f"no transaction was committed for {NO_COMMIT_MS // 1000} s; leaving the process")
        if outcome is Outcome.DOUBT:
            self._doubted_ms = mono_ms
            failpoints.at(failpoints.IN_DOUBT)
            self._insist(self._log.renew, end_ms)
        committed = self._insist(lambda: self._log.committed(list(stages)), end_ms)
        for partition, stage in stages.items():
            if partition in self._running:
                self._settle(stage, committed[partition], outcome)
        self._failed_ms = self._mono_ms()

    def _settle(self, stage: PartitionStage[S], committed: int | None, outcome: Outcome) -> None:
        """One partition after an abort or a doubt.

        Aborted and still at the old offset: the stage is dropped, the inputs are read again. After a doubt the bytes in
        the state topic decide: they are read from before the transaction, and recovery compares the partition record
        with the offset. So a stage that was committed is published by reading it, one that was not leaves no trace,
        and half a transaction stops the partition.
        """
        store = stage.store
        if outcome is Outcome.ABORTED and committed == store.committed:
            log.info("partition %d: rolled back to input %d", store.partition, store.next_offset)
            store.forget_decoded()
            if not self._log.start(store.partition, store.next_offset):
                self._restart(store)
            return
        became = {stage.next_offset: "committed", store.committed: "not committed"}.get(committed, "unclear")
        log.warning("partition %d: %s, offset %s: %s; reading its state", store.partition, outcome, committed, became)
        self._restart(store)

    def _restart(self, store: PartitionStore[S]) -> None:
        self._log.hold(store.partition)
        self._running.pop(store.partition, None)
        if self._log.number(store.partition):
            self._recovery.begin(store)
        else:
            self._park(store)

    def _insist(self, call: Callable[[], T], end_ms: float | None = None) -> T:
        """The same call until it succeeds. Raises `Fatal` behind `end_ms` (INSIST_MS from now), or when the process is
        to stop."""
        end_ms = self._mono_ms() + INSIST_MS if end_ms is None else end_ms
        while True:
            try:
                return call()
            except Retryable as error:
                log.warning("%s", error)
                if self._mono_ms() > end_ms or (self._stop is not None and self._stop.is_set()):
                    raise Fatal(f"leaving the process: {error}") from error
                self._sleep(error.retry_after_ms / 1000)

    # -- ownership -------------------------------------------------------------------------------------------------

    def assigned(self, partitions: Sequence[int]) -> None:
        """`Listener`: read what is missing of the state; the partition is paused until then."""
        log.info("assigned: %s", sorted(partitions))
        failpoints.at(failpoints.IN_ASSIGNED)
        for partition in partitions:
            store = self._parked.pop(partition, None) or PartitionStore(partition, self._core)
            self._recovery.begin(store)
        self.counters.assignments += 1

    def revoked(self, partitions: Sequence[int]) -> None:
        """`Listener`: park the state with its position."""
        log.info("revoked: %s", sorted(partitions))
        failpoints.at(failpoints.IN_REVOKED)
        self.counters.revocations += 1
        for partition in partitions:
            self._stopped.pop(partition, None)
            store = (
                self._running.pop(partition, None)
                or self._whole.pop(partition, None)
                or self._recovery.cancel(partition)
            )
            if store is not None:
                self._park(store)

    def _park(self, store: PartitionStore[S]) -> None:
        store.forget_decoded()
        store.parked_at = self._mono_ms()
        self._parked[store.partition] = store

    def _recover(self) -> None:
        """A slice of reading; partitions whose state is whole begin."""
        whole, failed = self._recovery.step(others_run=bool(self._running))
        for partition, error in failed:
            self._stop_partition(partition, str(error))
        mono_ms = self._mono_ms()
        for store in whole:
            self._whole[store.partition] = store
            store.parked_at = mono_ms
        for partition, store in list(self._whole.items()):
            if self._log.start(partition, store.next_offset):
                self._running[partition] = self._whole.pop(partition)
            elif mono_ms - store.parked_at > NO_START_MS:
                raise Fatal(
                    f"partition {partition} cannot be started at input {store.next_offset}; leaving the process"
                )

    # -- timers and alarms -----------------------------------------------------------------------------------------

    def _fire_timers(self) -> None:
        mono_ms = self._mono_ms()
        unreachable_ms = max(self._doubted_ms, self._log.unreachable_since() * 1000)
        due = [store for store in self._running.values() if store.timers.next_wake_in_ms(mono_ms) == 0]
        for store in due:
            most = min(max(1, TIMERS_PER_TURN // len(due)), self._timers_room(store, mono_ms))
            for key, value in store.timers.take(mono_ms, unreachable_ms, most, self._due_of(store)):
                self._log.append(Output(self._topics.inputs, store.partition, key[1].encode(), value))
                self.counters.timers += 1

    def _timers_room(self, store: PartitionStore[S], mono_ms: float) -> int:
        """How many timers of the partition may be appended now. Each has its share: where one waits behind a backlog,
        its timers do not stop those of the others."""
        share = min(TIMERS_AWAITED, self._size.records) // len(self._running)
        return max(0, max(1, share) - store.timers.awaited(mono_ms))

    def _due_of(self, store: PartitionStore[S]) -> Callable[[SessionKey, int], tuple[Iterable[DueTimer], int]]:
        def due_of(key: SessionKey, now_ms: int) -> tuple[Iterable[DueTimer], int]:
            return self._core.due(store.load(key).session, now_ms)

        return due_of

    def _stop_partition(self, partition: int, why: str) -> None:
        self._log.hold(partition)
        self._running.pop(partition, None)
        self._whole.pop(partition, None)
        self._recovery.cancel(partition)
        self._stopped[partition] = why
        log.error("ALARM partition_stopped: partition %d stands still: %s", partition, why)

    def _remind(self) -> None:
        mono_ms = self._mono_ms()
        if mono_ms - self._alarmed_ms < ALARM_AGAIN_MS:
            return
        self._alarmed_ms = mono_ms
        for partition, why in self._stopped.items():
            log.error("ALARM partition_stopped: partition %d stands still: %s", partition, why)
        for partition, store in list(self._parked.items()):
            if mono_ms - store.parked_at > PARKED_MS:
                del self._parked[partition]
