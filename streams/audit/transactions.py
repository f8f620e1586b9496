"""Whole transactions (invariant I7): each stamped record belongs to a transaction of which every record is there.

Stamps travel in headers: `<transactional id>:<instance>:<number>:<index>/<count>`. Memory: a few numbers for each
transaction. What compaction or age may have taken is never held against a transaction: see `StateTrail`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from onepen.streams.audit.evidence import Violation

HEADER: Final = "onepen-tx"
LATELY: Final = 16


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which transaction a record belongs to, and its place in it."""

    transaction: str
    index: int
    count: int


class Place(NamedTuple):
    """Where a record stands."""

    topic: str
    partition: int
    offset: int
    at_ms: int

    def __str__(self) -> str:
        return f"{self.topic} {self.partition}:{self.offset}"


def stamp_of(headers: Sequence[tuple[str, bytes | None]]) -> Stamp | None:
    """The stamp in a record's headers; None when there is none that can be read."""
    for name, value in headers:
        if name != HEADER or value is None:
            continue
        try:
            transaction, _, place = value.decode("ascii").rpartition(":")
            index, _, count = place.partition("/")
            return Stamp(transaction, int(index), int(count))
        except ValueError:
            return None
    return None


@dataclass(slots=True)
class _Seen:
    count: int
    where: Place
    oldest_ms: int
    records: int = 0
    indexes: int = 0
    """One bit for each index that was seen."""


@dataclass
class Transactions:
    """Fed with every stamped record of all topics, partition by partition in offset order."""

    violations: list[Violation] = field(default_factory=list)
    complete: int = 0
    _open: dict[str, _Seen] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _settled: set[str] = field(default_factory=set)
    _lately: dict[tuple[str, int], deque[str]] = field(default_factory=dict)

    def take(self, place: Place, stamp: Stamp, *, one_writer: bool) -> None:
        """The next stamped record of a partition. `one_writer`: transactions do not mix on this topic's partitions."""
        if one_writer:
            self._together(place, stamp)
        if stamp.transaction in self._done:
            return self._violation(place, f"a record more than the {stamp.count} of {stamp.transaction}")
        seen = self._open.get(stamp.transaction)
        if seen is None:
            seen = self._open[stamp.transaction] = _Seen(stamp.count, place, place.at_ms)
        seen.oldest_ms = min(seen.oldest_ms, place.at_ms)
        if stamp.count != seen.count or not 0 <= stamp.index < stamp.count:
            return self._violation(place, f"index {stamp.index} of {stamp.count}, {stamp.transaction} has {seen.count}")
        if seen.indexes >> stamp.index & 1:
            return self._violation(place, f"index {stamp.index} of {stamp.transaction} stands twice")
        seen.indexes |= 1 << stamp.index
        seen.records += 1
        if seen.records == seen.count:
            self.complete += 1
            self._done.add(stamp.transaction)
            self._settled.discard(stamp.transaction)
            del self._open[stamp.transaction]
        return None

    @property
    def count(self) -> int:
        """Transactions seen."""
        return len(self._done) + len(self._open)

    def settle(self, transaction: str) -> None:
        """This one was committed before the reading began: all of its records must be found."""
        if transaction not in self._done:
            self._settled.add(transaction)

    def _together(self, place: Place, stamp: Stamp) -> None:
        lately = self._lately.setdefault((place.topic, place.partition), deque(maxlen=LATELY))
        if lately and lately[-1] == stamp.transaction:
            return
        if stamp.transaction in lately:
            self._violation(place, f"{stamp.transaction} goes on behind a record of {lately[-1]}")
        lately.append(stamp.transaction)

    def end(self, whole_from_ms: int) -> Iterator[Violation]:
        """Everything was fed: what is wrong, and which settled ones are incomplete although nothing of them can have
        been taken away since `whole_from_ms`."""
        yield from self.violations
        for transaction, seen in self._open.items():
            if transaction in self._settled and seen.oldest_ms > whole_from_ms:
                missing = [n for n in range(seen.count) if not seen.indexes >> n & 1]
                shown = ", ".join(map(str, missing[:5])) + (" …" if len(missing) > 5 else "")
                what = f"{transaction} has {seen.records} of {seen.count} records; missing: {shown}"
                yield Violation("transactions", str(seen.where), what)

    def _violation(self, place: Place, what: str) -> None:
        self.violations.append(Violation("transactions", str(place), what))


@dataclass
class StateTrail:
    """The state topic of one partition, record by record: since when nothing is missing, and which inputs each
    transaction decided.

    A transaction's records and its one marker stand behind one another, so a hole of more than one offset means that
    something was compacted (or aborted) there: what is older is not judged.
    """

    partition: int
    whole_from_ms: int = 0
    marks: int = 0
    violations: list[Violation] = field(default_factory=list)
    _offset: int = -1
    _reached: int | None = None
    _ranges: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take(self, place: Place, next_input_offset: int | None, stamp: Stamp | None) -> None:
        """The next record; `next_input_offset` of a partition record, None for any other."""
        if place.offset > self._offset + 2:
            self.whole_from_ms, self._reached = place.at_ms, None
        self._offset = place.offset
        if next_input_offset is None:
            return
        reached = self._reached
        if reached is not None and next_input_offset <= reached:
            what = f"the next input is {next_input_offset}, after {reached} was reached"
            self.violations.append(Violation("transactions", str(place), what))
        if reached is not None and stamp is not None:
            self._ranges[stamp.transaction] = reached, next_input_offset
        self.marks += 1
        self._reached = next_input_offset

    def judge_cause(self, place: Place, cause_offset: int, stamp: Stamp | None) -> None:
        """An event follows from an input that its own transaction decided."""
        found = None if stamp is None else self._ranges.get(stamp.transaction)
        if found is not None and not found[0] <= cause_offset < found[1]:
            what = f"caused by input {cause_offset}, but its transaction decided inputs {found[0]} to {found[1] - 1}"
            self.violations.append(Violation("transactions", str(place), what))
