"""A piece of log in memory for the tests of what reads logs from outside: topics of one partition, record by record.

The founding story is decided by the real core and laid out as the processor would write it. `Scan` answers like
`streams.topic_scan.TopicScan`; the real one is driven by the integration tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from onepen.processors.rules import Keys
from onepen.schemas import codec
from onepen.schemas.ids import output_key
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.schemas.policies import Policy, PolicyRecord, policy_body
from onepen.schemas.topics import Topics
from onepen.streams.outside_reader import RawRecord
from onepen.streams.store import MARK_FORMAT, Mark
from tests.unit.demo.world import World, founding_story

KEYS = Keys("k", b"s" * 32)
PREFIX = "t"
TOPICS = Topics(PREFIX)
POLICY_AT, GARBAGE_AT = 3, 4


@dataclass
class Scan:
    """One partition of a topic."""

    records: list[RawRecord]
    first: int = 0

    def partitions(self) -> int:
        return 1

    def ends(self, partition: int) -> tuple[int, int]:
        assert partition == 0
        return self.first, max((record.offset for record in self.records), default=self.first - 1) + 1

    def read(self, partition: int, start: int, end: int) -> Iterator[RawRecord]:
        assert partition == 0
        assert start >= self.first, "that offset is not kept"
        yield from [record for record in self.records if start <= record.offset < end]


@dataclass
class StateScan(Scan):
    """Only partition records: another one at each look, until the last."""

    def read(self, partition: int, start: int, end: int) -> Iterator[RawRecord]:
        yield self.records[0]
        if len(self.records) > 1:
            del self.records[0]


def _mark(next_offset: int) -> RawRecord:
    mark = Mark(MARK_FORMAT, next_offset, PROTOCOL_VERSION, 1, "slot", ("a", "b"))
    return RawRecord(0, 9, 1, b"partition", mark.encode(), ())


@dataclass
class RecordedLog:
    """All topics; tests replace records in the lists."""

    inputs: list[RawRecord] = field(default_factory=list)
    events: list[RawRecord] = field(default_factory=list)
    receipts: list[RawRecord] = field(default_factory=list)
    dead_letters: list[RawRecord] = field(default_factory=list)
    decided: int = 0
    """How far the partition record says the inputs are decided, when it is first asked."""
    decided_later: int | None = None
    """The same when it is asked again: the system is live."""
    inputs_first: int = 0

    def topics(self) -> Any:
        later = self.decided if self.decided_later is None else self.decided_later
        return SimpleNamespace(
            inputs=Scan(self.inputs, self.inputs_first),
            events=Scan(self.events),
            receipts=Scan(self.receipts),
            state=StateScan([_mark(self.decided), _mark(later)]),
            dead_letters=Scan(self.dead_letters),
        )


def dead_letter_of(offset: int, reason: str = "no_frame") -> RawRecord:
    headers = (
        ("onepen-reason", reason.encode()),
        ("onepen-topic", TOPICS.inputs.encode()),
        ("onepen-partition", b"0"),
        ("onepen-offset", str(offset).encode()),
    )
    return RawRecord(0, 2 * offset, 1, b"k", b"garbage", headers)


def recorded(world: World) -> RecordedLog:
    """The topics after everything in `world` has been decided, with a policy and a dead letter in front."""
    policy = PolicyRecord(tenant_id=99, version=1, body=policy_body(Policy(version=1)))
    log = RecordedLog(
        inputs=[
            RawRecord(0, POLICY_AT, 1, b"policy", codec.encode(policy), ()),
            RawRecord(0, GARBAGE_AT, 1, b"k", b"garbage", ()),
        ],
        dead_letters=[dead_letter_of(GARBAGE_AT)],
    )
    for one in world.inputs:
        key = one.record.session_id.encode()  # type: ignore[union-attr]
        log.inputs.append(RawRecord(0, one.offset, one.at_ms, key, codec.encode(one.record), ()))
    for event in world.evidence_events:
        key = output_key(event.event.tenant_id, event.event.session_id)
        log.events.append(RawRecord(0, event.offset, event.event.at_ms, key, event.data, ()))
    for receipt in world.receipts:
        key = output_key(receipt.receipt.tenant_id, receipt.receipt.session_id)
        value = codec.encode(receipt.receipt)
        log.receipts.append(RawRecord(0, receipt.offset, receipt.receipt.at_ms, key, value, ()))
    log.decided = world.offset + 1
    return log


def recorded_story() -> RecordedLog:
    """The founding story: queue, steer, cancel, approval, takeover, timeout, repeat."""
    return recorded(founding_story())
