"""The state of one partition: bytes per session, staged copies of one batch, a bounded cache of decoded sessions.

Rule: bytes are the truth and change in two ways only: `restore` applies records of the state topic, `publish` applies a
stage whose transaction was committed. A stage that is dropped leaves no trace. A store that is parked keeps `position`,
the place in the state topic up to which its bytes are right, so that only the delta is read when it comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec

from onepen.processors import state_keys
from onepen.schemas import codec
from onepen.schemas.errors import Fatal
from onepen.streams.core import Core, SessionKey
from onepen.streams.log import Output, Record
from onepen.streams.timer_heap import TimerHeap

S = TypeVar("S")
T = TypeVar("T")

MARK_FORMAT: Final = 1
MARK_VERSION: Final = 1
CACHED_SESSIONS_MAX: Final = 4_000
_FRAME: Final = codec.encode_state(0, 1, b"")[: codec.FRAME_BYTES]
_AT_REST: Final = codec.encode_state(0, 1, b"")[: codec.FRAME_BYTES + 1]
"""How the value of a head without a deadline begins."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The `partition` record, written in every transaction. It must agree with the group's committed offset."""

    format: int
    next_input_offset: int
    protocol: int
    partitions: int
    slot: str
    transactional_ids: tuple[str, ...]

    def encode(self) -> bytes:
        return codec.encode_state(0, MARK_VERSION, msgspec.msgpack.encode(self))

    @classmethod
    def decode(cls, value: bytes) -> Mark:
        """Raises `Fatal` for a form that this release does not know."""
        _, version, body = codec.decode_state(value)
        if version != MARK_VERSION:
            raise Fatal(f"the partition record has version {version}; this release knows {MARK_VERSION}. Upgrade")
        try:
            mark = msgspec.msgpack.decode(body, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Fatal(f"the partition record cannot be read: {error}") from None
        if mark.format != MARK_FORMAT:
            raise Fatal(f"the partition record has format {mark.format}; this release knows {MARK_FORMAT}. Upgrade")
        return mark


def deadline_of(value: bytes) -> int:
    """`next_deadline_ms` of a state value, from its first varint; the body stays undecoded. Raises `Fatal`."""
    if value[: codec.FRAME_BYTES] != _FRAME:
        raise Fatal("a record of the state topic has an unknown frame; a newer version wrote it? Stop and upgrade")
    number = shift = 0
    for byte in value[codec.FRAME_BYTES :]:
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1)
        shift += 7
    raise Fatal("a record of the state topic ends in its first number")


def _bytes_of(records: dict[bytes, bytes]) -> int:
    return sum(map(len, records.values()))


def _pieces(
    records: Iterable[tuple[bytes, T]], size_of: Callable[[T], int], sessions_max: int, bytes_max: int
) -> Iterator[dict[bytes, T]]:
    piece: dict[bytes, T] = {}
    size_bytes = 0
    for key, value in records:
        piece[key] = value
        size_bytes += size_of(value)
        if len(piece) >= sessions_max or size_bytes >= bytes_max:
            yield piece
            piece, size_bytes = {}, 0
    if piece:
        yield piece


class Loaded(msgspec.Struct, Generic[S], gc=False):
    """A decoded session, the records beneath it (`Session.load` keeps looking into them), and the key of its head."""

    session: S
    base: dict[bytes, bytes]
    head: bytes


class PartitionStore(Generic[S]):
    """One partition. `next_offset` is the input to be decided next; `committed` what the group says (None: nothing)."""

    def __init__(self, partition: int, core: Core[S], cached_max: int = CACHED_SESSIONS_MAX) -> None:
        self.partition = partition
        self.position = 0
        self.next_offset = 0
        self.committed: int | None = None
        self.mark: Mark | None = None
        self.rules: Any = None
        self.policies: dict[bytes, bytes] = {}
        self.timers = TimerHeap()
        self.active: set[SessionKey] = set()
        """Sessions with an active run, as far as they have a deadline: every active run has one."""
        self.parked_at = 0.0
        self._core = core
        # Most sessions at rest are one small record; a dictionary for each would be most of the memory.
        self._single: dict[bytes, bytes] = {}
        self._many: dict[bytes, dict[bytes, bytes]] = {}
        self._cache: OrderedDict[SessionKey, Loaded[S]] = OrderedDict()
        self._cached_max = cached_max

    @property
    def empty(self) -> bool:
        return self.mark is None and not self._single and not self._many and not self.policies

    @property
    def sessions(self) -> int:
        return len(self._single) + len(self._many)

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Every record of the state, in no particular order."""
        if self.mark is not None:
            yield state_keys.PARTITION_KEY, self.mark.encode()
        yield from self.policies.items()
        yield from self._single.items()
        for base in self._many.values():
            yield from base.items()

    def restore_all(self, records: Iterable[tuple[int, bytes, bytes | None]]) -> None:
        """Apply records of this partition's state topic, in its order. Raises `Fatal` for what it does not know.

        Sessions at rest are most of a state: theirs are put down without another look."""
        single, many = self._single, self._many
        self._cache.clear()
        for _, key, value in records:
            if value is not None and key.startswith(b"s/") and value.startswith(_AT_REST) and key not in many:
                before = single.get(key)
                if before is None or before.startswith(_AT_REST):
                    single[key] = value
                    continue
            self.restore(key, value)

    def restore(self, key: bytes, value: bytes | None) -> None:
        """Apply one record of the state topic, in the order of the topic. Raises `Fatal` for what it does not know."""
        head = state_keys.head_of(key)
        if head is not None:
            if key == head:
                self._restore_head(key, value)
            self._restore_record(head, key, value)
        elif key == state_keys.PARTITION_KEY:
            if value is None:
                raise Fatal(f"the partition record of partition {self.partition} was deleted")
            self.mark = Mark.decode(value)
        elif state_keys.policy_of(key) is not None:
            if value is None:
                self.policies.pop(key, None)
            else:
                self.policies[key] = value
        else:
            raise Fatal(f"a record of the state topic has the unknown key {key[:64]!r}. Upgrade before going on")

    def _restore_head(self, key: bytes, value: bytes | None) -> None:
        owner = state_keys.session_of(key)
        assert owner is not None
        deadline_ms = 0 if value is None else deadline_of(value)
        self.timers.arm(owner, deadline_ms)
        if deadline_ms and value is not None and self._core.active_head(value):
            self.active.add(owner)
        else:
            self.active.discard(owner)

    def _restore_record(self, head: bytes, key: bytes, value: bytes | None) -> None:
        self._cache.clear()
        base = self._many.get(head)
        if value is not None:
            if base is not None:
                base[key] = value
            elif key == head:
                self._single[head] = value
            else:
                single = self._single.pop(head, None)
                self._many[head] = {key: value} if single is None else {head: single, key: value}
        elif base is not None:
            base.pop(key, None)
            self._keep(head, base)
        elif key == head:
            self._single.pop(head, None)

    def _keep(self, head: bytes, base: dict[bytes, bytes]) -> None:
        if not base:
            self._single.pop(head, None)
            self._many.pop(head, None)
        elif len(base) == 1 and head in base:
            self._single[head] = base[head]
            self._many.pop(head, None)
        else:
            self._many[head] = base
            self._single.pop(head, None)

    def single_records(self, sessions_max: int, bytes_max: int) -> Iterator[dict[bytes, bytes]]:
        """Sessions of which only the head is kept: key and value of the heads, so many at a time, and no more than the
        bytes but for one session."""
        return _pieces(self._single.items(), len, sessions_max, bytes_max)

    def grouped_records(self, sessions_max: int, bytes_max: int) -> Iterator[dict[bytes, dict[bytes, bytes]]]:
        """The other sessions: the key of the head, and all records; cut likewise."""
        return _pieces(self._many.items(), _bytes_of, sessions_max, bytes_max)

    def take_single(self, found: dict[bytes, bytes]) -> None:
        """What `single_records` gave, into a store that is filled. Raises `Fatal` for what it does not know.

        Which sessions are active is told beside it: to find it out is most of the work on a session.
        """
        self._single.update(found)
        for key, value in found.items():
            if not value.startswith(_AT_REST):
                self._arm(key, value)

    def take_grouped(self, found: dict[bytes, dict[bytes, bytes]]) -> None:
        """What `grouped_records` gave, likewise."""
        self._many.update(found)
        for key, records in found.items():
            value = records.get(key)
            if value is not None and not value.startswith(_AT_REST):
                self._arm(key, value)

    def _arm(self, key: bytes, value: bytes) -> None:
        owner = state_keys.session_of(key)
        assert owner is not None
        self.timers.arm(owner, deadline_of(value))

    def load(self, key: SessionKey) -> Loaded[S]:
        """The session as it was last published or restored; a new one when it was never seen."""
        loaded = self._cache.get(key)
        if loaded is not None:
            return loaded
        head = state_keys.head_key(*key)
        base = self._many.get(head)
        if base is None:
            single = self._single.get(head)
            base = {} if single is None else {head: single}
        return Loaded(self._core.load(key, base), base, head)

    def forget_decoded(self) -> None:
        """Decode from the bytes again from now on."""
        self._cache.clear()

    def publish(self, stage: PartitionStage[S], position: int | None, mono_ms: float) -> None:
        """The stage was committed; `position` is the place behind its last record in the state topic, if known."""
        core, cache = self._core, self._cache
        for key, (loaded, changes, deadline_ms) in stage.written.items():
            base, session = loaded.base, loaded.session
            for record, value in changes.items():
                if value is None:
                    base.pop(record, None)
                else:
                    base[record] = value
            self._keep(loaded.head, base)
            loaded.session = core.settled(session)
            cache[key] = loaded
            cache.move_to_end(key)
            self.timers.arm(key, deadline_ms)
            if core.active(session):
                self.active.add(key)
            else:
                self.active.discard(key)
            if key in stage.offered:
                self.timers.published(key, mono_ms)
        while len(cache) > self._cached_max:
            cache.popitem(last=False)
        self.policies |= stage.policies
        self.rules = stage.rules
        self.mark = stage.mark
        self.next_offset = self.committed = stage.next_offset
        if position is not None:
            self.position = position


class PartitionStage(Generic[S]):
    """What one batch would change in one partition. Nothing of it is visible before `PartitionStore.publish`."""

    def __init__(self, store: PartitionStore[S]) -> None:
        self.store = store
        self.next_offset = store.next_offset
        self.rules = store.rules
        self.mark: Mark | None = None
        self.newest_ms = 0
        self.records = 0
        self.outputs: list[Output] = []
        self.sessions: dict[SessionKey, Loaded[S]] = {}
        self.offered: set[SessionKey] = set()
        self.policies: dict[bytes, bytes] = {}
        self.written: dict[SessionKey, tuple[Loaded[S], dict[bytes, bytes | None], int]] = {}

    def took(self, record: Record) -> None:
        """The record is decided; the next one is the next input."""
        self.next_offset = record.offset + 1
        self.newest_ms = record.timestamp_ms
        self.records += 1

    def load(self, key: SessionKey) -> Loaded[S]:
        """The session as the batch has left it so far."""
        return self.sessions.get(key) or self.store.load(key)

    def put(self, key: SessionKey, session: S, loaded: Loaded[S], *, offered: bool) -> None:
        """What was `loaded` is this now."""
        if (ours := self.sessions.get(key)) is not None:
            ours.session = session
        else:
            self.sessions[key] = Loaded(session, loaded.base, loaded.head)
        if offered:
            self.offered.add(key)

    def write(self, core: Core[S], topic: str, mark: Mark) -> list[Output]:
        """All records of this partition for the transaction; the partition record is the last one in the state."""
        partition = self.store.partition
        outputs = self.outputs
        self.mark = mark
        self.written = {}
        for key, loaded in self.sessions.items():
            changes, deadline_ms = core.changes(loaded.session)
            self.written[key] = (loaded, changes, deadline_ms)
            for record, value in changes.items():
                outputs.append(Output(topic, partition, record, value))
        outputs += [Output(topic, partition, record, value) for record, value in self.policies.items()]
        outputs.append(Output(topic, partition, state_keys.PARTITION_KEY, mark.encode(), None, True))
        return outputs
