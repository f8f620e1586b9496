"""One held run as a state machine without I/O: what a worker may do, what it has to send, what it knows.

Rule 1: no clock, no thread, no Kafka. Time comes in as `Now`, records go out as values, the caller locks.
Rule 2: trust in the lease counts from the moment an answered claim or renewal was SENT, less a margin, on the
monotonic and on the wall clock, and the earlier of the two ends it. Local time may only shorten.
Rule 3: a report keeps its number and its bytes until a view says that it was decided; sent again it is the same.
Rule 4: the view with the highest (generation, no) wins; a lost, repeated or late one is harmless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from onepen.schemas.inputs import Content
from onepen.schemas.limits import RECORD_BYTES_MAX, REPORT_EVENTS_MAX
from onepen.schemas.offers import Offer
from onepen.schemas.statuses import TERMINAL, ActionState, Reason, RunStatus
from onepen.schemas.views import ActionView, Checkpoint, PendingSteer, SubtaskView, View
from onepen.schemas.worker_records import Claim, Release, Renew, Report, ReportEvent, WorkerRecord

REPORT_BYTES_MAX: Final = RECORD_BYTES_MAX - 8 * 1024
"""Payload bytes of one report: what is left of a record after its head."""
UNANSWERED_MAX: Final = 8
"""Reports on their way at once; the log keeps the digests of the last 16."""
GAP_PAUSE_MS: Final = 100
RENEWALS_KEPT: Final = 200
FINAL_WAIT_MS: Final = 150
"""First wait for the answer to the final report; it doubles with each repeat, up to two renewals."""
MARGIN_MAX_MS: Final = 1_000

ENDED_ELSEWHERE: Final = "ended_elsewhere"
ACCEPTED: Final = "accepted"
NEVER_SENT: Final = "lease_lost"

_OWN_GENERATION_ENDS = frozenset(
    {
        Reason.ALREADY_OWNED, Reason.NOT_OWNER, Reason.NOT_RUNNING, Reason.BAD_TOKEN, Reason.NO_INBOX,
        Reason.REPORT_CONFLICT, Reason.INVALID,
    }
)  # fmt: skip
_RUN_ENDS = frozenset({Reason.UNKNOWN_RUN, Reason.RUN_ENDED})


@dataclass(frozen=True, slots=True)
class Now:
    """One moment on both clocks."""

    mono_ms: int
    wall_ms: int


@dataclass(slots=True, eq=False)
class Ticket:
    """Where a reported event stands: its report and index once sent, and its fate once decided.

    `fate` is None, `accepted`, or the reason of the refusal. `sent` is when the report was FIRST sent.
    """

    no: int = 0
    index: int = 0
    sent: Now | None = None
    fate: str | None = None


@dataclass(slots=True)
class _Unanswered:
    report: Report
    tickets: list[Ticket]
    first_sent: Now
    last_sent: Now
    renewal_no: int


@dataclass(slots=True)
class Machine:
    """The worker's side of (run, generation). `optimistic`: the body may begin before the claim is answered."""

    offer: Offer
    worker_id: str
    inbox: int
    optimistic: bool = False
    margin_ms: int = -1
    granted: bool = False
    ended: str | None = None
    """Why this generation is over for this worker; `recorded` after its own final report."""
    status: str = RunStatus.RUNNING
    cancel_reason: str | None = None
    last_seq: int = 0
    timeout_at_ms: int | None = None
    pending: tuple[PendingSteer, ...] = ()
    contents: dict[str, Content | None] = field(default_factory=dict)
    actions: dict[tuple[str, str], ActionView] = field(default_factory=dict)
    subtasks: dict[str, SubtaskView] = field(default_factory=dict)
    """By call id. An end stays here when later views no longer name it."""
    checkpoint: Checkpoint | None = None
    want_contents: bool = False
    renewal_no: int = 0
    report_no: int = 0
    decided_no: int = 0
    view_no: int = -1
    late: int = 0
    unsent: list[ReportEvent] = field(default_factory=list)
    """What was queued and not sent when the run was over (see `late_report`)."""
    _claimed: Now | None = None
    _claim_at_ms: int = 0
    _trust: Now | None = None
    _trust_no: int = -1
    _renewals: dict[int, Now] = field(default_factory=dict)
    _renew_at_ms: int = 0
    _queue: deque[tuple[ReportEvent, Ticket]] = field(default_factory=deque)
    _unanswered: dict[int, _Unanswered] = field(default_factory=dict)
    _gap_at_ms: int | None = None
    _final: Ticket | None = None
    _final_wait_ms: int = FINAL_WAIT_MS

    def __post_init__(self) -> None:
        if self.offer.had_owner:
            self.optimistic = False  # protocol section 6.2: only in a run that never had an owner
        if self.margin_ms < 0:
            self.margin_ms = min(MARGIN_MAX_MS, self.offer.lease_ms // 10)

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def cancelling(self) -> bool:
        return self.status == RunStatus.CANCELLING

    def trusted(self, now: Now) -> bool:
        """True while something new may begin: the lease is ours by an answer, or at most one optimistic lease."""
        since = self._trust if self.granted else (self._claimed if self.optimistic else None)
        if since is None or self.ended is not None:
            return False
        length_ms = self.offer.lease_ms - self.margin_ms
        return now.mono_ms < since.mono_ms + length_ms and now.wall_ms < since.wall_ms + length_ms

    def suspended(self, now: Now) -> bool:
        """True while nothing new may begin: the lease is not ours yet, or its time, by our count, is over."""
        return self.ended is None and not self.trusted(now)

    def permit(self, ticket: Ticket, name: str, key: str, now: Now) -> ActionView | None:
        """The permit that answered the request on `ticket`, if the action may begin at this very moment."""
        action = self.actions.get((name, key))
        if action is None or ticket.sent is None or self.cancelling or not self.trusted(now):
            return None
        if action.state != ActionState.PERMITTED or action.report_no != ticket.no:
            return None
        in_time = (
            now.mono_ms < ticket.sent.mono_ms + action.valid_ms and now.wall_ms < ticket.sent.wall_ms + action.valid_ms
        )
        return action if in_time else None

    @property
    def answered_renewal_no(self) -> int:
        """The highest renewal answered; 0 = the claim, -1 = nothing yet."""
        return self._trust_no

    @property
    def unsettled(self) -> int:
        """Events queued or sent and not yet decided."""
        return len(self._queue) + sum(len(u.tickets) for u in self._unanswered.values())

    # -- what goes out -----------------------------------------------------------------------------------------

    def claim(self, now: Now) -> Claim:
        """The claim; sent again it is answered as before, and trust still counts from the first."""
        if self._claimed is None:
            self._claimed = now
            self._renew_at_ms = now.mono_ms + self.offer.renew_ms
        self._claim_at_ms = now.mono_ms + self.offer.renew_ms
        return Claim(**self._head())

    def tick(self, now: Now) -> list[WorkerRecord]:
        """What is due: the claim again, a renewal, reports that stayed unanswered too long."""
        if self.ended is not None or self._claimed is None:
            return []
        out: list[WorkerRecord] = []
        if not self.granted and now.mono_ms >= self._claim_at_ms:
            out.append(self.claim(now))
        if now.mono_ms >= self._renew_at_ms:
            out.append(self.renew(now))
        oldest = min(self._unanswered, default=None)
        if oldest is not None:
            waited_ms = now.mono_ms - self._unanswered[oldest].last_sent.mono_ms
            if waited_ms >= self._patience_ms():
                self._final_wait_ms *= 2
                out += self._resend(oldest, now)
        return out

    def _patience_ms(self) -> int:
        """How long an unanswered report waits before it is sent again. The final one is asked for sooner: the
        answer to it may be that it is recorded, and until then the lease has to be kept."""
        longest_ms = 2 * self.offer.renew_ms
        final = self._final is not None and self._final.no in self._unanswered
        return min(self._final_wait_ms, longest_ms) if final else longest_ms

    def renew(self, now: Now) -> Renew:
        """The next renewal; it goes out whether or not the last one was answered."""
        self.renewal_no += 1
        self._renewals[self.renewal_no] = now
        if len(self._renewals) > RENEWALS_KEPT:
            del self._renewals[min(self._renewals)]
        self._renew_at_ms = now.mono_ms + self.offer.renew_ms
        return Renew(
            **self._head(),
            no=self.renewal_no,
            suspended=self.suspended(now),
            want_contents=self.want_contents,
        )

    def queue(self, event: ReportEvent) -> Ticket:
        """Take an event for the next report. After the end it is `lease_lost` at once (see `late_report`)."""
        ticket = Ticket()
        if self.ended is not None:
            ticket.fate = NEVER_SENT
        else:
            self._queue.append((event, ticket))
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """Take back an event that was queued and is not sent; False when it is too late for that."""
        if ticket.sent is not None or ticket.fate is not None:
            return False
        self._queue = deque(entry for entry in self._queue if entry[1] is not ticket)
        ticket.fate = NEVER_SENT
        return True

    def queue_final(self, event: ReportEvent) -> Ticket:
        """Take the event that ends the run; its acceptance ends this machine as `recorded`."""
        self._final = self.queue(event)
        return self._final

    def flush(self, now: Now) -> list[Report]:
        """Reports made of what is queued, several events in one, as many as may be on their way."""
        out: list[Report] = []
        while self._queue and self.ended is None and len(self._unanswered) < UNANSWERED_MAX:
            events: list[ReportEvent] = []
            tickets: list[Ticket] = []
            size_bytes = 0
            while self._queue and len(events) < REPORT_EVENTS_MAX:
                event = self._queue[0][0]
                size_bytes += len(event.payload) + len(event.type) + 8
                if events and size_bytes > REPORT_BYTES_MAX:
                    break
                events.append(event)
                tickets.append(self._queue.popleft()[1])
            out.append(self._number(tuple(events), tickets, now))
        return out

    def _number(self, events: tuple[ReportEvent, ...], tickets: list[Ticket], now: Now) -> Report:
        self.report_no += 1
        report = Report(**self._head(), no=self.report_no, events=events)
        for index, ticket in enumerate(tickets):
            ticket.no, ticket.index, ticket.sent = report.no, index, now
        self._unanswered[report.no] = _Unanswered(report, tickets, now, now, self.renewal_no)
        return report

    def late_report(self, event: ReportEvent) -> Report:
        """Evidence after the lease is lost: refused by the log, kept by it, never sent again."""
        self.late += 1
        return Report(**self._head(), no=self.report_no + self.late, events=(event,))

    def release(self, reason: str) -> Release:
        """Give the right to write back; this machine is over."""
        self._end("released")
        return Release(**self._head(), reason=reason)

    def give_up(self, reason: str) -> None:
        """End without a record: a newer generation of the run is known."""
        self._end(reason)

    # -- what comes in -----------------------------------------------------------------------------------------

    def on_view(self, view: View, now: Now) -> list[WorkerRecord]:
        """Take a view (or a refusal) addressed to this worker; answers what has to be sent now."""
        if self.ended is not None or view.run_id != self.offer.run_id or view.worker_id != self.worker_id:
            return []
        if view.reason is not None:
            return self._refused(view, now)
        if view.generation > self.offer.generation:
            self._end(Reason.STALE_GENERATION)
            return []
        if view.generation < self.offer.generation or view.no < self.view_no:
            return []
        self._take(view)
        out: list[WorkerRecord] = list(self._lost_reports(view, now))
        out += self.flush(now)
        return out

    def _take(self, view: View) -> None:
        self.view_no = view.no
        self.granted = True
        if view.renewal_no > self._trust_no:
            sent = self._claimed if view.renewal_no == 0 else self._renewals.get(view.renewal_no)
            if sent is not None:
                self._trust, self._trust_no = sent, view.renewal_no
                self._renewals = {no: at for no, at in self._renewals.items() if no > view.renewal_no}
        self.status = view.status
        self.cancel_reason = view.cancel_reason
        self.last_seq = max(self.last_seq, view.last_seq)
        self.timeout_at_ms = view.timeout_at_ms
        self.actions = {(action.name, action.action_key): action for action in view.actions}
        self._take_subtasks(view.subtasks)
        self.checkpoint = view.checkpoint
        self._take_pending(view.pending)
        self._settle(view)
        if self.status in TERMINAL and self.ended is None:
            self._end(ENDED_ELSEWHERE)

    def _take_subtasks(self, subtasks: Iterable[SubtaskView]) -> None:
        for call in subtasks:
            known = self.subtasks.get(call.call_id)
            if known is None or known.result is None:  # a crowded view names an end without its result
                self.subtasks[call.call_id] = call

    def _take_pending(self, pending: Iterable[PendingSteer]) -> None:
        self.pending = tuple(pending)
        kept = {steer.input_id: self.contents.get(steer.input_id) for steer in self.pending}
        given = {steer.input_id: steer.content for steer in self.pending if steer.with_content}
        self.contents = {
            name: content for name, content in (kept | given).items() if name in given or name in self.contents
        }
        if all(steer.input_id in self.contents for steer in self.pending):
            self.want_contents = False

    def _settle(self, view: View) -> None:
        """Give every event of the reports decided by now its fate."""
        refused = {(r.no, r.index): r.reason for r in view.refused}
        for no in sorted(self._unanswered):
            if no > view.report_no:
                break
            entry = self._unanswered.pop(no)
            whole = refused.get((no, -1))
            for ticket in entry.tickets:
                ticket.fate = whole or refused.get((no, ticket.index)) or ACCEPTED
        self.decided_no = max(self.decided_no, view.report_no)
        if self._final is not None and self._final.fate == ACCEPTED:
            self._end(Reason.RECORDED)

    def _lost_reports(self, view: View, now: Now) -> list[Report]:
        """A renewal sent behind a report was answered and the report was not: it never arrived."""
        missing = [no for no, entry in self._unanswered.items() if view.renewal_no > entry.renewal_no]
        return self._resend(min(missing), now) if missing else []

    def _resend(self, first: int, now: Now) -> list[Report]:
        out = []
        for no in sorted(self._unanswered):
            if no >= first:
                entry = self._unanswered[no]
                entry.last_sent, entry.renewal_no = now, self.renewal_no
                out.append(entry.report)
        return out

    def _refused(self, view: View, now: Now) -> list[WorkerRecord]:
        reason = view.reason
        if reason == Reason.RECORDED and view.generation == self.offer.generation:
            self._recorded(view.report_no)
            return []
        if reason in _RUN_ENDS or view.generation > self.offer.generation:
            self._end(str(reason))
            return []
        if view.generation != self.offer.generation or view.record == "release":
            return []
        if reason == Reason.REPORT_GAP:
            return list(self._close_gap(view.report_no, now))
        if reason == Reason.NOT_OWNER and not self.granted and view.record != "claim":
            # A refused claim would have been answered before: ours never arrived.
            return [self.claim(now)]
        if reason in _OWN_GENERATION_ENDS:
            self._end(str(reason))
        return []

    def _recorded(self, report_no: int) -> None:
        for entry in self._unanswered.values():
            if entry.report.no <= report_no:
                for ticket in entry.tickets:
                    ticket.fate = ACCEPTED
        self._end(Reason.RECORDED)

    def _close_gap(self, decided_no: int, now: Now) -> list[Report]:
        """Send again from the awaited number on; once, though each report behind the gap was refused."""
        if self._gap_at_ms is not None and now.mono_ms < self._gap_at_ms + GAP_PAUSE_MS:
            return []
        missing = [no for no in self._unanswered if no > decided_no]
        if not missing:
            return []
        self._gap_at_ms = now.mono_ms
        return self._resend(min(missing), now)

    def _end(self, reason: str) -> None:
        self.ended = str(reason)
        for entry in self._unanswered.values():
            for ticket in entry.tickets:
                ticket.fate = ticket.fate or self.ended
        for event, ticket in self._queue:
            ticket.fate = self.ended
            self.unsent.append(event)
        self._unanswered.clear()
        self._queue.clear()

    def _head(self) -> dict[str, Any]:
        offer = self.offer
        return {
            "tenant_id": offer.tenant_id,
            "session_id": offer.session_id,
            "run_id": offer.run_id,
            "generation": offer.generation,
            "token": offer.token,
            "worker_id": self.worker_id,
            "inbox": self.inbox,
        }
