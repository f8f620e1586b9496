"""The eight questions of the launch checklist, each answered from the evidence: green or red, and what it rests on.

A question is red when a rule is broken, and also when the evidence does not show what it was meant to show: silence is
no proof. What must be seen is said by `Expectations`, for the story all of it, for a re-enactment next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from onepen.schemas import events as names
from onepen.schemas.worker_records import WorkerHead
from onepen.streams.audit import admission, effects, history, limits, tables, time_limits, waiting
from onepen.streams.audit.evidence import Evidence, LoggedEvent, Violation

Check = Callable[[Evidence], list[Violation]]

LISTED = 3
"""Violations and positions shown per answer; all of them are counted."""


@dataclass(frozen=True)
class Expectations:
    """What the evidence has to contain for an answer to mean anything. Zero or empty: not asked for."""

    runs_completed: int = 0
    queued: int = 0
    steered: int = 0
    duplicates: int = 0
    cancelled: int = 0
    voided: int = 0
    timed_out: int = 0
    takeovers: int = 0
    late_refusals: int = 0
    frozen_worker_pid: int = 0
    """The refused late reports must come from a worker whose id carries this pid."""
    effects: int = 0
    approvals: int = 0
    watched_actions: frozenset[str] = frozenset()
    """Names of actions whose target's ledger is part of the evidence."""


@dataclass(frozen=True)
class Answer:
    """One question, its colour, the sentences it rests on and what speaks against it."""

    number: int
    question: str
    rests_on: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def green(self) -> bool:
        return not self.violations


def exit_code(answers: Iterable[Answer]) -> int:
    """0 when there are answers and all are green, else 1."""
    listed = list(answers)
    return 0 if listed and all(answer.green for answer in listed) else 1


def answer_all(evidence: Evidence, expected: Expectations = Expectations()) -> list[Answer]:
    """The eight answers, in the order of the checklist."""
    return [make(evidence, expected) for make in _QUESTIONS]


def _run(evidence: Evidence, *checks: Check) -> list[Violation]:
    return [violation for check in checks for violation in check(evidence)]


def _of_type(evidence: Evidence, *types: str) -> list[LoggedEvent]:
    return [one for one in evidence.events if one.event.type in types]


def _ends(evidence: Evidence, status: str) -> list[LoggedEvent]:
    return [o for o in _of_type(evidence, names.RUN_FINISHED) if o.payload.get("terminalStatus") == status]


def _places(ones: Sequence[LoggedEvent]) -> str:
    shown = ", ".join(f"{one.partition}:{one.offset}" for one in ones[:LISTED])
    return f"{shown} and {len(ones) - LISTED} more" if len(ones) > LISTED else shown or "none"


def _span(evidence: Evidence) -> str:
    ranges: dict[int, tuple[int, int]] = {}
    for one in evidence.events:
        low, high = ranges.get(one.partition, (one.offset, one.offset))
        ranges[one.partition] = min(low, one.offset), max(high, one.offset)
    return ", ".join(f"{p}:{low}-{high}" for p, (low, high) in sorted(ranges.items())) or "no events"


def _at_least(check: str, what: str, seen: int, wanted: int) -> list[Violation]:
    if seen >= wanted:
        return []
    return [Violation(check, "the evidence", f"shows {seen} {what}, {wanted} were to be seen")]


def _one_active(evidence: Evidence, expected: Expectations) -> Answer:
    completed = len(_ends(evidence, "completed"))
    violations = _run(evidence, history.one_active_run, tables.one_active_in_table)
    violations += _at_least("one active run", "completed runs", completed, max(expected.runs_completed, 1))
    started, ended = _of_type(evidence, names.RUN_STARTED), _of_type(evidence, names.RUN_FINISHED)
    rests_on = (
        f"{len(started)} run.started, {len(ended)} run.finished in {len(evidence.by_session)} sessions, never two "
        f"open at any prefix of events {_span(evidence)}",
        f"rows of agent_runs in an active status: {tables.active_rows(evidence)}",
    )
    return Answer(1, "one active run per session", rests_on, tuple(violations))


def _append_only(evidence: Evidence, expected: Expectations) -> Answer:
    violations = _run(
        evidence,
        history.gapless,
        history.final,
        history.chained,
        history.causes_in_order,
        history.causes_exist,
        history.legal_steps,
        limits.bounded_events,
    )
    violations += _at_least("history", "events", len(evidence.events), 1)
    rests_on = (
        f"{len(evidence.events)} events, seq 1..n for each of {len(evidence.by_run)} runs, "
        "nothing behind a run.finished",
        f"hash chain of {len(evidence.by_session)} sessions recomputed from the bytes, back to 32 zero bytes",
    )
    return Answer(2, "append-only ordered history", rests_on, tuple(violations))


def _entries(evidence: Evidence, expected: Expectations) -> Answer:
    violations = _run(
        evidence,
        admission.conserved,
        admission.verdicts_follow_rules,
        admission.consumed_once,
        admission.unreadable_set_aside,
        waiting.queue_in_order,
        waiting.steers_settled,
        waiting.bounded_list,
    )
    verdicts = Counter(
        str(r.receipt.verdict) for r in evidence.receipts if r.receipt.kind == "input" and r.receipt.verdict
    )
    violations += _at_least("entry", "queued inputs", verdicts["queued"], expected.queued)
    violations += _at_least("entry", "steered inputs", verdicts["steered"], expected.steered)
    shown = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    rests_on = (
        f"{len(evidence.client_inputs)} input records: {shown or 'no verdicts'}; each one verdict, one disposition",
        f"steers applied at events {_places(_of_type(evidence, names.INPUT_APPLIED))}",
    )
    return Answer(3, "entry semantics", rests_on, tuple(violations))


def _cancel(evidence: Evidence, expected: Expectations) -> Answer:
    violations = _run(evidence, effects.cancel_is_a_barrier, history.balanced)
    cancelled, voided = _ends(evidence, "cancelled"), _of_type(evidence, names.ACTION_VOIDED)
    violations += _at_least("cancel", "cancelled runs", len(cancelled), expected.cancelled)
    violations += _at_least("cancel", "voided actions", len(voided), expected.voided)
    asked = _of_type(evidence, names.RUN_CANCEL_REQUESTED)
    rests_on = (
        f"abort accepted at events {_places(asked)}; cancelled at {_places(cancelled)}, "
        f"forced: {sum(bool(c.payload.get('forced')) for c in cancelled)}",
        f"voided with it: {_places(voided)}; every model request, tool, action and approval has its end; no subtasks",
    )
    return Answer(4, "cancel reaches model, tools, actions", rests_on, tuple(violations))


def _timeouts(evidence: Evidence, expected: Expectations) -> Answer:
    violations = _run(evidence, time_limits.deadlines, time_limits.timers_on_time, history.legal_steps, history.final)
    ends = Counter(str(o.payload.get("terminalStatus")) for o in _of_type(evidence, names.RUN_FINISHED))
    violations += _at_least("timeout", "timed out runs", ends["timed_out"], expected.timed_out)
    shown = ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))
    rests_on = (
        f"ends: {shown or 'none'}",
        f"timed_out at events {_places(_ends(evidence, 'timed_out'))}, each behind its deadline, by a timer in the log",
    )
    return Answer(5, "timeout and terminal status", rests_on, tuple(violations))


def _leases(evidence: Evidence, expected: Expectations) -> Answer:
    violations = _run(
        evidence,
        effects.generations,
        effects.leases_follow_claims,
        effects.only_the_owner_writes,
        effects.refused_records_wrote_nothing,
    )
    lost = _of_type(evidence, names.RUN_LEASE_LOST)
    late = [r for r in evidence.receipts if r.receipt.record == "report" and _superseded(evidence, r.about)]
    if expected.frozen_worker_pid:
        late = [r for r in late if _carries_pid(_worker_of(evidence, r.about), expected.frozen_worker_pid)]
    violations += _at_least("lease", "lost leases", len(lost), expected.takeovers)
    violations += _at_least("lease", "refused late reports", len(late), expected.late_refusals)
    where = ", ".join(f"{r.partition}:{r.offset} (by {_worker_of(evidence, r.about)})" for r in late[:LISTED])
    rests_on = (
        f"{len(_of_type(evidence, names.RUN_LEASED))} leases, {len(lost)} lost at events {_places(lost)}; one worker "
        "per run and generation, every reported event written by the holder",
        f"late reports refused: receipts {where or 'none'}",
    )
    return Answer(6, "lease and generation", rests_on, tuple(violations))


def _superseded(evidence: Evidence, position: tuple[int, int]) -> bool:
    """True for a record of a generation of its run that is not the last one."""
    logged = evidence.input_at.get(position)
    if logged is None or not isinstance(logged.record, WorkerHead):
        return False
    events = evidence.by_run.get(logged.record.run_id, [])
    return any(e.event.type == names.RUN_LEASED and e.event.generation > logged.record.generation for e in events)


def _worker_of(evidence: Evidence, position: tuple[int, int]) -> str:
    logged = evidence.input_at.get(position)
    return logged.record.worker_id if logged is not None and isinstance(logged.record, WorkerHead) else ""


def _carries_pid(worker_id: str, pid: int) -> bool:
    return str(pid) in worker_id.replace(":", "-").replace("/", "-").replace(".", "-").split("-")


def _keys(evidence: Evidence, expected: Expectations) -> Answer:
    violations = _run(evidence, effects.permits, effects.doubts_stand, effects.effects_once)
    violations += effects.done_means_done(evidence, expected.watched_actions)
    duplicates = [r for r in evidence.receipts if r.receipt.verdict == "duplicate"]
    effective = [e for e in evidence.effects if e.effective]
    permitted = _of_type(evidence, names.ACTION_PERMITTED)
    approved = [o for o in _of_type(evidence, names.APPROVAL_ANSWERED) if o.payload.get("decision") == "approve"]
    violations += _at_least("keys", "effects in the target's ledger", len(effective), expected.effects)
    violations += _at_least("keys", "approved actions", len(approved), expected.approvals)
    violations += _at_least("keys", "repeated inputs answered duplicate", len(duplicates), expected.duplicates)
    rests_on = (
        f"{len(permitted)} permits at events {_places(permitted)}; the target's ledger: {len(evidence.effects)} calls, "
        f"{len(effective)} effective, each key once",
        f"inputs repeated and answered duplicate: {len(duplicates)}",
    )
    return Answer(7, "idempotency keys", rests_on, tuple(violations))


def _replay(evidence: Evidence, expected: Expectations) -> Answer:
    violations = _run(evidence, tables.equal_to_fold, tables.replay_by_run, tables.below_offset)
    rests_on = (
        f"{tables.counts(evidence)} rows of agent_runs, _run_events, _inputs, _actions, _refused_reports: "
        "each equal to an independent fold of the log",
        tables.REPLAY_QUERY,
    )
    return Answer(8, "full replay by run id", rests_on, tuple(violations))


_QUESTIONS: tuple[Callable[[Evidence, Expectations], Answer], ...] = (
    _one_active, _append_only, _entries, _cancel, _timeouts, _leases, _keys, _replay,
)  # fmt: skip
