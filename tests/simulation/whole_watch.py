"""Readers that see every committed event and receipt as soon as it is visible, and judge it in that moment.

Independent of the core: sequence, chain of hashes, the one active run, generations and owners, verdicts and
dispositions are followed here from the records alone. The product's own predicates are asked now and then as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from onepen.processors import event_invariants, invariants
from onepen.schemas import codec
from onepen.schemas import events as ev
from onepen.schemas.events import Event, chain_hash
from onepen.schemas.limits import ZERO_HASH
from onepen.schemas.receipts import Receipt
from tests.simulation.whole_broker import Violation

if TYPE_CHECKING:
    from tests.simulation.whole_world import World

Key = tuple[int, str]
_TOLD = {ev.RUN_FINISHED, ev.APPROVAL_REQUESTED, ev.RUN_STARTED}


@dataclass(slots=True)
class Followed:
    """One session as its events tell it."""

    events: list[Event] = field(default_factory=list)
    framed: list[bytes] = field(default_factory=list)
    last_hash: bytes = ZERO_HASH
    run_no: int = 0
    run_id: str = ""
    seq: int = 0
    generation: int = 0
    owner: str = ""
    active: bool = False
    cancelling: bool = False


class Watch:
    def __init__(self, world: World) -> None:
        self.world = world
        self.facts = world.time.facts
        self.sessions: dict[Key, Followed] = {}
        self.owners: dict[tuple[str, int], str] = {}
        self.verdicts: dict[tuple[int, int], Receipt] = {}
        self.dispositions: dict[tuple[int, int], Receipt] = {}
        self.approvals: list[tuple[Event, dict[str, Any]]] = []
        self.finished: dict[Key, tuple[Event, dict[str, Any]]] = {}
        self.doubts: list[tuple[Key, dict[str, Any]]] = []
        self.erased: set[Key] = set()
        self.changed: dict[Key, None] = {}
        self._positions: Counter[tuple[str, int]] = Counter()
        self._dirty: dict[tuple[str, int], None] = {}
        self.decoded: dict[tuple[str, int, int], Event | Receipt] = {}

    def dirty(self, topic: str, partition: int) -> None:
        self._dirty[topic, partition] = None

    def read(self) -> None:
        """Take everything that has become visible."""
        while self._dirty:
            place = next(iter(self._dirty))
            del self._dirty[place]
            take: Callable[[bytes], Event | Receipt]
            take = self._event if place[0] == self.world.topics.events else self._receipt
            for offset, entry in self.world.broker.visible(*place, self._positions[place]):
                self._positions[place] = offset + 1
                self.world.time.steps["record delivered to a subscriber"] += 1
                self.decoded[*place, offset] = take(entry.value or b"")

    # -- events ----------------------------------------------------------------------------------------------------

    def _event(self, data: bytes) -> Event:
        event = codec.decode_as(Event, data)
        key = event.tenant_id, event.session_id
        one = self.sessions.setdefault(key, Followed())
        self._chain(one, event, data)
        self._order(one, event)
        one.events.append(event)
        one.framed.append(data)
        self.changed[key] = None
        self.facts[event.type] += 1
        self._remember(one, key, event)
        return event

    def _chain(self, one: Followed, event: Event, data: bytes) -> None:
        if event.prev_hash != one.last_hash or event.hash != chain_hash(one.last_hash, codec.event_body(data)):
            raise Violation(f"hash chain broken at {event.session_id} run {event.run_no} seq {event.seq}")
        one.last_hash = event.hash

    def _order(self, one: Followed, event: Event) -> None:
        where = f"{event.session_id} run {event.run_no} seq {event.seq} {event.type}"
        if event.type == ev.RUN_STARTED:
            if one.active:
                raise Violation(f"I1: two active runs: {where}")
            if event.run_no != one.run_no + 1:
                raise Violation(f"I2: run {one.run_no} is followed by {where}")
            one.run_no, one.run_id, one.seq, one.generation = event.run_no, event.run_id, 0, 0
            one.active, one.cancelling, one.owner = True, False, ""
        if not one.active or event.run_id != one.run_id:
            raise Violation(f"I3: an event of a run that is not active: {where}")
        if event.seq != one.seq + 1:
            raise Violation(f"I2: {one.seq} is followed by {where}")
        if event.generation < one.generation:
            raise Violation(f"I6: generation {one.generation} is followed by {event.generation}: {where}")
        one.seq, one.generation = event.seq, event.generation

    def _remember(self, one: Followed, key: Key, event: Event) -> None:
        kind = event.type
        if kind == ev.RUN_LEASED:
            owner = orjson.loads(event.payload)["workerId"]
            if self.owners.setdefault((event.run_id, event.generation), owner) != owner:
                raise Violation(f"I6: two owners of {event.run_id} generation {event.generation}")
            if one.owner and one.owner != owner:
                self.facts["takeover by another worker"] += 1
            one.owner = owner
        elif kind == ev.RUN_CANCEL_REQUESTED:
            one.cancelling = True
            self.facts["cancel with a holder"] += bool(one.owner)
        elif kind == ev.APPROVAL_REQUESTED:
            self.approvals.append((event, orjson.loads(event.payload)))
        elif kind == ev.RUN_FINISHED:
            self._finished(one, key, event)

    def _finished(self, one: Followed, key: Key, event: Event) -> None:
        payload = orjson.loads(event.payload)
        one.active = False
        self.finished[key] = event, payload
        self.doubts += [(key, doubt) for doubt in payload.get("inDoubt", [])]
        status = payload["terminalStatus"]
        self.facts[f"run {status}"] += 1
        if status == "timed_out":
            self.facts[f"timed out: {payload.get('reason')}"] += 1
        if status == "cancelled":
            if payload.get("forced"):
                self.facts["cancel forced"] += 1
            elif event.at_ms > (self._cancel_at(one, event) or event.at_ms):
                self.facts["cancel barrier waited"] += 1

    def _cancel_at(self, one: Followed, event: Event) -> int | None:
        for earlier in reversed(one.events):
            if earlier.run_id == event.run_id and earlier.type == ev.RUN_CANCEL_REQUESTED:
                return earlier.at_ms
        return None

    # -- receipts --------------------------------------------------------------------------------------------------

    def _receipt(self, data: bytes) -> Receipt:
        receipt = codec.decode_as(Receipt, data)
        place = receipt.partition, receipt.offset
        if receipt.kind != "input":
            self.facts[f"{receipt.kind} receipt: {receipt.reason}"] += 1
            return receipt
        if receipt.verdict is not None:
            if place in self.verdicts:
                raise Violation(f"I5: a second verdict for input {place}: {receipt.verdict}")
            self.verdicts[place] = receipt
            self.facts[f"verdict {receipt.verdict}"] += 1
            if receipt.verdict == "refused":
                self.facts[f"refused {receipt.reason}"] += 1
        if receipt.disposition is not None:
            if place in self.dispositions:
                raise Violation(f"a second disposition for input {place}: {receipt.disposition}")
            self.dispositions[place] = receipt
            self.facts[f"disposition {receipt.disposition}"] += 1
            if receipt.reason == "missed":
                self.facts["steer missed"] += 1
            if receipt.mode == "erase" and receipt.disposition == "done":
                self.erased.add((receipt.tenant_id, receipt.session_id))
        return receipt

    # -- the product's own predicates ------------------------------------------------------------------------------

    def look_at_sessions(self, count: int) -> None:
        """`invariants.broken` of sessions that have changed, with the state of whoever rightly owns them."""
        for key in list(self.changed)[:count]:
            del self.changed[key]
            found = self.world.owned_session(key)
            one = self.sessions[key]
            if found is None:
                broken = invariants.broken(None, one.events)
            elif found.head.last_hash != one.last_hash:
                raise Violation(f"{key}: the owner's state and the events differ")
            else:
                broken = invariants.broken(found, one.events)
            if broken:
                raise Violation(f"{key}: {broken}")

    def chains_verify(self) -> None:
        for key, one in self.sessions.items():
            if not event_invariants.chain_verifies(one.framed):
                raise Violation(f"{key}: the chain of hashes does not verify")
