"""Nothing of the protocol's tables is without a line: every cell of section 4, every row of section 8 (keys), every
deadline of section 11, every kind of timer, every event type, every reason of a refusal."""

from typing import Any

import pytest

from onepen.processors import actions, modes, timers
from onepen.processors.modes import Situation
from onepen.processors.state_keys import pair
from onepen.schemas import events as ev
from onepen.schemas.statuses import ActionState, Disposition, Reason, TimerKind, Verdict
from tests.unit.processors import tables
from tests.unit.processors.stage import Stage, run_lines

TABLES = tables.load()

DEADLINES = {
    "offer unclaimed": "offer: not passed, passed",
    "no worker at all": "no worker at all: 20 offers",
    "lease": "lease: not passed, passed",
    "run": "run: timed out is one step",
    "run, waiting for a person": "run: the clock stands while it only waits for a person",
    "progress": "stalled: 60 renewals in a row",
    "progress, not counted": "stalled: suspended, or waiting",
    "progress, of a tool": "stalled: an open tool may declare",
    "permit": "permit: no timer",
    "compaction": "compaction: not passed, passed",
    "cancel": "under the policy of the story",
    "attempts per run": "attempts: three by default",
}
"""Rows of section 11 -> the table of deadlines.txt that shows them; those below stand in the file of their subject."""
ELSEWHERE = {
    "run, waiting for a child": "subtasks: the time of a run that waits only for children",
    "cancel": "cancel: a cancel timer before its time",
    "queued input": "inputs: ttl: a queued input expires by its timer",
    "approval": "approvals: expired",
    "child's cancel": "subtasks: the child's cancel deadline: 5 s before",
    "child's cancel, its permits": "subtasks: the child's cancel deadline: never before the end",
    "child's cancel, its policy": "subtasks: the child's cancel deadline: never later",
}


def play_all(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Stage], dict[str, set[Any]]]:
    """Every table on its stage, and which cells were reached on the way."""
    reached: dict[str, set[Any]] = {"cells": set(), "keys": set(), "fired": set()}
    treatment, requested, consume = modes.treatment, actions.requested, timers.consume

    def seen_treatment(record: Any, policy: Any, situation: Situation) -> Any:
        reached["cells"].add((modes.row(record, policy), situation))
        return treatment(record, policy, situation)

    def seen_requested(turn: Any, payload: Any, raw: bytes, no: int) -> Any:
        action = turn.session.actions.get(pair(str(payload.get("name")), str(payload.get("actionKey"))))
        state = "unknown" if action is None else str(action.state)
        reached["keys"].add((state, action is not None and action.args_digest != payload.get("argsDigest")))
        return requested(turn, payload, raw, no)

    def seen_consume(turn: Any, timer: Any) -> None:
        before = len(turn.drafts) + len(turn.receipts) + len(turn.offers)
        consume(turn, timer)
        reached["fired"].add((timer.kind, len(turn.drafts) + len(turn.receipts) + len(turn.offers) > before))

    monkeypatch.setattr(modes, "treatment", seen_treatment)
    monkeypatch.setattr(timers, "consume", seen_consume)
    monkeypatch.setitem(__import__("onepen.processors.reports", fromlist=["x"])._ARMS, "action.requested",
                        seen_requested)  # fmt: skip
    stages = []
    for lines in TABLES.values():
        stages.append(Stage())
        run_lines(stages[-1], lines)
    return stages, reached


def test_every_cell_row_and_deadline_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, reached = play_all(monkeypatch)
    assert reached["cells"] == {(row, situation) for row in modes.TABLE for situation in Situation}
    states = ["unknown", *ActionState]
    assert reached["keys"] == {(str(s), d) for s in states for d in (False, True)} - {("unknown", True)}
    kinds = {str(kind) for kind in TimerKind} - {"forget"}
    assert {(kind, fired) for kind, fired in reached["fired"] if kind in kinds} == {
        (kind, fired) for kind in kinds for fired in (False, True)
    }
    _everything_is_said(stages)


def _everything_is_said(stages: list[Stage]) -> None:
    events = {event.type for stage in stages for event in stage.events}
    types = {value for name, value in vars(ev).items() if name.isupper() and isinstance(value, str) and "." in value}
    assert types - events <= {ev.WORKER_PREFIX}
    receipts = [receipt for stage in stages for receipt in stage.receipts]
    assert {receipt.verdict for receipt in receipts} >= set(Verdict)
    assert {receipt.disposition for receipt in receipts} >= set(Disposition)
    reasons = {receipt.reason for receipt in receipts}
    reasons |= {view.reason for stage in stages for decision in stage.decisions for view in decision.views}
    reasons |= {refused for stage in stages for refused in _refused_in_views(stage)}
    assert {str(reason) for reason in Reason} - {str(reason) for reason in reasons} <= UNSAID


UNSAID = {
    "too_many_inputs",  # test_remembering: ten thousand ids are no table
    "not_supported",  # nothing is, any more
    "worker_lost",  # a payload's reason, not a receipt's
    "no_worker",  # the same: there is nobody to be told
}


def _refused_in_views(stage: Stage) -> set[str]:
    return {each.reason for decision in stage.decisions for view in decision.views for each in view.refused}


@pytest.mark.parametrize("row", DEADLINES)
def test_each_deadline_has_its_table(row: str) -> None:
    assert any(name.startswith(f"deadlines: {DEADLINES[row]}") for name in TABLES)


@pytest.mark.parametrize("row", ELSEWHERE)
def test_each_other_deadline_has_its_table(row: str) -> None:
    assert any(name.startswith(ELSEWHERE[row]) for name in TABLES)


def test_there_are_enough_tables() -> None:
    assert sum(len(lines) for lines in TABLES.values()) > 1_200
