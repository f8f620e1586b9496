"""The log in memory: the shortest correct version, and thereby the specification of `log.py`.

`MemoryBroker` is shared and speaks the old transaction protocol (see there); each `MemoryLog` is one member. One
thread; nothing waits. What `kafka.py` learns from librdkafka's log, this one learns from the broker: a late copy of an
EndTxn is a doubt, unless `reads_doubt` is switched off to show what happens then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from onepen.schemas.errors import Retryable
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.log import (
    TX_HEADER,
    Batch,
    InputsLost,
    Listener,
    Member,
    Outcome,
    Output,
    Record,
    Survey,
    TooLarge,
)
from onepen.streams.memory_broker import MemoryBroker, Refused

__all__ = ["MemoryBroker", "MemoryLog", "MemoryTransaction"]


class MemoryTransaction:
    """See `log.Transaction`."""

    def __init__(self, log: MemoryLog, transactional_id: str, epoch: int, number: int, records: int) -> None:
        self._log = log
        self._broker = log.broker
        self._id, self._epoch = transactional_id, epoch
        self._stamp = f"{transactional_id}:{epoch}:{number}:"
        self._records = records
        self._index = 0
        self._refused: Refused | Retryable | None = None
        self._positions: dict[tuple[str, int], int] = {}
        self.open = True

    @property
    def positions(self) -> Mapping[tuple[str, int], int]:
        return self._positions

    def produce(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if not self._broker.fits(output):
                raise TooLarge(f"{output.topic}: a record of {len(output.value or b'')} bytes")
            stamp = (TX_HEADER, f"{self._stamp}{self._index}/{self._records}".encode())
            self._index += 1
            stamped = Output(output.topic, output.partition, output.key, output.value, [*(output.headers or ()), stamp])
            try:
                offset = self._broker.write(self._id, self._epoch, stamped)
            except (Refused, Retryable) as error:
                self._refused = self._refused or error
                return
            if output.track:
                self._positions[output.topic, output.partition] = offset + 1

    def commit(self, offsets: Mapping[int, int], member: Member) -> Outcome:
        if self._index != self._records and self._refused is None:
            raise ValueError(f"a transaction announced with {self._records} records has {self._index}")
        if not member.valid:
            raise ValueError("a commit needs a member id and a generation")
        try:
            if self._refused is not None:
                raise self._refused
            self._broker.add_offsets(self._id, self._epoch, self._log.group, offsets, member)
        except Refused as error:
            return Outcome.DOUBT if error.fatal else self.abort()
        except Retryable:
            return Outcome.DOUBT
        return self._end(commit=True)

    def abort(self) -> Outcome:
        return self._end(commit=False)

    def _end(self, *, commit: bool) -> Outcome:
        self.open = False
        late = self._broker.late_ends
        try:
            self._broker.end_transaction(self._id, self._epoch, commit=commit)
        except (Refused, Retryable):
            return Outcome.DOUBT
        if self._broker.late_ends > late and self._log.reads_doubt:
            return Outcome.DOUBT
        return Outcome.COMMITTED if commit else Outcome.ABORTED


class MemoryRestorer:
    """See `log.Restorer`."""

    def __init__(self, log: MemoryLog, state: str, inputs: str) -> None:
        self._log, self._broker = log, log.broker
        self._state, self._inputs = state, inputs
        self._positions: dict[int, int] = {}
        self._surveys: dict[int, Survey] = {}

    def open(self, partition: int, position: int) -> None:
        self._positions[partition] = position
        self._surveys.pop(partition, None)

    def close(self, partition: int) -> None:
        self._positions.pop(partition, None)
        self._surveys.pop(partition, None)

    def read(self, records_max: int) -> Sequence[tuple[int, bytes, bytes | None]]:
        found: list[tuple[int, bytes, bytes | None]] = []
        if not self._broker.reachable:
            return found
        for partition, position in self._positions.items():
            room = records_max - len(found)
            arrived = self._broker.visible(self._state, partition, position, records_max=room)
            found += [(partition, entry.key or b"", entry.value) for _, entry in arrived]
            if len(found) >= records_max:
                self._positions[partition] = arrived[-1][0] + 1 if arrived else position
                return found
            self._positions[partition] = self._broker.stable_end(self._state, partition)
        return found

    def position(self, partition: int) -> int:
        return self._positions[partition]

    def survey(self, partition: int) -> Survey | None:
        if partition not in self._surveys:
            try:
                committed = self._broker.committed(self._log.group, partition)
            except Retryable:
                return None
            self._surveys[partition] = Survey(
                committed=committed,
                state_end=self._broker.end(self._state, partition),
                state_start=self._broker.start(self._state, partition),
                inputs_start=self._broker.start(self._inputs, partition),
                inputs_end=self._broker.end(self._inputs, partition),
                newest_ms=self._broker.newest_ms(self._inputs, partition),
            )
        return self._surveys[partition]

    def end_transactions_of(self, transactional_ids: Sequence[str]) -> None:
        for transactional_id in transactional_ids:
            with contextlib.suppress(Retryable):  # nobody waits for it, so nobody is told that it failed
                self._broker.initialise(transactional_id)


class MemoryLog:
    """See `log.Log`. `idle(ms)` is called when a poll finds nothing; a simulation lets its world go on there."""

    def __init__(
        self,
        broker: MemoryBroker,
        settings: EngineSettings,
        *,
        monotonic: Callable[[], float] = lambda: 0.0,
        idle: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.broker = broker
        self.group = settings.group
        self.partitions = settings.partitions
        self.transactional_ids: tuple[str, ...] = settings.transactional_ids
        self.reads_doubt = True
        self._slot = settings.slot
        self._inputs = settings.topics.inputs
        self._monotonic, self._idle = monotonic, idle
        self._restorer = MemoryRestorer(self, settings.topics.state, self._inputs)
        self._listener: Listener | None = None
        self._member_id = ""
        self._generation = -1
        self._numbers: dict[int, int] = {}
        self._assigned: set[int] = set()
        self._live: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._held: deque[Record] = deque()
        self._epochs: dict[str, int] = {}
        self._begun = 0
        self._unreachable = 0.0

    @property
    def restorer(self) -> MemoryRestorer:
        return self._restorer

    def subscribe(self, listener: Listener) -> None:
        self._listener = listener
        self.renew()
        self._member_id = self.broker.join(self.group, self._slot, self.partitions)

    def _serve(self) -> None:
        """What a rebalance does to this member: everything revoked, then its new share assigned."""
        generation, share = self.broker.share(self.group, self._slot, self._member_id)
        if generation < 0:
            # Its session had ended, so what it owned is lost: it joins anew, which is a rebalance.
            self._member_id = self.broker.join(self.group, self._slot, self.partitions)
            generation, share = self.broker.share(self.group, self._slot, self._member_id)
        if generation == self._generation or self._listener is None:
            return
        self._generation = generation
        for partitions, call in (
            (sorted(self._assigned), self._listener.revoked),
            (share, self._listener.assigned),
        ):
            for partition in partitions:
                self._raise_number(partition)
            self._assigned = set() if call == self._listener.revoked else set(partitions)
            if partitions:
                call(partitions)

    def _raise_number(self, partition: int) -> int:
        self._live.pop(partition, None)
        number = self._numbers[partition] = self._numbers.get(partition, 0) + 1
        return number

    def number(self, partition: int) -> int:
        return self._numbers[partition] if partition in self._assigned else 0

    def poll(self, *, records_max: int, bytes_max: int, wait_ms: int) -> Batch:
        try:
            self._serve()
            self._fetch(records_max)
        except Retryable:
            self._unreachable = self._monotonic()
        records = self._take(records_max, bytes_max)
        if not records:
            self._idle(wait_ms)
            return Batch([], None)
        return Batch(records, self._member())

    def _fetch(self, records_max: int) -> None:
        for partition, number in list(self._live.items()):
            if self._next[partition] < self.broker.start(self._inputs, partition):
                self._raise_number(partition)
                raise InputsLost(partition, f"{self._inputs}-{partition}: offset {self._next[partition]} is gone")
            room = records_max - len(self._held)
            for offset, entry in self.broker.visible(self._inputs, partition, self._next[partition], records_max=room):
                self._next[partition] = offset + 1
                append_time = self.broker.append_time(self._inputs)
                self._held.append(
                    Record(
                        partition,
                        offset,
                        entry.key,
                        entry.value,
                        entry.headers,
                        entry.timestamp_ms,
                        append_time,
                        number,
                    )
                )

    def _take(self, records_max: int, bytes_max: int) -> list[Record]:
        taken: list[Record] = []
        size = 0
        while self._held and len(taken) < records_max and size < bytes_max:
            record = self._held.popleft()
            if self._owned(record):
                size += len(record.value or b"") + len(record.key or b"")
                taken.append(record)
        return taken

    def _owned(self, record: Record) -> bool:
        return self._live.get(record.partition) == record.number

    def _member(self) -> Member:
        return Member(self._member_id, self._generation, None)

    def ahead(self, records_max: int) -> Iterable[Record]:
        return list(self._held)[:records_max]

    def put_back(self, records: Sequence[Record]) -> None:
        self._held.extendleft(reversed(records))

    def start(self, partition: int, offset: int) -> bool:
        if partition not in self._assigned:
            return False
        self._live[partition] = self._raise_number(partition)
        self._next[partition] = offset
        return True

    def hold(self, partition: int) -> None:
        self._raise_number(partition)

    def begin(self, records: int) -> MemoryTransaction:
        self._begun += 1
        transactional_id = self.transactional_ids[self._begun % 2]
        return MemoryTransaction(self, transactional_id, self._epochs[transactional_id], self._begun, records)

    def committed(self, partitions: Sequence[int]) -> dict[int, int | None]:
        try:
            return {partition: self.broker.committed(self.group, partition) for partition in partitions}
        except Retryable:
            self._unreachable = self._monotonic()
            raise

    def renew(self) -> None:
        self._epochs = {one: self.broker.initialise(one) for one in self.transactional_ids}

    def append(self, output: Output) -> None:
        if self.broker.reachable:
            self.broker.append(output.topic, output.partition, output.key, output.value, output.headers or ())
        else:
            self._unreachable = self._monotonic()

    def unreachable_since(self) -> float:
        return self._unreachable

    def close(self, *, leave: bool) -> None:
        if leave:
            self.broker.leave(self.group, self._slot, self.partitions)
        if self._listener is not None and self._assigned:
            self._listener.revoked(sorted(self._assigned))
        self._assigned = set()
