"""The bug bank: defects put into the core one at a time. Each must turn a table red, else the tables are blind.

A defect replaces one function, method or constant, as a careless change would. The table named beside it is the one
that is expected to notice; any other red table counts too, and a defect that all tables survive fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from onepen.processors import (
    actions,
    admission,
    approvals,
    cancellation,
    clock,
    compaction,
    ending,
    erasing,
    evolve,
    input_rules,
    leases,
    modes,
    pending,
    remembering,
    reports,
    settling,
    starting,
    subtasks,
    timers,
    turn,
    worker_rules,
)
from onepen.processors.modes import Treatment
from onepen.schemas.statuses import Disposition, Reason, RunStatus
from tests.unit.processors import tables
from tests.unit.processors.stage import Stage, run_lines

TABLES = tables.load()
Patch = Callable[[pytest.MonkeyPatch], None]


def setting(module: Any, name: str, value: Any) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, name, value)

    return patch


def without(reason: Reason) -> Patch:
    """Skip one of the checks of who may write."""
    check = worker_rules._no_right

    def careless(turn: Any, record: Any) -> Reason | None:
        found = check(turn, record)
        return None if found is reason else found

    return setting(worker_rules, "_no_right", careless)


def _end_lease_keeps_work_open(turn: Any, reason: Any, event_type: str) -> None:
    turn.run.generation += 1
    turn.emit(event_type, {"workerId": turn.run.owner, "attempt": 1, "reason": reason.value})
    starting.publish_offer(turn)


def _end_lease_restarts_a_cancelled_run(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases.end_lease

    def careless(turn: Any, reason: Any, event_type: str) -> None:
        if turn.run.status is RunStatus.CANCELLING:
            _end_lease_keeps_work_open(turn, reason, event_type)
        else:
            whole(turn, reason, event_type)

    monkeypatch.setattr(leases, "end_lease", careless)


def _same_generation_at_the_next_offer(turn: Any) -> None:
    starting.publish_offer(turn)


def _lease_lost_under_the_same_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases.end_lease

    def careless(turn: Any, reason: Any, event_type: str) -> None:
        before = turn.run.generation
        whole(turn, reason, event_type)
        if turn.session.head.run is not None:
            turn.session.head.run.generation = before

    monkeypatch.setattr(leases, "end_lease", careless)


def _reports_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reports.report

    def careless(turn: Any, record: Any) -> Reason | None:
        if record.no <= turn.run.report_no:
            turn.run.report_no = record.no - 1
        return whole(turn, record)

    monkeypatch.setattr(reports, "report", careless)


def _no_conflict_of_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "report_digest", lambda record: b"same")


def _gaps_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reports.report

    def careless(turn: Any, record: Any) -> Reason | None:
        turn.run.report_no = max(turn.run.report_no, record.no - 1)
        return whole(turn, record)

    monkeypatch.setattr(reports, "report", careless)


def _closing_arm_by_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel without a holder that waits for its deadline instead of ending at once."""
    monkeypatch.setattr(cancellation, "finish_if_quiet", lambda turn: None)


def _cancel_voids_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation.ending, "void_unpermitted", lambda turn, reason: None)


def _abort_of_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = admission._cancel

    def careless(turn: Any, record: Any, own: str) -> None:
        if record.target_kind == "run":
            record = msgspec.structs.replace(record, target_kind="active", target_id=None)
        whole(turn, record, own)

    monkeypatch.setitem(admission._ARMS, Treatment.CANCEL, careless)


def _queue_forgets_the_steers_of_an_ended_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(turn: Any) -> None:
        for entry in pending.steers(turn):
            pending.remove(turn, entry.input_id)

    monkeypatch.setattr(pending, "carry_over", careless)


def _refused_steers_start_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(turn: Any) -> None:
        run = turn.run
        turn.session.head.pending = tuple(
            msgspec.structs.replace(e, for_run="") if e.for_run == run.run_id else e for e in turn.session.head.pending
        )

    monkeypatch.setattr(pending, "carry_over", careless)


def _duplicates_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "known", lambda turn, input_id: None)


def _refusals_do_not_take_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        admission,
        "_refuse",
        lambda turn, record, own, reason, detail=None: admission._turn_away(turn, record, reason, detail),
    )


def _an_id_is_forgotten_while_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        remembering, "_may_go", lambda turn, record: record.issued_at_ms + remembering.REMEMBER_MS < turn.now_ms
    )


def _an_answer_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = approvals._decide

    def careless(turn: Any, record: Any, action: Any) -> None:
        whole(turn, record, action)
        if record.decision == "approve":
            payload = {"actionKey": action.key, "name": action.name, "argsDigest": action.args_digest}
            actions._permit(turn, payload, 0)

    monkeypatch.setattr(approvals, "_decide", careless)


def _the_last_answer_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = approvals.answer

    def careless(turn: Any, record: Any) -> Any:
        found = whole(turn, record)
        return None if found is not None and found[0] is Reason.ALREADY_ANSWERED else found

    monkeypatch.setattr(approvals, "answer", careless)


def _the_digest_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = actions.requested

    def careless(turn: Any, payload: Any, raw: bytes, no: int) -> Reason | None:
        action = turn.session.actions.get(f"{payload.get('name')}/{payload.get('actionKey')}")
        if action is not None:
            payload = payload | {"argsDigest": action.args_digest}
        return whole(turn, payload, raw, no)

    monkeypatch.setitem(reports._ARMS, "action.requested", careless)


def _completed_closes_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reports._finish

    def careless(turn: Any, payload: Any, raw: bytes) -> Any:
        if payload.get("terminalStatus") == "completed" and turn.run.status is RunStatus.RUNNING:
            ending.close_all(turn, "completed")
        return whole(turn, payload, raw)

    monkeypatch.setattr(reports, "_finish", careless)


def _final_reports_set_the_status_after_a_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of the work overwrites the cancel."""
    monkeypatch.setattr(ending, "finish_cancelled", lambda turn, forced: ending.finish(turn, RunStatus.FAILED, {}))
    monkeypatch.setattr(evolve, "legal", lambda before, after: True)


def _timers_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(turn: Any, timer: Any) -> None:
        run = turn.session.head.run
        if run is not None and timer.kind == "lease" and run.owner:
            leases.lose(turn)

    monkeypatch.setattr(timers, "consume", careless)


def _timers_of_another_generation_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = timers.consume

    def careless(turn: Any, timer: Any) -> None:
        run = turn.session.head.run
        if run is not None:
            timer = msgspec.structs.replace(timer, generation=run.generation)
        whole(turn, timer)

    monkeypatch.setattr(timers, "consume", careless)


def _timers_of_another_run_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = timers.consume

    def careless(turn: Any, timer: Any) -> None:
        run = turn.session.head.run
        if run is not None:
            timer = msgspec.structs.replace(timer, run_id=run.run_id)
        whole(turn, timer)

    monkeypatch.setattr(timers, "consume", careless)


def _renewals_extend_the_cancel_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases.renew

    def careless(turn: Any, record: Any) -> Reason | None:
        if turn.run.cancel_deadline_ms:
            turn.run.cancel_deadline_ms = turn.now_ms + turn.run_policy.cancel_ms
        return whole(turn, record)

    monkeypatch.setattr(leases, "renew", careless)


def _old_renewals_extend_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases.renew

    def careless(turn: Any, record: Any) -> Reason | None:
        turn.run.renewal_no = 0
        return whole(turn, record)

    monkeypatch.setattr(leases, "renew", careless)


def _releases_count_as_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases.end_lease
    monkeypatch.setattr(leases, "end_lease", lambda turn, reason, _: whole(turn, reason, "run.lease_lost"))


def _claims_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases.claim

    def careless(turn: Any, record: Any) -> Reason | None:
        turn.run.owner = ""
        return whole(turn, record)

    monkeypatch.setattr(leases, "claim", careless)


def _expired_entries_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "expire", lambda turn, input_id: False)


def _the_queue_starts_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pending.next_startable

    def careless(turn: Any) -> Any:
        turn.session.head.pending = tuple(reversed(turn.session.head.pending))
        return whole(turn)

    monkeypatch.setattr(pending, "next_startable", careless)


def _aborted_entries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "discard_all", lambda turn: None)


def _withdrawn_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pending.remove

    def careless(turn: Any, input_id: str) -> Any:
        entry = whole(turn, input_id)
        if entry is not None:
            turn.dispose(input_id, Disposition.DISCARDED)
        return None

    monkeypatch.setattr(pending, "remove", careless)


def _cell(row: str, column: int, treatment: Treatment) -> Patch:
    """Another treatment in one cell of the table of inputs."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        cells = list(modes.TABLE[row])
        cells[column] = treatment
        monkeypatch.setitem(modes.TABLE, row, tuple(cells))

    return patch


def _any_expected_run_is_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = admission._steer

    def careless(turn: Any, record: Any, own: str) -> None:
        whole(turn, msgspec.structs.replace(record, expected_run_id=None), own)

    monkeypatch.setitem(admission._ARMS, Treatment.STEER, careless)


def _interrupts_go_last(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pending.append
    monkeypatch.setattr(
        pending, "append", lambda *args, for_run="", front=False: whole(*args, for_run=for_run, front=False)
    )


def _interrupts_overtake_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pending.append

    def careless(turn: Any, policy: Any, record: Any, *, for_run: str = "", front: bool = False) -> None:
        whole(turn, policy, record, for_run=for_run)
        if front:
            *rest, last = turn.session.head.pending
            turn.session.head.pending = (msgspec.structs.replace(last, front=True), *rest)

    monkeypatch.setattr(pending, "append", careless)


def _any_run_may_be_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_is_true", lambda value: True)


def _a_retry_begins_a_lineage(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = starting.start_run
    monkeypatch.setattr(starting, "start_run", lambda turn, record, *, lineage=None: whole(turn, record))


def _an_erase_spares_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cancellation.request
    monkeypatch.setattr(
        cancellation,
        "request",
        lambda turn, record, *, reason=None, with_queue=False: whole(turn, record, reason=reason),
    )


def _an_erased_session_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = erasing.purge

    def careless(turn: Any) -> None:
        whole(turn)
        turn.session.head.erased = False

    monkeypatch.setattr(erasing, "purge", careless)


def _late_evidence_of_an_erased_session_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_rules, "_counted", lambda turn, record: True)


def _any_compaction_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compaction._ended

    def careless(turn: Any, event_type: str, payload: Any, raw: bytes) -> Any:
        if turn.run.compaction_id:
            payload = payload | {"compactionId": turn.run.compaction_id}
        return whole(turn, event_type, payload, raw)

    monkeypatch.setattr(compaction, "_ended", careless)


def _a_foreign_compaction_timer_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = timers.consume

    def careless(turn: Any, timer: Any) -> None:
        if timer.kind == "compaction":
            compaction.deadline_passed(turn)
        else:
            whole(turn, timer)

    monkeypatch.setattr(timers, "consume", careless)


def _steers_are_applied_while_compacting(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reports._applied

    def careless(turn: Any, payload: Any, raw: bytes, no: int) -> Any:
        before, turn.run.status = turn.run.status, RunStatus.RUNNING
        reason = whole(turn, payload, raw, no)
        turn.run.status = before
        return reason

    monkeypatch.setitem(reports._ARMS, "input.applied", careless)


def _a_call_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = subtasks.started

    def careless(turn: Any, payload: Any, raw: bytes, no: int) -> Any:
        before = len(turn.forwards)
        reason = whole(turn, payload, raw, no)
        if reason is None and len(turn.forwards) == before:
            content = subtasks._content(payload)
            turn.forwards.append(turn.session.ids.get(turn.run.start_input_id).input)
            assert content is not None
        return reason

    monkeypatch.setitem(reports._ARMS, "subtask.started", careless)


def _the_cancel_does_not_wait_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reports._hand_back

    def careless(turn: Any, payload: Any, raw: bytes) -> None:
        whole(turn, payload, raw)
        subtasks.close(turn, "aborted")
        cancellation.finish_if_quiet(turn)

    monkeypatch.setattr(reports, "_hand_back", careless)


def _every_notice_closes_the_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = subtasks.heard

    def careless(turn: Any, notice: Any) -> bool:
        call = turn.session.calls.get(notice.call_id)
        if call is not None and turn.session.head.run is not None:
            run_id = turn.run.run_id
            notice = msgspec.structs.replace(notice, child_input_id=call.child_input_id, run_id=run_id)
        return whole(turn, notice)

    monkeypatch.setattr(subtasks, "heard", careless)


def _refusals_are_not_told_to_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn.Turn, "notify_parent", lambda self, record, status, reason: None)


def _ends_are_not_told_to_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_tell_parent", lambda *args: None)


def _the_final_report_behind_children_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_rules, "_repeated_final", lambda turn, record: False)


def _evidence_of_any_generation_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = settling.by_evidence

    def careless(turn: Any, report: Any) -> None:
        generations = {action.generation for _, action in turn.session.actions.items()}
        for generation in generations or {report.generation}:
            whole(turn, msgspec.structs.replace(report, generation=generation))

    monkeypatch.setattr(settling, "by_evidence", careless)


def _every_renewal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases._stalled

    def careless(turn: Any, record: Any) -> bool:
        monkeypatch.setattr(clock, "waits", lambda run: False)
        return whole(turn, msgspec.structs.replace(record, suspended=False))

    monkeypatch.setattr(leases, "_stalled", careless)


def _a_run_follows_the_newest_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = property(lambda self: self.rules.policy(self.session.tenant_id))
    monkeypatch.setattr(turn.Turn, "run_policy", newest)


def _no_room_counts_as_unclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases.offer_ended

    def careless(turn: Any) -> None:
        turn.run.offer_had_no_room = False
        whole(turn)

    monkeypatch.setattr(leases, "offer_ended", careless)


BANK: dict[str, tuple[Patch, str]] = {
    "the generation is not checked": (without(Reason.STALE_GENERATION), "leases: ownership is the generation"),
    "the token is not checked": (without(Reason.BAD_TOKEN), "leases: claims of another generation"),
    "the owner is not checked": (without(Reason.NOT_OWNER), "leases: renewals of others are refused"),
    "a claim takes the lease from its owner": (_claims_take_over, "leases: a claim of another worker"),
    "an offer keeps its generation": (
        setting(starting, "next_offer", _same_generation_at_the_next_offer),
        "leases: an unclaimed offer",
    ),
    "a lost lease leaves work open": (
        setting(leases, "end_lease", _end_lease_keeps_work_open),
        "leases: losing a lease is one step",
    ),
    "a lost lease keeps its generation": (_lease_lost_under_the_same_generation, "leases: takeover by another"),
    "a cancelled run is offered again": (_end_lease_restarts_a_cancelled_run, "leases: in cancelling the loss"),
    "a release counts as an attempt": (_releases_count_as_attempts, "leases: release is the same step"),
    "an old renewal extends the lease": (_old_renewals_extend_the_lease, "leases: renewals extend"),
    "a renewal extends the cancel deadline": (_renewals_extend_the_cancel_deadline, "cancel: forced by the cancel"),
    "a report is decided again": (_reports_decided_again, "reports: reports are numbered and decided once"),
    "a report with other events passes as a repeat": (_no_conflict_of_reports, "reports: a number again"),
    "a gap in reports is fine": (_gaps_are_fine, "reports: a gap is refused"),
    "starts are accepted in cancelling": (setting(reports, "_STARTS", frozenset()), "cancel: in cancelling starts"),
    "completed closes what is open": (_completed_closes_what_is_open, "reports: completed is refused"),
    "the outcome overwrites the cancel": (_final_reports_set_the_status_after_a_cancel, "cancel: three orders"),
    "failed closes nothing": (setting(ending, "close_all", lambda turn, reason: None), "reports: failed closes"),
    "a cancel voids nothing": (_cancel_voids_nothing, "cancel: every action not yet permitted"),
    "a cancel without a holder waits": (_closing_arm_by_arm, "cancel: without a holder and"),
    "a delayed stop hits the next run": (_abort_of_any_run, "inputs: abort of another run is stale"),
    "steers of an ended run are stranded": (_queue_forgets_the_steers_of_an_ended_run, "inputs: when the run ends"),
    "a steer starts a run its sender forbade": (_refused_steers_start_runs, "inputs: when the run ends"),
    "the queue starts from its end": (_the_queue_starts_from_its_end, "inputs: scope run keeps"),
    "an expired entry starts": (_expired_entries_start, "inputs: ttl: checked again"),
    "run_and_queue leaves the queue": (_aborted_entries_stay, "inputs: scope run_and_queue"),
    "withdrawn is called discarded": (_withdrawn_is_discarded, "inputs: abort of a pending input"),
    "the queue has no bound": (setting(pending, "has_room", lambda *_: True), "inputs: the pending list holds 20"),
    "a repeat is new": (_duplicates_are_new, "repeats: a repeat of every kind"),
    "a refusal does not take the id": (_refusals_do_not_take_the_id, "repeats: a repeat of every kind"),
    "an id is forgotten while it is pending": (_an_id_is_forgotten_while_pending, "repeats: an id is remembered as"),
    "the window has no upper bound": (setting(admission, "ISSUED_AT_FUTURE_MS", 10**15), "repeats: issued_at: both"),
    "the window ends a millisecond early": (
        setting(admission, "ISSUED_AT_PAST_MS", 86_399_999),
        "repeats: issued_at: both",
    ),
    "the digest of a key is not compared": (_the_digest_is_not_compared, "actions: permitted: in flight"),
    "a key in doubt is simply permitted": (
        setting(actions, "_resolve", lambda turn, action, payload, raw, no: actions._open(turn, payload, raw, no)),
        "actions: in doubt: refused",
    ),
    "the doubt of a name blocks nothing": (
        setting(actions, "_name_in_doubt", lambda *_: None),
        "actions: while an action of a name",
    ),
    "a permit is given without a lease": (
        setting(actions, "_permit_until", lambda turn: 10**15),
        "actions: nothing is",
    ),
    "an answer permits": (_an_answer_permits, "approvals: an answer permits nothing"),
    "the last answer decides": (_the_last_answer_decides, "approvals: the first answer"),
    "approvals are lost in a takeover": (
        setting(ending, "close_work", lambda turn, reason: ending.close_all(turn, reason)),
        "approvals: approvals outlive a takeover",
    ),
    "an approval expires before its time": (
        setting(approvals, "expire", lambda turn, name: True),
        "approvals: expired",
    ),
    "the clock runs while a person is waited for": (
        setting(clock, "only_waits", lambda *_: False),
        "deadlines: run: the clock stands",
    ),
    "timers are believed": (_timers_are_not_judged, "deadlines: lease: not passed"),
    "a timer of another generation fires": (_timers_of_another_generation_fire, "deadlines: lease: not passed"),
    "a timer of another run fires": (_timers_of_another_run_fire, "deadlines: run: timed out is one step"),
    # section 4, the whole table
    "an auto of the scheduler steers": (
        _cell("auto, any other source", 1, Treatment.STEER),
        "modes: auto while running",
    ),
    "an auto is refused while cancelling": (
        _cell("auto, source steers", 2, Treatment.MISSED),
        "modes: auto while cancelling",
    ),
    "an interrupt only queues": (
        _cell("prompt, on_busy interrupt", 1, Treatment.QUEUE_IN_FRONT),
        "modes: prompt, on_busy interrupt: running with a holder",
    ),
    "a late steer steers the cancelled run": (
        _cell("prompt, on_busy steer", 2, Treatment.STEER),
        "modes: prompt, on_busy steer: no active run",
    ),
    "a steer reaches a run it was not meant for": (_any_expected_run_is_steered, "modes: steer with another expected"),
    "an interrupt waits behind the queue": (_interrupts_go_last, "modes: prompt, on_busy interrupt: running without"),
    "interrupts overtake each other": (
        _interrupts_overtake_each_other,
        "modes: prompt, on_busy interrupt: running with a holder",
    ),
    "content that must be erasable is taken by value": (
        setting(input_rules, "_where_ok", lambda record, policy: True),
        "modes: erasable content",
    ),
    "a run follows the newest policy": (_a_run_follows_the_newest_policy, "modes: a policy takes over"),
    # retries, recovery, erase
    "any failed run may be retried": (_any_run_may_be_retried, "retry: refused: after failed"),
    "a retry begins a lineage of its own": (_a_retry_begins_a_lineage, "retry: after timed_out"),
    "keys of a lineage die while it runs": (
        setting(starting, "_revive_keys", lambda turn, lineage: None),
        "retry: keys of the lineage live on",
    ),
    "an erase spares the queue": (_an_erase_spares_the_queue, "erase: running with a holder"),
    "an erased session starts again": (_an_erased_session_starts_again, "erase: without an active run"),
    "an erase leaves the keys": (setting(erasing, "purge", lambda turn: None), "erase: without an active run"),
    "late evidence of an erased session is written": (
        _late_evidence_of_an_erased_session_is_written,
        "erase: late worker records",
    ),
    # compaction
    "any compaction may be ended": (_any_compaction_is_ended, "compaction: at most one is open"),
    "a lost lease leaves a compaction open": (
        setting(compaction, "close", lambda turn, reason: None),
        "compaction: the lease is lost",
    ),
    "a compaction timer is believed": (_a_foreign_compaction_timer_is_believed, "deadlines: compaction: not passed"),
    "a steer is applied while compacting": (_steers_are_applied_while_compacting, "compaction: inputs meanwhile wait"),
    # subtasks
    "a call sends its record again": (_a_call_is_sent_again, "subtasks: asked again: it joins"),
    "a cycle of sessions is begun": (
        setting(subtasks, "_too_many", lambda turn, child: None),
        "subtasks: a session that is in the chain",
    ),
    "a cancel does not reach the children": (
        setting(subtasks, "abort_children", lambda turn, reason: None),
        "subtasks: a cancel reaches the children",
    ),
    "a cancel does not wait for the children": (
        _the_cancel_does_not_wait_for_children,
        "subtasks: a cancel reaches the children",
    ),
    "every notice closes the branch": (_every_notice_closes_the_branch, "subtasks: a notice for another input"),
    "a refusal is not told to the parent": (
        _refusals_are_not_told_to_the_parent,
        "subtasks: a child's input that is refused",
    ),
    "an end is not told to the parent": (_ends_are_not_told_to_the_parent, "subtasks: the end of the run"),
    "a child has all the time of its policy to cancel": (
        setting(cancellation, "CHILD_CANCEL_AHEAD_MS", -(10**9)),
        "subtasks: the parent's abort: started",
    ),
    "the final report behind children is stale": (
        _the_final_report_behind_children_is_stale,
        "subtasks: while only children keep",
    ),
    # settling, deadlines
    "evidence of any generation settles": (_evidence_of_any_generation_settles, "settling: a late report of a"),
    "a late report settles nothing": (
        setting(settling, "by_evidence", lambda turn, report: None),
        "settling: by the late report",
    ),
    "waiting and suspended renewals count": (_every_renewal_counts, "deadlines: stalled: suspended"),
    "no room counts as unclaimed": (_no_room_counts_as_unclaimed, "deadlines: no worker: an offer that found"),
}


def red_tables(first: str) -> list[str]:
    """Names of the tables that turn red, the expected one first; one is enough."""
    names = sorted(TABLES, key=lambda name: not name.startswith(first))
    for name in names:
        try:
            run_lines(Stage(), TABLES[name])
        except Exception:
            return [name]
    return []


@pytest.mark.parametrize("defect", BANK)
def test_a_defect_turns_a_table_red(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, expected = BANK[defect]
    assert any(name.startswith(expected) for name in TABLES), f"no table is called {expected}"
    patch(monkeypatch)
    red = red_tables(expected)
    assert red, f"all tables survive: {defect}"
    assert red[0].startswith(expected), f"{defect} was noticed by another table only: {red[0]}"


def test_without_a_defect_no_table_is_red() -> None:
    assert red_tables("leases") == []
