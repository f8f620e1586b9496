"""Defects put into the product, each of which has to turn worlds red: what the simulator can see, and that it looks.

Each is a context manager; the test plays seeds until one is red.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import msgspec

from onepen.processors import worker_rules
from onepen.schemas.statuses import Reason
from onepen.sinks.postgres import writer
from onepen.streams import recovery
from onepen.streams.core import SessionCore
from onepen.streams.engine import Engine
from onepen.streams.log import Member, Outcome
from onepen.streams.memory import MemoryLog, MemoryRestorer, MemoryTransaction
from onepen.streams.store import PartitionStore
from onepen.streams.worker.machine import Machine
from tests.simulation.whole_database import Database
from tests.simulation.whole_workers import Target


@contextlib.contextmanager
def published_before_the_commit() -> Iterator[None]:
    """The engine publishes what it staged whatever becomes of the transaction; an abort is not rolled back."""
    whole = Engine._finish

    def careless(self: Any, stages: Any, written: Any) -> None:
        outcome, transaction = written
        if outcome is Outcome.ABORTED and transaction is not None:
            written = Outcome.COMMITTED, transaction
        whole(self, stages, written)

    with mock.patch.object(Engine, "_finish", careless):
        yield


@contextlib.contextmanager
def doubt_taken_for_a_commit() -> Iterator[None]:
    """An EndTxn without an answer is believed to have been carried out."""
    whole = MemoryTransaction.commit

    def careless(self: Any, offsets: Mapping[int, int], member: Member) -> Outcome:
        outcome = whole(self, offsets, member)
        return Outcome.COMMITTED if outcome is Outcome.DOUBT else outcome

    with mock.patch.object(MemoryTransaction, "commit", careless):
        yield


@contextlib.contextmanager
def doubt_not_read() -> Iterator[None]:
    """What librdkafka's log says of a silently repeated EndTxn is not looked at; the first copy ends another one."""
    whole = MemoryLog.__init__

    def careless(self: Any, *args: Any, **more: Any) -> None:
        whole(self, *args, **more)
        self.reads_doubt = False

    with mock.patch.object(MemoryLog, "__init__", careless):
        yield


@contextlib.contextmanager
def ownership_numbers_ignored() -> Iterator[None]:
    """Records polled before a revocation, or before a seek, are handed out behind it."""
    with mock.patch.object(MemoryLog, "_owned", return_value=True):
        yield


@contextlib.contextmanager
def recovery_reads_what_is_not_committed() -> Iterator[None]:
    """A new owner takes records of open and of aborted transactions for state."""
    whole = MemoryRestorer.read

    def careless(self: Any, records_max: int) -> Any:
        log = self._log
        reader = mock.Mock(wraps=self._broker, reachable=self._broker.reachable)
        reader.visible = lambda *a, **k: log.broker.visible(*a, **{**k, "committed": False})
        reader.stable_end = log.broker.end
        with mock.patch.object(self, "_broker", reader):
            return whole(self, records_max)

    with mock.patch.object(MemoryRestorer, "read", careless):
        yield


@contextlib.contextmanager
def parked_state_not_read_on() -> Iterator[None]:
    """A partition that comes back is taken up as it was parked, and its record is not compared with the offset."""
    whole = Engine.assigned

    def careless(self: Any, partitions: Any) -> None:
        for partition in partitions:
            if partition in self._parked:
                self._parked[partition].position = self._log.broker.end(self._topics.state, partition)
        whole(self, partitions)

    def blind(store: Any, survey: Any, partitions: int) -> int:
        return int(survey.committed or 0)

    with mock.patch.object(Engine, "assigned", careless), mock.patch.object(recovery, "first_offset", blind):
        yield


@contextlib.contextmanager
def event_dropped() -> Iterator[None]:
    """Now and then the last event of a decision is not written."""
    whole = SessionCore._outputs

    def careless(self: Any, session: Any, decision: Any, partition: int) -> Any:
        found = whole(self, session, decision, partition)
        lost = bool(decision.events) and decision.events[-1].seq % 7 == 0
        return [one for one in found if not (lost and one.value == decision.event_bytes[-1])]

    with mock.patch.object(SessionCore, "_outputs", careless):
        yield


@contextlib.contextmanager
def any_generation_may_write() -> Iterator[None]:
    """Reports of a worker that lost its lease are taken."""
    whole = worker_rules._no_right

    def careless(turn: Any, record: Any) -> Reason | None:
        found = whole(turn, record)
        return None if found in (Reason.STALE_GENERATION, Reason.NOT_OWNER) else found

    with mock.patch.object(worker_rules, "_no_right", careless):
        yield


@contextlib.contextmanager
def worker_deaf_to_the_loss_of_its_lease() -> Iterator[None]:
    """A worker goes on renewing whatever it is told."""
    whole = Machine._end

    def careless(self: Any, reason: str) -> None:
        if reason == Reason.RECORDED:
            whole(self, reason)

    with mock.patch.object(Machine, "_end", careless):
        yield


@contextlib.contextmanager
def sink_without_the_fence() -> Iterator[None]:
    """The sink moves its position whoever owns the partition by now."""
    whole = Database.__init__

    def careless(self: Any, *args: Any) -> None:
        whole(self, *args)
        self.fenced = False

    with mock.patch.object(Database, "__init__", careless):
        yield


@contextlib.contextmanager
def sink_takes_a_lost_batch_for_written() -> Iterator[None]:
    """A batch whose outcome is unknown counts as done."""

    async def careless(connection: Any, slices: Any, written: Any) -> list[Any]:
        written.done.update(part.place for part in slices)
        return []

    whole, whole_wait = writer.Writer.write, writer.Writer._wait_out
    writing: set[int] = set()

    async def wait_out(self: Any, error: Exception) -> None:
        if id(self) not in writing:
            return await whole_wait(self, error)
        self._connection = None
        raise _Believed

    async def write(self: Any, slices: Any) -> Any:
        writing.add(id(self))
        try:
            return await whole(self, slices)
        except _Believed:
            return writer.Written(done={part.place for part in slices})
        finally:
            writing.discard(id(self))

    with (
        mock.patch.object(writer, "_still_waiting", careless),
        mock.patch.object(writer.Writer, "_wait_out", wait_out),
        mock.patch.object(writer.Writer, "write", write),
    ):
        yield


class _Believed(Exception):
    pass


@contextlib.contextmanager
def record_of_the_state_forgotten() -> Iterator[None]:
    """Tombstones of the state are not applied when they are read back."""
    whole = PartitionStore.restore

    def careless(self: Any, key: bytes, value: bytes | None) -> None:
        if value is not None:
            whole(self, key, value)

    with mock.patch.object(PartitionStore, "restore", careless):
        yield


@contextlib.contextmanager
def permits_outlive_their_time() -> Iterator[None]:
    """A worker begins an action however old its permit is, and shows the target neither deadline nor token."""

    def careless(self: Any, ticket: Any, name: str, key: str, now: Any) -> Any:
        action = self.actions.get((name, key))
        return None if action is None else msgspec.structs.replace(action, deadline_ms=1 << 60)

    with mock.patch.object(Machine, "permit", careless), mock.patch.object(Target, "_fence", return_value=True):
        yield


Mutant = Callable[[], contextlib.AbstractContextManager[None]]

QUICK: tuple[Mutant, ...] = (
    published_before_the_commit,
    doubt_taken_for_a_commit,
    recovery_reads_what_is_not_committed,
    record_of_the_state_forgotten,
    ownership_numbers_ignored,
)
"""Those that the first worlds show."""

SLOW: tuple[Mutant, ...] = (
    doubt_not_read,
    parked_state_not_read_on,
    event_dropped,
    any_generation_may_write,
    worker_deaf_to_the_loss_of_its_lease,
    sink_without_the_fence,
    sink_takes_a_lost_batch_for_written,
    permits_outlive_their_time,
)

MUTANTS = (*QUICK, *SLOW)
