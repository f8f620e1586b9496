"""Exhaustive search: all that a bounded world can do, in every order. Run with -s to see states, transitions, depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from onepen.processors import actions, cancellation, leases, pending, subtasks, timers
from onepen.processors.decide import Decision
from onepen.schemas import events as ev
from tests.search.configurations import ALL
from tests.search.explore import Move, Node, Violation, explore

SHORTER = ("actions", "compaction")
EVENTS = {
    "admission": {ev.INPUT_STEERED, ev.INPUT_APPLIED, ev.INPUT_CARRIED_OVER, ev.RUN_CANCEL_REQUESTED},
    "queue": {ev.INPUT_STEERED, ev.INPUT_APPLIED, ev.RUN_LEASE_LOST},
    "leases": {ev.RUN_LEASED, ev.RUN_LEASE_LOST, ev.RUN_RELEASED, ev.TOOL_FINISHED, ev.RUN_CANCEL_REQUESTED},
    "actions": {ev.ACTION_PERMITTED, ev.ACTION_IN_DOUBT, ev.ACTION_VOIDED, ev.APPROVAL_ANSWERED, ev.APPROVAL_EXPIRED},
    "actions settled": {ev.ACTION_PERMITTED, ev.ACTION_IN_DOUBT, ev.ACTION_FINISHED, ev.APPROVAL_ANSWERED},
    "compaction": {ev.COMPACTION_STARTED, ev.COMPACTION_FINISHED, ev.COMPACTION_FAILED, ev.INPUT_APPLIED},
    "retry and erase": {ev.ACTION_IN_DOUBT, ev.ACTION_PERMITTED, ev.RUN_CANCEL_REQUESTED},
    "children": {ev.SUBTASK_STARTED, ev.SUBTASK_FINISHED, ev.RUN_RELEASED, ev.RUN_CANCEL_REQUESTED},
}
"""What must have happened somewhere, lest a world proves nothing."""


def exhaust(name: str) -> None:
    found = explore(ALL[name]())
    assert EVENTS[name] | {ev.RUN_STARTED, ev.RUN_FINISHED} <= found.seen
    assert found.states > 1_000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHORTER)
def test_a_world_is_exhausted(name: str) -> None:
    exhaust(name)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(ALL.keys() - set(SHORTER)))
def test_a_larger_world_is_exhausted(name: str) -> None:
    exhaust(name)


def no_takeover(node: Node, move: Move, decision: Decision | None, after: Node) -> str | None:
    """A false invariant: a run that had an owner is never leased again."""
    run = node.sessions[move.index].head.run
    leased = decision is not None and any(event.type == ev.RUN_LEASED for event in decision.events)
    return "a takeover" if leased and run is not None and run.had_owner else None


def test_a_false_invariant_is_violated_with_its_shortest_trace() -> None:
    with pytest.raises(Violation) as caught:
        explore(ALL["leases"](), [no_takeover])
    print(caught.value)
    assert caught.value.what == "a takeover"
    assert caught.value.trace == ["p1", "w1 claims", "releases", "w1 claims"]


def test_without_its_timers_a_run_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that every run can end bites: a core that never looks at the run's deadline and at lost leases."""
    monkeypatch.setattr(timers, "_fire", lambda turn, run, timer: None)
    with pytest.raises(Violation, match="cannot end"):
        explore(ALL["compaction"]())


def _extended_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leases.renew

    def careless(turn: Any, record: Any) -> Any:
        turn.run.owner = record.worker_id + "x"
        return whole(turn, record)

    monkeypatch.setattr(leases, "renew", careless)


def _timers_of_any_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = timers.consume

    def careless(turn: Any, timer: Any) -> None:
        run = turn.session.head.run
        whole(turn, timer if run is None else msgspec.structs.replace(timer, generation=run.generation))

    monkeypatch.setattr(timers, "consume", careless)


def _cancel_keeps_approvals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation.ending, "void_unpermitted", lambda turn, reason: None)


def _doubt_is_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "_resolve", lambda turn, a, payload, raw, no: actions._open(turn, payload, raw, no))


def _steers_are_stranded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "carry_over", lambda turn: None)


def _children_are_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtasks, "abort_children", lambda turn, reason: None)
    monkeypatch.setattr(subtasks, "close", lambda turn, status: None)


@pytest.mark.parametrize(
    ("name", "defect"),
    [
        ("leases", _extended_cancel),
        ("leases", _timers_of_any_generation),
        ("actions", _cancel_keeps_approvals),
        ("actions", _doubt_is_permitted),
        ("compaction", _steers_are_stranded),
        ("children", _children_are_never_told),
    ],
)
def test_a_defect_is_found_with_a_trace(
    name: str, defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises(Violation) as caught:
        explore(ALL[name]())
    print(caught.value)
    assert 1 <= len(caught.value.trace) < 12
