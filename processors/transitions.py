"""Legal moves of a run, as data: `decide` refuses by it, `evolve` asserts it, the documentation is drawn from it."""

from __future__ import annotations

from onepen.schemas.statuses import ACTIVE, TERMINAL
from onepen.schemas.statuses import RunStatus as S

TRANSITIONS: dict[S, frozenset[S]] = {
    S.RUNNING: frozenset({S.COMPACTING, S.CANCELLING, S.COMPLETED, S.FAILED, S.TIMED_OUT}),
    S.COMPACTING: frozenset({S.RUNNING, S.CANCELLING, S.FAILED, S.TIMED_OUT}),
    S.CANCELLING: frozenset({S.CANCELLED}),
    **{terminal: frozenset() for terminal in TERMINAL},
}

assert TRANSITIONS.keys() == set(S)
assert all(TRANSITIONS[status] for status in ACTIVE), "every active status must be able to end"


def legal(before: S, after: S) -> bool:
    return after in TRANSITIONS[before]


def mermaid() -> str:
    """The diagram of the documentation: one arrow per legal move, sorted."""
    arrows = [f"    {before} --> {after}" for before, moves in TRANSITIONS.items() for after in moves]
    ends = [f"    {status} --> [*]" for status in sorted(TERMINAL)]
    return "\n".join(["stateDiagram-v2", "    [*] --> running", *sorted(arrows), *ends])
