"""Which input ids a session remembers, for how long, and how many (protocol section 4, "Repeats")."""

from __future__ import annotations

from onepen.processors.session import Remembered, forgotten
from onepen.processors.turn import Turn
from onepen.schemas.inputs import Input
from onepen.schemas.limits import REMEMBER_MS, REMEMBERED_EXTRA, REMEMBERED_MAX
from onepen.schemas.statuses import Disposition, Mode, Reason, Verdict

_RECHECK_MS = 60_000
_TEXT_CHARS_KEPT = 128
FORGET_SLACK_MS = 600_000
"""How long what may be forgotten may still stand: a pass looks at everything remembered, so it serves many at once."""
_EXTRA_MODES = frozenset((Mode.ABORT, Mode.ANSWER, Mode.ERASE))


def known(turn: Turn, input_id: str) -> Remembered | None:
    """What is remembered of an id; an id whose time is over counts as unknown even while its record still stands."""
    found = turn.session.ids.get(input_id)
    if found is None or _may_go(turn, found):
        return None
    return found


def _may_go(turn: Turn, record: Remembered) -> bool:
    if record.issued_at_ms + REMEMBER_MS >= turn.now_ms or record.disposition is None:
        return False
    run = turn.session.head.run
    return run is None or record.run_id != run.run_id


def forget(turn: Turn, *, slack_ms: int = FORGET_SLACK_MS) -> None:
    """Drop ids and action keys whose time is over, once the earliest of them is due by `slack_ms`. Nothing is decided
    by when this runs: whose time is over counts as unknown while its record still stands."""
    due_ms = turn.session.head.next_forget_ms
    if due_ms and due_ms + slack_ms <= turn.now_ms:
        _forget(turn)


def _forget(turn: Turn) -> None:
    head = turn.session.head
    next_ms = 0

    def later(at_ms: int) -> None:
        nonlocal next_ms
        due_ms = max(at_ms, turn.now_ms + _RECHECK_MS) if at_ms <= turn.now_ms else at_ms
        next_ms = min(next_ms, due_ms) if next_ms else due_ms

    for input_id, record in turn.session.ids.items():
        if _may_go(turn, record):
            turn.session.ids.drop(input_id)
            head.remembered -= 1
        else:
            later(record.issued_at_ms + REMEMBER_MS + 1)
    for name, action in turn.session.actions.items():
        if forgotten(action, turn.now_ms):
            turn.session.actions.drop(name)
        elif action.forget_ms:
            later(action.forget_ms + 1)
    for name, call in turn.session.calls.items():
        if forgotten(call, turn.now_ms):
            turn.session.calls.drop(name)
        elif call.forget_ms:
            later(call.forget_ms + 1)
    for name, kept in turn.session.retries.items():
        if kept.until_ms < turn.now_ms:
            turn.session.retries.drop(name)
        else:
            later(kept.until_ms + 1)
    head.next_forget_ms = next_ms


def due_at(turn: Turn, at_ms: int) -> None:
    """Make sure `forget` runs soon after `at_ms` at the latest."""
    head = turn.session.head
    head.next_forget_ms = min(head.next_forget_ms, at_ms) if head.next_forget_ms else at_ms


def has_room(turn: Turn, mode: str) -> bool:
    """False when the session remembers as many ids as it may."""
    places = REMEMBERED_MAX + (REMEMBERED_EXTRA if mode in _EXTRA_MODES else 0)
    if turn.session.head.remembered >= places:
        forget(turn, slack_ms=0)
    return turn.session.head.remembered < places


def remember(
    turn: Turn,
    record: Input,
    digest: str,
    verdict: Verdict,
    *,
    reason: Reason | None = None,
    run_id: str | None = None,
    disposition: Disposition | None = None,
    keep: bool = False,
) -> None:
    """Take the id. `keep`: the input itself stays too, because it is pending or starts a run."""
    if turn.session.ids.get(record.input_id) is None:
        turn.session.head.remembered += 1
    turn.session.ids.put(
        record.input_id,
        Remembered(
            digest=digest,
            issued_at_ms=record.issued_at_ms,
            partition=turn.moment.partition,
            offset=turn.moment.offset,
            mode=record.mode[:_TEXT_CHARS_KEPT],  # of an invalid input these may be long
            user_id=record.user_id,
            source=record.source[:_TEXT_CHARS_KEPT],
            verdict=verdict,
            reason=reason,
            run_id=run_id,
            disposition=disposition,
            input=record if keep else None,
        ),
    )
    due_at(turn, record.issued_at_ms + REMEMBER_MS + 1)
