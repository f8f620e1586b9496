"""Decide a partition's inputs again, outside of the engine: the same pure `decide`, a driver of its own.

Rule: input records in, decisions out; nothing is read, written or waited for here, and nothing of the engine is used.
Memory is bounded by the state of the sessions, not by the length of the topic: bytes are the truth, and only lately
used sessions stay decoded. Dead letters are taken as given: a record that has one is passed over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from onepen.processors import state_keys, timers
from onepen.processors.attribution import attribute
from onepen.processors.decide import Command, Decision, Moment, decide
from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Poison
from onepen.schemas.inputs import Input
from onepen.schemas.policies import Policy, PolicyRecord
from onepen.schemas.worker_records import WorkerHead

if TYPE_CHECKING:
    from onepen.streams.outside_reader import RawRecord

__all__ = ["Decided", "Reexecution", "SessionKey", "Undecidable", "verdict_of"]

SessionKey = tuple[int, str]
DECODED_SESSIONS_MAX: Final = 2_000


class Undecidable(Exception):
    """An input that has no dead letter and cannot be decided. The message says why."""


class Decided(NamedTuple):
    """An input record, the command in it, and what follows from it."""

    command: Command
    decision: Decision


class _Loaded(NamedTuple):
    session: Session
    base: dict[bytes, bytes]


class Reexecution:
    """One partition while its inputs are decided again: from nothing, or from the `records` of an archived state."""

    def __init__(
        self,
        partition: int,
        partitions: int,
        keys: Keys,
        records: Mapping[bytes, bytes] | None = None,
        *,
        decoded_max: int = DECODED_SESSIONS_MAX,
    ) -> None:
        """`partitions`: of the inputs topic. Raises `Fatal` for records that this release does not know."""
        self.partition = partition
        self.partitions = partitions
        self._keys = keys
        self._records: dict[SessionKey, dict[bytes, bytes]] = {}
        policies: dict[bytes, bytes] = {}
        for key, value in (records or {}).items():
            owner = state_keys.session_of(key)
            if owner is not None:
                self._records.setdefault(owner, {})[key] = value
            elif state_keys.policy_of(key) is not None:
                policies[key] = value
        self.rules = Rules.start(keys).restored(policies)
        self._decoded: OrderedDict[SessionKey, _Loaded] = OrderedDict()
        self._decoded_max = decoded_max
        self._start_hashes: dict[SessionKey, bytes] = {}
        self._imposed: set[int] = set()
        self.tokens_valid = 0
        self.tokens_invalid = 0

    def impose(self, tenant_id: int, policy: Policy) -> None:
        """Let `policy` hold for a tenant from here on, whatever its recorded policies say. Its version must be one that
        no recorded policy has: runs keep the version they were started under."""
        self._imposed.add(tenant_id)
        self.rules = replace(
            self.rules,
            latest={**self.rules.latest, tenant_id: policy},
            versions={**self.rules.versions, (tenant_id, policy.version): policy},
        )

    @property
    def sessions(self) -> int:
        """Sessions that have any state."""
        return len(self._records)

    def decide(self, record: RawRecord) -> Decided | None:
        """What follows from an input record without a dead letter; None for a policy. Raises `Undecidable`, `Fatal`."""
        try:
            command = codec.decode_inputs(record.value)
            attribute(command, record.key, record.headers, self.partition, self.partitions)
            if isinstance(command, PolicyRecord):
                if command.tenant_id not in self._imposed:
                    self.rules = admit_policy(self.rules, command)[0]
                return None
        except Poison as poison:
            raise Undecidable(f"has no dead letter, but cannot be decided: {poison}") from None
        return self._apply(command, Moment(self.partition, record.offset, record.at_ms))

    def _apply(self, command: Command, moment: Moment) -> Decided:
        if isinstance(command, WorkerHead):
            self._look_at_token(command)
        key = (command.tenant_id, command.session_id)
        loaded = self._load(key)
        try:
            decision = decide(self.rules, loaded.session, command, moment)
        except Fatal:
            raise
        except Exception as error:  # the processor would have dead-lettered it as internal_error
            raise Undecidable(f"has no dead letter, but deciding it fails: {type(error).__name__}: {error}") from error
        self._keep(key, decision.session, loaded.base)
        return Decided(command, decision)

    def session(self, key: SessionKey) -> Session:
        """The session as the inputs so far have left it."""
        return self._load(key).session

    def start_hash(self, key: SessionKey) -> bytes:
        """The last hash of a session before the first input that was decided here."""
        if key not in self._start_hashes:
            self._load(key)
        return self._start_hashes[key]

    def records(self) -> Iterable[tuple[bytes, bytes]]:
        """The state records of all sessions, in no particular order."""
        for base in self._records.values():
            yield from base.items()

    def _look_at_token(self, record: WorkerHead) -> None:
        """One token that fits shows that the key is the processor's; there is no need to look at more."""
        if self.tokens_valid:
            return
        who = (record.tenant_id, record.session_id, record.run_id, record.generation)
        if self._keys.valid(record.token, *who):
            self.tokens_valid += 1
        else:
            self.tokens_invalid += 1

    def _load(self, key: SessionKey) -> _Loaded:
        loaded = self._decoded.get(key)
        if loaded is not None:
            self._decoded.move_to_end(key)
            return loaded
        base = self._records.get(key, {})
        loaded = _Loaded(Session.load(key[0], key[1], base), base)
        self._start_hashes.setdefault(key, loaded.session.head.last_hash)
        return loaded

    def _keep(self, key: SessionKey, session: Session, base: dict[bytes, bytes]) -> None:
        for name, value in session.changes(timers.next_deadline_ms(session)).items():
            if value is None:
                base.pop(name, None)
            else:
                base[name] = value
        self._records[key] = base
        self._decoded[key] = _Loaded(session.settled(), base)
        self._decoded.move_to_end(key)
        while len(self._decoded) > self._decoded_max:
            self._decoded.popitem(last=False)


def verdict_of(decided: Decided) -> tuple[str, str | None] | None:
    """(verdict, reason) of an input record by its decision; None for any other record."""
    if not isinstance(decided.command, Input):
        return None
    for receipt in decided.decision.receipts:
        if receipt.kind == "input" and receipt.verdict is not None:
            return receipt.verdict, receipt.reason
    return None
