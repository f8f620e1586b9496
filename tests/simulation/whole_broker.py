"""The broker in memory as a whole world needs it: transaction time-outs, late copies, compaction, and one link per
process through which its requests are lost, answered too late, or its last ones.

Checked here, because only here it can be seen: a committed transaction is whole and is one transaction, and no
committed input offset ever falls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onepen.schemas.errors import Fatal, Retryable
from onepen.schemas.topics import TopicPlan, Topics
from onepen.streams.log import TX_HEADER, Headers, Member, Output
from onepen.streams.memory_broker import Entry, MemoryBroker, OpenTransaction, Refused
from tests.simulation.whole_time import Timeline

T = TypeVar("T")

TRANSACTION_TIMEOUT_MS = 5_000
SESSION_TIMEOUT_MS = 6_000
_GONE = Entry(None, None, (), 0, marker=True)


class Violation(AssertionError):
    """Something happened that never may."""


class ProcessDied(BaseException):
    """The process is killed at this very instruction: nothing of the product may catch it."""


@dataclass(slots=True)
class _Late:
    """The first copy of an EndTxn whose client has given up waiting for it; it may be carried out at any time."""

    transactional_id: str
    epoch: int
    commit: bool


class Broker(MemoryBroker):
    """`on_records` is told which partitions have new records that readers may see."""

    def __init__(self, plan: Sequence[TopicPlan], topics: Topics, time: Timeline) -> None:
        super().__init__(plan, lambda: time.now_ms)
        self.time = time
        self.topics = topics
        self.on_records: Callable[[str, int], None] = lambda topic, partition: None
        self.late: list[_Late] = []
        self._stamps: dict[str, list[bytes]] = {}

    # -- transactions ----------------------------------------------------------------------------------------------

    def transaction(self, transactional_id: str, epoch: int) -> OpenTransaction:
        known = self._open.get(transactional_id)
        found = super().transaction(transactional_id, epoch)
        if known is None:
            self._stamps[transactional_id] = []
            self.time.after(TRANSACTION_TIMEOUT_MS, lambda: self._expire(found))
        return found

    def _expire(self, transaction: OpenTransaction) -> None:
        if transaction.committed is None:
            self.time.facts["transaction timed out at the broker"] += 1
            self._epochs[transaction.transactional_id] += 1
            self._finish(transaction.transactional_id, commit=False)

    def append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        transaction: OpenTransaction | None = None,
    ) -> int:
        if transaction is not None:
            self._stamps[transaction.transactional_id].append(next(v or b"" for k, v in headers if k == TX_HEADER))
        offset = super().append(topic, partition, key, value, headers, transaction)
        if transaction is None:
            self.on_records(topic, partition)
        return offset

    def _finish(self, transactional_id: str, *, commit: bool) -> None:
        transaction = self._open.get(transactional_id)
        if transaction is None:
            return
        if commit:
            self._check_whole(transactional_id)
            for group, offsets in transaction.offsets.items():
                self._check_forward(group, offsets)
        elif transaction.partitions:
            self.time.facts["aborted transaction with records"] += 1
        super()._finish(transactional_id, commit=commit)
        for topic, partition in transaction.partitions:
            self.on_records(topic, partition)

    def _check_whole(self, transactional_id: str) -> None:
        stamps = [stamp.rpartition(b":") for stamp in self._stamps[transactional_id]]
        heads = {head for head, _, _ in stamps}
        if len(heads) > 1:
            raise Violation(f"I7: one transaction of {transactional_id} has the records of several: {sorted(heads)}")
        for place, (_, _, tail) in enumerate(stamps):
            if tail != b"%d/%d" % (place, len(stamps)):
                raise Violation(f"I7: half a transaction of {transactional_id} was committed: {tail!r} at {place}")

    def _check_forward(self, group: str, offsets: Mapping[int, int]) -> None:
        before = self._group(group).offsets
        for partition, offset in offsets.items():
            if offset <= before.get(partition, -1):
                raise Violation(f"I7: partition {partition} was decided to {before[partition]}, again to {offset}")

    # -- late copies of EndTxn -------------------------------------------------------------------------------------

    def hold_end(self, transactional_id: str, epoch: int, *, commit: bool) -> None:
        """A copy of an EndTxn stays in a socket; it arrives within seconds, or when `release` is called."""
        late = _Late(transactional_id, epoch, commit)
        self.late.append(late)
        self.time.after(self.time.random.choice([0, 300, 3_000, 3_000]), lambda: self.release(late))

    def is_open(self, transactional_id: str) -> bool:
        return transactional_id in self._open

    def release(self, late: _Late) -> None:
        if late not in self.late:
            return
        self.late.remove(late)
        self.time.facts["late EndTxn released"] += 1
        if self._epochs[late.transactional_id] != late.epoch:
            self.time.facts["late EndTxn fenced"] += 1
        elif late.transactional_id in self._open:
            self.time.facts["late EndTxn ended a transaction"] += 1
            self._finish(late.transactional_id, commit=late.commit)

    # -- groups and retention --------------------------------------------------------------------------------------

    def member_of(self, group: str, slot: str) -> str | None:
        return self._group(group).members.get(slot)

    def owner_of(self, group: str, partition: int) -> str | None:
        shares = self._group(group).shares
        return next((slot for slot, share in shares.items() if partition in share), None)

    def compact(self, topic: str, partition: int) -> int:
        """What a log cleaner does below the last stable offset: of each key only its last record stays."""
        entries = self._topics[topic][partition]
        last: set[bytes] = set()
        cleaned = 0
        for place in range(self.stable_end(topic, partition) - 1, -1, -1):
            entry = entries[place]
            if entry.marker or (entry.transaction is not None and not entry.transaction.committed):
                continue
            key = entry.key or b""
            if key in last:
                entries[place] = _GONE
                cleaned += 1
            last.add(key)
        return cleaned

    def values(self, topic: str, partition: int) -> list[tuple[int, Entry]]:
        return self.visible(topic, partition, 0)


class Link:
    """The broker as one process reaches it. Faults are armed for the n-th request of a kind from now on."""

    POINTS = ("write", "offsets", "end", "renew", "committed")

    def __init__(self, broker: Broker, stand_still: Callable[[int], None]) -> None:
        self.broker = broker
        self.cut = False
        self.late_ends = 0
        self.count, self.start, self.end = broker.count, broker.start, broker.end
        self.stable_end, self.newest_ms = broker.stable_end, broker.newest_ms
        self.append_time, self.fits = broker.append_time, broker.fits
        self._stand_still = stand_still
        self._armed: dict[str, tuple[int, str, int]] = {}

    @property
    def facts(self) -> dict[str, int]:
        return self.broker.time.facts

    @property
    def reachable(self) -> bool:
        return self.broker.reachable and not self.cut

    def arm(self, point: str, nth: int, kind: str, ms: int = 0) -> None:
        """`kind`: die, freeze, lost; before the end also refused; for the end also reply_lost, in_flight, repeated."""
        self._armed[point] = (nth, kind, ms)

    def disarm(self) -> None:
        self._armed.clear()

    def _request(self, point: str) -> str:
        """A request begins. Answers the fault that the caller has to carry out itself, or nothing."""
        kind = self._due(point) if self._armed else ""
        if not self.reachable:
            raise Retryable("the broker is unreachable")
        if kind == "lost":
            self.facts[f"{point} request lost"] += 1
            raise Retryable("the request got no answer")
        if kind == "refused":
            self.facts["transaction has to be aborted"] += 1
            raise Refused("the coordinator asks for an abort")
        return kind

    def _due(self, point: str) -> str:
        armed = self._armed.get(point)
        if armed is None:
            return ""
        nth, kind, ms = armed
        if nth > 1:
            self._armed[point] = (nth - 1, kind, ms)
            return ""
        del self._armed[point]
        if kind == "die":
            self.facts[f"processor died at {point}"] += 1
            raise ProcessDied(point)
        if kind == "freeze":
            self.facts[f"processor stood still at {point}"] += 1
            self._stand_still(ms)
            return ""
        return kind

    # -- transactions ----------------------------------------------------------------------------------------------

    def initialise(self, transactional_id: str) -> int:
        self._request("renew")
        return self.broker.initialise(transactional_id)

    def write(self, transactional_id: str, epoch: int, output: Output) -> int:
        self._request("write")
        self._late_in_the_middle(transactional_id)
        return self._or_fenced(lambda: self.broker.write(transactional_id, epoch, output))

    def _late_in_the_middle(self, transactional_id: str) -> None:
        """The worst moment for a late copy: while a later transaction of the same id is half written."""
        late = [one for one in self.broker.late if one.transactional_id == transactional_id]
        if late and self.broker.is_open(transactional_id) and self.broker.time.chance(0.5):
            self.broker.release(late[0])

    def _or_fenced(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except Refused as error:
            self.facts["zombie processor fenced" if error.fatal else "commit refused: rebalance in its middle"] += 1
            raise

    def add_offsets(
        self, transactional_id: str, epoch: int, group: str, offsets: Mapping[int, int], member: Member
    ) -> None:
        self._request("offsets")

        self._or_fenced(lambda: self.broker.add_offsets(transactional_id, epoch, group, offsets, member))

    def end_transaction(self, transactional_id: str, epoch: int, *, commit: bool) -> None:
        try:
            kind = self._request("end")
        except Retryable:
            self.facts["EndTxn not sent"] += 1
            raise
        word = "commit" if commit else "abort"
        if kind == "in_flight":
            self.facts[f"{word} in flight when the client gave up"] += 1
            self.broker.hold_end(transactional_id, epoch, commit=commit)
            raise Retryable("no answer to EndTxn in time")
        self._or_fenced(lambda: self.broker.end_transaction(transactional_id, epoch, commit=commit))
        if kind == "repeated":
            self.facts[f"{word} repeated silently"] += 1
            self.broker.hold_end(transactional_id, epoch, commit=commit)
            self.late_ends += 1
        elif kind == "reply_lost":
            self.facts[f"{word} carried out, reply lost"] += 1
            raise Retryable("no answer to EndTxn in time")

    # -- groups and reading ----------------------------------------------------------------------------------------

    def join(self, group: str, slot: str, partitions: int) -> str:
        self._request("join")
        return self.broker.join(group, slot, partitions)

    def leave(self, group: str, slot: str, partitions: int) -> None:
        self.broker.leave(group, slot, partitions)

    def share(self, group: str, slot: str, member_id: str) -> tuple[int, list[int]]:
        self._request("share")
        try:
            return self.broker.share(group, slot, member_id)
        except Fatal:
            self.facts["zombie processor finds its slot taken"] += 1
            raise

    def committed(self, group: str, partition: int) -> int | None:
        self._request("committed")
        try:
            return self.broker.committed(group, partition)
        except Retryable:
            self.facts["committed offset not stable"] += 1
            raise

    def visible(
        self, topic: str, partition: int, offset: int, *, committed: bool = True, records_max: int | None = None
    ) -> list[tuple[int, Entry]]:
        if not self.reachable:
            raise Retryable("the broker is unreachable")
        return self.broker.visible(topic, partition, offset, committed=committed, records_max=records_max)

    def append(self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers = ()) -> None:
        """A hint by the plain producer: late as a rule, sometimes very late, twice or never."""
        time = self.broker.time
        time.steps["timer fired"] += 1
        roll = time.random.random()
        if roll < 0.02:
            return
        late_ms = 1 if roll < 0.9 else time.random.choice([200, 2_000, 9_000])
        time.after(late_ms, lambda: self._land(topic, partition, key, value))
        if roll > 0.97:
            time.after(late_ms + time.random.randrange(3_000), lambda: self._land(topic, partition, key, value))

    def _land(self, topic: str, partition: int, key: bytes | None, value: bytes | None) -> None:
        self.broker.append(topic, partition, key, value)
