"""What a report says of a child is checked before it is used: the child's input must be one that can be decided."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onepen.processors.decide import Decision
from onepen.processors.input_rules import broken_rule
from onepen.schemas import codec
from onepen.schemas.inputs import Input
from onepen.schemas.limits import DAY_MS, DURATION_MS_MAX, RECORD_BYTES_MAX
from onepen.schemas.worker_records import Report, ReportEvent
from tests.unit.processors.stage import Stage

POINTER = {"uri": "s3://b/o", "digest": "ab" * 32, "sizeBytes": 2**63 - 1}


def started(**members: Any) -> Decision:
    stage = Stage()
    stage.do("prompt p1")
    stage.do("claim w1")
    members = {"callId": "c1", "sessionId": "child", **members}
    payload = json.dumps(members, separators=(",", ":")).replace("1000000000000000.0", "1e15")
    event = ReportEvent(type="subtask.started", payload=payload.encode())
    return stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(event,)))


@pytest.mark.parametrize(
    "members",
    [
        {"content": "x", "timeoutMs": DURATION_MS_MAX + 1},
        {"content": "x", "timeoutMs": 2**63},
        {"content": "x", "timeoutMs": 0},
        {"pointer": POINTER | {"sizeBytes": 2**63}},
        {"content": [1e15] * 50_000},  # written out in full they take four times the bytes
        {"content": None},
    ],
    ids=["time-out", "time-out-64-bit", "time-out-0", "size", "numbers", "none"],
)
def test_what_no_input_could_carry_is_refused(members: dict[str, Any]) -> None:
    decision = started(**members)
    assert not decision.forwards
    assert [each.reason for view in decision.views for each in view.refused] == ["invalid"]


@pytest.mark.parametrize(
    "members",
    [
        {"content": "x", "timeoutMs": DURATION_MS_MAX},
        {"pointer": POINTER},
        {"content": "\0" * 40_000},
        {"content": [10**15] * 15_000},
    ],
    ids=["time-out", "size", "escapes", "numbers"],
)
def test_what_is_sent_can_be_decided(members: dict[str, Any]) -> None:
    (child,) = started(**members).forwards
    data = codec.encode(child)
    assert len(data) < RECORD_BYTES_MAX + 16 * 1024
    read = codec.decode_inputs(data)
    assert isinstance(read, Input)
    assert broken_rule(read, Stage().rules.policy(7)) is None


def test_the_child_of_a_run_that_waited_long_lives_no_longer_than_an_input_may() -> None:
    stage = Stage()
    stage.policy(runTimeoutMs=DURATION_MS_MAX, approvalMs=2 * DAY_MS, leaseMs=30_000)
    for line in ("prompt p1", "claim w1", "report w1 1 act+k1,approval"):
        stage.do(line)
    stage.now_ms += DAY_MS
    for line in ("answer n1 k1 deny", "claim w1"):
        stage.do(line)
    run = stage.session.head.run
    assert run is not None
    assert run.timeout_at_ms - run.started_ms > DURATION_MS_MAX
    stage.do("report w1 2 sub+c1")
    (child,) = stage.decisions[-1].forwards
    assert isinstance(child, Input)
    assert child.ttl_ms == DURATION_MS_MAX
