"""From an assigned partition to one that may decide: read the state, check it against the offsets, say where to begin.

Rule: a partition starts only when its own partition record and the group's committed offset agree. The target of the
read is the high watermark, read with read_committed until the position passes it; the partition stays paused meanwhile
and the others go on, because one step is at most SLICE_MS long. Standing still behind somebody's open transaction, the
ids of the last writer are initialised, which ends it; standing still for long is told loudly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar

from onepen.schemas.errors import Fatal
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.streams import failpoints
from onepen.streams.core import Core
from onepen.streams.counters import EngineCounters
from onepen.streams.local_archive import Loading, LocalArchives, check_marks, check_position
from onepen.streams.log import Log, Survey
from onepen.streams.state_file import Unusable
from onepen.streams.store import PartitionStore

log = logging.getLogger("onepen.processor.recovery")

S = TypeVar("S")

SLICE_MS: Final = 20
CHUNK_RECORDS: Final = 2_000
STANDS_STILL_MS: Final = 500
NO_PROGRESS_MS: Final = 30_000
STILL_ROUNDS_MAX: Final = 10
"""So often a partition is asked about anew while others run; after that the clients of this process may be at fault."""
_PARTITION: Final = itemgetter(0)


@dataclass(slots=True)
class _Reading(Generic[S]):
    store: PartitionStore[S]
    began_ms: float
    moved_ms: float
    from_start: bool
    surveyed: bool = False
    ended: set[str] = field(default_factory=set)
    """Transactional ids of former writers whose open transactions were ended."""
    still_rounds: int = 0
    records: int = 0
    target: int = 0
    loading: Loading | None = None
    """The archive that is still on its way into the store; nothing is read from the log before."""
    archived: bool = False
    """The state began as a local archive."""
    known_until: int = 0
    """The position of what was known before anything was read."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a partition has been read. `target` is 0 until the brokers have named it."""

    partition: int
    position: int
    target: int
    began_ms: float


class StateDisagrees(Fatal):
    """The partition record and the committed offset differ: a torn transaction, or state that was lost."""


class Recovery(Generic[S]):
    """Partitions that are being read. `mono_ms` is the engine's monotonic clock."""

    def __init__(
        self,
        log_: Log,
        core: Core[S],
        mono_ms: Callable[[], float],
        counters: EngineCounters | None = None,
        archives: LocalArchives | None = None,
    ) -> None:
        self._log = log_
        self._core = core
        self._mono_ms = mono_ms
        self._counters = counters or EngineCounters()
        self._archives = archives
        self._reading: dict[int, _Reading[S]] = {}
        self.busy = False
        """The last step ended because its time was over: more has arrived already."""

    def __bool__(self) -> bool:
        return bool(self._reading)

    def __contains__(self, partition: int) -> bool:
        return partition in self._reading

    def progress(self) -> tuple[Progress, ...]:
        """May be called on any thread."""
        return tuple(
            Progress(partition, reading.store.position, reading.target, reading.began_ms)
            for partition, reading in list(self._reading.items())
        )

    def begin(self, store: PartitionStore[S]) -> None:
        """Read the store's delta; all of it when it is new, from a local archive if there is one."""
        new = store.position == 0 and store.empty
        loading = self._archives.open(store) if self._archives is not None and new else None
        if loading is None:
            self._begin_reading(store)
            return
        now_ms = self._mono_ms()
        self._reading[store.partition] = _Reading(
            store, now_ms, now_ms, from_start=False, loading=loading, archived=True
        )

    def _begin_reading(self, store: PartitionStore[S]) -> None:
        now_ms = self._mono_ms()
        self._log.restorer.open(store.partition, store.position)
        self._reading[store.partition] = _Reading(
            store, now_ms, now_ms, store.position == 0, known_until=store.position
        )

    def _begin_anew(self, partition: int) -> None:
        """All of it, from the brokers."""
        self.cancel(partition)
        self._begin_reading(PartitionStore(partition, self._core))

    def cancel(self, partition: int) -> PartitionStore[S] | None:
        """Stop reading; a store that is returned is right up to its position and may be parked."""
        reading = self._reading.pop(partition, None)
        if reading is None:
            return None
        if reading.loading is not None:
            reading.loading.close()
            return None
        self._log.restorer.close(partition)
        return None if reading.archived else reading.store  # what was not checked yet is loaded again

    def step(self, *, others_run: bool = False) -> tuple[list[PartitionStore[S]], list[tuple[int, Fatal]]]:
        """At most about SLICE_MS of reading. Stores that are whole, and partitions that must not start, with reasons.

        A partition that made no progress for NO_PROGRESS_MS is asked about anew, with an alarm, where `others_run`, up
        to STILL_ROUNDS_MAX times.
        Raises `Fatal` otherwise: nothing is lost by leaving the process, and its clients may be what is at fault.
        """
        self.busy = False
        if self._archives is not None:
            self._archives.sweep()
        if not self._reading:
            return [], []
        now_ms = self._mono_ms()
        self._load(now_ms + SLICE_MS / 2)  # what is read from the brokers meanwhile must not stand still
        failed = self._read(now_ms + SLICE_MS)
        failpoints.at(failpoints.IN_RECOVERY)
        whole: list[PartitionStore[S]] = []
        now_ms = self._mono_ms()
        for partition, reading in list(self._reading.items()):
            if reading.loading is not None:
                continue
            survey = self._log.restorer.survey(partition)
            if self._stands_still(partition, reading, survey, now_ms, others_run):
                continue
            if survey is None or self._out_of_reach(reading, survey) or reading.store.position < survey.state_end:
                continue
            try:
                self._finish(reading, survey, now_ms)
            except StateDisagrees as error:
                if reading.from_start:
                    failed.append((partition, error))
                    self.cancel(partition)
                else:
                    self._doubted(reading, f"does not agree ({error})")
            except Fatal as error:
                failed.append((partition, error))
                self.cancel(partition)
            else:
                self.cancel(partition)
                whole.append(reading.store)
        return whole, failed

    def _load(self, end_ms: float) -> None:
        """Archives first: what is in them need not come over the network."""
        for partition, reading in list(self._reading.items()):
            done: bool | None = False
            while reading.loading is not None and done is False and self._mono_ms() < end_ms:
                try:
                    done = reading.loading.step()
                except Unusable as error:
                    self._doubted(reading, error)
                    break
                if done is not None:
                    self.busy = True
                    reading.moved_ms = self._mono_ms()
            if done and reading.loading is not None:
                reading.loading.close()
                reading.loading = None
                reading.known_until = reading.store.position
                log.info("partition %d: the local archive has %d sessions", partition, reading.store.sessions)
                # From its last record on: it must still be there, or what came after it.
                self._log.restorer.open(partition, max(0, reading.store.position - 1))

    def _doubted(self, reading: _Reading[S], why: object) -> None:
        """What was there before it was read from the log is not trusted any more."""
        partition = reading.store.partition
        if reading.archived and self._archives is not None:
            self._archives.drop(partition, why)
        else:
            log.warning("partition %d: the parked state %s; reading the whole state again", partition, why)
        self._begin_anew(partition)

    def _out_of_reach(self, reading: _Reading[S], survey: Survey) -> bool:
        if reading.from_start:
            return False
        try:
            check_position(reading.known_until, survey)
        except Unusable as error:
            self._doubted(reading, error)
            return True
        return False

    def _read(self, end_ms: float) -> list[tuple[int, Fatal]]:
        failed: list[tuple[int, Fatal]] = []
        restorer = self._log.restorer
        while self._mono_ms() < end_ms:
            found = restorer.read(CHUNK_RECORDS)
            if not found:
                break
            before = dict(self._reading)
            # What arrives of one partition comes in long runs.
            for partition, records in groupby(found, _PARTITION):
                if self._reading.get(partition) is not before.get(partition):
                    continue  # given up, or begun anew, in the middle of what was found
                error = self._apply(partition, list(records))
                if error is not None:
                    failed.append((partition, error))
        else:
            self.busy = True
        now_ms = self._mono_ms()
        for partition, reading in self._reading.items():
            if reading.loading is not None:
                continue
            position = restorer.position(partition)
            if position != reading.store.position:
                reading.store.position = position
                reading.moved_ms = now_ms
        return failed

    def _apply(self, partition: int, records: Sequence[tuple[int, bytes, bytes | None]]) -> Fatal | None:
        reading = self._reading.get(partition)
        if reading is None:
            return None
        reading.records += len(records)
        try:
            if reading.archived and reading.store.mark is not None:
                check_marks(reading.store.mark, records)
            reading.store.restore_all(records)
        except Unusable as unusable:
            self._doubted(reading, unusable)
        except Fatal as error:
            self.cancel(partition)
            return error
        return None

    def _stands_still(
        self, partition: int, reading: _Reading[S], survey: Survey | None, now_ms: float, others_run: bool
    ) -> bool:
        """True when the reading was begun again because nothing moved for NO_PROGRESS_MS."""
        if survey is not None and not reading.surveyed:
            reading.surveyed = True
            reading.target = survey.state_end
            reading.moved_ms = now_ms
        still_ms = now_ms - reading.moved_ms
        if still_ms >= NO_PROGRESS_MS:
            what = "the committed offset is not stable" if survey is None else f"{survey.state_end} is the target"
            why = (
                f"recovery of partition {partition} made no progress for {NO_PROGRESS_MS // 1000} s at position "
                f"{reading.store.position} ({what}). Is a broker away, or a transaction open that nobody ends? "
                "To look: kafka-transactions.sh find-hanging; to mend: kafka-transactions.sh abort"
            )
            if not others_run or reading.still_rounds == STILL_ROUNDS_MAX:
                raise Fatal(why)
            log.error("ALARM recovery_stands_still: %s", why)
            self._begin_reading(self.cancel(partition) or PartitionStore(partition, self._core))
            again = self._reading[partition]
            again.ended, again.still_rounds = reading.ended, reading.still_rounds + 1
            return True
        if still_ms >= STANDS_STILL_MS and (mark := reading.store.mark) is not None:
            known = reading.ended.union(self._log.transactional_ids)
            others = [tid for tid in mark.transactional_ids if tid not in known]
            if others:
                reading.ended.update(others)
                log.info("partition %d stands still; ending what %s left open", partition, others)
                self._log.restorer.end_transactions_of(others)
        return False

    def _finish(self, reading: _Reading[S], survey: Survey, now_ms: float) -> None:
        store = reading.store
        store.next_offset = first_offset(store, survey, self._log.partitions)
        store.committed = survey.committed
        store.rules = self._core.rules(store.policies)
        store.timers.taken_over(now_ms)
        store.timers.clock.seen(survey.newest_ms, now_ms)
        if self._archives is not None:
            self._archives.used(store.partition)
        self._counters.restored += reading.records
        self._counters.recovery_ms.observe(now_ms - reading.began_ms)
        log.info(
            "partition %d: %d sessions, %d records read in %d ms, next input %d",
            store.partition,
            store.sessions,
            reading.records,
            now_ms - reading.began_ms,
            store.next_offset,
        )


def first_offset(store: PartitionStore[Any], survey: Survey, partitions: int) -> int:
    """Where to begin, or `Fatal` saying what does not fit. No automatic reset: nothing is skipped or repeated."""
    where = f"partition {store.partition}"
    mark, committed = store.mark, survey.committed
    if mark is None:
        if committed is not None:
            raise StateDisagrees(
                f"{where}: inputs are committed up to {committed}, but its state has no partition record; "
                f"to look: onepen partition mend {store.partition}"
            )
        if not store.empty:
            raise StateDisagrees(f"{where}: its state has records but no partition record")
        if survey.inputs_start > 0:
            raise Fatal(
                f"{where}: the first {survey.inputs_start} inputs are gone and were never decided; take another "
                "ONEPEN_PREFIX, or restore the state topic"
            )
        return 0
    if mark.protocol > PROTOCOL_VERSION:
        raise Fatal(f"{where}: written under protocol {mark.protocol}; this release speaks {PROTOCOL_VERSION}. Upgrade")
    if mark.partitions != partitions:
        raise Fatal(
            f"{where}: its state was written for {mark.partitions} partitions, configured are {partitions}; "
            f"to mend: set ONEPEN_PARTITIONS={mark.partitions}"
        )
    if committed is not None and committed != mark.next_input_offset:
        raise StateDisagrees(
            f"{where}: torn transaction: committed offset {committed}, partition record {mark.next_input_offset}; "
            f"to mend: onepen partition mend {store.partition}"
        )
    # A group offset that expired is no loss as long as the inputs still reach back.
    begin = mark.next_input_offset
    if survey.inputs_start > begin:
        raise Fatal(
            f"{where}: inputs {begin} to {survey.inputs_start - 1} are gone and were never decided; "
            f"to mend: onepen partition mend {store.partition} --skip-lost"
        )
    if begin > survey.inputs_end:
        raise Fatal(f"{where}: the next input is {begin}, but the inputs end at {survey.inputs_end}. Another topic?")
    return begin
