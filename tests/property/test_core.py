"""Histories of one session, drawn by Hypothesis and by seeds: see world.py for what is checked after every record.

Seeds are fixed, so that a red run is red again; ONEPEN_TEST_SEED starts elsewhere and is printed.
"""

import os
from collections import Counter
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.world import World

FIRST_SEED = int(os.environ.get("ONEPEN_TEST_SEED", "1"))
HISTORIES = int(os.environ.get("ONEPEN_TEST_HISTORIES", "64"))

SOMETIMES = (
    # every event of this slice
    "run.started", "run.leased", "run.lease_lost", "run.released", "run.cancel_requested", "run.finished",
    "model.request.started", "model.request.finished", "message.completed", "tool.started", "tool.finished",
    "action.requested", "action.permitted", "action.finished", "action.voided", "action.in_doubt",
    "approval.requested", "approval.answered", "approval.expired", "approval.voided",
    "input.steered", "input.applied", "input.carried_over", "x.note", "subtask.started", "subtask.finished",
    "run.compaction_started", "run.compaction_finished", "run.compaction_failed",
    # every way a run ends
    "+run.finished(completed)", "+run.finished(failed)", "+run.finished(failed,retryable)", "+run.finished(cancelled)",
    "+run.finished(cancelled,forced)", "+run.finished(timed_out,retryable)",
    # every verdict, and what a refusal may say
    "started/consumed", "queued", "steered", "cancelling", "answered/done", "withdrawn/done", "duplicate",
    "refused:busy", "refused:missed", "refused:invalid", "erased", "refused:erased", "refused:too_old",
    "refused:not_retryable", "sent:prompt:child", "sent:abort:child",
    "refused:from_the_future", "refused:input_id_reused", "refused:no_active_run", "refused:stale_run",
    "refused:unknown_input", "refused:already_settled", "refused:cancelled", "refused:unknown_approval",
    "refused:digest_mismatch", "refused:already_answered", "refused:queue_full",
    "worker:unknown_run", "worker:bad_token", "worker:run_ended", "worker:stale_generation", "worker:already_owned",
    "worker:not_owner", "worker:report_conflict", "worker:report_gap", "worker:unknown_type", "worker:run_cancelling",
    "worker:already_open", "worker:not_open", "worker:still_open", "worker:unknown_steer", "worker:out_of_order",
    "worker:key_conflict", "worker:in_flight", "worker:in_doubt", "worker:already_ended", "worker:lease_expired",
    "notice:recorded", "notice:lease_lost", "notice:released", "notice:timed_out", "notice:forced",
)  # fmt: skip


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(script=st.binary(min_size=60, max_size=400))
def test_histories_that_hypothesis_draws(script: bytes) -> None:
    World(script).run()


def test_histories_from_seeds_and_that_everything_happens_in_them() -> None:
    print(f"seeds {FIRST_SEED} to {FIRST_SEED + HISTORIES - 1}")
    seen: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
        try:
            World(Random(seed).randbytes(420), seen).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    never = [word for word in SOMETIMES if not seen[word]]
    assert not never, f"never happened in {HISTORIES} histories: {never}"
