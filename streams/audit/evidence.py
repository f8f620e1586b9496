"""What the checks judge: records with their log positions, table rows, the ledger of the outside world.

Plain values, already read and decoded; how they were read is no concern of the checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from onepen.schemas.codec import InputsRecord
from onepen.schemas.errors import Invalid
from onepen.schemas.events import Event
from onepen.schemas.inputs import Input
from onepen.schemas.policies import DEFAULT_POLICY, Policy, PolicyRecord, parse_policy
from onepen.schemas.receipts import Receipt

Row = Mapping[str, Any]
SessionKey = tuple[int, str]
Position = tuple[int, int]
"""(partition, offset)."""


@dataclass(frozen=True)
class LoggedEvent:
    """An event as a read-committed reader found it. `data` is the framed record, byte for byte."""

    partition: int
    offset: int
    data: bytes
    event: Event

    @cached_property
    def payload(self) -> dict[str, Any]:
        loaded = orjson.loads(self.event.payload)
        return loaded if isinstance(loaded, dict) else {}

    @property
    def session(self) -> SessionKey:
        return self.event.tenant_id, self.event.session_id

    @property
    def cause(self) -> Position:
        return self.event.cause.partition, self.event.cause.offset

    def __str__(self) -> str:
        e = self.event
        return f"events {self.partition}:{self.offset} ({e.session_id} run {e.run_no} seq {e.seq} {e.type})"


@dataclass(frozen=True)
class LoggedReceipt:
    """A receipt with its own position; `receipt.partition/offset` is that of the record it answers."""

    partition: int
    offset: int
    receipt: Receipt

    @property
    def about(self) -> Position:
        return self.receipt.partition, self.receipt.offset

    def __str__(self) -> str:
        r = self.receipt
        return f"receipts {self.partition}:{self.offset} (about inputs {r.partition}:{r.offset})"


@dataclass(frozen=True)
class LoggedInput:
    """A record of the inputs topic with the broker's time."""

    partition: int
    offset: int
    at_ms: int
    record: InputsRecord

    @property
    def position(self) -> Position:
        return self.partition, self.offset

    def __str__(self) -> str:
        return f"inputs {self.partition}:{self.offset} ({type(self.record).__name__})"


@dataclass(frozen=True)
class Effect:
    """One call that reached an outside target, from the target's own ledger. `effective`: the target did it (a repeat
    of a key that it knows is answered, not done again)."""

    number: int
    session_id: str
    run_id: str
    generation: int
    name: str
    action_key: str
    args_digest: str
    effective: bool

    def __str__(self) -> str:
        return f"ledger {self.number} ({self.name} {self.action_key})"


@dataclass(frozen=True)
class Tables:
    """Rows of one database snapshot, with the callers' texts in place of surrogate ids (see `fold` for the columns)."""

    runs: Sequence[Row] = ()
    events: Sequence[Row] = ()
    inputs: Sequence[Row] = ()
    actions: Sequence[Row] = ()
    refused: Sequence[Row] = ()
    checkpoints: Sequence[Row] | None = None
    """None: not read."""
    subtasks: Sequence[Row] | None = None
    events_until: Mapping[int, int] | None = None
    """Partition -> what the tables claim to have of the events topic: everything below this offset."""
    caught_up: bool = True
    """The tables have all events and all receipts of the log, so that both say the same."""


@dataclass(frozen=True)
class Unreadable:
    """A record of the inputs topic that is no record of ours."""

    partition: int
    offset: int
    reason: str
    at_ms: int = 0

    @property
    def position(self) -> Position:
        return self.partition, self.offset

    def __str__(self) -> str:
        return f"inputs {self.partition}:{self.offset} ({self.reason})"


@dataclass(frozen=True)
class Evidence:
    """All of it. Lists are in log order per partition. `tables` None: not read, and questions about them are red."""

    events: Sequence[LoggedEvent]
    receipts: Sequence[LoggedReceipt]
    inputs: Sequence[LoggedInput]
    effects: Sequence[Effect] = ()
    tables: Tables | None = None
    quiet: bool = True
    """Nothing is under way: each input must have its disposition and each run its end."""
    queries: Mapping[str, str] = field(default_factory=dict)
    dead: frozenset[Position] = frozenset()
    """Inputs that have a dead letter."""
    unreadable: Sequence[Unreadable] = ()
    decided: Mapping[int, int] | None = None
    """Partition -> next input to be decided when the reading began: what follows from inputs below is all here. None:
    everything is here. A live system has decided a little more, of which parts may be missing."""
    kept_from: Mapping[int, int] = field(default_factory=dict)
    """Partition -> first offset of the inputs topic that is still kept; missing: all."""
    policies: Mapping[tuple[int, int], Policy] = field(default_factory=dict)
    """(tenant, version) -> policies that were taken, as the state topic has them for ever."""
    dead_from_ms: int = 0
    """Of records appended before, a dead letter may have been deleted with age."""

    def whole(self, position: Position) -> bool:
        """True when everything that follows from the input at this position has been read."""
        return self.decided is None or position[1] < self.decided.get(position[0], 0)

    def kept(self, position: Position) -> bool:
        """False when the input at this position may have been deleted with age."""
        return position[1] >= self.kept_from.get(position[0], 0)

    def policy(self, tenant_id: int, position: Position) -> Policy:
        """The tenant's policy in force for an input at this position."""
        known = self._policies.get((position[0], tenant_id), [])
        before = [policy for offset, policy in known if offset <= position[1]]
        if before:
            return before[-1]
        # The record that put it in force may have been deleted with age.
        versions = [version for tenant, version in self.policies if tenant == tenant_id]
        older = [version for version in versions if not known or version < known[0][1].version]
        return self.policies[tenant_id, max(older)] if older else DEFAULT_POLICY

    @cached_property
    def _policies(self) -> dict[tuple[int, int], list[tuple[int, Policy]]]:
        """(partition, tenant) -> policies that came into force, with their offsets."""
        found: dict[tuple[int, int], list[tuple[int, Policy]]] = {}
        for one in self.inputs:
            if not isinstance(one.record, PolicyRecord) or one.position in self.dead or one.record.tenant_id < 1:
                continue
            known = found.setdefault((one.partition, one.record.tenant_id), [])
            if known and known[-1][1].version >= one.record.version:
                continue
            try:
                known.append((one.offset, parse_policy(one.record.body, one.record.version)))
            except Invalid:
                continue  # has a dead letter, or conservation says that it lacks one
        return found

    @cached_property
    def by_session(self) -> dict[SessionKey, list[LoggedEvent]]:
        return grouped(self.events, lambda e: e.session)

    @cached_property
    def by_run(self) -> dict[str, list[LoggedEvent]]:
        return grouped(self.events, lambda e: e.event.run_id)

    @cached_property
    def by_cause(self) -> dict[Position, list[LoggedEvent]]:
        return grouped(self.events, lambda e: e.cause)

    @cached_property
    def input_at(self) -> dict[Position, LoggedInput]:
        return {one.position: one for one in self.inputs}

    @cached_property
    def client_inputs(self) -> list[tuple[LoggedInput, Input]]:
        """Records of mode prompt, abort and so on, those of parents for their children included; no dead letters."""
        dead = self.dead
        return [(one, one.record) for one in self.inputs if isinstance(one.record, Input) and one.position not in dead]

    @cached_property
    def receipts_about(self) -> dict[Position, list[LoggedReceipt]]:
        """Input position -> the receipts about that input."""
        return grouped((r for r in self.receipts if r.receipt.kind == "input"), lambda r: r.about)

    @cached_property
    def verdicts(self) -> dict[Position, LoggedReceipt]:
        """Input position -> the receipt with its verdict."""
        return {r.about: r for r in self.receipts if r.receipt.kind == "input" and r.receipt.verdict is not None}


@dataclass(frozen=True)
class Violation:
    """A rule that does not hold: which check saw it, where, and what is wrong."""

    check: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}"


def grouped(items: Iterable[Any], key: Any) -> dict[Any, list[Any]]:
    """Items by key, each group in the given order."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
