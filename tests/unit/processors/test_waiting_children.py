"""Two runs that wait for each other: each has a child queued behind the other run, and no ancestor is in sight.

No clock of a run counts while it only waits for a child, so the queue's must: every child's input has a lifetime, and
what comes back of it sets the run free (protocol section 11: every active run has an armed deadline).
"""

from __future__ import annotations

from typing import Any

import pytest

from onepen.processors.decide import Decision
from onepen.schemas.inputs import Input
from onepen.schemas.notices import Notice
from tests.unit.processors.stage import Stage

HOUR_MS = 3_600_000


class Pair:
    """Two sessions; what one sends to the other arrives at once."""

    def __init__(self) -> None:
        self.stages = {name: Stage(session_id=name) for name in ("left", "right")}
        self.now_ms = self.stages["left"].now_ms

    def do(self, name: str, line: str) -> None:
        stage = self.stages[name]
        before = len(stage.decisions)
        stage.do(line)
        for decision in stage.decisions[before:]:
            self.deliver(decision)

    def deliver(self, decision: Decision) -> None:
        for record in decision.forwards:
            if isinstance(record, Input | Notice):
                self.deliver(self.stages[record.session_id].decide(record))

    def run(self, name: str) -> Any:
        return self.stages[name].session.head.run

    def pass_time(self, until_ms: int) -> None:
        """Holders renew, deadlines fire in order; nobody reports anything."""
        while self.now_ms < until_ms:
            self.now_ms += 10_000
            for name, stage in self.stages.items():
                stage.now_ms = self.now_ms
                for due in stage.due():
                    self.deliver(stage.decide(due.timer))
                if stage.session.head.run is not None and stage.session.head.run.owner:
                    self.do(name, f"renew w1 {self.now_ms}")


def waiting(**policy: Any) -> Pair:
    pair = Pair()
    for name in pair.stages:
        pair.stages[name].policy(**policy)
        pair.do(name, "prompt i1")
        pair.do(name, "claim w1")
    pair.do("left", "report w1 1 sub+c1,to=right")
    pair.do("right", "report w1 1 sub+c1,to=left")
    for name in pair.stages:
        assert [entry.input_id[:4] for entry in pair.stages[name].session.head.pending] == ["sub-"]
        assert pair.run(name).open_children == 1
    return pair


def test_their_children_expire_and_both_go_on() -> None:
    pair = waiting()
    began_ms = pair.now_ms
    pair.pass_time(began_ms + HOUR_MS - 20_000)
    assert all(stage.session.head.pending for stage in pair.stages.values()), "not before the hour is over"
    pair.pass_time(began_ms + HOUR_MS + 20_000)
    for name in pair.stages:
        assert not pair.stages[name].session.head.pending
        assert pair.run(name).open_children == 0, "what became of the child has come back"
        assert pair.stages[name].session.calls.get("c1").status == "expired"  # type: ignore[union-attr]
        pair.do(name, "report w1 2 done:completed")
        assert pair.run(name) is None


@pytest.mark.parametrize(
    ("policy", "timeout_ms", "lifetime_ms"),
    [
        ({}, None, HOUR_MS),
        ({"runTimeoutMs": 60_000}, None, 60_000),
        ({"queuedTtlMs": 5_000}, None, 5_000),
        ({"queuedTtlMs": 9 * HOUR_MS}, None, HOUR_MS),
        ({}, 5 * HOUR_MS, 5 * HOUR_MS),
        ({}, 60_000, HOUR_MS),
    ],
)
def test_a_child_is_queued_no_longer_than_its_parent_may_run(
    policy: dict[str, int], timeout_ms: int | None, lifetime_ms: int
) -> None:
    stage = Stage()
    stage.policy(**policy)
    stage.decide(stage.input("prompt", "i1", timeout_ms=timeout_ms))
    stage.do("claim w1")
    stage.do("report w1 1 sub+c1,to=child")
    (child,) = stage.decisions[-1].forwards
    assert isinstance(child, Input)
    assert child.ttl_ms == lifetime_ms
