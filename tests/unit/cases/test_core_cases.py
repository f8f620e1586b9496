"""Cases that others have met in public, in the core: compaction, children, progress, attribution, unknown versions.

The shorter ones are in tests/unit/processors/test_cases.py; tests/CASES.md says where the rest of each case is shown.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from onepen.processors import invariants
from onepen.processors.attribution import attribute
from onepen.processors.rules import Rules, admit_policy
from onepen.processors.session import Session
from onepen.processors.state_keys import head_key
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Poison
from onepen.schemas.inputs import JSON, TEXT, Content
from onepen.schemas.limits import EVENT_BYTES_MAX, PROTOCOL_VERSION, RECORD_BYTES_MAX
from onepen.schemas.partitioning import partition_of
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.worker_records import Report, ReportEvent
from tests.unit.processors.stage import KEYS, Stage, event_of

PARTITIONS = 4


def play(*lines: str) -> Stage:
    stage = Stage()
    for line in lines:
        stage.do(line)
    return stage


def told(stage: Stage, event_type: str, member: str) -> list[Any]:
    return [orjson.loads(event.payload).get(member) for event in stage.events if event.type == event_type]


def dispositions(stage: Stage, input_id: str) -> list[str | None]:
    return [r.disposition for r in stage.receipts if r.input_id == input_id and r.disposition]


# -- B08, B14: compaction


@pytest.mark.parametrize("end", ["ok", "failed", "deadline"])
def test_b08_inputs_during_a_compaction_wait_and_disturb_nothing(end: str) -> None:
    stage = play("policy compactionMs=20000", "prompt p1", "claim w1", "report w1 1 compact+z1")
    assert stage.do("steer s1")[0] == "steered"
    assert stage.do("steer s2")[0] == "steered"
    assert stage.do("prompt p2") == ["queued"], "the next prompt has its verdict at once"
    assert stage.do("state")[0] == "r1:compacting:g1", "nothing ended the compaction"
    assert stage.do("report w1 2 applied:s1") == ["worker:compacting", "view:compacting"]
    if end == "deadline":
        stage.do("wait 20000")
        assert stage.do("fire compaction z1") == ["+run.compaction_failed(z1)", "view:running"]
        assert stage.do("report w1 3 compact-z1:ok") == ["worker:not_open", "view:running"], "its late end is refused"
    else:
        stage.do(f"report w1 3 compact-z1:{end}")
    assert stage.do("state")[0] == "r1:running:g1"
    stage.do("report w1 4 applied:s1 applied:s2")
    assert told(stage, "input.applied", "inputId") == ["s1", "s2"], "in their order, with their ids"
    assert "+run.finished(completed)" in stage.do("report w1 5 done:completed")
    assert told(stage, "run.started", "inputId") == ["p1", "p2"]
    assert [dispositions(stage, name) for name in ("s1", "s2", "p2")] == [["consumed"]] * 3


def test_b08_what_a_failed_compaction_leaves_is_handed_on_when_the_run_ends() -> None:
    stage = play(
        "prompt p1", "claim w1", "report w1 1 compact+z1", "steer s1", "steer s2 if_missed=reject", "prompt p2"
    )
    stage.do("report w1 2 compact-z1:failed done:failed")
    assert told(stage, "run.started", "inputId") == ["p1", "s1"]
    assert told(stage, "input.carried_over", "inputId") == ["s1"]
    assert [dispositions(stage, name) for name in ("s1", "s2")] == [["consumed"], ["discarded"]]
    assert stage.do("state") == ["r2:running:g1", "p2@next"]


@pytest.mark.parametrize(
    ("ends", "forced"),
    [
        (("report w1 2 compact-z1:failed", "report w1 3 done:cancelled"), False),
        (("report w1 2 done:cancelled",), False),
        (("wait 30000", "fire cancel"), True),
    ],
    ids=["worker ends both", "worker ends the run", "worker says nothing"],
)
def test_b14_a_cancelled_compaction_does_not_wedge_the_session(ends: tuple[str, ...], forced: bool) -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 compact+z1", "abort a1 active")
    assert stage.do("prompt p2") == ["queued"]
    for line in ends:
        stage.do(line)
    finished = [event.type for event in stage.events if event.run_no == 1]
    assert finished[-1] == "run.finished"
    assert finished.count("run.compaction_failed") == 1, "the branch has its end before the run has"
    assert told(stage, "run.finished", "terminalStatus") == ["cancelled"]
    assert told(stage, "run.finished", "forced") == [forced]
    assert stage.do("state") == ["r2:running:g1"], "the next prompt starts"
    assert stage.do("run compaction_id") == ["compaction_id="], "no flag stays behind"
    stage.do("claim w2")
    assert "+run.compaction_started(z1)" in stage.do("report w2 1 compact+z1")


def test_b14_a_takeover_closes_the_old_compaction_before_new_work() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 compact+z1", "wait 30000", "fire lease")
    assert [event.type for event in stage.events][-2:] == ["run.compaction_failed", "run.lease_lost"]
    stage.do("claim w2")
    assert stage.do("report w1 2 compact-z1:ok g=1") == ["worker:stale_generation", "notice:stale_generation"]
    assert "+run.compaction_started(z2)" in stage.do("report w2 1 compact+z2")
    assert "worker:already_open" in stage.do("report w2 2 compact+z3"), "at most one is open"
    stage.do("report w2 3 compact-z2:ok done:completed")
    assert told(stage, "run.compaction_finished", "compactionId") == ["z2"]


# -- B17, B38: whose record it is


def misplaced(stage: Stage, key: bytes | None, *, partition: int | None = None, tenant_id: int = 7) -> str:
    """What becomes of an abort of the stage's run that was written under this key."""
    session_id = stage.session_id
    record = msgspec.structs.replace(
        stage.input("abort", "a1", target_kind="run", target_id=stage.run_id("r1")), tenant_id=tenant_id
    )
    where = partition_of(session_id.encode(), PARTITIONS) if partition is None else partition
    try:
        attribute(record, key, (), where, PARTITIONS)
    except Poison as poison:
        return poison.reason
    return f"{record.tenant_id}/{record.session_id}"


def test_b17_an_abort_under_another_key_or_tenant_never_reaches_the_run() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1,approval")
    assert misplaced(stage, b"session-42") == "7/session-42"
    assert misplaced(stage, b"s2") == "wrong_key"
    assert misplaced(stage, b"session-42", tenant_id=9) == "9/session-42", "another session than that of tenant 7"
    others = Stage(tenant_id=9)
    assert others.do("answer n1 k1 approve") == Stage(tenant_id=9).do("answer n1 k-unknown approve")
    others.decide(others.input("abort", "a1", target_kind="run", target_id=stage.run_id("r1")))
    assert others.receipts[-1].reason == "no_active_run"
    nameless = stage.input("abort", "a1", target_kind="run", target_id="")
    stage.decide(nameless)
    assert (stage.receipts[-1].verdict, stage.receipts[-1].reason) == ("refused", "invalid"), "nothing never means all"
    assert stage.do("state") == ["r1:running:g1"]


@pytest.mark.parametrize("target", ["*", "%", "active", "run-", "r1,r2"])
def test_b17_a_target_is_compared_and_never_expanded(target: str) -> None:
    stage = play("prompt p1", "claim w1")
    stage.decide(stage.input("abort", "a1", target_kind="run", target_id=target))
    assert (stage.receipts[-1].verdict, stage.receipts[-1].reason) == ("refused", "stale_run")
    assert stage.do("state") == ["r1:running:g1"]


@pytest.mark.parametrize("key", [None, b"", b" ", b"session-42 ", b"SESSION-42", "session\u201342".encode()])
def test_b38_a_key_that_is_not_the_session_is_parked_with_its_reason(key: bytes | None) -> None:
    assert misplaced(Stage(), key) == "wrong_key"


def test_b38_a_record_on_another_partition_is_parked_with_its_reason() -> None:
    home = partition_of(b"session-42", PARTITIONS)
    found = [misplaced(Stage(), b"session-42", partition=where) for where in range(PARTITIONS)]
    assert found == ["7/session-42" if where == home else "wrong_partition" for where in range(PARTITIONS)]


# -- B22: parent and child


def test_b22b_a_child_whose_worker_dies_ends_and_its_parent_is_told_once() -> None:
    child = play("child c1 max_attempts=1", "claim w9", "wait 30000")
    assert "told:c1:failed" in child.do("fire lease")
    assert told(child, "run.finished", "reason") == ["worker_lost"]
    again = [*child.do("fire lease run=r1 g=1"), *child.do("report w9 1 done:completed run=r1 g=1")]
    assert again == [".", "worker:run_ended", "notice:run_ended"], "told once"
    parent = play("prompt p1", "claim w1", "report w1 1 sub+c1")
    assert parent.do("report w1 2 done:failed")[-1] == "sent:abort:child", "it is not left running by itself"
    parent = play("prompt p1", "claim w1", "report w1 1 sub+c1")
    assert "+subtask.finished(c1,failed)" in parent.do("notice c1 failed")
    assert not any(word.startswith("+") for word in parent.do("notice c1 failed")), "told again, nothing happens"
    assert "+run.finished(completed)" in parent.do("report w1 2 done:completed"), "the parent is not held"


def test_b22c_a_child_that_ends_after_its_parent_writes_nothing_to_it() -> None:
    parent = play("prompt p1", "claim w1", "report w1 1 sub+c1", "report w1 2 done:completed")
    events, run = len(parent.events), parent.session.head.run
    assert parent.do("notice c1 completed") == ["notice:c1:completed"], "recorded as late"
    assert (len(parent.events), parent.session.head.run) == (events, run)


# -- B27: alive without work


def test_b27b_renewals_without_work_do_not_keep_a_hung_run_alive() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 tool+c1")
    assert stage.do("renew w1 1..59") == ["view:running"]
    assert "+run.finished(timed_out,retryable)" in stage.do("renew w1 60")
    assert told(stage, "run.finished", "reason") == ["stalled"]
    assert told(stage, "tool.finished", "status") == ["unknown"], "and the run is balanced"


# -- B36: sizes in the core


@pytest.mark.parametrize("share", [0.9, 1.0, 1.1, 20])
def test_b36_a_large_prompt_fits_its_event_or_is_refused_and_the_next_goes_on(share: float) -> None:
    stage = Stage()
    content = Content(media_type=TEXT, data=b"\x01" * int(share * RECORD_BYTES_MAX))
    decision = stage.decide(stage.input("prompt", "p1", content=content))
    assert (stage.receipts[-1].verdict, stage.receipts[-1].reason) == ("refused", "invalid"), "each byte becomes six"
    plain = Content(media_type=TEXT, data=b"x" * int(share * RECORD_BYTES_MAX))
    decision = stage.decide(stage.input("prompt", "p2", content=plain))
    assert decision.receipts[0].verdict == ("started" if share <= 1 else "refused")
    assert all(len(data) <= EVENT_BYTES_MAX for data in decision.event_bytes)
    assert stage.do("prompt p3")[0] in ("started/consumed", "queued")


# -- B37: what another version wrote


def test_b37_state_of_another_version_is_fatal_and_never_read_as_empty() -> None:
    stage = play("prompt p1", "claim w1")
    key = head_key(7, "session-42")
    deadline_ms, version, body = codec.decode_state(stage.records[key])
    newer = {**stage.records, key: codec.encode_state(deadline_ms, version + 1, body)}
    with pytest.raises(Fatal, match="version"):
        Session.load(7, "session-42", newer)
    assert Session.load(7, "session-42", stage.records).head.run is not None


def test_b37_a_protocol_that_this_release_does_not_speak_stops_the_partition() -> None:
    body = orjson.dumps({"protocol": PROTOCOL_VERSION + 1})
    rules = Rules.start(KEYS)
    with pytest.raises(Fatal, match="protocol"):
        admit_policy(rules, PolicyRecord(tenant_id=0, version=1, body=body))
    same, written = admit_policy(rules, PolicyRecord(tenant_id=0, version=1, body=b'{"protocol":0}'))
    assert same.settings.protocol == PROTOCOL_VERSION
    newer = {key: codec.encode_state(0, 1, body) for key in written}
    with pytest.raises(Fatal, match="protocol"):
        Rules.start(KEYS).restored(newer)


def test_b37_events_of_kinds_that_are_new_travel_unchanged() -> None:
    stage = play("prompt p1", "claim w1")
    raw = b'{"b":1.50,"a":{"unheard":"of"}}'
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(ReportEvent(type="x.newer", payload=raw),)))
    assert (stage.events[-1].type, stage.events[-1].payload) == ("x.newer", raw)


# -- B42: what JSON cannot say


@pytest.mark.parametrize(
    "payload",
    [
        b'{"toolCallId":"c1","toolName":"t","note":"\\ud800"}',
        b'{"toolCallId":"c1","toolName":"t","note":"\\udc00 low"}',
        b'{"toolCallId":"c1","toolName":"t","note":NaN}',
        b'{"toolCallId":"c1","toolName":"t","note":-Infinity}',
        b'{"toolCallId":"c1","toolName":"t","note":1e999}',
        b'{"toolCallId":"c1","toolName":"t","note":"\xed\xa0\x80"}',
        b'["toolCallId"]',
    ],
)
def test_b42_what_cannot_be_encoded_never_reaches_the_log(payload: bytes) -> None:
    stage = play("prompt p1", "claim w1")
    stage.decide(
        Report(**stage.worker_head("w1", {}), no=1, events=(ReportEvent(type="tool.started", payload=payload),))
    )
    assert [r.reason for r in stage.receipts if r.kind == "worker"] == ["invalid"]
    for event in stage.events:
        event.payload.decode()
        orjson.loads(event.payload)
    assert invariants.broken(stage.session) == []
    stage.do("report w1 2 compact+z1")
    stage.do("report w1 3 compact-z1:ok done:completed")
    assert stage.do("prompt p2")[0] == "started/consumed", "compaction and the next prompt work"


@pytest.mark.parametrize(
    ("media_type", "data"),
    [(TEXT, b"\xed\xa0\x80"), (TEXT, b"\xff"), (JSON, b'"\\ud800"'), (JSON, b"NaN"), (JSON, b"1e999"), (JSON, b"{")],
)
def test_b42_an_input_past_the_edge_is_refused_with_its_reason(media_type: str, data: bytes) -> None:
    stage = play("prompt p1", "claim w1")
    stage.decide(stage.input("steer", "s1", content=Content(media_type=media_type, data=data)))
    assert (stage.receipts[-1].verdict, stage.receipts[-1].reason) == ("refused", "invalid")
    assert stage.do("steer s2")[0] == "steered"


# -- B53: nobody's absence is a stop


def test_b53_nothing_but_an_abort_in_the_log_stops_a_run() -> None:
    stage = play("prompt p1 source=ui", "claim w1")
    for minute in range(10):
        stage.do("wait 25000")
        stage.do(f"renew w1 {minute + 1}")
        stage.do(f"report w1 {minute + 1} msg")
    assert stage.do("state") == ["r1:running:g1"], "whoever looked on, and however long nobody did"
    other_client = stage.input("abort", "a1", target_kind="run", target_id=stage.run_id("r1"), source="cli", user_id=99)
    stage.decide(other_client)
    assert stage.receipts[-1].verdict == "cancelling"
    assert told(stage, "run.cancel_requested", "by") == [99]
    stage.do("report w1 11 done:cancelled")
    assert stage.events[-1].type == "run.finished"


def test_b11_what_was_committed_before_the_stop_is_not_done_again() -> None:
    stage = play(
        "prompt p1", "claim w1", "report w1 1 act+k1 act-k1:ok", "abort a1 run=r1", "report w1 2 done:completed"
    )
    assert stage.do("prompt p2 retry_of=r1")[0].startswith("refused:"), "cancelled is no end to be retried"
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1 act-k1:ok", "report w1 2 done:failed,retryable")
    stage.do("prompt p2 retry_of=r1")
    stage.do("claim w2")
    assert "worker:already_ended" in stage.do("report w2 1 act+k1")


def test_b07_an_input_for_another_run_is_answered_by_its_own_rule() -> None:
    stage = play("prompt p1", "claim w1", "follow_up f1", "report w1 1 done:completed")
    assert stage.do("steer s1 expected_run_id=r1 if_missed=reject") == ["refused:missed"]
    assert stage.do("steer s2 expected_run_id=r1")[0] == "queued"
    assert stage.do("state") == ["r2:running:g1", "s2@next"]


def test_b31_the_lease_is_kept_until_the_final_report_is_recorded() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 msg")
    for number in range(4):
        stage.do("wait 20000")
        assert stage.do(f"renew w1 {number + 1}") == ["view:running"], "renewed while the report is on its way"
    assert stage.do("fire lease") == ["."]
    assert "+run.finished(completed)" in stage.do("report w1 2 done:completed")


def test_b42_texts_that_are_whole_stay_as_they_are() -> None:
    stage = play("prompt p1", "claim w1")
    event = event_of("tool.started", toolCallId="c1", toolName="t", note="\U0001f600 \\ud83d\\ude00")
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(event,)))
    assert orjson.loads(stage.events[-1].payload)["note"] == "\U0001f600 \\ud83d\\ude00"
