"""Another policy over recorded inputs: which verdicts differ, on logs decided by the real core."""

from __future__ import annotations

import pytest

from onepen.processors.rules import Keys
from onepen.schemas import codec
from onepen.schemas.errors import Invalid
from onepen.schemas.policies import Policy, PolicyRecord, policy_body
from onepen.streams.outside_reader import RawRecord
from onepen.streams.settings import Settings
from onepen.streams.simulating import Simulation, simulate_on
from tests.recorded_log import KEYS, PREFIX, RecordedLog, recorded, recorded_story
from tests.unit.demo.world import TENANT, World


def simulated(
    log: RecordedLog, policy: Policy, *, tenant: int = TENANT, since_ms: int = 0, keys: Keys = KEYS
) -> Simulation:
    settings = Settings(prefix=PREFIX, partitions=1, tenant_id=tenant)
    return simulate_on(log.topics(), settings, keys, policy, [0], since_ms, {}, lambda *_: None)


def busy() -> World:
    """A prompt that starts, one that waits and one that insists on waiting; then the run ends."""
    world = World()
    world.send("s", "p-1")
    world.send("s", "p-2")
    world.send("s", "p-3", on_busy="queue")
    offer = world.claim("s", "w-1")
    world.report(offer, "w-1", ("run.finished", {"terminalStatus": "completed"}))
    return world


def test_the_policy_in_force_changes_nothing() -> None:
    found = simulated(recorded_story(), Policy())
    assert (found.differing, found.differences, found.unfit_worker_records) == (0, [], 0)
    assert found.inputs == 9
    assert found.before == found.after


def test_who_would_have_been_refused() -> None:
    log = recorded(busy())
    found = simulated(log, Policy(on_busy="reject"))
    (one,) = found.differences
    assert (one.input_id, one.before, one.after) == ("p-2", ("queued", None), ("refused", "busy"))
    assert (one.partition, one.offset) == (0, log.inputs[3].offset)
    assert found.changes == {"queued -> refused busy": 1}
    assert (found.inputs, found.differing) == (3, 1)
    assert found.after == {"started": 1, "refused busy": 1, "queued": 1}


def test_interrupts_make_the_rest_go_another_way() -> None:
    """The run that a worker had claimed is gone then: what it said no longer fits, and is counted."""
    found = simulated(recorded(busy()), Policy(on_busy="interrupt"))
    assert found.unfit_worker_records == 2
    assert found.differing == 0, "queued in front is queued"


def test_recorded_policies_of_the_tenant_hold_for_one_side_only() -> None:
    log = recorded(busy())
    strict = PolicyRecord(tenant_id=TENANT, version=3, body=policy_body(Policy(version=3, on_busy="reject")))
    log.inputs.insert(0, RawRecord(0, 1, 1, b"policy", codec.encode(strict), ()))
    found = simulated(log, Policy())
    assert found.changes == {"refused busy -> queued": 1}
    assert simulated(log, Policy(on_busy="reject")).differing == 0


def test_only_one_tenant_and_only_from_a_moment_on() -> None:
    log = recorded(busy())
    assert simulated(log, Policy(on_busy="reject"), tenant=TENANT + 1).inputs == 0
    late = simulated(log, Policy(on_busy="reject"), since_ms=log.inputs[4].at_ms)
    assert (late.inputs, late.differing) == (1, 0)


def test_a_token_key_that_fits_nothing_is_refused() -> None:
    with pytest.raises(Invalid, match="token_key"):
        simulated(recorded_story(), Policy(), keys=Keys("k", b"t" * 32))
