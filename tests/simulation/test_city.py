"""Whole histories with the real core and the real worker's machine under faults, from fixed seeds.

Two phases: faults on, where nothing wrong may happen; faults off, where everything must come to its end.
ONEPEN_TEST_SEED starts elsewhere; the seed of a red city is in its message.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from onepen.processors import actions, ending, reports, worker_rules
from onepen.schemas.statuses import Reason
from tests.simulation.city import City
from tests.unit.processors.test_bug_bank import BANK

FIRST_SEED = int(os.environ.get("ONEPEN_TEST_SEED", "1"))
CITIES = int(os.environ.get("ONEPEN_TEST_CITIES", "24"))
SOMETIMES = (
    # faults, and what they lead to
    "lost record", "batch lost before its commit", "frozen", "killed", "run.lease_lost", "action.in_doubt",
    "approval.answered", "input.applied", "input.carried_over", "run.cancel_requested", "action.finished",
    "refused stale_generation", "refused run_ended", "refused already_owned", "refused report_gap",
    "refused run_cancelling",
    # inputs of every mode
    "prompt: started", "prompt: queued", "prompt reject: refused busy", "prompt steer: steered", "interrupt: queued",
    "steer: steered", "steer expected run: steered", "steer expected other: queued",
    "steer expected other: refused missed", "auto ui: steered", "auto remote: steered", "auto scheduler: queued",
    "follow_up: queued", "retry: started", "retry: refused not_retryable", "abort: cancelling",
    "abort run: cancelling", "abort run: refused stale_run", "abort input: cancelling", "abort input: withdrawn",
    "erase: erased", "prompt: refused erased",
    # recovery, doubts and their ends
    "taken over by resume", "taken over by rerun", "resolution reconciled_not_performed", "resolution repeat",
    "doubt settled after its run", "answer not_performed: answered",
    # compaction, children, policies
    "run.compaction_started", "run.compaction_finished", "run.compaction_failed", "subtask.started",
    "prompt of a parent: started", "prompt of a parent: queued", "abort of a parent: cancelling",
    "abort of a parent: withdrawn", "child completed", "child cancelled", "child detached",
    "policy changed under a run",
    # ends
    "finished completed", "finished failed", "finished cancelled", "finished cancelled forced", "finished timed_out",
)  # fmt: skip


def play(seed: int) -> City:
    city = City(seed)
    try:
        city.run(for_ms=45_000)
        city.heal()
        city.run(for_ms=240_000, until=city.at_rest)
        assert city.at_rest(), f"not at rest: {[one.head.run for one in city.sessions.values()]}"
        city.check()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return city


def test_cities_under_faults() -> None:
    print(f"seeds {FIRST_SEED} to {FIRST_SEED + CITIES - 1}")
    seen: Counter[str] = Counter()
    effects = refused = runs = 0
    for seed in range(FIRST_SEED, FIRST_SEED + CITIES):
        city = play(seed)
        seen += city.seen
        effects += len(city.target.effects)
        refused += city.target.refused
        runs += sum(session.head.run_no for session in city.sessions.values())
    print(f"{runs} runs, {effects} effects, {refused} late calls refused by the target, {dict(seen)}")
    never = [what for what in SOMETIMES if not seen[what]]
    assert not never, f"never happened: {never}"
    assert effects > 5
    assert refused > 0


def test_a_city_without_faults_loses_no_lease() -> None:
    city = City(99, faults=False)
    city.run(for_ms=30_000)
    city.heal()
    city.run(for_ms=120_000, until=city.at_rest)
    city.check()
    assert city.seen["run.lease_lost"] == 0
    assert city.seen["run.finished"] > 5


def test_the_same_seed_is_the_same_city() -> None:
    one, other = play(FIRST_SEED), play(FIRST_SEED)
    assert one.framed == other.framed


# -- the city bites: defects put into the core turn it red -----------------------------------------------------------


def _blind_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        actions, "_resolve", lambda turn, action, payload, raw, no: actions._open(turn, payload, raw, no)
    )


def _long_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "_permit_until", lambda turn: turn.now_ms + 60_000)


def _any_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = worker_rules._no_right

    def careless(turn: Any, record: Any) -> Reason | None:
        found = whole(turn, record)
        return None if found in (Reason.STALE_GENERATION, Reason.NOT_OWNER) else found

    monkeypatch.setattr(worker_rules, "_no_right", careless)


def _reports_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reports.report

    def careless(turn: Any, record: Any) -> Reason | None:
        turn.run.report_no = min(turn.run.report_no, record.no - 1)
        return whole(turn, record)

    monkeypatch.setattr(reports, "report", careless)


def _silent_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ending.finish

    def careless(turn: Any, status: Any, payload: Any) -> None:
        turn.run.doubts = ()
        whole(turn, status, {**payload, "inDoubt": []} if "inDoubt" in payload else payload)

    monkeypatch.setattr(ending, "finish", careless)


def _of_the_bank(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    patch, _ = BANK[name]
    return patch


_silent_end = _of_the_bank("an end is not told to the parent")
_silent_refusal = _of_the_bank("a refusal is not told to the parent")
_stranded_steers = _of_the_bank("steers of an ended run are stranded")


@pytest.mark.parametrize(
    "defect",
    [
        *(_blind_repeats, _long_permits, _any_generation, _reports_twice, _silent_doubt),
        *(_silent_end, _silent_refusal, _stranded_steers),
    ],
    ids=lambda defect: defect.__name__,
)
def test_a_defect_of_the_core_turns_a_city_red(
    defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    for seed in range(1, 40):
        try:
            play(seed)
        except AssertionError:
            return
    pytest.fail("39 cities survive the defect")
