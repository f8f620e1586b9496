"""The state of one session, as a value: a small head that every record rewrites, and parts that are touched rarely.

Callers never mutate a `Session`; `fork()` gives the working copy that a decision fills. Bytes are the truth: a session
is loaded from its state records and says which of them changed. Nothing here grows with the session's past.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from onepen.processors import state_keys
from onepen.schemas import codec
from onepen.schemas.errors import Fatal
from onepen.schemas.inputs import Input, Parent
from onepen.schemas.limits import ZERO_HASH
from onepen.schemas.statuses import BranchKind, RunStatus
from onepen.schemas.views import Checkpoint

STATE_VERSION = 1
T = TypeVar("T")


class Entry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One place of the pending list. `for_run` names the run a steer is for; empty: for the next run."""

    input_id: str
    for_run: str
    size_bytes: int
    if_missed: str
    expires_ms: int
    front: bool = False
    """An interrupt: before everything that only waits, behind earlier interrupts."""


class Run(msgspec.Struct, array_like=True, gc=False):
    """The active run. Mutable only inside a fork. Times are ms of the log; 0 = not set unless said otherwise."""

    run_id: str
    run_no: int
    status: RunStatus
    generation: int
    seq: int
    start_input_id: str
    policy_version: int
    max_attempts: int
    timeout_at_ms: int
    started_ms: int
    lineage: str = ""
    """Id of the first run of a chain of retries: the scope of its action keys."""
    recovery: str = "resume"
    parent: Parent | None = None
    user_id: int = 0
    waiting_left_ms: int = -1
    """What was left of the run's time when it began to wait only for people; -1 = the deadline runs."""
    owner: str = ""
    inbox: int = 0
    lease_expires_ms: int = 0
    lease_ms: int = 0
    had_owner: bool = False
    losses: int = 0
    """Leases with an owner that were lost: they count as attempts."""
    offer_expires_ms: int = 0
    offer_ms: int = 0
    offer_ordinal: int = 0
    offers_unclaimed: int = 0
    offer_had_no_room: bool = False
    report_no: int = 0
    report_digests: tuple[tuple[int, bytes], ...] = ()
    refused: tuple[tuple[int, int, str], ...] = ()
    asked: tuple[str, ...] = ()
    """Action keys (name/key) lately asked for and not open: the view still answers them."""
    asked_calls: tuple[str, ...] = ()
    refused_records: int = 0
    renewal_no: int = 0
    view_no: int = 0
    open_branches: int = 0
    open_approvals: int = 0
    open_children: int = 0
    compaction_id: str = ""
    compaction_deadline_ms: int = 0
    idle_renewals: int = 0
    """Renewals in a row without a report, as far as they count."""
    idle_limits: tuple[tuple[str, int], ...] = ()
    """Own progress limits declared by open tools: (call id, renewals)."""
    doubts: tuple[tuple[str, str], ...] = ()
    voided: tuple[tuple[str, str], ...] = ()
    cancel_ms: int = 0
    cancel_deadline_ms: int = 0
    cancel_reason: str = ""
    cancel_by: int = 0
    cancel_input_id: str = ""
    cancel_scope: str = ""
    aborts: tuple[str, ...] = ()
    """Input ids of aborts waiting for the end of the run; more than are kept here are found by a scan."""
    aborts_overflow: bool = False
    stopped: tuple[tuple[str, str, str, int, str], ...] = ()
    """Branches ended since the cancel: (kind, id, name, took_ms, status)."""
    stopped_count: int = 0
    work_outcome: bytes = b""
    action_requests: int = 0
    """How often an action key was opened in this run; 0 = there is none to mark at its end."""
    handed_back: tuple[str, int] | None = None
    """Owner and generation of the final report, while a cancelled run waits for nothing but its children."""


class LastRun(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What stays of the last run, so that a repeated final report and a stale stop get their answer."""

    run_id: str
    run_no: int
    status: RunStatus
    generation: int
    report_no: int
    owner: str
    refused_records: int


class Head(msgspec.Struct, array_like=True, gc=False):
    """Rewritten by every record of the session; at most 16 KiB. The pending list is written apart, when it changes."""

    now_ms: int = 0
    run_no: int = 0
    last_hash: bytes = ZERO_HASH
    remembered: int = 0
    next_forget_ms: int = 0
    pending: tuple[Entry, ...] = ()
    run: Run | None = None
    last: LastRun | None = None
    checkpoint: Checkpoint | None = None
    erased: bool = False
    """No new input from here on; what the session held is gone as soon as no run is active."""
    refused_records: int = 0


class Queue(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The pending list as it is written: a record of its own, so that a full one costs a renewal nothing."""

    entries: tuple[Entry, ...]


class Remembered(msgspec.Struct, frozen=True, gc=False, kw_only=True, array_like=True):
    """A decided input id. `input` is kept while it is pending or starts the active run."""

    digest: str
    issued_at_ms: int
    partition: int
    offset: int
    mode: str
    user_id: int
    source: str
    verdict: str
    reason: str | None
    run_id: str | None
    disposition: str | None
    input: Input | None = None


class Action(msgspec.Struct, frozen=True, gc=False, kw_only=True, array_like=True):
    """State of one action key (tenant, session, name, key)."""

    name: str
    key: str
    args_digest: str
    state: str
    run_id: str
    requested_ms: int
    honours_keys: bool = False
    report_no: int = 0
    deadline_ms: int = 0
    valid_ms: int = 0
    result: bytes | None = None
    result_seq: int = 0
    approval_expires_ms: int = 0
    answer: str = ""
    answered_by: str = ""
    forget_ms: int = 0
    lineage: str = ""
    generation: int = 0
    result_bytes: int = 0
    """Size of the result, also where it was too large to be kept here."""
    repeats_doubt: bool = False
    """Asked again by `repeat` while it was in doubt: it is so still unless the repeat ends `ok` or `error`."""


class Branch(msgspec.Struct, frozen=True, gc=False, kw_only=True, array_like=True):
    """Something that was started and has to end before the run is balanced."""

    kind: BranchKind
    id: str
    name: str
    started_ms: int


class Call(msgspec.Struct, frozen=True, gc=False, kw_only=True, array_like=True):
    """A call id of a subtask, remembered like an action key: asked again it joins the open branch or gets the end."""

    call_id: str
    digest: str
    child_session_id: str
    child_input_id: str
    lineage: str
    ancestors: tuple[str, ...]
    status: str = ""
    """Empty while the branch is open."""
    reason: str | None = None
    child_run_id: str | None = None
    result: bytes | None = None
    abort_sent: bool = False
    forget_ms: int = 0


def forgotten(kept: Action | Call, now_ms: int) -> bool:
    """Its time is over (protocol section 8): it counts as unknown, even while its record still stands."""
    return 0 < kept.forget_ms < now_ms


class Retry(msgspec.Struct, frozen=True, gc=False, kw_only=True, array_like=True):
    """What a retry of the last run would take over, while it is accepted."""

    run_id: str
    lineage: str
    input: Input
    until_ms: int


class _Stored(dict[bytes, T | None]):
    """The committed records of one kind by their keys, shared by all forks of a session: decoded once asked for."""

    __slots__ = ("_keys", "_kind", "_records", "prefix")

    def __init__(self, kind: type[T], prefix: bytes, records: Mapping[bytes, bytes]) -> None:
        super().__init__()
        self.prefix = prefix
        self._kind = kind
        self._records = records
        self._keys: set[bytes] | None = None

    def __missing__(self, key: bytes) -> T | None:
        found = self.read(key)
        if found is not None:
            self[key] = found
        return found

    def read(self, key: bytes) -> T | None:
        """The record as it is written, without keeping it; None when there is none."""
        raw = self._records.get(key)
        return None if raw is None else decode_body(self._kind, raw)

    def all_keys(self) -> set[bytes]:
        """Keys of all committed records. One pass over the session's records, once; a session may have thousands."""
        if self._keys is None:
            prefix = self.prefix
            self._keys = {key for key in self._records if key.startswith(prefix)}
        return self._keys

    def apply(self, key: bytes, value: T | None) -> None:
        if value is None:
            self.pop(key, None)
        else:
            self[key] = value
        if self._keys is not None:
            (self._keys.discard if value is None else self._keys.add)(key)


class _Base:
    """What all forks of a session share: its committed records by kind, and the keys of its single records."""

    __slots__ = ("_kinds", "actions", "branches", "calls", "head_key", "ids", "queue_key", "retries")

    def __init__(self, tenant_id: int, session_id: str, records: Mapping[bytes, bytes]) -> None:
        def stored(kind: type[T], letter: str) -> _Stored[T]:
            return _Stored(kind, state_keys.prefix(letter, tenant_id, session_id), records)

        self.head_key = state_keys.head_key(tenant_id, session_id)
        self.queue_key = state_keys.queue_key(tenant_id, session_id)
        self.ids = stored(Remembered, state_keys.INPUTS)
        self.actions = stored(Action, state_keys.ACTIONS)
        self.branches = stored(Branch, state_keys.BRANCHES)
        self.calls = stored(Call, state_keys.CALLS)
        self.retries = stored(Retry, state_keys.RETRY)
        kinds: tuple[_Stored[Any], ...] = (self.ids, self.actions, self.branches, self.calls, self.retries)
        self._kinds = {kind.prefix[:2]: kind for kind in kinds}

    def apply(self, changed: Mapping[bytes, Any]) -> None:
        for key, value in changed.items():
            self._kinds[key[:2]].apply(key, value)


class Parts(msgspec.Struct, Generic[T], eq=False, gc=False):
    """One kind of records of a session: what is committed underneath, the session's changes over it."""

    _stored: _Stored[T]
    _changed: dict[bytes, Any]

    def get(self, name: str) -> T | None:
        stored, changed = self._stored, self._changed
        key = stored.prefix + name.encode()
        return changed[key] if key in changed else stored[key]

    def put(self, name: str, value: T) -> None:
        self._changed[self._stored.prefix + name.encode()] = value

    def swap(self, name: str, value: T | None) -> T | None:
        """Put `value` (None: drop the record); what stood there before."""
        stored, changed = self._stored, self._changed
        key = stored.prefix + name.encode()
        before = changed[key] if key in changed else stored[key]
        changed[key] = value
        return before

    def drop(self, name: str) -> None:
        self._changed[self._stored.prefix + name.encode()] = None

    def _keys(self) -> set[bytes]:
        keys, prefix = self._stored.all_keys(), self._stored.prefix
        changed = [key for key in self._changed if key.startswith(prefix)]
        if changed:
            keys = keys.copy()
            for key in changed:
                (keys.discard if self._changed[key] is None else keys.add)(key)
        return keys

    def names(self) -> list[str]:
        """Names of all present records, sorted (a replay must see the same order)."""
        start = len(self._stored.prefix)
        return [key[start:].decode() for key in sorted(self._keys())]

    def items(self, prefix: str = "") -> Iterator[tuple[str, T]]:
        """All present records whose names begin with `prefix`, in the order of their names."""
        start = len(self._stored.prefix)
        wanted = self._stored.prefix + prefix.encode()
        for key in sorted(self._keys()):
            if not key.startswith(wanted):
                continue
            value: T | None = self._changed.get(key)
            if value is None:
                value = self._stored.get(key) or self._stored.read(key)
            assert value is not None
            yield key[start:].decode(), value


class Session(msgspec.Struct, eq=False):
    """One session. See the module's rule; `load`, `fork`, `changes` and `settled` are all a shell needs."""

    tenant_id: int
    session_id: str
    head: Head
    _base: _Base
    _changed: dict[bytes, Any]
    """Records put (None: dropped) since the session was loaded or settled, of every kind, by their keys."""
    pending_written: tuple[Entry, ...] = ()
    dirty: bool = False

    @property
    def ids(self) -> Parts[Remembered]:
        return Parts(self._base.ids, self._changed)

    @property
    def actions(self) -> Parts[Action]:
        return Parts(self._base.actions, self._changed)

    @property
    def branches(self) -> Parts[Branch]:
        return Parts(self._base.branches, self._changed)

    @property
    def calls(self) -> Parts[Call]:
        return Parts(self._base.calls, self._changed)

    @property
    def retries(self) -> Parts[Retry]:
        return Parts(self._base.retries, self._changed)

    @classmethod
    def load(cls, tenant_id: int, session_id: str, records: Mapping[bytes, bytes]) -> Session:
        """A session from its state records (none: a session never seen). `records` stays the base: the shell applies
        `changes()` to it before it calls `settled()`. Raises `Fatal` on a state version it does not know."""
        base = _Base(tenant_id, session_id, records)
        raw, queue = records.get(base.head_key), records.get(base.queue_key)
        head = Head() if raw is None else decode_body(Head, raw)
        written = () if queue is None else decode_body(Queue, queue).entries
        head.pending = written or head.pending
        return cls(tenant_id, session_id, head, base, {}, written)

    def fork(self) -> Session:
        """A working copy; changes made in it are not seen here."""
        # As `copy.copy` does it, without its search for how to copy.
        head: Head = self.head.__copy__()  # type: ignore[attr-defined]
        if head.run is not None:
            head.run = head.run.__copy__()  # type: ignore[attr-defined]
        changed = self._changed
        changed = changed.copy() if changed else {}
        return Session(self.tenant_id, self.session_id, head, self._base, changed, self.pending_written, self.dirty)

    def changes(self, next_deadline_ms: int = 0) -> dict[bytes, bytes | None]:
        """State records that differ from what was loaded or last settled (None = tombstone).

        `next_deadline_ms` goes in front of the head's value, so that a recovery can build its timers without decoding.
        """
        if not self.dirty:
            return {}
        changed: dict[bytes, bytes | None] = {}
        for key, value in self._changed.items():
            changed[key] = None if value is None else encode_body(value)
        head = self.head
        if head.pending is not self.pending_written:
            changed[self._base.queue_key] = encode_body(Queue(head.pending)) if head.pending else None
        if head.pending:
            head = replace(head, pending=())
        changed[self._base.head_key] = encode_body(head, next_deadline_ms)
        return changed

    def settled(self) -> Session:
        """The same value with nothing left to write; for after the changes were committed and applied to the base."""
        if self._changed:
            self._base.apply(self._changed)
        return Session(self.tenant_id, self.session_id, self.head, self._base, {}, self.head.pending)


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Head, Queue, Remembered, Action, Branch, Call, Retry)
}


def encode_body(value: object, next_deadline_ms: int = 0) -> bytes:
    return codec.encode_state(next_deadline_ms, STATE_VERSION, _encoder.encode(value))


def decode_body(kind: type[T], raw: bytes) -> T:
    _, version, body = codec.decode_state(raw)
    if version != STATE_VERSION:
        raise Fatal(f"state record of version {version}; this release knows {STATE_VERSION}. Upgrade before going on")
    return _decoders[kind].decode(body)  # type: ignore[no-any-return]
