"""What inputs lead to, held against what stands on the topics: byte for byte, and the chain of hashes.

Rule: pure. Expected records and found ones come in the order of the log; where they differ, a look ahead in both tells
a record that is missing from one that was added and one that was changed, so that one damage is one finding and not
the whole rest of the topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from onepen.schemas import codec
from onepen.schemas.errors import Poison
from onepen.schemas.events import Event, chain_hash
from onepen.schemas.ids import output_key
from onepen.schemas.limits import ZERO_HASH

if TYPE_CHECKING:
    from onepen.streams.outside_reader import RawRecord
    from onepen.streams.reexecution import SessionKey

__all__ = ["AHEAD", "Alignment", "Chain", "ChainError", "Expected", "Findings", "Mismatch"]

AHEAD: Final = 64
"""How many records of both sides are looked at to find the place where they agree again."""

LISTED_MAX: Final = 1_000
"""Findings that are kept with their position; all are counted."""


class Expected(NamedTuple):
    """A record that must stand on a topic, and the input it follows from."""

    input_offset: int
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One place where a topic differs from what the inputs lead to.

    `input_offset`: the input whose decision asks for it (None: no input does); `offset`: the record on `topic` (None:
    it is missing).
    """

    topic: str
    partition: int
    input_offset: int | None
    offset: int | None
    what: str

    def shown(self) -> dict[str, Any]:
        """As JSON members."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "inputOffset": self.input_offset,
            "offset": self.offset,
            "what": self.what,
        }


@dataclass(frozen=True, slots=True)
class ChainError:
    """An event whose hash does not follow from its bytes, or whose prevHash is not the hash before it."""

    partition: int
    offset: int
    session_id: str
    what: str

    def shown(self) -> dict[str, Any]:
        """As JSON members."""
        return {"partition": self.partition, "offset": self.offset, "sessionId": self.session_id, "what": self.what}


@dataclass(slots=True)
class Findings:
    """What was looked at, and what is wrong. Lists are bounded by LISTED_MAX; the counts are not."""

    inputs: int = 0
    events: int = 0
    receipts: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    chain_errors: list[ChainError] = field(default_factory=list)
    mismatch_count: int = 0
    chain_error_count: int = 0
    tokens_valid: int = 0
    """Partitions on which some worker record fits the token key."""
    tokens_invalid: int = 0
    """Worker records that came before the first that fits."""

    @property
    def clean(self) -> bool:
        return not self.mismatch_count and not self.chain_error_count

    @property
    def wrong_key(self) -> bool:
        """True when nothing a worker said fits the token key, and the log says otherwise."""
        return bool(self.mismatch_count and self.tokens_invalid and not self.tokens_valid)

    def differs(self, mismatch: Mismatch) -> None:
        self.mismatch_count += 1
        if len(self.mismatches) < LISTED_MAX:
            self.mismatches.append(mismatch)

    def breaks(self, error: ChainError) -> None:
        self.chain_error_count += 1
        if len(self.chain_errors) < LISTED_MAX:
            self.chain_errors.append(error)


class Alignment:
    """Expected records of one topic against the found ones, in order."""

    def __init__(
        self,
        topic: str,
        partition: int,
        found: Iterator[RawRecord],
        differs: Callable[[Mismatch], None],
        taken: Callable[[RawRecord], None],
        *,
        lenient_below: int = 0,
    ) -> None:
        """`found`: records of the topic in its order. `taken` is told each one that has been judged.

        `lenient_below`: records below this offset may follow from inputs before the first expected one; as long as
        nothing has agreed they are passed over.
        """
        self._topic = topic
        self._partition = partition
        self._source = found
        self._differs = differs
        self._taken = taken
        self._found: deque[RawRecord] = deque()
        self._expected: deque[Expected] = deque()
        self._lenient_below = lenient_below

    def expect(self, expected: Expected) -> None:
        """The next record that must stand on the topic."""
        self._expected.append(expected)
        self._settle(AHEAD)

    def finish(self) -> None:
        """Nothing more is expected: judge all that was."""
        self._settle(0)

    def rest(self) -> Iterator[RawRecord]:
        """Found records that nothing expected has claimed. For after `finish`."""
        while self._fill(1):
            record = self._found.popleft()
            if record.offset >= self._lenient_below:
                yield record

    def surplus(self, record: RawRecord) -> None:
        """A record that no input leads to."""
        self._differs(Mismatch(self._topic, self._partition, None, record.offset, "follows from no input"))
        self._taken(record)

    def _settle(self, waiting_max: int) -> None:
        while self._expected:
            self._fill(1)
            if self._found and _same(self._found[0], self._expected[0]):
                self._lenient_below = 0
                self._taken(self._found.popleft())
                self._expected.popleft()
            elif len(self._expected) <= waiting_max:
                return
            else:
                self._judge()

    def _judge(self) -> None:
        """The heads differ: which side has to move on to where they agree again?"""
        self._fill(AHEAD)
        head = self._expected[0]
        if not self._found:
            return self._missing()
        later = next((n for n, one in enumerate(self._found) if _same(one, head)), None)
        ahead = islice(self._expected, AHEAD)
        awaited = next((n for n, one in enumerate(ahead) if _same(self._found[0], one)), None)
        if later is None and awaited is None and self._found[0].offset < self._lenient_below:
            self._found.popleft()
        elif later is not None and (awaited is None or later <= awaited):
            for _ in range(later):
                self._before_later()
        elif awaited is not None:
            for _ in range(awaited):
                self._missing()
        else:
            self._changed()

    def _before_later(self) -> None:
        """A found record that stands before the one that is expected next."""
        record = self._found.popleft()
        if record.offset >= self._lenient_below:
            self.surplus(record)

    def _missing(self) -> None:
        gone = self._expected.popleft()
        self._differs(Mismatch(self._topic, self._partition, gone.input_offset, None, "is missing on the topic"))

    def _changed(self) -> None:
        wanted, found = self._expected.popleft(), self._found.popleft()
        what = "has another key" if found.value == wanted.value else f"has other bytes{_difference(found, wanted)}"
        self._differs(Mismatch(self._topic, self._partition, wanted.input_offset, found.offset, what))
        self._taken(found)

    def _fill(self, wanted: int) -> bool:
        while len(self._found) < wanted:
            record = next(self._source, None)
            if record is None:
                break
            self._found.append(record)
        return bool(self._found)


def _same(found: RawRecord, expected: Expected) -> bool:
    return found.value == expected.value and found.key == expected.key


def _difference(found: RawRecord, wanted: Expected) -> str:
    """Which members of the two records differ, for people."""
    try:
        is_, should = codec.decode(found.value), codec.decode(wanted.value)
    except Poison as poison:
        return f" ({poison.reason})"
    if type(is_) is not type(should):
        return f" (a {type(is_).__name__})"
    names = [name for name in is_.__struct_fields__ if getattr(is_, name) != getattr(should, name)]
    return f" in {', '.join(names)}" if names else ""


class Chain:
    """Follows the hashes of every session through the events as they stand on the topic."""

    def __init__(self, start_hash: Callable[[SessionKey], bytes], breaks: Callable[[ChainError], None]) -> None:
        """`start_hash`: the hash before a session's first event (32 zero bytes when it begins here)."""
        self._start_hash = start_hash
        self._breaks = breaks
        self._last: dict[SessionKey, bytes] = {}

    def follow(self, record: RawRecord) -> None:
        """The next event of the topic."""
        try:
            event = codec.decode_as(Event, record.value)
        except Poison as poison:
            self._breaks(ChainError(record.partition, record.offset, "", f"no event: {poison}"))
            return
        key = event.tenant_id, event.session_id
        before = self._last.get(key)
        if before is None:
            before = self._start_hash(key)

        def broken(what: str) -> None:
            self._breaks(ChainError(record.partition, record.offset, event.session_id, what))

        if event.prev_hash != before:
            broken("prevHash is not the hash of the session's event before")
        assert record.value is not None
        if chain_hash(event.prev_hash, codec.event_body(record.value)) != event.hash:
            broken("hash does not follow from the bytes")
        if record.key != output_key(event.tenant_id, event.session_id):
            broken("its key names another session")
        self._last[key] = event.hash


def from_nothing(_: SessionKey) -> bytes:
    """`start_hash` of sessions that begin with the log."""
    return ZERO_HASH
