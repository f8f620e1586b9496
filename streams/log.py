"""What the engine needs of a log, and nothing more: ownership, batches, transactions, positions, hints, restore.

Rule: a `Log` is one member's view. It never decides what a record means and never hides a doubt. `memory.py` is the
short correct version and thereby the specification, `kafka.py` the real one; `tests/conformance` judges both.

Ownership numbers: each input partition has a number, raised whenever it is assigned, revoked, lost, started, held or
moved. A record carries the number under which it was polled. One whose number is no longer current is never handed
out again: brokers check a member's generation, not what it owns, so nobody else would notice (decision of step 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec

from onepen.schemas.errors import Fatal, Retryable

Headers = Sequence[tuple[str, bytes | None]]


class Record(msgspec.Struct, gc=False):
    """One input record. `number` is the ownership number of its partition when it was polled; `command` what the core
    read in it, as far as that was done before its turn."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    log_append_time: bool
    number: int
    command: Any = None


class Output(msgspec.Struct, gc=False):
    """One record to be written to an explicit partition. `track`: its position is wanted after the commit."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None = None
    track: bool = False


class Member(msgspec.Struct, frozen=True):
    """Group membership at one moment. `raw` is what the log's own commit wants; never kept beyond its batch."""

    member_id: str
    generation: int
    raw: Any

    @property
    def valid(self) -> bool:
        """False for an empty member id or a negative generation: a commit with it would not be checked at all."""
        return bool(self.member_id) and self.generation >= 0


class Batch(msgspec.Struct):
    """Records of owned, started partitions, in log order per partition, and the membership taken behind them.

    `member` is None when there are no records. It is the only one to be used for the commit of this batch.
    """

    records: list[Record]
    member: Member | None


class Outcome(Enum):
    """What became of a transaction. `DOUBT`: it cannot be told from here; see `Log.renew` and `Log.committed`."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    DOUBT = "doubt"


class Survey(msgspec.Struct, frozen=True):
    """What the brokers said about a partition, in the order in which recovery needs it.

    `committed`: the group's offset, read stable (None: there is none), taken BEFORE `state_end`, the high watermark of
    the state partition. So the state of every transaction that is counted in `committed` lies below `state_end`.
    `newest_ms`: the largest broker timestamp on the inputs partition, 0 when it is empty. `state_start`: the first
    offset of the state partition.
    """

    committed: int | None
    state_end: int
    inputs_start: int
    inputs_end: int
    newest_ms: int
    state_start: int = 0


class Listener(Protocol):
    """Called inside `poll` and `close` only, when no transaction is open. Must not call the log's blocking methods."""

    def assigned(self, partitions: Sequence[int]) -> None: ...

    def revoked(self, partitions: Sequence[int]) -> None:
        """Also when they were lost."""
        ...


class Transaction(Protocol):
    """One transaction, begun by `Log.begin`. Exactly one of `commit` and `abort` ends it."""

    @property
    def positions(self) -> Mapping[tuple[str, int], int]:
        """After COMMITTED: (topic, partition) -> position behind the tracked record written there, as far as known."""
        ...

    def produce(self, outputs: Sequence[Output]) -> None:
        """Hand the records over; each gets the transaction stamp. Raises `TooLarge`; all else shows at the end."""
        ...

    @property
    def open(self) -> bool:
        """Neither committed nor aborted yet."""
        ...

    def commit(self, offsets: Mapping[int, int], member: Member) -> Outcome:
        """Write input offsets as the group and commit all together.

        Raises `TooLarge`; for all else that the brokers answer it returns an outcome.
        """
        ...

    def abort(self) -> Outcome:
        """ABORTED, or DOUBT when even that is not known."""
        ...


class Restorer(Protocol):
    """Reads state partitions with read_committed, without group, while the engine goes on."""

    def open(self, partition: int, position: int) -> None:
        """Begin to read the partition's state at `position` and to survey it. Opened again: from there anew."""
        ...

    def read(self, records_max: int) -> Sequence[tuple[int, bytes, bytes | None]]:
        """(partition, key, value) of what has arrived; never waits."""
        ...

    def position(self, partition: int) -> int:
        """Everything committed below it was handed out by `read`."""
        ...

    def survey(self, partition: int) -> Survey | None:
        """None while the brokers have not answered, or while the committed offset is unstable."""
        ...

    def end_transactions_of(self, transactional_ids: Sequence[str]) -> None:
        """End, in the background, what these writers left open; each is then fenced, as if it had been replaced."""
        ...

    def close(self, partition: int) -> None: ...


class Log(Protocol):
    """One member of the processors' group. All methods are called on one thread."""

    @property
    def partitions(self) -> int:
        """Of the inputs topic."""
        ...

    @property
    def transactional_ids(self) -> tuple[str, ...]:
        """Those of this slot."""
        ...

    @property
    def restorer(self) -> Restorer: ...

    def subscribe(self, listener: Listener) -> None:
        """End what a predecessor under the same slot left open, then join the group."""
        ...

    def poll(self, *, records_max: int, bytes_max: int, wait_ms: int) -> Batch:
        """Records put back or held come first. Raises `Fatal` (leave the process) or `InputsLost`."""
        ...

    def ahead(self, records_max: int) -> Iterable[Record]:
        """Records that were read and that later polls will hand out if they are still owned; they stay where they are.
        Not to be kept beyond the next call."""
        ...

    def put_back(self, records: Sequence[Record]) -> None:
        """Records of the last batch that were not taken; the next polls hand them out again if still owned."""
        ...

    def start(self, partition: int, offset: int) -> bool:
        """Hand out records of an assigned partition from `offset` on; False: not possible yet, call again."""
        ...

    def hold(self, partition: int) -> None:
        """Hand out nothing of this partition until it is started again."""
        ...

    def number(self, partition: int) -> int:
        """The ownership number; 0 while the partition is not assigned."""
        ...

    def begin(self, records: int) -> Transaction:
        """A transaction that will have exactly so many records; the stamp in their headers says so."""
        ...

    def committed(self, partitions: Sequence[int]) -> dict[int, int | None]:
        """The group's offsets, stable. Raises `Retryable` when the brokers do not answer in time."""
        ...

    def renew(self) -> None:
        """After a doubt: new writers under the same transactional ids, which fences whatever is under way.

        Raises `Retryable` when the brokers do not answer in time.
        """
        ...

    def append(self, output: Output) -> None:
        """Write a hint outside of transactions, at some later moment or not at all."""
        ...

    def unreachable_since(self) -> float:
        """Monotonic time at which the brokers were last found unreachable; 0.0 = never."""
        ...

    def close(self, *, leave: bool) -> None:
        """`leave`: give the partitions away at once; else keep them for a restart under the same slot."""
        ...


TX_HEADER = "onepen-tx"
"""`<transactional id>:<instance>:<transaction>:<index>/<count>` on every record of a transaction: a checker finds a
transaction of which not all indexes 0 … count - 1 are there. It stands outside the bytes that a replay reproduces."""


class InputsLost(Fatal):
    """Records of an input partition are gone before they were decided. `partition` says where."""

    def __init__(self, partition: int, message: str) -> None:
        super().__init__(message)
        self.partition = partition


class TooLarge(Fatal):
    """A record of a transaction is larger than its topic takes."""


__all__ = [
    "TX_HEADER",
    "Batch",
    "Fatal",
    "InputsLost",
    "Listener",
    "Log",
    "Member",
    "Outcome",
    "Output",
    "Record",
    "Restorer",
    "Retryable",
    "Survey",
    "TooLarge",
    "Transaction",
]
