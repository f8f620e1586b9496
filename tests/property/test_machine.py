"""The core beside a deliberately naive model (naive_model.py), driven by Hypothesis: see machine.py.

Both are the same in every run, so that a change is not stopped by what was there before it. With ONEPEN_TEST_ANEW=1 the
long one draws anew and prints how to repeat what it found: to be run again and again before a release. With
ONEPEN_TEST_SHRINK=1 either looks for a short history (minutes, so with `--timeout=900`). A machine that cannot fail
proves nothing: with defects of the bug bank in the core the two must disagree within so many histories.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machine import SideBySide
from tests.unit.processors.test_bug_bank import BANK

# Shrinking a history of this kind takes minutes: only where it is asked for.
PHASES = [Phase.generate, Phase.shrink] if os.environ.get("ONEPEN_TEST_SHRINK") else [Phase.generate]
STEADY = settings(
    max_examples=400, stateful_step_count=40, derandomize=True, database=None, deadline=None, phases=PHASES,
    suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
)  # fmt: skip
ANEW = bool(os.environ.get("ONEPEN_TEST_ANEW"))
LONG = settings(STEADY, max_examples=800, stateful_step_count=50, derandomize=not ANEW, print_blob=True)
HUNT = settings(STEADY, max_examples=600, phases=[Phase.generate])

SOMETIMES = (
    "prompt started", "prompt queued", "prompt steered", "prompt refused busy",
    "prompt refused not_retryable", "prompt duplicate", "steer steered", "steer started",
    "steer queued", "steer refused missed", "auto steered", "auto started", "follow_up queued",
    "follow_up refused too_old", "follow_up refused from_the_future", "abort cancelling", "abort withdrawn",
    "abort refused already_settled", "abort refused no_active_run", "answer answered",
    "answer refused digest_mismatch", "erase erased", "Claim", "Claim bad_token", "Renew", "Release", "Report",
    "Report report_gap", "Report report_conflict", "Report run_ended", "Report stale_generation", "Notice", "permitted",
    "event refused key_conflict", "event refused in_flight", "event refused in_doubt", "event refused already_ended",
    "event refused run_cancelling", "event refused still_open",
    "event refused lease_expired", "disposed consumed", "disposed expired", "disposed discarded missed",
    "disposed discarded aborted", "disposed withdrawn", "finished completed", "finished failed", "finished cancelled",
    "finished cancelled forced", "finished timed_out",
)  # fmt: skip
DEFECTS = (
    "the generation is not checked", "the token is not checked", "a lost lease leaves work open",
    "a release counts as an attempt", "a report is decided again", "a gap in reports is fine",
    "the outcome overwrites the cancel", "a cancel voids nothing", "starts are accepted in cancelling",
    "the queue starts from its end",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_the_core_does_what_a_naive_reading_of_the_protocol_does() -> None:
    SideBySide.seen.clear()
    run_state_machine_as_test(SideBySide, settings=STEADY)
    seen = SideBySide.seen
    print(f"{sum(seen.values())} facts: {dict(seen)}")
    never = [what for what in SOMETIMES if not seen[what]]
    assert not never, f"never happened: {never}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_core_does_so_in_more_and_longer_histories() -> None:
    run_state_machine_as_test(SideBySide, settings=LONG)


def disagreement() -> Exception | None:
    """What the machine stumbles over within its bound of histories."""
    try:
        run_state_machine_as_test(SideBySide, settings=HUNT)
    except HypothesisException:
        raise
    except Exception as error:
        return error
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_the_core_is_a_disagreement(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, _ = BANK[defect]
    patch(monkeypatch)
    assert disagreement() is not None, f"core and model agree in {HUNT.max_examples} histories: {defect}"
