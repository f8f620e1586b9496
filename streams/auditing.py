"""Reads topics and tables and lets the checks of `streams.audit` judge them (`onepen audit`).

Rule 1: works beside a live system. How far every partition has been decided is read first; what follows from inputs
below must be there, what follows from later ones may be. The snapshot of the tables is older than what is read of the
log, and is held against the log up to exactly where it stands.
Rule 2: partition by partition. A session lives on one partition, so memory is bounded by the largest partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from onepen.processors.rules import Keys, Rules
from onepen.processors.state_keys import PARTITION_KEY, policy_of
from onepen.schemas import codec
from onepen.schemas.errors import Poison
from onepen.schemas.events import Event
from onepen.schemas.policies import Policy
from onepen.schemas.receipts import Receipt
from onepen.sinks.postgres_audit import AuditSnapshot
from onepen.streams.audit.attribution import unattributable
from onepen.streams.audit.checks import ON_TABLES, ON_TOPICS, Check
from onepen.streams.audit.evidence import (
    Evidence,
    LoggedEvent,
    LoggedInput,
    LoggedReceipt,
    Tables,
    Unreadable,
    Violation,
)
from onepen.streams.audit.families import Families
from onepen.streams.audit.transactions import Place, StateTrail, Transactions, stamp_of
from onepen.streams.outside_reader import RawRecord
from onepen.streams.partition_mark import decode_mark, read_mark
from onepen.streams.settings import Settings
from onepen.streams.topic_scan import TopicScan
from onepen.streams.verifying import dead_offset

__all__ = ["Audit", "audit"]

LISTED_MAX: Final = 1_000
NEVER_MS: Final = 2**63 - 1
Progress = Callable[[int, int, int], None]


@dataclass
class Audit:
    """What was looked at, by check, and every violation found (the first LISTED_MAX are kept, all are counted)."""

    checked: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, Violation]] = field(default_factory=list)
    violation_count: int = 0

    def book(self, name: str, looked_at: int, found: Iterable[Violation]) -> None:
        """Add what one check looked at and found."""
        self.checked[name] += looked_at
        for violation in found:
            self.violation_count += 1
            if len(self.violations) < LISTED_MAX:
                self.violations.append((name, violation))


def audit(settings: Settings, dsn: str | None, *, progress: Progress = lambda *_: None) -> Audit:
    """Judge all partitions; `dsn` None: topics only. Raises `Retryable` and what the drivers raise when unreachable."""
    result = Audit()
    with ExitStack() as stack:
        snapshot = None
        if dsn is not None:
            snapshot = AuditSnapshot(dsn)
            stack.callback(snapshot.close)
        reader = _Reader(settings, stack)
        for partition in range(reader.partitions):
            progress(partition, 0, 1)
            evidence = reader.evidence(partition)
            _judge(result, ON_TOPICS, evidence)
            if snapshot is not None:
                _judge(result, ON_TABLES, _with_tables(settings, snapshot, evidence, partition))
            progress(partition, 1, 1)
        reader.finish(result)
    return result


def _judge(result: Audit, checks: Iterable[Check], evidence: Evidence) -> None:
    for check in checks:
        result.book(check.name, check.looked_at(evidence), check.judge(evidence))


def _with_tables(settings: Settings, snapshot: AuditSnapshot, evidence: Evidence, partition: int) -> Evidence:
    """The evidence up to where the snapshot stands, with its rows."""
    rows = snapshot.partition(partition)
    events_until = snapshot.next_offsets.get((settings.topics.events, partition), 0)
    receipts_until = snapshot.next_offsets.get((settings.topics.receipts, partition), 0)
    # Events and receipts are applied apart: only where the tables have both is a missing disposition a fault.
    caught_up = not any(one.offset >= events_until for one in evidence.events) and not any(
        one.offset >= receipts_until for one in evidence.receipts
    )
    tables = Tables(
        rows.runs,
        rows.events,
        rows.inputs,
        rows.actions,
        rows.refused,
        rows.checkpoints,
        rows.subtasks,
        {partition: events_until},
        caught_up=caught_up,
    )
    return Evidence(
        events=[one for one in evidence.events if one.offset < events_until],
        receipts=[one for one in evidence.receipts if one.offset < receipts_until],
        inputs=evidence.inputs,
        tables=tables,
        quiet=False,
        dead=evidence.dead,
        decided=evidence.decided,
        kept_from=evidence.kept_from,
        policies=evidence.policies,
        dead_from_ms=evidence.dead_from_ms,
    )


class _Reader:
    """All topics, and what is judged across partitions."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        topics = settings.topics
        self._settings = settings

        def scan(topic: str) -> TopicScan:
            return stack.enter_context(TopicScan(settings, topic))

        self._inputs, self._events, self._receipts = scan(topics.inputs), scan(topics.events), scan(topics.receipts)
        self._state, self._dead = scan(topics.state), scan(topics.deadletters)
        self._others = scan(topics.offers), scan(topics.signals)
        self.partitions = self._inputs.partitions()
        self._decided = {partition: self._mark(partition) for partition in range(self.partitions)}
        self._transactions = Transactions()
        self._trails: list[StateTrail] = []
        self._families = Families()
        self._stamped = 0
        self._whole_from_ms = 0

    def _mark(self, partition: int) -> int:
        mark = read_mark(self._state, partition)
        return 0 if mark is None else mark.next_input_offset

    def evidence(self, partition: int) -> Evidence:
        """Everything of one partition of inputs, events and receipts. The order of reading matters, see Rule 1."""
        receipts = [self._receipt(raw) for raw in self._read(self._receipts, partition)]
        until = self._mark(partition)
        trail, policies = self._state_trail(partition)
        events = self._read_events(partition, until, trail)
        first = self._inputs.ends(partition)[0]
        dead, dead_from_ms = self._dead_offsets(partition)
        inputs, unreadable = self._read_inputs(partition)
        found = Evidence(
            events=events,
            receipts=[one for one in receipts if one is not None],
            inputs=inputs,
            unreadable=unreadable,
            quiet=False,
            dead=frozenset((partition, offset) for offset in dead),
            decided=self._decided,
            kept_from={partition: first},
            policies=policies,
            dead_from_ms=dead_from_ms,
        )
        self._families.take(found, live=until != self._decided[partition])
        return found

    def finish(self, result: Audit) -> None:
        """What is judged once everything was read."""
        for scan in self._others:
            for partition in range(scan.partitions()):
                for _ in self._read(scan, partition, whole=True):
                    pass
        result.book("subtasks", len(self._families.asked), self._families.end())
        whole_from_ms = max([self._whole_from_ms, *(trail.whole_from_ms for trail in self._trails)])
        found = [violation for trail in self._trails for violation in trail.violations]
        result.book("transactions", self._transactions.count, [*found, *self._transactions.end(whole_from_ms)])
        result.book("input_ranges", sum(trail.marks for trail in self._trails), ())

    # -- records ---------------------------------------------------------------------------------------------------

    def _read(self, scan: TopicScan, partition: int, *, whole: bool = False) -> Iterable[RawRecord]:
        """Records of a partition up to its end. `whole`: what age has taken from it counts for transactions."""
        first, end = scan.ends(partition)
        one_writer = scan in (self._events, self._receipts, self._state)
        for number, record in enumerate(scan.read(partition, first, end)):
            if whole and first and not number:
                self._whole_from_ms = max(self._whole_from_ms, record.at_ms)
            stamp = stamp_of(record.headers)
            if stamp is not None:
                place = Place(scan.topic, partition, record.offset, record.at_ms)
                self._transactions.take(place, stamp, one_writer=one_writer)
            yield record

    def _receipt(self, raw: RawRecord) -> LoggedReceipt | None:
        try:
            return LoggedReceipt(raw.partition, raw.offset, codec.decode_as(Receipt, raw.value))
        except Poison as poison:
            self._unreadable_output(self._receipts.topic, raw, poison)
            return None

    def _unreadable_output(self, topic: str, raw: RawRecord, poison: Poison) -> None:
        where = f"{topic} {raw.partition}:{raw.offset}"
        self._transactions.violations.append(Violation("transactions", where, f"cannot be read: {poison}"))

    def _state_trail(self, partition: int) -> tuple[StateTrail, Mapping[tuple[int, int], Policy]]:
        """What each transaction decided, and the policies that the partition has taken."""
        trail, policies = StateTrail(partition), dict[bytes, bytes]()
        self._trails.append(trail)
        for raw in self._read(self._state, partition):
            place = Place(self._state.topic, partition, raw.offset, raw.at_ms)
            mark = decode_mark(raw.value or b"", partition) if raw.key == PARTITION_KEY else None
            if raw.value and policy_of(raw.key or b"") is not None:
                policies[raw.key or b""] = raw.value
            stamp = stamp_of(raw.headers)
            trail.take(place, None if mark is None else mark.next_input_offset, stamp)
            if mark is not None and stamp is not None and mark.next_input_offset <= self._decided[partition]:
                self._transactions.settle(stamp.transaction)
        return trail, Rules.start(Keys("", b"")).restored(policies).versions

    def _read_events(self, partition: int, until: int, trail: StateTrail) -> list[LoggedEvent]:
        found = []
        for raw in self._read(self._events, partition):
            try:
                event = codec.decode_as(Event, raw.value)
            except Poison as poison:
                self._unreadable_output(self._events.topic, raw, poison)
                continue
            stamp = stamp_of(raw.headers)
            trail.judge_cause(Place(self._events.topic, partition, raw.offset, raw.at_ms), event.cause.offset, stamp)
            if event.cause.offset >= until:
                continue
            if stamp is not None and event.cause.offset < self._decided[partition]:
                self._transactions.settle(stamp.transaction)
            found.append(LoggedEvent(partition, raw.offset, raw.value or b"", event))
        return found

    def _dead_offsets(self, partition: int) -> tuple[set[int], int]:
        """Inputs of the partition that have a dead letter, and since when no letter is missing."""
        topic, where = self._inputs.topic, partition % self._dead.partitions()
        letters = list(self._read(self._dead, where, whole=True))
        found = {offset for raw in letters if (offset := dead_offset(raw, topic, partition)) is not None}
        if not self._dead.ends(where)[0]:
            return found, 0
        return found, letters[0].at_ms if letters else NEVER_MS

    def _read_inputs(self, partition: int) -> tuple[list[LoggedInput], list[Unreadable]]:
        inputs: list[LoggedInput] = []
        unreadable: list[Unreadable] = []
        for raw in self._read(self._inputs, partition, whole=True):
            try:
                record = codec.decode_inputs(raw.value)
            except Poison as poison:
                unreadable.append(Unreadable(partition, raw.offset, poison.reason, raw.at_ms))
                continue
            why = unattributable(record, raw.key, raw.headers, partition, self.partitions)
            if why is None:
                inputs.append(LoggedInput(partition, raw.offset, raw.at_ms, record))
            else:
                unreadable.append(Unreadable(partition, raw.offset, why, raw.at_ms))
        return inputs, unreadable
