"""One turn: the working copy of a session while one record is judged, and what follows from the record.

A turn only collects. Which events, receipts, offers and views follow is decided by the modules beside this one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from onepen.processors import clock
from onepen.processors.evolve import evolve
from onepen.processors.rules import Rules
from onepen.processors.session import Remembered, Run, Session
from onepen.schemas import ids
from onepen.schemas.events import Cause, EventDraft
from onepen.schemas.inputs import Content, Input, Parent
from onepen.schemas.notices import Notice
from onepen.schemas.offers import Offer
from onepen.schemas.policies import Policy
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import Disposition, Mode, Reason, Verdict
from onepen.schemas.strict_json import canonical, embed
from onepen.schemas.views import View
from onepen.schemas.worker_records import WorkerHead


class Moment(msgspec.Struct, frozen=True, gc=False):
    """Where and when a record stands: partition, offset, and the broker's timestamp in ms."""

    partition: int
    offset: int
    at_ms: int


class Turn(msgspec.Struct, eq=False):
    """Mutable while one record is judged; nobody else sees it."""

    rules: Rules
    session: Session
    moment: Moment
    now_ms: int
    drafts: list[EventDraft] = []
    receipts: list[Receipt] = []
    offers: list[Offer] = []
    views: list[View] = []
    forwards: list[Input | Notice] = []
    """Records for other sessions of the tenant, written in this record's transaction."""
    view_wanted: bool = False
    contents_wanted: bool = False
    refused_events: tuple[tuple[int, str], ...] = ()

    @property
    def run(self) -> Run:
        """The active run; callers have checked that there is one."""
        run = self.session.head.run
        assert run is not None
        return run

    @property
    def run_policy(self) -> Policy:
        """The policy the active run was started under."""
        return self.rules.policy_at(self.session.tenant_id, self.run.policy_version)

    def resume_clock(self) -> None:
        """Let the run's deadline count again, before something is permitted that must end by it."""
        clock.resume(self.run, self.now_ms)

    def start(self, payload: dict[str, Any], event_type: str) -> None:
        """Open the session's next run with its first event, under generation 1."""
        session = self.session
        run_no = session.head.run_no + 1
        run_id = ids.run_id(session.tenant_id, session.session_id, run_no)
        self._append(run_id, run_no, 1, event_type, 1, payload, canonical(payload))

    def emit(self, event_type: str, payload: dict[str, Any], raw: bytes | None = None) -> None:
        """Append one event of the active run and apply it. `raw` is the payload's text as the worker sent it."""
        run = self.session.head.run
        assert run is not None
        body = canonical(payload) if raw is None else raw
        self._append(run.run_id, run.run_no, run.seq + 1, event_type, run.generation, payload, body)

    def _append(
        self, run_id: str, run_no: int, seq: int, kind: str, generation: int, payload: dict[str, Any], body: bytes
    ) -> None:
        session, moment, drafts = self.session, self.moment, self.drafts
        draft = EventDraft(
            tenant_id=session.tenant_id,
            session_id=session.session_id,
            run_id=run_id,
            run_no=run_no,
            seq=seq,
            type=kind,
            generation=generation,
            at_ms=self.now_ms,
            cause=Cause(moment.partition, moment.offset, len(drafts)),
            payload=body,
        )
        evolve(session, draft, payload)
        drafts.append(draft)

    def answer(
        self,
        record: Input,
        verdict: Verdict,
        *,
        reason: Reason | None = None,
        disposition: Disposition | None = None,
        run_id: str | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        """The receipt with the verdict of the input record in hand (and its disposition when already known)."""
        if disposition not in (None, Disposition.CONSUMED, Disposition.DUPLICATE):
            self.notify_parent(record, disposition.value, reason)
        self.receipts.append(
            Receipt(
                kind="input",
                tenant_id=record.tenant_id,
                session_id=record.session_id,
                partition=self.moment.partition,
                offset=self.moment.offset,
                at_ms=self.now_ms,
                input_id=record.input_id[: ids.ID_CHARS_MAX],
                mode=record.mode[: ids.ID_CHARS_MAX],
                user_id=record.user_id,
                source=record.source[: ids.ID_CHARS_MAX],
                verdict=verdict,
                disposition=disposition,
                reason=reason,
                run_id=run_id,
                detail=None if detail is None else canonical(detail),
            )
        )

    def dispose(
        self,
        input_id: str,
        disposition: Disposition,
        *,
        reason: Reason | None = None,
        run_id: str | None = None,
    ) -> None:
        """The final disposition of an earlier input: its receipt, and no content kept for it unless it starts a run."""
        known = self.session.ids.get(input_id)
        assert known is not None, "only a remembered input is pending"
        assert known.disposition is None, "one final disposition per input record"
        if known.input is not None and disposition is not Disposition.CONSUMED:
            self.notify_parent(known.input, disposition.value, reason)
        self.session.ids.put(
            input_id,
            msgspec.structs.replace(
                known,
                disposition=disposition,
                run_id=run_id or known.run_id,
                input=known.input if disposition is Disposition.CONSUMED else None,
            ),
        )
        self.receipts.append(self._disposed(input_id, known, disposition, reason, run_id))

    def _disposed(
        self,
        input_id: str,
        known: Remembered,
        disposition: Disposition,
        reason: Reason | None,
        run_id: str | None,
    ) -> Receipt:
        return Receipt(
            kind="input",
            tenant_id=self.session.tenant_id,
            session_id=self.session.session_id,
            partition=known.partition,
            offset=known.offset,
            at_ms=self.now_ms,
            input_id=input_id,
            mode=known.mode,
            user_id=known.user_id,
            source=known.source,
            disposition=disposition,
            reason=reason,
            run_id=run_id or known.run_id,
        )

    def notify_parent(self, record: Input, status: str, reason: Reason | None) -> None:
        """Tell the parent of a child's input how it ended, where no run of its own will."""
        if record.parent is not None and record.mode == Mode.PROMPT:
            self.tell_parent(record.parent, record.input_id, None, status, reason, None)

    def tell_parent(
        self,
        parent: Parent,
        input_id: str,
        run_id: str | None,
        status: str,
        reason: str | None,
        result: bytes | None,
    ) -> None:
        """One notice to the session that waits for a child's input."""
        self.forwards.append(
            Notice(
                tenant_id=self.session.tenant_id,
                session_id=parent.session_id,
                run_id=parent.run_id,
                call_id=parent.call_id,
                child_session_id=self.session.session_id,
                child_input_id=input_id,
                child_run_id=run_id,
                status=status,
                reason=reason,
                result=result,
            )
        )

    def notify(self, record: WorkerHead, kind: str, reason: Reason, report_no: int = 0) -> None:
        """Answer a refused worker record to its own inbox: run, generation, status, reason, nothing else."""
        head = self.session.head
        run, last = head.run, head.last
        status, generation = "", 0
        if run is not None and run.run_id == record.run_id:
            status, generation = run.status.value, run.generation
        elif last is not None and last.run_id == record.run_id:
            status, generation = last.status.value, last.generation
        self.tell(record.worker_id, record.inbox, record.run_id, generation, status, reason, kind, report_no)

    def tell(
        self,
        worker_id: str,
        inbox: int,
        run_id: str,
        generation: int,
        status: str,
        reason: Reason,
        kind: str | None = None,
        report_no: int = 0,
    ) -> None:
        """One message to a worker that is not (or no longer) the holder."""
        self.views.append(
            View(
                tenant_id=self.session.tenant_id,
                session_id=self.session.session_id,
                run_id=run_id,
                generation=generation,
                no=0,
                status=status,
                worker_id=worker_id,
                inbox=inbox,
                reason=reason,
                record=kind,
                report_no=report_no,
            )
        )


def content_members(content: Content | None) -> dict[str, Any]:
    """How content appears in an event's payload (see schemas/events.py). JSON text is embedded unchanged."""
    if content is None:
        return {"content": None}
    if content.data is None:
        pointer = {"uri": content.uri, "digest": content.digest, "sizeBytes": content.size_bytes}
        return {"mediaType": content.media_type, "pointer": pointer}
    return {"mediaType": content.media_type, "content": embed(content.media_type, content.data)}
