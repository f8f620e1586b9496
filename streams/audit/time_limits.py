"""Deadlines: nothing ends by its time before that time, and what ends by a timer follows from a timer in the log."""

from __future__ import annotations

from typing import Final

from onepen.schemas.events import (
    APPROVAL_ANSWERED,
    APPROVAL_EXPIRED,
    APPROVAL_REQUESTED,
    COMPACTION_FAILED,
    COMPACTION_STARTED,
    RUN_CANCEL_REQUESTED,
    RUN_FINISHED,
    RUN_LEASE_LOST,
    RUN_LEASED,
    RUN_STARTED,
    SUBTASK_FINISHED,
)
from onepen.schemas.timers import Timer
from onepen.schemas.worker_records import Renew
from onepen.streams.audit.evidence import Evidence, LoggedEvent, LoggedInput, Violation

MOVES_DEADLINE: Final = (RUN_STARTED, APPROVAL_ANSWERED, APPROVAL_EXPIRED, SUBTASK_FINISHED)
"""Events of ours whose `timeoutAt` is the run's deadline; a worker's member of that name is none."""

BY_TIMER: Final = {"deadline": "run", "no_worker": "offer"}
"""Reason of a timed-out end -> kind of the timer that brings it."""


def deadlines(evidence: Evidence) -> list[Violation]:
    """`timed_out` is retryable and follows from a timer whose time had come, or (`stalled`) from a renewal."""
    found = []
    for events in evidence.by_run.values():
        due = 0
        for one in events:
            moved = one.payload.get("timeoutAt") if one.event.type in MOVES_DEADLINE else None
            # While a run only waits its clock stands still, so the deadline told last is the least it can be.
            due = moved if isinstance(moved, int) else due
            if one.event.type == RUN_FINISHED and one.payload.get("terminalStatus") == "timed_out":
                found += _timed_out(evidence, one, due)
    return found


def _timed_out(evidence: Evidence, one: LoggedEvent, due: int) -> list[Violation]:
    found = []
    reason = str(one.payload.get("reason"))
    cause = evidence.input_at.get(one.cause)
    if reason == "deadline" and one.event.at_ms < due:
        found.append(Violation("timeout", str(one), f"timed out at {one.event.at_ms}, the deadline was {due}"))
    if reason in BY_TIMER:
        if cause is not None and not _is_timer(cause, BY_TIMER[reason]):
            found.append(Violation("timeout", str(one), f"not caused by a timer record of kind {BY_TIMER[reason]}"))
    elif reason != "stalled":
        found.append(Violation("timeout", str(one), f"no deadline is called {reason}"))
    elif cause is not None and not isinstance(cause.record, Renew):
        found.append(Violation("timeout", str(one), "stalled, but not caused by a renewal"))
    if cause is None and evidence.kept(one.cause):
        found.append(Violation("timeout", str(one), "not caused by a record of the log"))
    if one.payload.get("retryable") is not True:
        found.append(Violation("timeout", str(one), "a timeout is retryable and must say so"))
    return found


def _is_timer(cause: LoggedInput, kind: str) -> bool:
    return isinstance(cause.record, Timer) and cause.record.kind == kind


def timers_on_time(evidence: Evidence) -> list[Violation]:
    """What a timer brought came at its deadline or later, in the run and generation it was armed for."""
    found = []
    for events in evidence.by_run.values():
        armed: dict[str, tuple[str, int]] = {}
        for one in events:
            cause = evidence.input_at.get(one.cause)
            if cause is not None and isinstance(cause.record, Timer) and one.event.at_ms < cause.record.deadline_ms:
                found.append(Violation("timers", str(one), f"{cause} was to fire at {cause.record.deadline_ms}"))
            found += _brought(one, armed, cause)
            _arm(one, armed)
    return found


def _arm(one: LoggedEvent, armed: dict[str, tuple[str, int]]) -> None:
    """Remember the deadlines that events tell: what ends by them -> (kind of timer, time)."""
    told = {
        RUN_LEASED: ("lease", "leaseExpiresAt"),
        APPROVAL_REQUESTED: ("approval", "expiresAt"),
        COMPACTION_STARTED: ("compaction", "deadlineAt"),
        RUN_CANCEL_REQUESTED: ("cancel", "cancelDeadlineAt"),
    }.get(one.event.type)
    at_ms = None if told is None else one.payload.get(told[1])
    if told is not None and isinstance(at_ms, int):
        armed[_subject(one, told[0])] = told[0], at_ms


def _subject(one: LoggedEvent, kind: str) -> str:
    if kind == "approval":
        return f"approval {one.payload.get('name')} {one.payload.get('actionKey')}"
    return kind


def _brought(one: LoggedEvent, armed: dict[str, tuple[str, int]], cause: LoggedInput | None) -> list[Violation]:
    """An end by a deadline: the deadline was armed, it had come, and a timer of that kind was the cause."""
    kind = _ended_by(one, cause)
    if kind is None:
        return []
    found = []
    subject = armed.get(_subject(one, kind))
    if subject is None:
        return [Violation("timers", str(one), f"no {kind} deadline was armed")]
    if one.event.at_ms < subject[1]:
        found.append(Violation("timers", str(one), f"the {kind} deadline was {subject[1]}"))
    if cause is not None and not _is_timer(cause, kind):
        found.append(Violation("timers", str(one), f"not caused by a timer of kind {kind}"))
    return found


def _ended_by(one: LoggedEvent, cause: LoggedInput | None) -> str | None:
    """The kind of deadline that an event says it is the end of."""
    match one.event.type:
        case kind if kind == RUN_LEASE_LOST:
            return "lease"
        case kind if kind == APPROVAL_EXPIRED:
            return "approval"
        case kind if kind == COMPACTION_FAILED and one.payload.get("reason") == "deadline":
            # A worker's own report may use the word too; it is not the end of a deadline.
            return "compaction" if cause is not None and isinstance(cause.record, Timer) else None
        case kind if kind == RUN_FINISHED and one.payload.get("forced") is True:
            # The lease's end forces a cancel as well.
            return "cancel" if cause is not None and _is_timer(cause, "cancel") else None
    return None
