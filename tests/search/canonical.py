"""When two sessions count as the same: the canonical form of a state.

Times are relative to `now` and end at 0 (passed is passed); workers are interchangeable (the smallest of all their
permutations stands for the rest); generations count from the current one. Left out is what no decision reads and what
only tells how long it took or where in the log it stood: hashes, offsets, sequences, counters of views and of evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any

from onepen.processors.session import Action, Call, Entry, Head, LastRun, Remembered, Retry, Run, Session
from onepen.schemas.inputs import Parent
from onepen.schemas.views import Checkpoint

LEFT_OUT: Mapping[type, frozenset[str]] = {
    Head: frozenset(("now_ms", "last_hash", "next_forget_ms", "refused_records", "remembered")),
    Run: frozenset((
        "seq", "started_ms", "cancel_ms", "view_no", "offer_ordinal", "refused_records", "refused", "report_digests",
        "renewal_no", "stopped", "stopped_count", "generation", "report_no", "asked", "asked_calls", "action_requests",
        "voided", "work_outcome",
    )),
    LastRun: frozenset(("generation", "report_no", "refused_records")),
    Remembered: frozenset(("digest", "issued_at_ms", "partition", "offset", "user_id", "source", "input")),
    Action: frozenset(("requested_ms", "report_no", "result", "result_seq", "result_bytes", "forget_ms", "generation",
                       "valid_ms", "deadline_ms")),
    Call: frozenset(("digest", "forget_ms", "result")),
    Retry: frozenset(("input", "until_ms")),
    Checkpoint: frozenset(("run_id", "through_seq")),
    Entry: frozenset(),
    Parent: frozenset(),
}  # fmt: skip
_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(name for name in kind.__struct_fields__ if name not in left)  # type: ignore[attr-defined]
    for kind, left in LEFT_OUT.items()
}
_LONG_AGO_MS = 10**12
"""Every time of the log is larger, every length is smaller."""


def canonical(sessions: Iterable[Session], now_ms: int, workers: tuple[str, ...], beside: Any) -> str:
    """The canonical form of the sessions and of what lies `beside` them (budgets, records on their way)."""
    text = repr(([_session(session, now_ms) for session in sessions], beside))
    if len(workers) == 1:
        return text
    return min(_renamed(text, workers, names) for names in permutations(workers))


def _renamed(text: str, workers: tuple[str, ...], names: tuple[str, ...]) -> str:
    for number, worker in enumerate(workers):
        text = text.replace(f"'{worker}'", f"'<{number}>'").replace(f"inbox{worker[1:]};", f"inbox<{number}>;")
    for number, name in enumerate(names):
        text = text.replace(f"'<{number}>'", f"'{name}'").replace(f"inbox<{number}>;", f"inbox{name[1:]};")
    return text


def _session(session: Session, now_ms: int) -> Any:
    parts = [
        (name, _struct(value, now_ms))
        for kept in (session.ids, session.actions, session.calls, session.retries)
        for name, value in kept.items()
    ]
    return _struct(session.head, now_ms), parts, session.branches.names()


def _struct(value: Any, now_ms: int) -> tuple[Any, ...]:
    return tuple([_plain(getattr(value, name), name, now_ms) for name in _FIELDS[type(value)]])


def _plain(value: Any, name: str, now_ms: int) -> Any:
    if name == "inbox":
        return f"inbox{value};"
    kind = type(value)
    if kind is int:
        return value if value < _LONG_AGO_MS else max(0, value - now_ms)
    if kind is str or value is None or kind is bool:
        return value
    if kind is tuple:
        return tuple([_plain(one, "", now_ms) for one in value])
    if kind in _FIELDS:
        return _struct(value, now_ms)
    return str(value)
