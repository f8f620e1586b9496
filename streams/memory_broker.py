"""The broker of the log in memory: topics, transactions, groups, and the faults that tests and simulations need.

Rule: the OLD transaction protocol, which librdkafka speaks with any broker. An open transaction holds the last stable
offset of every partition it wrote to; EndTxn names producer and epoch but not the transaction, so a late copy of one
ends whatever is open by then; a group commit is checked for member and generation, not for what the member owns; a
transactional id is fenced by its epoch. One thread; time comes from outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onepen.schemas.errors import Fatal, Retryable
from onepen.schemas.topics import TopicPlan
from onepen.streams.log import Headers, Member, Output

DEFAULT_RECORD_BYTES_MAX = 1024 * 1024


class Refused(Exception):
    """A request that the broker answers with an error; `fatal`: this producer will never be served again."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


@dataclass(slots=True)
class OpenTransaction:
    """A transaction at the broker. `committed`: None while it is open; `partitions`: its first offset in each."""

    transactional_id: str
    committed: bool | None = None
    partitions: dict[tuple[str, int], int] = field(default_factory=dict)
    offsets: dict[str, dict[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One place of a partition. `key` and `value` are both None in a marker, which no reader sees."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    transaction: OpenTransaction | None = None
    marker: bool = False


class _Group:
    def __init__(self) -> None:
        self.generation = 0
        self.members: dict[str, str] = {}
        """Slot -> member id, in the order of joining."""
        self.shares: dict[str, list[int]] = {}
        self.offsets: dict[int, int] = {}


class MemoryBroker:
    """Topics, transactions and groups. Every method is one request and takes effect at once."""

    def __init__(self, plan: Sequence[TopicPlan], clock_ms: Callable[[], int]) -> None:
        self.clock_ms = clock_ms
        self.reachable = True
        self._topics: dict[str, list[list[Entry]]] = {t.name: [[] for _ in range(t.partitions)] for t in plan}
        self._sizes = {t.name: int(t.settings.get("max.message.bytes", DEFAULT_RECORD_BYTES_MAX)) for t in plan}
        self._append_time = {t.name for t in plan if t.settings.get("message.timestamp.type") == "LogAppendTime"}
        self._starts: dict[tuple[str, int], int] = {}
        self._newest_ms: dict[tuple[str, int], int] = {}
        self._epochs: dict[str, int] = {}
        self._open: dict[str, OpenTransaction] = {}
        self._groups: dict[str, _Group] = {}
        self._ids = itertools.count(1)
        self._late: list[tuple[str, int, bool]] = []
        self._copy_next_end = False

    def request(self) -> None:
        if not self.reachable:
            raise Retryable("the broker is unreachable")

    # -- partitions ------------------------------------------------------------------------------------------------

    def count(self, topic: str) -> int:
        return len(self._topics[topic])

    def end(self, topic: str, partition: int) -> int:
        """The high watermark."""
        return len(self._topics[topic][partition])

    def start(self, topic: str, partition: int) -> int:
        return self._starts.get((topic, partition), 0)

    def stable_end(self, topic: str, partition: int) -> int:
        """The last stable offset: the first record of the first open transaction, else the end."""
        place, end = (topic, partition), len(self._topics[topic][partition])
        return min((open_.partitions.get(place, end) for open_ in self._open.values()), default=end)

    def append_time(self, topic: str) -> bool:
        return topic in self._append_time

    def newest_ms(self, topic: str, partition: int) -> int:
        return self._newest_ms.get((topic, partition), 0)

    def visible(
        self, topic: str, partition: int, offset: int, *, committed: bool = True, records_max: int | None = None
    ) -> list[tuple[int, Entry]]:
        """Records from `offset` on: below the last stable offset and not aborted, or (not `committed`) all."""
        entries = self._topics[topic][partition]
        end = self.stable_end(topic, partition) if committed else len(entries)
        found = (
            (place, entries[place])
            for place in range(offset, end)
            if not entries[place].marker
            and not (committed and (by := entries[place].transaction) is not None and not by.committed)
        )
        return list(found if records_max is None else itertools.islice(found, max(0, records_max)))

    def append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        transaction: OpenTransaction | None = None,
    ) -> int:
        entries, at_ms = self._topics[topic][partition], self.clock_ms()
        entries.append(Entry(key, value, tuple(headers), at_ms, transaction))
        self._newest_ms[topic, partition] = max(at_ms, self._newest_ms.get((topic, partition), 0))
        return len(entries) - 1

    def fits(self, output: Output) -> bool:
        return len(output.value or b"") + len(output.key or b"") <= self._sizes[output.topic]

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Retention: records below `offset` are gone."""
        self._starts[topic, partition] = offset

    # -- transactions ----------------------------------------------------------------------------------------------

    def initialise(self, transactional_id: str) -> int:
        """A new epoch: what was left open is aborted, and whoever had the former epoch is fenced."""
        self.request()
        self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
        self._finish(transactional_id, commit=False)
        return self._epochs[transactional_id]

    def transaction(self, transactional_id: str, epoch: int) -> OpenTransaction:
        """The open transaction of this id; one begins with its first request."""
        self.request()
        if self._epochs.get(transactional_id) != epoch:
            raise Refused(f"{transactional_id}: fenced by a newer producer", fatal=True)
        return self._open.setdefault(transactional_id, OpenTransaction(transactional_id))

    def write(self, transactional_id: str, epoch: int, output: Output) -> int:
        transaction = self.transaction(transactional_id, epoch)
        place = (output.topic, output.partition)
        transaction.partitions.setdefault(place, self.end(*place))
        headers = output.headers or []
        return self.append(output.topic, output.partition, output.key, output.value, headers, transaction)

    def add_offsets(
        self, transactional_id: str, epoch: int, group: str, offsets: Mapping[int, int], member: Member
    ) -> None:
        """Pending until the end. Checked: member and generation; not checked: what the member owns."""
        state = self._group(group)
        if member.generation != state.generation or member.member_id not in state.members.values():
            raise Refused(f"generation {member.generation} of {member.member_id} is not the current one")
        self.transaction(transactional_id, epoch).offsets.setdefault(group, {}).update(offsets)

    def end_transaction(self, transactional_id: str, epoch: int, *, commit: bool) -> None:
        """EndTxn. It does not say which transaction it ends: whichever is open now."""
        self.request()
        if self._epochs.get(transactional_id) != epoch:
            raise Refused(f"{transactional_id}: fenced by a newer producer", fatal=True)
        if self._copy_next_end:
            self._copy_next_end = False
            self._late.append((transactional_id, epoch, commit))
        self._finish(transactional_id, commit=commit)

    def _finish(self, transactional_id: str, *, commit: bool) -> None:
        transaction = self._open.pop(transactional_id, None)
        if transaction is None:
            return
        transaction.committed = commit
        for topic, partition in transaction.partitions:
            self._topics[topic][partition].append(Entry(None, None, (), self.clock_ms(), marker=True))
        if commit:
            for group, offsets in transaction.offsets.items():
                self._group(group).offsets.update(offsets)

    # -- faults ----------------------------------------------------------------------------------------------------

    def copy_next_end(self) -> None:
        """The next EndTxn is carried out, and its first copy stays in a socket: the client repeated it silently."""
        self._copy_next_end = True

    @property
    def late_ends(self) -> int:
        return len(self._late)

    def deliver_late_ends(self) -> int:
        """The copies arrive; answers how many of them were not fenced."""
        late, self._late = self._late, []
        current = [one for one in late if self._epochs[one[0]] == one[1]]
        for transactional_id, _, commit in current:
            self._finish(transactional_id, commit=commit)
        return len(current)

    # -- groups ----------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> _Group:
        return self._groups.setdefault(name, _Group())

    def join(self, group: str, slot: str, partitions: int) -> str:
        """A new member id; an earlier member of the same slot is replaced without a rebalance (static membership)."""
        self.request()
        state = self._group(group)
        known = slot in state.members
        state.members[slot] = f"{slot}-{next(self._ids)}"
        if not known:
            self._rebalance(state, partitions)
        return state.members[slot]

    def leave(self, group: str, slot: str, partitions: int) -> None:
        """A member leaves, or its session ends."""
        state = self._group(group)
        if state.members.pop(slot, None) is not None:
            self._rebalance(state, partitions)

    def _rebalance(self, state: _Group, partitions: int) -> None:
        state.generation += 1
        slots = sorted(state.members)
        state.shares = {
            slot: list(range(i * partitions // len(slots), (i + 1) * partitions // len(slots)))
            for i, slot in enumerate(slots)
        }

    def share(self, group: str, slot: str, member_id: str) -> tuple[int, list[int]]:
        """(generation, partitions) of a member as the coordinator has it; generation -1: its session has ended.

        Raises `Fatal` for one that was replaced.
        """
        self.request()
        state = self._group(group)
        if slot not in state.members:
            return -1, []
        if state.members[slot] != member_id:
            raise Fatal(f"{slot}: another member took this slot")
        return state.generation, state.shares[slot]

    def committed(self, group: str, partition: int) -> int | None:
        """Stable: raises `Retryable` while a transaction that is still open has an offset of this partition."""
        self.request()
        if any(partition in transaction.offsets.get(group, {}) for transaction in self._open.values()):
            raise Retryable(f"the committed offset of partition {partition} is not stable")
        return self._group(group).offsets.get(partition)
