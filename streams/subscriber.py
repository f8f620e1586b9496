"""Events for readers: by session, run, input, tenant, or all; history first, then live.

Rule: only committed events, each (session, run, seq) once and in order. Where the events of a session join (log to
log, table to log) the hash of the one before is checked, so a gap is an error and never silent. With a dsn the
history comes from PostgreSQL up to the sink's `next_offset` and the rest from the log; without one all from the log.
A subscription only reads: closing it cancels nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

import orjson

from onepen.schemas import codec
from onepen.schemas import events as ev
from onepen.schemas.errors import Fatal, Invalid, Poison, Retryable
from onepen.schemas.events import Event
from onepen.schemas.ids import check_id, output_key
from onepen.schemas.partitioning import partition_of
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import Disposition, Reason, Verdict
from onepen.streams.deadline import Deadline
from onepen.streams.log_tail import CursorAhead, CursorTooOld, LogTail
from onepen.streams.seams import Cursor, Seam, run_seam, session_seam
from onepen.streams.settings import Settings, load_settings

__all__ = ["CursorAhead", "CursorTooOld", "Subscriber", "Subscription", "UnknownRun"]

log = logging.getLogger("onepen.subscriber")

UNKNOWN_AFTER_MS: Final = 10_000
Events = Generator[Event, None, None]
Maker = Callable[[LogTail, Deadline | None], Events]
_ENDS_WITHOUT_A_RUN = frozenset(Disposition) - {Disposition.CONSUMED}
_OF_ANOTHER_RECORD = frozenset({Reason.TOO_OLD, Reason.FROM_THE_FUTURE, Reason.TOO_MANY_INPUTS, Reason.INPUT_ID_REUSED})
"""Refusals of a record that did not take the id: another record with it may have been accepted, or may be yet."""
_NAMES_INPUT = (ev.RUN_STARTED, ev.INPUT_STEERED, ev.INPUT_APPLIED, ev.INPUT_CARRIED_OVER)


class UnknownRun(Invalid):
    """No such run in the log, and none appeared in time."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="run_id")


class Subscription(Iterator[Event]):
    """Iterate it; it ends by itself where its maker says so. Close it (or use `with`) when leaving earlier.

    One thread iterates; any thread may close it.
    """

    def __init__(self, tail: LogTail, events: Events):
        self._tail = tail
        self._events = events
        # Re-entrant: a signal handler may close what this very thread iterates.
        self._lock = threading.RLock()
        self._reading = False
        self.cursor: Cursor | None = None
        """(run_no, seq) of the last event given out: `after=` of the next subscription to the same session."""

    @property
    def offsets(self) -> dict[int, int]:
        """Next offset by partition of the events topic: `offsets=` of the next subscription to the same."""
        return {
            partition: offset for (topic, partition), offset in self._tail.next_offsets.items()
            if topic.endswith(".events")
        }  # fmt: skip

    def __next__(self) -> Event:
        with self._lock:
            self._reading = True
        try:
            event = next(self._events)
        except BaseException:
            self._tail.stopping.set()
            raise
        finally:
            with self._lock:
                self._reading = False
                self._close_stopped()
        self.cursor = (event.run_no, event.seq)
        return event

    def close(self) -> None:
        """Stop reading: the iteration ends, also one that waits in another thread. Nothing in the log changes by it."""
        with self._lock:
            self._tail.stopping.set()
            self._close_stopped()

    def _close_stopped(self) -> None:
        """Whoever reads closes when the reading is over; nobody else may touch what it reads."""
        if self._tail.stopping.is_set() and not self._reading:
            self._events.close()
            self._tail.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Subscriber:
    """Makes subscriptions for one tenant. `timeout_ms` of a subscription bounds all of it (`DeadlineExpired`)."""

    def __init__(
        self,
        bootstrap: str | None = None,
        *,
        tenant_id: int | None = None,
        prefix: str | None = None,
        dsn: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._settings = settings or load_settings(bootstrap=bootstrap, tenant_id=tenant_id, prefix=prefix, dsn=dsn)
        self._topic = self._settings.topics.events

    def run(
        self,
        run_id: str,
        *,
        session_id: str | None = None,
        after_seq: int = 0,
        timeout_ms: int | None = None,
        unknown_after_ms: int = UNKNOWN_AFTER_MS,
    ) -> Subscription:
        """The events of one run, to its `run.finished`. `session_id` saves searching all partitions.

        Raises `UnknownRun` when it is not in the log and does not appear within `unknown_after_ms`.
        """
        check_id(run_id, "run_id")
        if session_id is not None:
            check_id(session_id, "session_id")

        def events(tail: LogTail, deadline: Deadline | None) -> Events:
            partitions = self._partitions(tail, session_id)
            seam = run_seam(self._settings, partitions, run_id, after_seq, deadline)
            if not seam.complete:
                places = partitions if seam.partition is None else [seam.partition]
                tail.open({(self._topic, p): seam.starts.get(p) for p in places})
            records = self._read(tail, deadline)
            return run_events(seam, records, tail, run_id, after_seq, unknown_after_ms)

        return self._subscription(events, timeout_ms)

    def session(
        self,
        session_id: str,
        *,
        after: Cursor | Event | None = None,
        follow: bool = True,
        timeout_ms: int | None = None,
    ) -> Subscription:
        """The events of a session after a cursor, in order. Without `follow` it ends at what was there.

        Raises `CursorTooOld` (with the earliest kept) and `CursorAhead` (with the head) for a cursor that names
        no event, so a reader re-synchronises knowingly.
        """
        key = output_key(self._settings.tenant_id, check_id(session_id, "session_id"))

        def events(tail: LogTail, deadline: Deadline | None) -> Events:
            (partition,) = self._partitions(tail, session_id)
            at = (after.run_no, after.seq) if isinstance(after, Event) else (after or (0, 0))
            seam = session_seam(self._settings, partition, session_id, at, deadline)
            tail.open({(self._topic, partition): seam.starts.get(partition)})
            return session_events(seam, self._read(tail, deadline, key), tail, after, follow)

        return self._subscription(events, timeout_ms)

    def input(self, input_id: str, *, session_id: str | None = None, timeout_ms: int | None = None) -> Subscription:
        """The events that one input led to: of the run it started or was applied to, to that run's end.

        Ends without an event when the input was refused, withdrawn, discarded, expired, or asked for no run.
        """
        check_id(input_id, "input_id")

        def events(tail: LogTail, deadline: Deadline | None) -> Events:
            partitions = self._partitions(tail, session_id)
            receipts = self._settings.topics.receipts
            places = [(topic, p) for topic in (self._topic, receipts) for p in partitions]
            tail.open(dict.fromkeys(places))
            return input_events(self._read(tail, deadline, receipts_too=True), tail, input_id)

        return self._subscription(events, timeout_ms)

    def tenant(
        self,
        *,
        offsets: Mapping[int, int] | None = None,
        follow: bool = True,
        timeout_ms: int | None = None,
    ) -> Subscription:
        """All events of this tenant. `offsets` by partition; partitions without one begin at the first kept."""
        return self._everything(offsets, follow, timeout_ms, self._settings.tenant_id)

    def all(
        self,
        *,
        offsets: Mapping[int, int] | None = None,
        follow: bool = True,
        timeout_ms: int | None = None,
    ) -> Subscription:
        """All events of all tenants. In order within a session; between sessions as the partitions bring them."""
        return self._everything(offsets, follow, timeout_ms, None)

    def _everything(
        self, offsets: Mapping[int, int] | None, follow: bool, timeout_ms: int | None, tenant_id: int | None
    ) -> Subscription:
        def events(tail: LogTail, deadline: Deadline | None) -> Events:
            partitions = self._partitions(tail, None)
            for partition in offsets or {}:
                if partition not in partitions:
                    raise Invalid(f"offsets: {self._topic} has no partition {partition}", field="offsets")
            tail.open({(self._topic, p): (offsets or {}).get(p) for p in partitions})
            return every_event(self._read(tail, deadline), tail, follow, tenant_id)

        return self._subscription(events, timeout_ms)

    def _subscription(self, events: Maker, timeout_ms: int | None) -> Subscription:
        deadline = None if timeout_ms is None else Deadline(timeout_ms)
        tail = LogTail(self._settings, deadline)
        try:
            return Subscription(tail, events(tail, deadline))
        except BaseException as error:
            tail.close()
            if isinstance(error, Retryable) and deadline is not None:
                deadline.check(f"subscription ({error})")
            raise

    def _partitions(self, tail: LogTail, session_id: str | None) -> list[int]:
        count = tail.count(self._topic)
        return list(range(count)) if session_id is None else [partition_of(session_id.encode(), count)]

    def _read(
        self,
        tail: LogTail,
        deadline: Deadline | None,
        key: bytes | None = None,
        *,
        receipts_too: bool = False,
    ) -> Iterator[Event | Receipt | None]:
        """Decoded records; None whenever there was none for a moment, so that callers can look at the time."""
        mine = f"{self._settings.tenant_id}/".encode()
        while not tail.stopping.is_set():
            if deadline is not None:
                deadline.check("subscription")
            message = tail.poll()
            if message is None:
                yield None
                continue
            found = message.key() or b""
            if (key is not None and found != key) or (receipts_too and not found.startswith(mine)):
                continue
            try:
                record = codec.decode(message.value())
            except Poison as error:
                where = f"{message.topic()}[{message.partition()}]:{message.offset()}"
                raise Fatal(f"{where} is not a record of ours ({error}); a newer version wrote it? Upgrade") from None
            if isinstance(record, Event | Receipt):
                yield record


def run_events(
    seam: Seam,
    records: Iterator[Event | Receipt | None],
    tail: LogTail,
    run_id: str,
    after_seq: int,
    unknown_after_ms: int,
) -> Events:
    """Events of `run_id` with seq beyond `after_seq`, to its end: those of the tables first."""
    waiting: Deadline | None = None
    last = seam.last
    yield from seam.events
    if last is not None and last.type == ev.RUN_FINISHED:
        if last.seq < after_seq:
            raise CursorAhead(f"after: run {run_id} ended with seq {last.seq}", head=last.seq)
        return
    for record in records:
        if isinstance(record, Event) and record.run_id == run_id:
            if last is not None and not follows(last, record):
                continue
            last = record
            if record.seq > after_seq:
                yield record
            if record.type == ev.RUN_FINISHED:
                if record.seq < after_seq:
                    raise CursorAhead(f"after: run {run_id} ended with seq {record.seq}", head=record.seq)
                return
        elif record is None and last is None and tail.caught_up:
            waiting = waiting or Deadline(unknown_after_ms)
            if waiting.expired:
                raise UnknownRun(f"run_id: no run {run_id} in the log")


def session_events(
    seam: Seam,
    records: Iterator[Event | Receipt | None],
    tail: LogTail,
    after: Cursor | Event | None,
    follow: bool,
) -> Events:
    """Events of one session beyond the cursor: those of the tables first, then the log's.

    The cursor is judged by the first event beyond it, or by the end when there is none.
    """
    at = (after.run_no, after.seq) if isinstance(after, Event) else (after or (0, 0))
    last = seam.last
    judged = at == (0, 0) or seam.judged
    if not judged and seam.events:
        judge_cursor(at, after, seam.before, seam.events[0], False)
        judged = True
    yield from seam.events
    for record in records:
        if isinstance(record, Event):
            if last is not None and not follows(last, record):
                continue
            if (record.run_no, record.seq) > at:
                if not judged:
                    judge_cursor(at, after, last, record, any(kept.first > 0 for kept in tail.kept.values()))
                    judged = True
                yield record
            last = record
        elif record is None and tail.caught_up:
            if not judged:
                head = (0, 0) if last is None else (last.run_no, last.seq)
                if at > head and not (at[1] == 0 and at[0] <= head[0] + 1):
                    raise CursorAhead(f"after: the session's last event is {head[0]}/{head[1]}", head=head)
                judged = True
            if not follow:
                return


def judge_cursor(at: Cursor, after: object, last: Event | None, first: Event, removed: bool) -> None:
    """`first` is the first event beyond the cursor, `last` the one before it in what is kept."""
    if last is not None and (last.run_no, last.seq) == at:
        return
    place = (first.run_no, first.seq)
    if place in ((at[0], at[1] + 1), (at[0] + 1, 1) if at[1] == 0 else None):
        return
    if isinstance(after, Event) and first.prev_hash == after.hash:
        return
    if last is None and removed:
        raise CursorTooOld(f"after: the session's events are kept from {place[0]}/{place[1]} on", earliest=place)
    head = (0, 0) if last is None else (last.run_no, last.seq)
    raise CursorAhead(f"after: there is no event {at[0]}/{at[1]}; the next is {place[0]}/{place[1]}", head=head)


def follows(last: Event, event: Event) -> bool:
    """False for a repeat; raises `Fatal` when something is missing between the two."""
    if (event.run_no, event.seq) <= (last.run_no, last.seq):
        return False
    if event.prev_hash != last.hash:
        raise Fatal(
            f"session {event.session_id}: something is missing or changed between event {last.run_no}/{last.seq} "
            f"and {event.run_no}/{event.seq} (the hash of the one before differs)"
        )
    return True


class _Fate:
    """What the receipts say of one input: those of the record that took its id decide, each other record's does not."""

    def __init__(self, input_id: str) -> None:
        self._input_id = input_id
        self._decides: tuple[int, int] | None = None
        self._turned_away = False
        self._over = False
        self.promised: set[str] = set()

    def take(self, receipt: Receipt) -> None:
        mine = receipt.kind == "input" and receipt.input_id == self._input_id
        if not mine or receipt.verdict == Verdict.DUPLICATE:
            return
        if receipt.reason in _OF_ANOTHER_RECORD:
            self._turned_away = True
            return
        self._decides = self._decides or (receipt.partition, receipt.offset)
        if (receipt.partition, receipt.offset) != self._decides:
            return
        self._over = self._over or receipt.disposition in _ENDS_WITHOUT_A_RUN
        if receipt.verdict == Verdict.STEERED and receipt.run_id is not None:
            self.promised.add(receipt.run_id)

    def over(self, all_read: bool) -> bool:
        """No run will come of it. That no record took the id is known when all was read."""
        return self._over or (all_read and self._turned_away and self._decides is None)


def input_events(records: Iterator[Event | Receipt | None], tail: LogTail, input_id: str) -> Events:
    """Events of the runs that the input touched, from the one that names it on.

    Receipts and events are topics of their own: a receipt may come first. One that says `steered` promises events of
    its run, so its end is waited for.
    """
    fate = _Fate(input_id)
    runs: set[str] = set()
    finished: set[str] = set()
    consumed: set[str] = set()
    for record in records:
        if isinstance(record, Receipt):
            fate.take(record)
        elif isinstance(record, Event):
            if record.type in _NAMES_INPUT and _input_of(record) == input_id:
                runs.add(record.run_id)
                if record.type in (ev.RUN_STARTED, ev.INPUT_APPLIED):
                    consumed.add(record.run_id)
            if record.run_id in runs:
                yield record
                if record.type == ev.RUN_FINISHED:
                    runs.discard(record.run_id)
                    finished.add(record.run_id)
                    if record.run_id in consumed:
                        return
        if not runs and fate.promised <= finished and fate.over(record is None and tail.caught_up):
            return


def _input_of(event: Event) -> Any:
    return orjson.loads(event.payload).get("inputId")


def every_event(
    records: Iterator[Event | Receipt | None], tail: LogTail, follow: bool, tenant_id: int | None
) -> Events:
    """All events; a repeat of a (session, run, seq) is dropped and a gap is an error."""
    last: dict[tuple[int, str], Event] = {}
    for record in records:
        if isinstance(record, Event):
            session = (record.tenant_id, record.session_id)
            before = last.get(session)
            if before is not None and not follows(before, record):
                continue
            last[session] = record
            if tenant_id is None or record.tenant_id == tenant_id:
                yield record
        elif record is None and tail.caught_up and not follow:
            return
