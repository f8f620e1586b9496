"""What stands in events, views, offers and receipts: the members that the tables of words do not show."""

from typing import Any

import orjson
import pytest

from onepen.processors.decide import Decision
from onepen.schemas import codec, ids
from onepen.schemas.events import Event, chain_hash, render
from onepen.schemas.inputs import JSON, OPAQUE, Content
from onepen.schemas.limits import EVENT_BYTES_MAX, RECORD_BYTES_MAX, REFUSED_RECEIPTS_PER_GENERATION
from onepen.schemas.views import View
from onepen.schemas.worker_records import Report
from tests.unit.processors.stage import KEYS, START_MS, Stage, event_of


def payload(event: Event) -> dict[str, Any]:
    value = orjson.loads(event.payload)
    assert isinstance(value, dict)
    return value


def last(stage: Stage, kind: str) -> dict[str, Any]:
    return next(payload(event) for event in reversed(stage.events) if event.type == kind)


def view_of(decision: Decision) -> View:
    (view,) = decision.views
    return view


def play(*lines: str) -> Stage:
    stage = Stage()
    for line in lines:
        stage.do(line)
    return stage


# -- offers, permits, views ---------------------------------------------------------------------------------------


def test_an_offer_names_the_last_event_and_carries_the_right_to_claim() -> None:
    stage = play("prompt p1")
    (offer,) = stage.decisions[-1].offers
    started = stage.events[-1]
    assert (offer.last_seq, offer.last_hash) == (started.seq, started.hash)
    assert offer.token == KEYS.token(7, "session-42", started.run_id, 1)
    assert (offer.expires_at_ms - offer.at_ms, offer.had_owner, offer.attempt, offer.ordinal) == (5_000, False, 1, 1)
    assert offer.content == Content(data=b"text of p1")
    assert (offer.lease_ms, offer.renew_ms, offer.permit_ms) == (30_000, 10_000, 10_000)


def test_an_offer_after_a_loss_forbids_an_optimistic_start() -> None:
    stage = play("prompt p1", "claim w1", "wait 30000", "fire lease")
    (offer,) = stage.decisions[-1].offers
    assert (offer.had_owner, offer.attempt, offer.ordinal, offer.generation) == (True, 2, 2, 2)
    assert (offer.last_seq, offer.last_hash) == (stage.events[-1].seq, stage.events[-1].hash)


def test_a_permit_lasts_ten_seconds_and_carries_the_fencing_token() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1")
    permit = last(stage, "action.permitted")
    assert (permit["deadlineAt"], permit["validMs"], permit["reportNo"]) == (START_MS + 10_000, 10_000, 1)
    assert permit["fencing"] == {"runId": ids.run_id(7, "session-42", 1), "generation": 1}
    (action,) = view_of(stage.decisions[-1]).actions
    assert (action.state, action.report_no, action.deadline_ms, action.valid_ms) == (
        "permitted", 1, START_MS + 10_000, 10_000
    )  # fmt: skip


def test_a_permit_never_outlives_the_lease() -> None:
    stage = play("prompt p1", "claim w1", "wait 25000", "report w1 1 act+k1")
    assert last(stage, "action.permitted")["deadlineAt"] == START_MS + 30_000
    assert last(stage, "action.permitted")["validMs"] == 5_000


def test_a_permit_never_outlives_the_run() -> None:
    stage = play("prompt p1 timeout_ms=12000", "claim w1", "wait 9000", "report w1 1 act+k1")
    assert last(stage, "action.permitted")["deadlineAt"] == START_MS + 12_000


def test_a_permit_never_outlives_a_run_whose_clock_stood_still() -> None:
    stage = play("prompt p1 timeout_ms=4000", "claim w1", "report w1 1 act+k1,approval", "wait 20000")
    stage.do("report w1 2 act+k2,name=post")
    assert last(stage, "action.permitted")["deadlineAt"] == stage.now_ms + 4_000


def test_the_event_that_ends_a_wait_carries_the_new_deadline() -> None:
    stage = play("prompt p1 timeout_ms=20000", "claim w1", "wait 5000", "report w1 1 act+k1,approval")
    assert view_of(stage.decisions[-1]).timeout_at_ms is None
    stage.do("wait 20000")
    stage.do("answer n1 k1 approve")
    assert last(stage, "approval.answered")["timeoutAt"] == stage.now_ms + 15_000
    assert view_of(stage.decisions[-1]).timeout_at_ms == stage.now_ms + 15_000


def test_the_event_that_ends_one_of_two_waits_says_that_the_run_still_waits() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1,approval act+k2,approval,name=post")
    stage.do("answer n1 k1 deny")
    assert last(stage, "approval.answered")["timeoutAt"] is None


def test_the_grant_hands_over_contents_in_order_and_later_views_name_them() -> None:
    stage = play("prompt p1", "steer s1", "steer s2", "claim w1")
    granted = view_of(stage.decisions[-1])
    assert [(s.input_id, s.content) for s in granted.pending] == [
        ("s1", Content(data=b"text of s1")), ("s2", Content(data=b"text of s2"))
    ]  # fmt: skip
    assert granted.contents_complete
    stage.do("report w1 1 msg")
    later = view_of(stage.decisions[-1])
    assert [(s.input_id, s.with_content) for s in later.pending] == [("s1", False), ("s2", False)]
    assert not later.contents_complete
    assert later.no > granted.no


def test_contents_fill_a_view_up_to_200_kib_in_order() -> None:
    stage = play("prompt p1", "claim w1", "steer s1 bytes=150000", "steer s2 bytes=60000", "steer s3 bytes=10")
    view = view_of(stage.decisions[-1])
    assert [s.with_content for s in view.pending] == [True, False, False]
    assert not view.contents_complete


def test_a_content_larger_than_a_view_wants_is_handed_over_alone() -> None:
    stage = play("prompt p1", "claim w1", "steer s1 bytes=250000", "steer s2 bytes=10")
    view = view_of(stage.decisions[-1])
    assert [s.with_content for s in view.pending] == [True, False]
    assert len(codec.encode(view)) < EVENT_BYTES_MAX


def test_a_view_answers_the_highest_report_and_renewal_and_names_what_was_refused() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 tool-c9:ok msg", "renew w1 3")
    view = view_of(stage.decisions[-1])
    assert (view.report_no, view.renewal_no) == (1, 3)
    assert [(r.no, r.index, r.reason) for r in view.refused] == [(1, 0, "not_open")]


def test_a_view_keeps_the_last_hundred_refusals() -> None:
    stage = play("prompt p1", "claim w1")
    for no in range(1, 131):
        stage.do(f"report w1 {no} tool-c9:ok")
    refused = view_of(stage.decisions[-1]).refused
    assert [r.no for r in refused] == list(range(31, 131))


def test_the_gap_names_the_number_awaited() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 msg", "report w1 5 msg")
    assert view_of(stage.decisions[-1]).report_no + 1 == 2


def test_a_refused_worker_hears_run_generation_status_reason_and_nothing_else() -> None:
    stage = play("prompt p1", "claim w1", "steer s1", "claim w2 inbox=9")
    view = view_of(stage.decisions[-1])
    assert (view.worker_id, view.inbox, view.run_id) == ("w2", 9, ids.run_id(7, "session-42", 1))
    assert (view.generation, view.status, view.reason, view.record) == (1, "running", "already_owned", "claim")
    assert (view.pending, view.actions, view.last_seq, view.last_hash) == ((), (), 0, b"")


def test_the_first_result_is_shown_to_who_asks_again() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1")
    end = event_of("action.finished", actionKey="k1", name="mail", status="ok", result={"sent": "b@example.org"})
    stage.decide(Report(**stage.worker_head("w1", {}), no=2, events=(end,)))
    stage.do("report w1 3 act+k1")
    (action,) = view_of(stage.decisions[-1]).actions
    assert (action.state, action.result) == ("ok", b'{"sent":"b@example.org"}')


def test_a_result_too_large_to_be_kept_is_named_by_its_event() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1")
    end = event_of("action.finished", actionKey="k1", name="mail", status="ok", result="x" * 20_000)
    stage.decide(Report(**stage.worker_head("w1", {}), no=2, events=(end,)))
    where = stage.events[-1]
    stage.do("report w1 3 done:completed")
    for line in ("prompt p2", "claim w2", "report w2 1 act+k1"):
        stage.do(line)
    (action,) = view_of(stage.decisions[-1]).actions
    assert (action.state, action.result, action.result_bytes) == ("ok", None, 20_002)
    assert (action.result_run_id, action.result_seq) == (where.run_id, where.seq)


def test_recorded_results_never_make_a_view_too_large() -> None:
    stage = play("prompt p1", "claim w1")
    for number in range(1, 33):
        end = event_of("action.finished", actionKey=f"k{number}", name="mail", status="ok", result="x" * 16_000)
        stage.do(f"report w1 {3 * number - 2} act+k{number}")
        stage.decide(Report(**stage.worker_head("w1", {}), no=3 * number - 1, events=(end,)))
        stage.do(f"report w1 {3 * number} act+k{number}")
    stage.do("steer s1 bytes=250000")
    view = view_of(stage.decisions[-1])
    assert len(view.actions) == 32
    assert view.actions[0].action_key == "k32"
    assert view.actions[0].result is not None, "the last one asked for comes first"
    assert len(codec.encode(view)) < EVENT_BYTES_MAX


# -- terminal events ----------------------------------------------------------------------------------------------


def test_the_receipt_of_a_cancel_names_everything() -> None:
    stage = play(
        "prompt p1", "claim w1", "follow_up f1", "steer s1", "steer s2 if_missed=reject",
        "report w1 1 model+t1 tool+c1 act+k1 act+k2,name=post,approval",
        "abort a1 active reason=enough user_id=99", "wait 1500", "report w1 2 tool-c1:cancelled", "wait 500",
        "report w1 3 done:completed",
    )  # fmt: skip
    end = last(stage, "run.finished")
    assert (end["terminalStatus"], end["forced"], end["reason"], end["by"], end["inputId"]) == (
        "cancelled", False, "enough", 99, "a1"
    )  # fmt: skip
    assert end["voided"] == [{"name": "post", "actionKey": "k2"}]
    assert end["inDoubt"] == [{"name": "mail", "actionKey": "k1"}]
    assert {(b["branch"], b["id"], b["tookMs"], b["status"]) for b in end["stopped"]} == {
        ("approval", "post/k2", 0, "voided"),
        ("action", "post/k2", 0, "voided"),
        ("tool", "c1", 1500, "cancelled"),
        ("action", "mail/k1", 2000, "in_doubt"),
        ("model_request", "t1", 2000, "unknown"),
    }
    assert end["stoppedCount"] == 5
    assert (end["queued"], end["queuedCount"]) == (["f1", "s1"], 2)
    assert end["workOutcome"] == {"terminalStatus": "completed", "output": "the answer"}


def test_a_cancel_without_doubt_is_not_forced_and_names_nobody_in_doubt() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1", "abort a1 active", "report w1 2 act-k1:ok done:failed")
    end = last(stage, "run.finished")
    assert (end["forced"], end["inDoubt"], end["workOutcome"]["terminalStatus"]) == (False, [], "failed")


def test_lists_of_a_terminal_event_end_at_a_hundred_and_count_on() -> None:
    stage = play("prompt p1", "claim w1")
    stage.do("report w1 1 " + " ".join(f"tool+c{n}" for n in range(60)))
    stage.do("report w1 2 " + " ".join(f"model+t{n}" for n in range(40)))
    stage.do("report w1 3 model+one_too_many")
    assert [r.reason for r in stage.decisions[-1].receipts] == ["too_many_branches"]
    stage.do("abort a1 active")
    for n in range(60):
        stage.do(f"report w1 {4 + n} tool-c{n}:ok")
    stage.do("report w1 64 done:failed")
    end = last(stage, "run.finished")
    assert (len(end["stopped"]), end["stoppedCount"]) == (100, 100)


def test_an_action_takes_one_of_the_hundred_branches_and_its_approval_another() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 " + " ".join(f"tool+c{n}" for n in range(99)))
    assert stage.do("report w1 2 act+k1,approval") == ["worker:too_many_branches", "view:running"]
    assert "+action.permitted(k1)" in stage.do("report w1 3 act+k1")
    assert stage.do("report w1 4 act+k2") == ["worker:too_many_branches", "view:running"]


@pytest.mark.parametrize("name", ["forced", "inDoubt", "voided", "workOutcome", "queued"])
def test_a_worker_cannot_claim_what_only_the_processor_states(name: str) -> None:
    stage = play("prompt p1", "claim w1")
    event = event_of("run.finished", terminalStatus="completed", **{name: []})
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(event,)))
    assert [r.reason for r in stage.decisions[-1].receipts] == ["invalid"]
    assert stage.session.head.run is not None


def test_retryable_of_a_failure_is_the_workers_and_a_truth_value() -> None:
    stage = play("prompt p1", "claim w1")
    wrong = event_of("run.finished", terminalStatus="failed", retryable="yes")
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(wrong,)))
    assert stage.session.head.run is not None
    right = event_of("run.finished", terminalStatus="failed", retryable=True, error="no connection")
    stage.decide(Report(**stage.worker_head("w1", {}), no=2, events=(right,)))
    assert last(stage, "run.finished") == {"terminalStatus": "failed", "retryable": True, "error": "no connection"}


@pytest.mark.parametrize("abort", [False, True])
def test_members_of_a_final_report_keep_their_text(abort: bool) -> None:
    stage = play("prompt p1", "claim w1", *(["abort a1 active"] if abort else []))
    raw = b'{"big": 123456789012345678901234567890, "n": 1e15, "nul": "\\u0000", "terminalStatus": "completed"}'
    event = event_of("x.y")
    event = type(event)(type="run.finished", payload=raw)
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(event,)))
    for text in (b"123456789012345678901234567890", b"1e15", b'"\\u0000"'):
        assert text in stage.events[-1].payload


def test_an_outcome_that_would_grow_by_rewriting_fits_its_event() -> None:
    stage = play("prompt p1", "claim w1", "abort a1 active")
    raw = b'{"terminalStatus": "failed", "n": [' + b"1e15," * 50_000 + b"1]}"
    assert len(raw) < RECORD_BYTES_MAX
    event = type(event_of("x.y"))(type="run.finished", payload=raw)
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(event,)))
    assert stage.events[-1].type == "run.finished"
    assert len(stage.decisions[-1].event_bytes[-1]) < EVENT_BYTES_MAX


# -- events ---------------------------------------------------------------------------------------------------------


def test_a_start_names_its_input_and_its_policy() -> None:
    stage = play("policy version=4 leaseMs=3000 renewMs=1000", "prompt p1 source=scheduler user_id=5")
    assert payload(stage.events[0]) == {
        "inputMode": "prompt", "tenantId": 7, "inputId": "p1", "source": "scheduler", "userId": 5,
        "mediaType": "text/plain", "content": "text of p1", "policyVersion": 4,
        "timeoutAt": START_MS + 3_600_000, "maxAttempts": 3, "inputPosition": {"partition": 5, "offset": 101},
        "recovery": "resume", "lineage": stage.events[0].run_id,
    }  # fmt: skip


def test_a_run_that_starts_from_the_queue_names_the_position_of_its_input() -> None:
    stage = play("prompt p1", "claim w1", "follow_up f1", "report w1 1 done:completed")
    started = stage.events[-1]
    assert payload(started)["inputPosition"] == {"partition": 5, "offset": 103}
    assert (started.cause.offset, started.cause.index) == (104, 1)
    assert payload(started)["inputMode"] == "follow_up"


def test_the_chain_runs_through_the_session() -> None:
    stage = play("prompt p1", "claim w1", "follow_up f1", "report w1 1 msg done:completed", "claim w2")
    hashes = [bytes(32)]
    for decision in stage.decisions:
        for event, data in zip(decision.events, decision.event_bytes, strict=True):
            assert event.prev_hash == hashes[-1]
            assert event.hash == chain_hash(event.prev_hash, codec.event_body(data))
            assert codec.decode(data) == event
            hashes.append(event.hash)
    assert [event.run_no for event in stage.events] == [1, 1, 1, 1, 2, 2]
    assert stage.session.head.last_hash == hashes[-1]


def test_events_of_one_record_share_their_cause_and_count_their_index() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 msg msg tool+c1")
    assert [(e.cause.offset, e.cause.index) for e in stage.events[-3:]] == [(103, 0), (103, 1), (103, 2)]


def test_the_json_rendering_has_exactly_this_shape() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 tool+call-551")
    assert render(stage.events[-1]) == {
        "sessionId": "session-42", "runId": ids.run_id(7, "session-42", 1), "seq": 3, "type": "tool.started",
        "payload": {"toolCallId": "call-551", "toolName": "look_up"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (Content(data="ja\0 – nein".encode()), {"mediaType": "text/plain", "content": "ja\0 – nein"}),
        (Content(media_type=JSON, data=b'{"a": [1, 2]}'), {"mediaType": JSON, "content": {"a": [1, 2]}}),
        (Content(media_type=OPAQUE, data=b"\xff\0"), {"mediaType": OPAQUE, "content": {"base64": "/wA="}}),
        (
            Content(uri="s3://b/o", digest="sha256:1", size_bytes=9),
            {"mediaType": "text/plain", "pointer": {"uri": "s3://b/o", "digest": "sha256:1", "sizeBytes": 9}},
        ),
    ],
)
def test_content_as_it_appears_in_events(content: Content, shown: dict[str, Any]) -> None:
    stage = Stage()
    stage.decide(stage.input("prompt", "p1", content=content))
    started = payload(stage.events[0])
    assert {name: started[name] for name in shown} == shown


@pytest.mark.parametrize(
    "content",
    [
        Content(data=b"\xff"),
        Content(data=b"\xed\xa0\x80"),
        Content(data=b"\0" * 200_000),
        Content(media_type=JSON, data=b"NaN"),
        Content(media_type=JSON, data=b'"\\ud800"'),
        Content(media_type=JSON, data=b"1e999"),
        Content(media_type=JSON, data=b"{"),
        Content(media_type=JSON, data=b"[" * 65 + b"]" * 65),
        Content(media_type="", data=b"x"),
        Content(media_type="x" * 129, data=b"x"),
        Content(data=b"x", uri="s3://b/o"),
        Content(),
        Content(uri="s3://b/o"),
        Content(uri="s3://" + "b" * 2048, digest="sha256:1"),
        Content(uri="s3://b/o", digest="d" * 129),
        Content(uri="s3://b/o", digest="sha256:1", size_bytes=-1),
        Content(data=b"x" * (RECORD_BYTES_MAX + 1)),
    ],
)
def test_content_that_is_refused(content: Content) -> None:
    stage = Stage()
    stage.decide(stage.input("prompt", "p1", content=content))
    assert [(r.verdict, r.reason) for r in stage.receipts] == [("refused", "invalid")]


@pytest.mark.parametrize(
    "content",
    [
        Content(data=b"\n" * RECORD_BYTES_MAX),
        Content(data=b"x" * RECORD_BYTES_MAX),
        Content(media_type=OPAQUE, data=bytes(RECORD_BYTES_MAX)),
        Content(media_type=JSON, data=b"[" * 64 + b"]" * 64),
        Content(media_type=JSON, data=b'"' + b"[" * 200 + b'"'),
        Content(uri="s3://" + "b" * 2043, digest="d" * 128),
    ],
)
def test_every_accepted_content_fits_its_event(content: Content) -> None:
    stage = Stage()
    stage.decide(stage.input("prompt", "p1", content=content))
    assert [r.verdict for r in stage.receipts] == ["started"]
    assert codec.decode(stage.decisions[-1].event_bytes[0]) == stage.events[0]


def test_an_input_without_content_or_with_members_of_another_mode_is_invalid() -> None:
    stage = Stage()
    for number, members in enumerate([
        {"content": None}, {"target_kind": "active"}, {"target_id": "r1"}, {"action_key": "k1"},
        {"action_name": "mail"}, {"args_digest": "d1"}, {"decision": "approve"}, {"reason": "x" * 1025},
        {"source": "s" * 129},
    ]):  # fmt: skip
        stage.decide(stage.input("prompt", f"p{number}", **members))
        assert stage.receipts[-1].reason == "invalid", members


def test_an_input_id_that_is_none_is_refused_and_not_taken() -> None:
    stage = Stage()
    for bad in ("", "a b", "ä", "x" * 129, "a\0"):
        stage.decide(stage.input("prompt", bad))
        assert (stage.receipts[-1].verdict, stage.receipts[-1].reason) == ("refused", "invalid")
    assert stage.session.head.remembered == 0


# -- receipts -------------------------------------------------------------------------------------------------------


def test_a_duplicate_names_the_first_verdict_and_its_run() -> None:
    stage = play("prompt p1", "claim w1", "follow_up f1", "again p1", "again f1")
    of_prompt, of_follow_up = stage.receipts[-2:]
    assert of_prompt.run_id == ids.run_id(7, "session-42", 1)
    assert orjson.loads(of_prompt.detail or b"")["first"] == {
        "verdict": "started", "reason": None, "disposition": "consumed", "position": {"partition": 5, "offset": 101}
    }  # fmt: skip
    assert orjson.loads(of_follow_up.detail or b"")["first"]["disposition"] is None


def test_a_refusal_names_the_active_run() -> None:
    stage = play("prompt p1", "prompt p2 on_busy=reject", "abort a1 run=r9")
    assert {r.run_id for r in stage.receipts[-2:]} == {ids.run_id(7, "session-42", 1)}


def test_an_abort_without_a_run_names_the_last_one_and_how_it_ended() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 done:completed", "abort a1 active")
    assert orjson.loads(stage.receipts[-1].detail or b"") == {
        "lastRunId": ids.run_id(7, "session-42", 1), "lastRunStatus": "completed"
    }  # fmt: skip


def test_an_abort_of_an_input_names_what_became_of_it() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 done:completed", "abort a1 input=p1")
    assert orjson.loads(stage.receipts[-1].detail or b"")["target"] == {
        "verdict": "started", "reason": None, "disposition": "consumed", "runId": ids.run_id(7, "session-42", 1)
    }  # fmt: skip


def test_a_later_answer_is_told_the_first() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 act+k1,approval", "answer n1 k1 approve", "answer n2 k1 deny")
    assert orjson.loads(stage.receipts[-1].detail or b"") == {"decision": "approve", "inputId": "n1"}


def test_evidence_is_written_a_hundred_times_per_generation_and_then_counted() -> None:
    stage = play("prompt p1", "claim w1")
    for _ in range(REFUSED_RECEIPTS_PER_GENERATION + 20):
        stage.do("renew w2 1")
    assert sum(r.kind == "worker" for r in stage.receipts) == 100
    assert stage.session.head.run is not None
    assert stage.session.head.run.refused_records == 120
    assert stage.decisions[-1].views[0].reason == "not_owner", "the worker is answered all the same"
    stage.do("release w1 shutdown")
    stage.do("renew w2 1")
    assert stage.receipts[-1].kind == "worker"


def test_evidence_of_a_run_that_has_ended_is_bounded_too() -> None:
    stage = play("prompt p1", "claim w1", "report w1 1 done:completed")
    for _ in range(120):
        stage.do("renew w1 1")
    assert sum(r.kind == "worker" for r in stage.receipts) == 100


def test_evidence_for_a_session_nobody_knows_is_bounded() -> None:
    stage = Stage()
    for _ in range(120):
        stage.do("claim w1 run=r1 g=1")
    assert len(stage.receipts) == 100


def test_late_results_are_kept_as_evidence() -> None:
    stage = play(
        "prompt p1", "claim w1", "report w1 1 tool+c1", "wait 30000", "fire lease", "report w1 2 tool-c1:ok g=1"
    )
    receipt = stage.receipts[-1]
    assert (receipt.kind, receipt.reason, receipt.worker_id, receipt.report_no) == (
        "worker", "stale_generation", "w1", 2
    )  # fmt: skip
    assert orjson.loads(receipt.detail or b"")["events"] == [
        {"type": "tool.finished", "payload": {"toolCallId": "c1", "status": "ok"}}
    ]


def test_evidence_that_readers_could_not_write_again_is_left_out() -> None:
    """Libraries that read a thousand levels of JSON write some hundred."""
    stage = play("prompt p1", "claim w1", "wait 30000", "fire lease")
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    event = type(event_of("x.y"))(type="x.deep", payload=deep)
    stage.decide(Report(**stage.worker_head("w1", {"g": "1"}), no=1, events=(event,)))
    (receipt,) = stage.decisions[-1].receipts
    assert receipt.reason == "stale_generation"
    assert orjson.loads(receipt.detail or b"") == {"events": [{"type": "x.deep"}]}


def test_evidence_is_bounded_in_size() -> None:
    stage = play("prompt p1", "claim w1")
    huge = tuple(event_of("x." + "y" * 500, text="z" * 3_000) for _ in range(80))
    stage.decide(Report(**stage.worker_head("w2", {}), no=1, events=huge))
    assert len(codec.encode(stage.receipts[-1])) < 64 * 1024


@pytest.mark.parametrize(
    "payload_text",
    [b"", b"[]", b"null", b"{", b'{"a": NaN}', b'"\\ud800"', b"{" * 5_000, b'{"a":' * 65 + b"1" + b"}" * 65, b"\xff"],
)
@pytest.mark.parametrize("kind", ["message.completed", "run.finished", "action.requested", "x.note"])
def test_payloads_that_are_no_object_are_refused(payload_text: bytes, kind: str) -> None:
    stage = play("prompt p1", "claim w1")
    event = type(event_of("x.y"))(type=kind, payload=payload_text)
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=(event,)))
    assert [r.reason for r in stage.decisions[-1].receipts] == ["invalid"]
    assert stage.decisions[-1].events == ()


@pytest.mark.parametrize("value", [None, True, 1, 1.5, [], {}, [[]], {"a": []}, "", " ", "x" * 200, "ä"])
@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("model.request.started", ("turnId",)),
        ("model.request.finished", ("turnId", "status")),
        ("tool.started", ("toolCallId", "toolName")),
        ("tool.finished", ("toolCallId", "status")),
        ("action.requested", ("actionKey", "name", "argsDigest")),
        ("action.finished", ("actionKey", "name", "status")),
        ("input.applied", ("inputId",)),
        ("run.finished", ("terminalStatus",)),
    ],
)
def test_members_of_a_wrong_type_are_refused(value: object, kind: str, members: tuple[str, ...]) -> None:
    stage = play("prompt p1", "claim w1", "steer s1", "report w1 1 model+a tool+a act+a")
    for no, wrong in enumerate(members, start=2):
        fields = {name: value if name == wrong else "a" for name in members}
        stage.decide(Report(**stage.worker_head("w1", {}), no=no, events=(event_of(kind, **fields),)))
        assert stage.decisions[-1].events == (), (kind, wrong, value)
        assert len(stage.decisions[-1].receipts) == 1


def test_a_report_larger_than_a_record_is_refused() -> None:
    stage = play("prompt p1", "claim w1")
    events = tuple(event_of("message.completed", text="x" * 100_000) for _ in range(3))
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=events))
    assert [r.reason for r in stage.decisions[-1].receipts] == ["invalid"]
    many = tuple(event_of("x.n") for _ in range(101))
    stage.decide(Report(**stage.worker_head("w1", {}), no=1, events=many))
    assert [r.reason for r in stage.decisions[-1].receipts] == ["invalid"]


# -- time -----------------------------------------------------------------------------------------------------------


def test_the_time_of_a_session_never_falls() -> None:
    stage = play("prompt p1")
    stage.now_ms -= 5_000
    stage.do("claim w1")
    assert [event.at_ms for event in stage.events] == [START_MS, START_MS]
    stage.now_ms += 6_000
    stage.do("report w1 1 msg")
    assert stage.events[-1].at_ms == START_MS + 1_000


def test_two_tenants_may_use_the_same_session_id() -> None:
    mine, other = Stage(tenant_id=7), Stage(tenant_id=9)
    mine.do("prompt p1")
    other.do("prompt p1")
    assert mine.events[0].run_id != other.events[0].run_id
    assert not mine.records.keys() & other.records.keys()
    assert mine.decisions[0].offers[0].token != other.decisions[0].offers[0].token


def test_a_token_of_another_session_tenant_run_or_generation_opens_nothing() -> None:
    stage = play("prompt p1")
    run_id = ids.run_id(7, "session-42", 1)
    for token in (
        KEYS.token(8, "session-42", run_id, 1),
        KEYS.token(7, "session-43", run_id, 1),
        KEYS.token(7, "session-42", ids.run_id(7, "session-42", 2), 1),
        KEYS.token(7, "session-42", run_id, 2),
        "",
        "k1.",
        "ä",
    ):
        assert stage.do(f"claim w1 token={token}") in (
            ["worker:bad_token", "notice:bad_token"],
        ), token  # fmt: skip
    assert stage.do(f"claim w1 token={KEYS.token(7, 'session-42', run_id, 1)}") == ["+run.leased", "view:running"]


def test_the_secret_of_the_tokens_is_not_shown() -> None:
    assert "secret" not in repr(KEYS)
    assert "secret" not in repr(Stage().rules)
