"""The checks against a good history and against damaged copies of it: no damage goes unnoticed, no check is idle."""

import inspect
from collections.abc import Callable

import pytest

from onepen.demo.checks import (
    Evidence,
    Expectations,
    Violation,
    answer_all,
    exit_code,
)
from onepen.streams.audit import admission, effects, history, limits, tables, time_limits, waiting
from tests.unit.demo.mutants import MUTANTS
from tests.unit.demo.world import FROZEN_PID, founding_story, with_changes

STORY = Expectations(
    runs_completed=3, queued=2, steered=1, duplicates=1, cancelled=1, voided=1, timed_out=1, takeovers=1,
    late_refusals=1, frozen_worker_pid=FROZEN_PID, effects=1, approvals=1, watched_actions=frozenset({"send_mail"}),
)  # fmt: skip
GOOD = founding_story().evidence()

Check = Callable[[Evidence], list[Violation]]


def _watched(evidence: Evidence) -> list[Violation]:
    return effects.done_means_done(evidence, STORY.watched_actions)


CHECKS: dict[str, Check] = {
    name: check
    for module in (admission, effects, history, limits, tables, time_limits, waiting)
    for name, check in inspect.getmembers(module, inspect.isfunction)
    if list(inspect.signature(check).parameters) == ["evidence"]
    and inspect.signature(check).return_annotation == "list[Violation]"
} | {"done_means_done": _watched}


def test_a_good_history_is_green() -> None:
    answers = answer_all(GOOD, STORY)
    assert [str(v) for a in answers for v in a.violations] == []
    assert [a.number for a in answers] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert exit_code(answers) == 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_damaged_history_is_red(name: str) -> None:
    damage, _ = MUTANTS[name]
    answers = answer_all(damage(GOOD), STORY)
    assert exit_code(answers) == 1, f"{name} survived"


@pytest.mark.parametrize(("name", "check"), [(n, c) for n, (_, checks) in MUTANTS.items() for c in checks])
def test_the_check_meant_for_a_damage_finds_it(name: str, check: str) -> None:
    assert CHECKS[check](GOOD) == []
    assert CHECKS[check](MUTANTS[name][0](GOOD)), f"{check} let {name} pass"


def test_every_check_is_killed_by_some_damage() -> None:
    tried = {check for _, checks in MUTANTS.values() for check in checks}
    assert tried == CHECKS.keys()


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("a_second_active_run", 1),
        ("one_event_dropped", 2),
        ("one_event_doubled", 2),
        ("two_events_swapped", 2),
        ("half_a_chain", 2),
        ("a_prompt_steered_instead_of_queued", 3),
        ("an_action_not_voided_by_the_abort", 4),
        ("timed_out_too_early", 5),
        ("a_late_report_that_was_accepted", 6),
        ("a_mail_sent_twice", 7),
        ("one_row_off_by_one", 8),
    ],
)
def test_the_matching_question_turns_red(name: str, question: int) -> None:
    answers = answer_all(MUTANTS[name][0](GOOD), STORY)
    assert not answers[question - 1].green
    assert exit_code(answers) == 1


@pytest.mark.parametrize(
    "field",
    ["runs_completed", "queued", "steered", "duplicates", "cancelled", "voided", "timed_out", "takeovers",
     "late_refusals", "effects", "approvals"],
)  # fmt: skip
def test_what_was_to_be_seen_and_was_not_is_red(field: str) -> None:
    more = Expectations(**{**STORY.__dict__, field: getattr(STORY, field) + 1})
    assert exit_code(answer_all(GOOD, more)) == 1


def test_a_late_report_of_another_process_does_not_count() -> None:
    other = Expectations(**{**STORY.__dict__, "frozen_worker_pid": FROZEN_PID + 1})
    assert not answer_all(GOOD, other)[5].green


def test_nothing_at_all_is_red() -> None:
    empty = with_changes(GOOD, events=[], receipts=[], inputs=[], effects=[], tables=None)
    assert exit_code(answer_all(empty, STORY)) == 1
    assert exit_code([]) == 1


def test_what_is_under_way_is_no_violation() -> None:
    """A run that has not ended and an input without disposition are wrong only once all is quiet."""
    cut = [e for e in GOOD.events if e.event.session_id == "slow"][:-2]
    started = with_changes(
        GOOD,
        events=cut,
        receipts=[r for r in GOOD.receipts if r.receipt.session_id == "slow"],
        inputs=[i for i in GOOD.inputs if getattr(i.record, "session_id", "") == "slow"],
        quiet=False,
    )
    for name in ("one_active_run", "final", "conserved"):
        assert CHECKS[name](started) == []
        assert CHECKS[name](with_changes(started, quiet=True)) or name == "conserved"
