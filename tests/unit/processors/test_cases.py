"""Cases that others have met in public (named after their id), as far as the core alone can show them."""

from typing import Any

import orjson
import pytest

from onepen.processors import invariants
from onepen.processors.decide import Moment, decide
from onepen.processors.session import Session
from onepen.schemas import ids
from onepen.schemas.events import Event
from onepen.schemas.inputs import Content
from onepen.schemas.worker_records import Claim, Report
from tests.unit.processors.stage import Stage, event_of


def play(*lines: str) -> Stage:
    stage = Stage()
    for line in lines:
        stage.do(line)
    return stage


def finished(stage: Stage, run_no: int = 1) -> dict[str, Any]:
    run_id = ids.run_id(stage.tenant_id, stage.session_id, run_no)
    (event,) = [event for event in stage.events if event.run_id == run_id and event.type == "run.finished"]
    payload: dict[str, Any] = orjson.loads(event.payload)
    return payload


def started(stage: Stage) -> list[Event]:
    return [event for event in stage.events if event.type == "run.started"]


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        ("prompt p2 source=scheduler", "queued"),
        ("prompt p2 source=scheduler on_busy=reject", "refused:busy"),
        ("prompt p2 source=remote", "queued"),
        ("follow_up p2 source=queue", "queued"),
    ],
)
def test_b01_two_prompts_in_one_batch_are_one_run(second: str, verdict: str) -> None:
    stage = Stage()
    assert stage.do("prompt p1")[0] == "started/consumed"
    assert stage.do(second) == [verdict]
    assert [orjson.loads(event.payload)["inputId"] for event in started(stage)] == ["p1"]
    assert stage.receipts[-1].run_id == started(stage)[0].run_id, "the verdict names the active run"


@pytest.mark.parametrize("when", [(), ("claim w1",), ("claim w1", "report w1 1 done:completed")])
def test_b02_a_redelivered_prompt_starts_no_second_run(when: tuple[str, ...]) -> None:
    stage = play("prompt p1", *when)
    assert stage.do("again p1") == ["duplicate"]
    assert stage.receipts[-1].run_id == started(stage)[0].run_id, "the first run's id"
    assert len(started(stage)) == 1


def test_b02_a_redelivered_steer_is_applied_once() -> None:
    stage = play("prompt p1", "claim w1", "steer s1", "again s1", "report w1 1 applied:s1", "again s1")
    stage.do("report w1 2 applied:s1")
    assert sum(event.type == "input.applied" for event in stage.events) == 1


def test_b02_a_batch_read_again_after_a_crash_gives_the_same_bytes() -> None:
    stage = play("prompt p1", "claim w1")
    state = dict(stage.records)
    record = stage.input("steer", "s1")
    moment = Moment(stage.partition, stage.offset + 1, stage.now_ms)
    first, again = (
        decide(stage.rules, Session.load(7, "session-42", dict(state)), record, moment) for _ in range(2)
    )  # the first was never committed
    assert first.event_bytes == again.event_bytes
    assert first.receipts == again.receipts


def test_b04a_a_refusal_leaves_the_active_run_to_be_found() -> None:
    stage = play("prompt p1", "claim w1")
    before = {key: value for key, value in invariants.whole(stage.session).items() if key.startswith((b"a/", b"b/"))}
    run = stage.session.head.run
    stage.do("prompt p2 on_busy=reject")
    assert stage.session.head.run == run
    after = {key: value for key, value in invariants.whole(stage.session).items() if key.startswith((b"a/", b"b/"))}
    assert after == before
    assert stage.do("abort a1 run=r1")[0] == "cancelling"


def test_b05_a_steer_and_a_follow_up_at_the_end_are_carried_over_in_order() -> None:
    stage = play("prompt p1", "claim w1", "steer s1", "follow_up f1", "report w1 1 done:completed")
    assert [orjson.loads(event.payload)["inputId"] for event in started(stage)] == ["p1", "s1"]
    assert stage.do("state") == ["r2:running:g1", "f1@next"]
    carried = [event for event in stage.events if event.type == "input.carried_over"]
    assert [orjson.loads(event.payload)["inputId"] for event in carried] == ["s1"]


def test_b05_a_steer_refused_for_capacity_is_not_called_delivered() -> None:
    stage = play("policy pendingMax=1", "prompt p1", "claim w1", "steer s1")
    assert stage.do("steer s2") == ["refused:queue_full"]
    assert sum(event.type == "input.steered" for event in stage.events) == 1


def test_b07a_a_steer_between_two_runs_is_decided_at_its_own_place_in_the_log() -> None:
    stage = play("prompt p1", "claim w1", "follow_up f1", "report w1 1 done:completed")
    assert stage.do("steer s1") == ["steered", "+input.steered(s1)"]
    assert stage.do("state") == ["r2:running:g1", "s1@r2"]


def test_b07b_a_steer_of_an_ended_run_is_never_applied_to_the_next() -> None:
    stage = play("prompt p1", "claim w1", "steer s1 if_missed=reject", "follow_up f1", "report w1 1 done:completed")
    stage.do("claim w2")
    assert stage.do("report w2 1 applied:s1") == ["worker:unknown_steer", "view:running"]
    assert "s1=discarded:missed" in [word for d in stage.decisions for word in _dispositions(d)]


def _dispositions(decision: Any) -> list[str]:
    return [f"{r.input_id}={r.disposition}:{r.reason}" for r in decision.receipts if r.disposition]


def test_b07c_constant_steering_does_not_keep_a_run_from_ending() -> None:
    stage = play("prompt p1", "claim w1")
    for number in range(20):
        stage.now_ms += 10
        stage.do(f"steer s{number}")
    assert "+run.finished(completed)" in stage.do("report w1 1 done:completed")


@pytest.mark.parametrize(
    ("scope", "kept"), [("", ["f1", "f2"]), ("scope=run", ["f1", "f2"]), ("scope=run_and_queue", [])]
)
def test_b09_an_abort_carries_what_becomes_of_the_queue(scope: str, kept: list[str]) -> None:
    stage = play("prompt p1", "claim w1", "follow_up f1", "follow_up f2", f"abort a1 active {scope}")
    assert len(started(stage)) == 1, "nothing starts before the end of the first run"
    stage.do("report w1 1 done:failed")
    for worker_no in (2, 3):
        if stage.session.head.run is not None:
            stage.do(f"claim w{worker_no}")
            stage.do(f"report w{worker_no} 1 done:completed")
    assert [orjson.loads(event.payload)["inputId"] for event in started(stage)] == ["p1", *kept]
    for name in ("f1", "f2"):
        found = [r for r in stage.receipts if r.input_id == name and r.disposition]
        assert len(found) == 1
        assert found[0].disposition == ("consumed" if kept else "discarded")


def test_b10_a_delayed_stop_does_not_touch_the_next_run() -> None:
    stage = play("prompt p1", "claim w1", "follow_up f1", "report w1 1 done:completed")
    before = stage.session.head.run
    for number in range(3):
        assert stage.do(f"abort a{number} run=r1") == ["refused:stale_run"]
    assert stage.session.head.run == before
    assert stage.do("again a0") == ["duplicate"], "the same stop again gets the same answer"


def test_b10_a_stop_without_a_target_is_refused_unless_it_means_whatever_is_active() -> None:
    stage = play("prompt p1", "claim w1")
    stage.decide(stage.input("abort", "a1"))
    assert stage.receipts[-1].reason == "invalid"
    assert stage.do("abort a2 active")[0] == "cancelling"


def test_b11_the_three_orders_of_an_end_and_a_stop() -> None:
    first = play("prompt p1", "claim w1", "report w1 1 done:completed")
    assert first.do("abort a1 run=r1") == ["refused:no_active_run"]
    assert finished(first)["terminalStatus"] == "completed"
    for outcome in ("completed", "failed"):
        stage = play("prompt p1", "claim w1", "abort a1 run=r1", f"report w1 1 done:{outcome}")
        end = finished(stage)
        assert (end["terminalStatus"], end["forced"]) == ("cancelled", False)
        assert end["workOutcome"] == {"terminalStatus": outcome, "output": "the answer"}, "both facts are kept"


def test_b13a_cancelled_is_not_written_while_work_goes_on() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 model+t1 tool+c1 tool+c2 act+k1,approval", "abort a1 active")
    assert stage.do("prompt p2") == ["queued"], "the next prompt has its verdict at once"
    stage.do("wait 20000")
    stage.do("renew w1 1")
    for no, end in enumerate(("model-t1:aborted", "tool-c1:cancelled", "tool-c2:ok"), start=2):
        assert not any(word.startswith("+run.finished") for word in stage.do(f"report w1 {no} {end}"))
    assert "+run.finished(cancelled)" in stage.do("report w1 5 done:failed")
    assert len(started(stage)) == 2


def test_b13b_a_worker_that_never_confirms_is_cut_off() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 tool+c1 act+k1", "abort a1 active", "prompt p2", "wait 30000")
    stage.do("fire cancel")
    end = finished(stage)
    assert (end["forced"], end["inDoubt"]) == (True, [{"name": "mail", "actionKey": "k1"}])
    assert len(started(stage)) == 2
    for line in ("renew w1 1", "report w1 2 tool-c1:ok", "report w1 2 act+k2", "claim w1"):
        assert not any(word.startswith("+") for word in stage.do(f"{line} run=r1 g=1")), line


@pytest.mark.parametrize(
    "end",
    [("abort a1 active", "report w1 2 done:failed"), ("wait 30000", "fire lease"), ("report w1 2 done:failed",)],
)
def test_b15_an_interrupted_tool_call_does_not_stay_open(end: tuple[str, ...]) -> None:
    stage = play("prompt p1 max_attempts=1", "claim w1", "report w1 1 tool+c1 tool+c2", *end)
    ends = [orjson.loads(event.payload) for event in stage.events if event.type == "tool.finished"]
    assert {(e["toolCallId"], e["status"]) for e in ends} == {("c1", "unknown"), ("c2", "unknown")}
    assert stage.events[-1].type == "run.finished"
    late = stage.do("report w1 3 tool-c1:ok run=r1 g=1")
    assert late == ["worker:run_ended", "notice:run_ended"]
    assert b'"toolCallId":"c1"' in (stage.receipts[-1].detail or b""), "kept as evidence"
    assert stage.do("prompt p2")[0] == "started/consumed"


def test_b17_only_the_exact_tenant_session_and_run_acts() -> None:
    mine, others = Stage(tenant_id=7, session_id="s1"), Stage(tenant_id=9, session_id="s1")
    for stage in (mine, others):
        stage.do("prompt p1")
        stage.do("claim w1")
        stage.do("report w1 1 act+k1,approval")
    run_id = started(mine)[0].run_id
    abort = others.input("abort", "a1", target_kind="run", target_id=run_id)
    others.decide(abort)
    assert others.receipts[-1].reason == "stale_run"
    unknown = others.input("abort", "a2", target_kind="run", target_id="run-unknown")
    others.decide(unknown)
    assert others.receipts[-1].reason == "stale_run", "another tenant's run is answered like an unknown one"
    for stage in (mine, others):
        assert stage.session.head.run is not None
        assert stage.session.head.run.status == "running"


def test_b18_an_action_whose_outcome_is_unknown_is_not_repeated_blindly() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1", "wait 30000", "fire lease", "claim w2")
    assert stage.do("report w2 1 act+k1") == ["worker:in_doubt", "view:running"]
    end = play("prompt p1", "claim w1", "report w1 1 act+k1", "abort a1 active", "report w1 2 done:completed")
    assert finished(end)["inDoubt"] == [{"name": "mail", "actionKey": "k1"}]


@pytest.mark.parametrize(
    ("kill_behind", "answer"),
    [
        ("", "+action.permitted(k1)"),  # before the intent
        ("report w1 1 act+k1", "worker:in_doubt"),  # after the intent, or after the effect
        ("report w1 1 act+k1 act-k1:ok", "worker:already_ended"),  # after the result
    ],
)
def test_b18_kill_points(kill_behind: str, answer: str) -> None:
    stage = play(
        "prompt p1", "claim w1", *([kill_behind] if kill_behind else []), "wait 30000", "fire lease", "claim w2"
    )
    assert answer in stage.do("report w2 1 act+k1")


def test_b19_one_key_and_two_bodies() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1")
    assert "worker:key_conflict" in stage.do("report w1 2 act+k1,digest=d2"), "also while the first is in flight"
    assert "worker:in_flight" in stage.do("report w1 3 act+k1")
    assert "+action.permitted(k1)" in stage.do("report w1 4 act+k1,name=post,digest=d2"), "scope: the action's name"
    stage.do("report w1 5 act-k1:ok")
    assert "worker:key_conflict" in stage.do("report w1 6 act+k1,digest=d2")
    assert sum(event.type == "action.permitted" for event in stage.events) == 2


def test_b19_one_input_id_and_two_bodies() -> None:
    stage = play("prompt p1", "claim w1")
    assert stage.do("again p1 text=other") == ["refused:input_id_reused"]


def test_b20_what_waits_for_a_yes_does_not_survive_the_stop() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 tool+c3 act+c1,approval act+c2,name=post", "abort a1 active")
    assert stage.do("answer n1 c1 approve") == ["refused:cancelled"]
    assert stage.do("report w1 2 act+c1") == ["worker:run_cancelling", "view:cancelling"]
    stage.do("report w1 3 done:failed")
    stage.do("prompt p2")
    stage.do("claim w2")
    assert "+action.permitted(c4)" in stage.do("report w2 1 act+c4")


def test_b23_a_timeout_is_one_clean_boundary() -> None:
    stage = play("prompt p1 timeout_ms=1000", "claim w1", "steer s1", "follow_up f1", "wait 1000")
    words = stage.do("fire run")
    assert "+run.finished(timed_out,retryable)" in words
    assert "+run.started" in words
    assert stage.do("state") == ["r2:running:g1", "f1@next"]
    assert stage.do("renew w1 1 run=r1 g=1") == ["worker:run_ended", "notice:run_ended"]
    assert stage.do("report w1 1 done:completed run=r1 g=1") == ["worker:run_ended", "notice:run_ended"]
    assert finished(stage)["retryable"] is True
    assert finished(stage)["terminalStatus"] == "timed_out"


def test_b26_ownership_is_the_generation_not_the_name() -> None:
    stage = play("prompt p1", "claim w1", "wait 30000", "fire lease", "claim w1")
    for line in ("renew w1 9", "report w1 1 msg", "release w1 shutdown", "report w1 1 done:completed"):
        assert stage.do(f"{line} g=1") == ["worker:stale_generation", "notice:stale_generation"], line
    assert stage.do("state") == ["r1:running:g2"]
    assert "+run.finished(completed)" in stage.do("report w1 1 done:completed")


def test_b27c_a_renewal_just_after_the_end_may_stand() -> None:
    stage = play("prompt p1", "claim w1", "wait 30001")
    assert stage.do("renew w1 1") == ["view:running"]
    assert stage.do("fire lease") == ["."]


def test_b28_stamps_of_others_decide_nothing() -> None:
    stage = Stage()
    stage.decide(stage.input("prompt", "p1", issued_at_ms=stage.now_ms - 3_600_000))
    assert stage.events[0].at_ms == stage.now_ms
    stage.do("claim w1")
    stage.do("renew w1 1")
    stage.do("renew w1 2")
    assert [v.renewal_no for d in stage.decisions[-2:] for v in d.views] == [1, 2], "two within one millisecond"


def test_b29_a_takeover_is_conditional_in_the_log() -> None:
    stage = play("prompt p1", "claim w1", "wait 30000")
    lease = stage.due()[0].timer
    stage.do("report w1 1 done:completed")
    stage.do("prompt p2")
    decision = stage.decide(lease)
    assert stage.words(decision) == ["."], "the sweep acts on an old picture"
    assert stage.do("state") == ["r2:running:g1"]


def test_b29_cancelling_becomes_cancelled_and_is_never_restarted() -> None:
    stage = play("prompt p1", "claim w1", "abort a1 active", "wait 30000", "fire lease")
    assert finished(stage)["terminalStatus"] == "cancelled"
    assert not stage.decisions[-1].offers


def test_b31_a_final_report_sent_again_is_recorded_and_the_work_not_redone() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 msg", "report w1 2 done:completed")
    assert stage.do("rereport w1 2") == ["notice:recorded"]
    assert stage.do("rereport w1 2") == ["notice:recorded"]
    assert sum(event.type == "run.finished" for event in stage.events) == 1


def test_b31_if_the_process_dies_the_next_sees_the_recorded_steps() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 tool+c1 tool-c1:ok act+k1 act-k1:ok", "wait 30000", "fire lease")
    stage.do("claim w2")
    assert "worker:already_ended" in stage.do("report w2 1 act+k1")


@pytest.mark.parametrize("nul", ["value\0", "\\u0000 is only mentioned", "\0"])
def test_b41_nul_survives(nul: str) -> None:
    stage = play("prompt p1", "claim w1")
    event = event_of("tool.started", toolCallId="c1", toolName="look_up", note=nul)
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(event,)))
    assert orjson.loads(stage.events[-1].payload)["note"] == nul
    stage.decide(stage.input("steer", "s1", content=Content(data=nul.encode())))
    stage.do("report w1 2 applied:s1 tool-c1:ok done:completed")
    assert finished(stage)["terminalStatus"] == "completed"


@pytest.mark.parametrize("issued_at_ms", [0, 4_102_444_800_000, 1_790_000_000, 253_402_300_800_000, -1])
def test_b44_an_odd_date_touches_only_its_own_record(issued_at_ms: int) -> None:
    stage = Stage()
    stage.decide(stage.input("prompt", "p1", issued_at_ms=issued_at_ms))
    assert stage.receipts[-1].reason in ("too_old", "from_the_future")
    assert stage.session.head.now_ms == stage.now_ms
    assert stage.do("prompt p2")[0] == "started/consumed"


def test_b54_a_hot_session_is_refused_cheaply_beyond_its_bound() -> None:
    stage = play("prompt p1", "claim w1")
    for number in range(40):
        stage.do(f"steer s{number} bytes=200000")
    refused = [r for r in stage.receipts if r.reason == "queue_full"]
    assert len(refused) == 35, "five of 200 kB fit into 1 MiB"
    assert sum(entry.size_bytes for entry in stage.session.head.pending) <= 1024 * 1024
    kept = sum(len(value) for value in stage.records.values())
    assert kept < 1_100_000, "what was refused is not kept"


def test_a_claim_of_a_run_that_was_never_started_is_no_way_in() -> None:
    stage = Stage()
    stage.decide(Claim(**stage.worker_head("w1", {"run": "r1", "g": "1"})))
    assert [r.reason for r in stage.receipts] == ["unknown_run"]
    assert stage.do("prompt p1")[0] == "started/consumed"
