"""Families of sessions from fixed seeds: see families.py. ONEPEN_TEST_SEED starts elsewhere."""

import os
from collections import Counter

import pytest

from onepen.processors import ending, subtasks
from tests.simulation.families import Family

FIRST_SEED = int(os.environ.get("ONEPEN_TEST_SEED", "1"))
FAMILIES = int(os.environ.get("ONEPEN_TEST_FAMILIES", "48"))
SOMETIMES = (
    "delivered Input", "delivered Notice", "subtask.started", "worker:cycle", "worker:key_conflict",
    "worker:already_ended", "run.released", "+subtask.finished(a,detached)", "+subtask.finished(a,aborted)",
    "+subtask.finished(a,cancelled)", "+subtask.finished(a,completed)", "refused:erased",
)  # fmt: skip


def play(seed: int, seen: Counter[str]) -> None:
    try:
        Family(seed, seen).play()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def test_families_come_to_rest_and_every_child_is_told() -> None:
    print(f"seeds {FIRST_SEED} to {FIRST_SEED + FAMILIES - 1}")
    seen: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + FAMILIES):
        play(seed, seen)
    never = [word for word in SOMETIMES if not seen[word]]
    assert not never, f"never happened: {never}"


@pytest.mark.parametrize("defect", ["an end is not told", "children are not aborted", "a call is sent again"])
def test_a_defect_turns_a_family_red(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match defect:
        case "an end is not told":
            monkeypatch.setattr(ending, "_tell_parent", lambda *args: None)
        case "children are not aborted":
            monkeypatch.setattr(subtasks, "close", lambda turn, status: None)
        case _:
            monkeypatch.setattr(subtasks, "_again", lambda turn, call, digest: None)
            monkeypatch.setattr(subtasks, "derived_id", lambda kind, run_id, call_id: f"{kind}-{call_id}")
    for seed in range(1, 20):
        try:
            play(seed, Counter())
        except AssertionError:
            return
    pytest.fail("19 families survive the defect")
