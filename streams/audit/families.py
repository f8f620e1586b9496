"""Subtasks across sessions: what a parent sent arrived, and what became of it was told, each once.

Parents and children stand on different partitions: facts are collected partition by partition and judged at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from onepen.schemas.events import RUN_CANCEL_REQUESTED, RUN_FINISHED, SUBTASK_FINISHED, SUBTASK_STARTED
from onepen.schemas.inputs import Input
from onepen.schemas.notices import Notice
from onepen.streams.audit.evidence import Evidence, LoggedEvent, Violation

Child = tuple[int, str, str]
"""(tenant, child session, child input id)"""


@dataclass
class Families:
    """All parents and children of the log."""

    asked: dict[Child, LoggedEvent] = field(default_factory=dict)
    _inputs: Counter[Child] = field(default_factory=Counter)
    _aborts: Counter[Child] = field(default_factory=Counter)
    _notices: Counter[Child] = field(default_factory=Counter)
    _to_abort: dict[Child, LoggedEvent] = field(default_factory=dict)
    _disposed: dict[Child, str] = field(default_factory=dict)
    _trimmed: bool = False
    _live: bool = False

    def take(self, evidence: Evidence, *, live: bool = False) -> None:
        """The evidence of one partition. `live`: more was decided while it was read."""
        self._live = live
        self._trimmed = self._trimmed or any(evidence.kept_from.values())
        for one in evidence.inputs:
            record = one.record
            if isinstance(record, Input) and record.parent is not None:
                name = record.target_id if record.mode == "abort" else record.input_id
                counter = self._aborts if record.mode == "abort" else self._inputs
                counter[record.tenant_id, record.session_id, name or ""] += 1
            elif isinstance(record, Notice):
                self._notices[record.tenant_id, record.child_session_id, record.child_input_id] += 1
        for events in evidence.by_run.values():
            self._parent(evidence, events)
        ended = {e.event.run_id for e in evidence.events if e.event.type == RUN_FINISHED and evidence.whole(e.cause)}
        for logged, record in evidence.client_inputs:
            if record.parent is not None and record.mode != "abort":
                self._child(evidence, record, logged.position, ended)

    def _parent(self, evidence: Evidence, events: list[LoggedEvent]) -> None:
        open_: dict[str, tuple[Child, LoggedEvent]] = {}
        for one in events:
            call, payload = str(one.payload.get("callId")), one.payload
            if not evidence.whole(one.cause):
                break
            if one.event.type == SUBTASK_STARTED:
                child = one.event.tenant_id, str(payload.get("sessionId")), str(payload.get("inputId"))
                self.asked[child] = one
                open_[call] = child, one
            elif one.event.type == SUBTASK_FINISHED:
                ended = open_.pop(call, None)
                if ended is not None and payload.get("status") == "aborted":
                    self._to_abort[ended[0]] = ended[1]
            elif one.event.type == RUN_CANCEL_REQUESTED:
                self._to_abort |= dict(open_.values())

    def _child(self, evidence: Evidence, record: Input, position: tuple[int, int], ended: set[str]) -> None:
        """What the child's input came to, as far as it is over."""
        child = record.tenant_id, record.session_id, record.input_id
        for receipt in (one.receipt for one in evidence.receipts_about.get(position, [])):
            if receipt.verdict == "duplicate" or receipt.disposition is None or not evidence.whole(position):
                continue
            if receipt.disposition == "consumed":
                over = receipt.run_id in ended
            else:
                # Without its verdict the receipt follows from a later input, which a live system may just have decided.
                over = receipt.verdict is not None or not self._live
            if over:
                self._disposed[child] = receipt.disposition

    def end(self) -> Iterator[Violation]:
        """Everything was taken: what did not arrive, or more than once."""
        for child, started in self.asked.items():
            arrived = self._inputs[child]
            if arrived > 1 or (not arrived and not self._trimmed):
                yield Violation("subtasks", str(started), f"its input reached the child {arrived} times")
        for child, started in self._to_abort.items():
            if not self._aborts[child] and not self._trimmed:
                yield Violation("subtasks", str(started), "was open when its parent stopped, and got no abort")
        for child, disposition in self._disposed.items():
            told = self._notices[child]
            if told != 1 and not self._trimmed:
                where = f"input {child[2]} of session {child[1]}"
                yield Violation("subtasks", where, f"{disposition}, and its parent was told {told} times")
