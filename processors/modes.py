"""What happens to an input: the table of protocol section 4 as data. Admission dispatches by it, the documentation is
drawn from it; how each treatment is carried out stands in `admission`.
"""

from __future__ import annotations

from enum import StrEnum

from onepen.schemas.inputs import Input
from onepen.schemas.policies import Policy
from onepen.schemas.statuses import Mode, OnBusy


class Situation(StrEnum):
    """The session as an input meets it."""

    FREE = "no active run"
    BUSY = "running, compacting"
    CANCELLING = "cancelling"


class Treatment(StrEnum):
    START = "starts a run"
    QUEUE = "queued"
    QUEUE_IN_FRONT = "queued in front, behind earlier interrupts"
    INTERRUPT = "cancels the run, queued in front"
    STEER = "pending for this run; another expected_run_id: if_missed"
    MISSED = "if_missed: as prompt, or refused missed"
    BUSY = "refused busy"
    NO_RUN = "refused no_active_run, naming the last run and how it ended"
    CANCEL = "cancelling"
    WIDEN = "the first cancel stands; a wider scope is carried out"
    SETTLE = "settles an action in doubt of an earlier run, else refused"
    DECIDE = (
        "the first answer decides an approval, later ones are refused, naming it; settles a doubt of an earlier run"
    )
    CANCELLED = "refused cancelled; settles a doubt of an earlier run"
    ERASE = "erased; an active run is cancelled with its queue"


T = Treatment
TABLE: dict[str, tuple[Treatment, Treatment, Treatment]] = {
    "prompt, on_busy queue": (T.START, T.QUEUE, T.QUEUE),
    "prompt, on_busy reject": (T.START, T.BUSY, T.BUSY),
    "prompt, on_busy steer": (T.START, T.STEER, T.QUEUE),
    "prompt, on_busy interrupt": (T.START, T.INTERRUPT, T.QUEUE_IN_FRONT),
    "follow_up": (T.START, T.QUEUE, T.QUEUE),
    "steer": (T.MISSED, T.STEER, T.MISSED),
    "auto, source steers": (T.START, T.STEER, T.QUEUE),
    "auto, any other source": (T.START, T.QUEUE, T.QUEUE),
    "abort of a run or active": (T.NO_RUN, T.CANCEL, T.WIDEN),
    "answer": (T.SETTLE, T.DECIDE, T.CANCELLED),
    "erase": (T.ERASE, T.ERASE, T.ERASE),
}
"""Row -> treatment in each situation, in the order of `Situation`. An abort of an input id goes by its fate."""

_SITUATIONS = tuple(Situation)

assert all(f"prompt, on_busy {choice}" in TABLE for choice in OnBusy)


def row(record: Input, policy: Policy) -> str:
    """The row of the table an input belongs to."""
    match record.mode:
        case Mode.PROMPT:
            return f"prompt, on_busy {record.on_busy or policy.on_busy}"
        case Mode.AUTO:
            return "auto, source steers" if record.source in policy.auto_steers else "auto, any other source"
        case Mode.ABORT:
            return "abort of a run or active"
        case _:
            return record.mode


def treatment(record: Input, policy: Policy, situation: Situation) -> Treatment:
    """The cell of the table."""
    return TABLE[row(record, policy)][_SITUATIONS.index(situation)]


def markdown() -> str:
    """The table of the documentation."""
    lines = ["| mode | " + " | ".join(Situation) + " |", "|---|---|---|---|"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in TABLE.items()]
    return "\n".join(lines)
