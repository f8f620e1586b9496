"""The table of protocol section 4 a second time: which verdicts an input may get in the state that the events tell.

No reducer and no state: only which run was active at that position, whether it was cancelling, and whether the session
had been erased.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onepen.schemas.events import RUN_CANCEL_REQUESTED, RUN_FINISHED, RUN_STARTED
from onepen.schemas.inputs import Input
from onepen.schemas.policies import Policy
from onepen.streams.audit.evidence import LoggedEvent

Allowed = dict[str, frozenset[str]]
"""Verdict -> the reasons that may stand with it (none: no reason)."""

OF_THE_RECORD: Final = frozenset(
    {
        "invalid",
        "too_old",
        "from_the_future",
        "input_id_reused",
        "too_many_inputs",
        "queue_full",
        "erased",
        "cycle",
        "not_retryable",
    }
)
"""Refusals that rest on the record or on counters alone: possible in every state, and they leave no event."""

SETTLING: Final = frozenset(("ok", "error", "not_performed"))
"""Decisions that tell how an action in doubt ended."""

_ABORT_OF_INPUT: Final = frozenset(("unknown_input", "already_settled", "no_active_run", "stale_run"))
_APPROVAL: Final = frozenset(("unknown_approval", "digest_mismatch", "already_answered"))


@dataclass(frozen=True)
class Before:
    """What the events before a position say of a session."""

    active: str | None
    cancelling: bool


class Timeline:
    """The pen of one session along the log."""

    def __init__(self, events: Sequence[LoggedEvent]) -> None:
        self._offsets: list[int] = []
        self._states: list[Before] = [Before(None, False)]
        for one in events:
            state = _after(one, self._states[-1])
            if state is not None:
                self._offsets.append(one.event.cause.offset)
                self._states.append(state)

    def before(self, offset: int) -> Before:
        """State just before the record at `offset` was decided."""
        return self._states[bisect_left(self._offsets, offset)]


def _after(one: LoggedEvent, state: Before) -> Before | None:
    match one.event.type:
        case kind if kind == RUN_STARTED:
            return Before(one.event.run_id, False)
        case kind if kind == RUN_CANCEL_REQUESTED:
            return Before(state.active, True)
        case kind if kind == RUN_FINISHED:
            return Before(None, False)
    return None


def _only(verdict: str, *reasons: str) -> Allowed:
    return {verdict: frozenset(reasons)}


def on_busy(record: Input, policy: Policy) -> str:
    """What the input asks for when a run is active."""
    return record.on_busy or policy.on_busy


def in_front(record: Input, policy: Policy) -> bool:
    """True for an input that is queued in front: an interrupt, also a steer that found no run and counts as one."""
    return record.mode in ("prompt", "steer") and on_busy(record, policy) == "interrupt"


def allowed(record: Input, state: Before, policy: Policy) -> Allowed:
    """Verdicts that the table of modes allows (those of `OF_THE_RECORD` and duplicates apart)."""
    match record.mode:
        case "prompt" if record.retry_of is not None:
            return _only("started") if state.active is None else _only("refused", "not_retryable")
        case "prompt":
            return _prompt(record, state, policy, on_busy(record, policy))
        case "follow_up":
            return _only("started") if state.active is None else _only("queued")
        case "steer":
            return _missed(record, state, policy) if state.active is None else _steer(record, state, policy)
        case "auto":
            return _auto(record, state, policy)
        case "abort":
            return _abort(record, state)
        case "answer":
            return _answer(record, state)
        case "erase":
            return _only("erased")
    return _only("refused", "invalid")


def _prompt(record: Input, state: Before, policy: Policy, choice: str) -> Allowed:
    if state.active is None:
        return _only("started")
    if choice == "reject":
        return _only("refused", "busy")
    if choice == "steer" and not state.cancelling:
        return _steer(record, state, policy)
    return _only("queued")


def _steer(record: Input, state: Before, policy: Policy) -> Allowed:
    if not state.cancelling and record.expected_run_id in (None, state.active):
        return _only("steered")
    return _missed(record, state, policy)


def _missed(record: Input, state: Before, policy: Policy) -> Allowed:
    if (record.if_missed or policy.if_missed) == "reject":
        return _only("refused", "missed")
    choice = on_busy(record, policy)
    return _prompt(record, state, policy, "queue" if choice == "steer" else choice)


def _auto(record: Input, state: Before, policy: Policy) -> Allowed:
    if state.active is None:
        return _only("started")
    if record.source in policy.auto_steers and not state.cancelling:
        return _steer(record, state, policy)
    return _only("queued")


def _abort(record: Input, state: Before) -> Allowed:
    if record.target_kind == "input":
        return {"withdrawn": frozenset(), "cancelling": frozenset(), "refused": _ABORT_OF_INPUT}
    if state.active is None:
        return _only("refused", "no_active_run")
    if record.target_kind == "run" and record.target_id != state.active:
        return _only("refused", "stale_run")
    return _only("cancelling")


def _answer(record: Input, state: Before) -> Allowed:
    if record.decision in SETTLING:
        return {"answered": frozenset(), "refused": _APPROVAL}
    if state.active is None:
        return _only("refused", "no_active_run")
    if state.cancelling:
        return _only("refused", "cancelled")
    return {"answered": frozenset(), "refused": _APPROVAL}
