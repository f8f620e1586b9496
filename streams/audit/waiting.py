"""The pending list of a session, kept a second time from the receipts: its order, its bounds, what became of steers.

Receipts of a session stand in the order of the decisions: they tell when something entered the list and when it left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onepen.schemas.events import INPUT_APPLIED, INPUT_CARRIED_OVER, INPUT_STEERED, RUN_FINISHED, RUN_STARTED
from onepen.schemas.inputs import Input
from onepen.schemas.limits import PENDING_MAX
from onepen.streams.audit.admission import input_of
from onepen.streams.audit.evidence import Evidence, LoggedEvent, LoggedReceipt, Position, SessionKey, Violation, grouped
from onepen.streams.audit.modes import in_front


@dataclass
class _List:
    """Positions of the inputs that wait, in the order of the list."""

    entries: list[Position] = field(default_factory=list)
    front: set[Position] = field(default_factory=set)
    unsure: set[Position] = field(default_factory=set)
    """Of these nobody knows any more whether they went in front: their records were deleted with age."""

    def put(self, position: Position, front: bool | None) -> None:
        if front is None:
            self.unsure.add(position)
        if not front:
            self.entries.append(position)
            return
        self.front.add(position)
        self.entries.insert(sum(one in self.front for one in self.entries), position)

    def take(self, position: Position) -> None:
        self.entries = [one for one in self.entries if one != position]
        self.front.discard(position)
        self.unsure.discard(position)


def _receipts(evidence: Evidence) -> dict[SessionKey, list[LoggedReceipt]]:
    return grouped(
        (r for r in evidence.receipts if r.receipt.kind == "input"),
        lambda r: (r.receipt.tenant_id, r.receipt.session_id),
    )


def queue_in_order(evidence: Evidence) -> list[Violation]:
    """A run begins with what stands first in the list: log order, interrupts in front of it."""
    found = []
    for session, receipts in _receipts(evidence).items():
        starts = {
            (one.event.run_id, input_of(one))
            for one in evidence.by_session.get(session, [])
            if one.event.type == RUN_STARTED
        }
        found += [violation for violation, _ in _walk(evidence, receipts, starts) if violation is not None]
    return found


def bounded_list(evidence: Evidence) -> list[Violation]:
    """Never more than PENDING_MAX inputs wait in a session."""
    found = []
    for receipts in _receipts(evidence).values():
        for (_, length), one in zip(_walk(evidence, receipts, set()), receipts, strict=True):
            if length > PENDING_MAX:
                found.append(Violation("bounds", str(one), f"{length} inputs wait, {PENDING_MAX} may"))
    return found


def _walk(
    evidence: Evidence, receipts: list[LoggedReceipt], starts: set[tuple[str, str | None]]
) -> Iterator[tuple[Violation | None, int]]:
    """Per receipt: what is wrong with it, and how many inputs wait after it."""
    waiting = _List()
    for one in receipts:
        receipt, violation = one.receipt, None
        if receipt.disposition is not None and receipt.verdict is None:
            begins = (receipt.run_id or "", receipt.input_id) in starts and receipt.disposition == "consumed"
            if begins and not waiting.unsure and one.about in waiting.entries and waiting.entries[0] != one.about:
                violation = Violation("entry", str(one), f"began a run before the input at {waiting.entries[0]}")
            waiting.take(one.about)
        elif receipt.verdict in ("queued", "steered"):
            waiting.put(one.about, _front(evidence, one))
        yield violation, len(waiting.entries)


def _front(evidence: Evidence, one: LoggedReceipt) -> bool | None:
    """Whether an input that was queued or steered went in front of the list; None: not known any more."""
    if one.receipt.verdict != "queued":
        return False
    logged = evidence.input_at.get(one.about)
    if logged is None and not evidence.kept(one.about):
        return None
    policy = evidence.policy(one.receipt.tenant_id, one.about)
    return logged is not None and isinstance(logged.record, Input) and in_front(logged.record, policy)


def steers_settled(evidence: Evidence) -> list[Violation]:
    """Each steer of a run is applied in it, in order, or leaves it at its end: carried over, discarded, withdrawn."""
    found = []
    gone = {
        (r.receipt.tenant_id, r.receipt.session_id, r.receipt.input_id)
        for r in evidence.receipts
        if r.receipt.disposition not in (None, "consumed") and r.receipt.verdict is None
    }
    for events in evidence.by_run.values():
        open_: list[str] = []
        for one in events:
            name, kind = input_of(one) or "", one.event.type
            if kind == INPUT_STEERED:
                open_.append(name)
            elif kind == INPUT_APPLIED:
                found += _applied(one, name, open_, gone)
            elif kind == INPUT_CARRIED_OVER:
                if name not in open_:
                    found.append(Violation("steers", str(one), "was not pending for this run"))
                else:
                    open_.remove(name)
            elif kind == RUN_FINISHED and evidence.whole(one.cause):
                left = [name for name in open_ if (*one.session, name) not in gone]
                found += [Violation("steers", str(one), f"the steer {name} is stranded") for name in left]
    return found


def _applied(one: LoggedEvent, name: str, open_: list[str], gone: set[tuple[int, str, str | None]]) -> list[Violation]:
    if name not in open_:
        return [Violation("steers", str(one), "was not pending for this run")]
    before = [other for other in open_[: open_.index(name)] if (*one.session, other) not in gone]
    open_.remove(name)
    return [Violation("steers", str(one), f"applied before {other}, which stands earlier") for other in before]
