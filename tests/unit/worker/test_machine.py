"""The worker's state machine with a clock made by hand: trust, suspension, numbering, resending, permits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from onepen.schemas.inputs import Content
from onepen.schemas.offers import Offer
from onepen.schemas.statuses import Reason
from onepen.schemas.views import ActionView, Checkpoint, PendingSteer, RefusedEvent, SubtaskView, View
from onepen.schemas.worker_records import Claim, Release, Renew, Report, ReportEvent
from onepen.streams.worker.machine import (
    ACCEPTED,
    NEVER_SENT,
    REPORT_BYTES_MAX,
    UNANSWERED_MAX,
    Machine,
    Now,
)

LEASE_MS, RENEW_MS, MARGIN_MS = 3_000, 1_000, 300


def offer(**changes: Any) -> Offer:
    fields: dict[str, Any] = {
        "tenant_id": 1, "session_id": "s", "run_id": "run-1", "run_no": 1, "generation": 1, "token": "t",
        "input_id": "in-1", "user_id": 1, "source": "ui", "mode": "prompt", "content": Content(data=b"hi"),
        "last_seq": 1, "last_hash": b"h", "had_owner": False, "attempt": 1, "ordinal": 1, "hops": 0,
        "recovery": "resume", "lineage": "run-1",
        "at_ms": 0, "expires_at_ms": 5_000, "lease_ms": LEASE_MS, "renew_ms": RENEW_MS, "permit_ms": 1_500,
    }  # fmt: skip
    return Offer(**(fields | changes))


def view(**changes: Any) -> View:
    fields: dict[str, Any] = {
        "tenant_id": 1, "session_id": "s", "run_id": "run-1", "generation": 1, "no": 1, "status": "running",
        "worker_id": "w", "inbox": 0,
    }  # fmt: skip
    return View(**(fields | changes))


def at(ms: int, wall_ms: int | None = None) -> Now:
    return Now(ms, 1_000_000 + (ms if wall_ms is None else wall_ms))


def machine(**changes: Any) -> Machine:
    optimistic = changes.pop("optimistic", False)
    return Machine(offer(**changes), "w", 0, optimistic=optimistic)


def held(**changes: Any) -> Machine:
    m = machine(**changes)
    m.claim(at(0))
    m.on_view(view(), at(20))
    return m


def event(kind: str = "x.note", payload: bytes = b"{}") -> ReportEvent:
    return ReportEvent(type=kind, payload=payload)


END = LEASE_MS - MARGIN_MS


@pytest.mark.parametrize(
    ("moment", "trusted"),
    [
        (at(END - 1), True),
        (at(END), False),
        (at(100, wall_ms=END), False),  # the wall clock jumped ahead: local time may only shorten
        (at(END, wall_ms=0), False),  # the wall clock jumped back: the monotonic one ends it
        (at(END - 1, wall_ms=-600_000), True),
    ],
)
def test_b28_trust_counts_from_the_claim_sent_on_both_clocks(moment: Now, trusted: bool) -> None:
    m = machine()
    assert not m.trusted(at(0))
    m.claim(at(0))
    assert not m.trusted(at(1)), "a claim without an answer gives nothing"
    m.on_view(view(), at(END - 2))  # a late answer does not lengthen it
    assert m.trusted(moment) is trusted


def test_trust_grows_only_with_the_renewal_that_was_answered() -> None:
    m = held()
    first = m.renew(at(1_000))
    second = m.renew(at(2_000))
    assert (first.no, second.no) == (1, 2)
    m.on_view(view(no=2, renewal_no=1), at(2_100))
    assert m.trusted(at(1_000 + END - 1))
    assert not m.trusted(at(1_000 + END))
    m.on_view(view(no=3, renewal_no=2), at(2_200))
    assert m.trusted(at(2_000 + END - 1))
    m.on_view(view(no=2, renewal_no=1), at(2_300))  # an older view comes late
    assert m.trusted(at(2_000 + END - 1))


def test_a_claim_sent_again_is_trusted_from_the_first_only() -> None:
    m = machine()
    m.claim(at(0))
    again = m.tick(at(1_000))
    assert any(isinstance(r, Claim) for r in again)
    m.on_view(view(), at(1_050))
    assert not m.trusted(at(END))


def test_suspended_after_silence_and_going_on_after_an_answer() -> None:
    m = held()
    assert not m.suspended(at(END - 1))
    assert m.suspended(at(END))
    sent = m.tick(at(END))
    assert [r.suspended for r in sent if isinstance(r, Renew)] == [True]
    m.on_view(view(no=2, renewal_no=1), at(END + 10))
    assert m.trusted(at(END + 10))


def test_renewals_go_out_whether_or_not_they_are_answered() -> None:
    m = held()
    sent = [r for ms in range(0, 6_001, 50) for r in m.tick(at(ms)) if isinstance(r, Renew)]
    assert [r.no for r in sent] == [1, 2, 3, 4, 5, 6]


def test_optimistic_for_one_lease_and_never_after_an_owner() -> None:
    m = machine(optimistic=True)
    m.claim(at(0))
    assert m.trusted(at(END - 1))
    assert not m.trusted(at(END))
    other = machine(optimistic=True, had_owner=True)
    other.claim(at(0))
    assert not other.trusted(at(1))


def test_renewals_say_truthfully_whether_work_could_go_on() -> None:
    m = machine()
    m.claim(at(0))
    assert m.renew(at(10)).suspended, "not granted, not optimistic: nothing may begin"
    eager = machine(optimistic=True)
    eager.claim(at(0))
    assert not eager.renew(at(10)).suspended
    assert eager.renew(at(END)).suspended
    ours = held()
    assert [ours.renew(at(ms)).suspended for ms in (50, END - 1, END)] == [False, False, True]
    ours.on_view(view(no=2, renewal_no=3), at(END + 10))
    assert not ours.renew(at(END + 20)).suspended


@pytest.mark.parametrize(
    ("refusal", "ended"),
    [
        (view(reason="already_owned", record="claim"), "already_owned"),
        (view(reason="stale_generation", record="claim", generation=2), "stale_generation"),
        (view(reason="unknown_run", record="claim", generation=0), "unknown_run"),
        (view(reason="run_ended", record="report", generation=1, status="failed"), "run_ended"),
        (view(reason="lease_lost", generation=2), "lease_lost"),
        (view(reason="timed_out", generation=2, status="timed_out"), "timed_out"),
        (view(generation=2, no=1), "stale_generation"),
        (view(reason="report_conflict", record="report"), "report_conflict"),
        # what concerns others changes nothing
        (view(reason="stale_generation", record="report", generation=1), None),
        (view(reason="already_owned", record="release"), None),
        (view(reason="lease_lost", generation=2, worker_id="other"), None),
        (view(reason="lease_lost", generation=2, run_id="run-2"), None),
    ],
)
def test_what_ends_a_generation(refusal: View, ended: str | None) -> None:
    m = machine(optimistic=True)
    m.claim(at(0))
    ticket = m.queue(event())
    m.flush(at(1))
    m.on_view(refusal, at(10))
    assert m.ended == ended
    assert ticket.fate == ended
    assert m.trusted(at(20)) is (ended is None)
    if ended is not None:
        assert m.tick(at(5_000)) == []
        assert m.queue(event()).fate == NEVER_SENT


def test_a_renewal_refused_before_the_grant_means_that_the_claim_was_lost() -> None:
    m = machine()
    m.claim(at(0))
    again = m.on_view(view(reason="not_owner", record="renew"), at(50))
    assert [type(r) for r in again] == [Claim]
    assert m.ended is None


def test_events_queued_together_go_into_one_report_and_get_their_own_fate() -> None:
    m = held()
    tickets = [m.queue(event(f"x.{n}")) for n in range(3)]
    (report,) = m.flush(at(30))
    assert (report.no, len(report.events)) == (1, 3)
    assert m.flush(at(31)) == []
    m.on_view(view(no=2, report_no=1, refused=(RefusedEvent(no=1, index=1, reason="not_open"),)), at(40))
    assert [t.fate for t in tickets] == [ACCEPTED, "not_open", ACCEPTED]
    late = m.queue(event())
    (second,) = m.flush(at(50))
    m.on_view(view(no=3, report_no=2, refused=(RefusedEvent(no=2, index=-1, reason="invalid"),)), at(60))
    assert (second.no, late.fate) == (2, "invalid")


def test_reports_are_cut_by_bytes_and_by_how_many_are_on_their_way() -> None:
    m = held()
    big = event(payload=b"x" * (REPORT_BYTES_MAX // 2))
    for _ in range(3):
        m.queue(big)
    assert [len(r.events) for r in m.flush(at(30))] == [1, 1, 1]
    n = held()
    reports: list[Report] = []
    for _ in range(UNANSWERED_MAX + 3):
        n.queue(event())
        reports += n.flush(at(30))
    assert len(reports) == UNANSWERED_MAX
    (rest,) = [r for r in n.on_view(view(no=2, report_no=2), at(40)) if isinstance(r, Report)]
    assert (rest.no, len(rest.events)) == (UNANSWERED_MAX + 1, 3)


def test_a_report_without_an_answer_is_sent_again_unchanged() -> None:
    m = held()
    m.queue(event("x.a"))
    (first,) = m.flush(at(100))
    assert not [r for r in m.tick(at(1_500)) if isinstance(r, Report)]
    again = [r for r in m.tick(at(2_100)) if isinstance(r, Report)]
    assert again == [first]
    m.on_view(view(no=2, report_no=1), at(2_150))
    assert not [r for r in m.tick(at(9_000)) if isinstance(r, Report)]


def test_a_renewal_answered_without_the_report_before_it_brings_the_report_again() -> None:
    m = held()
    m.queue(event("x.a"))
    (lost,) = m.flush(at(100))
    m.renew(at(200))
    assert m.on_view(view(no=2, report_no=0, renewal_no=1), at(230)) == [lost]
    assert m.on_view(view(no=3, report_no=0, renewal_no=1), at(235)) == [], "once per renewal"


def test_a_gap_is_closed_once_from_the_awaited_number() -> None:
    m = held()
    sent = []
    for n in range(3):
        m.queue(event(f"x.{n}"))
        sent += m.flush(at(30 + n))
    gap = view(reason="report_gap", record="report", report_no=1)
    assert m.on_view(gap, at(50)) == sent[1:]
    assert m.on_view(gap, at(51)) == []


def test_b31_the_final_report_is_asked_for_until_it_is_recorded() -> None:
    m = held()
    final = m.queue_final(event("run.finished", b'{"terminalStatus":"completed"}'))
    (report,) = m.flush(at(100))
    resent = [ms for ms in range(100, 3_000, 50) for r in m.tick(at(ms)) if isinstance(r, Report)]
    assert resent[0] == 250
    assert len(resent) >= 3
    m.on_view(view(reason="recorded", record="report", report_no=report.no, status="completed"), at(3_000))
    assert m.ended == Reason.RECORDED
    assert final.fate == ACCEPTED


def test_a_final_report_that_is_refused_ends_nothing() -> None:
    m = held()
    final = m.queue_final(event("run.finished"))
    m.flush(at(100))
    m.on_view(view(no=2, report_no=1, refused=(RefusedEvent(no=1, index=0, reason="still_open"),)), at(120))
    assert (m.ended, final.fate) == (None, "still_open")


def permitted(no: int, valid_ms: int = 1_500) -> tuple[ActionView, ...]:
    return (
        ActionView(
            action_key="k", name="mail", args_digest="d", state="permitted", report_no=no,
            deadline_ms=9_000, valid_ms=valid_ms,
        ),
    )  # fmt: skip


def asked() -> tuple[Machine, Any]:
    m = held()
    ticket = m.queue(event("action.requested"))
    m.flush(at(100))
    return m, ticket


@pytest.mark.parametrize(
    ("answer", "moment", "may"),
    [
        (view(no=2, report_no=1, actions=permitted(1)), at(1_599), True),
        (view(no=2, report_no=1, actions=permitted(1)), at(1_600), False),  # counted from the FIRST sending
        (view(no=2, report_no=1, actions=permitted(1)), at(500, wall_ms=1_600), False),
        (view(no=2, report_no=1, actions=permitted(7)), at(200), False),  # the permit of another request
        (view(no=2, report_no=1, actions=permitted(1), status="cancelling"), at(200), False),
        (view(no=2, report_no=1), at(200), False),
        (view(no=2, report_no=1, actions=permitted(1, valid_ms=60_000)), at(END), False),  # suspended
        (view(generation=2, no=1), at(200), False),
    ],
)
def test_when_a_permitted_action_may_begin(answer: View, moment: Now, may: bool) -> None:
    m, ticket = asked()
    m.on_view(answer, at(150))
    assert (m.permit(ticket, "mail", "k", moment) is not None) is may


def test_a_permit_is_not_lengthened_by_sending_the_request_again() -> None:
    m, ticket = asked()
    assert any(isinstance(r, Report) for r in m.tick(at(2_100)))
    m.renew(at(2_110))
    m.on_view(view(no=2, report_no=1, renewal_no=1, actions=permitted(1)), at(2_120))
    assert m.trusted(at(2_120))
    assert m.permit(ticket, "mail", "k", at(2_120)) is None


def steer(name: str, *, content: bool) -> PendingSteer:
    return PendingSteer(
        input_id=name, user_id=1, source="ui", with_content=content,
        content=Content(data=name.encode()) if content else None,
    )  # fmt: skip


def test_contents_of_pending_steers_are_kept_from_earlier_views() -> None:
    m = held()
    m.on_view(view(no=2, pending=(steer("a", content=True),)), at(30))
    m.want_contents = True
    m.on_view(view(no=3, pending=(steer("a", content=False), steer("b", content=False))), at(40))
    assert m.contents == {"a": Content(data=b"a")}
    assert m.want_contents
    assert m.renew(at(50)).want_contents
    m.on_view(view(no=4, pending=(steer("b", content=True),)), at(60))
    assert m.contents == {"b": Content(data=b"b")}
    assert not m.want_contents


def call(name: str, status: str, result: bytes | None = None) -> SubtaskView:
    return SubtaskView(call_id=name, session_id="child", status=status, result=result)


def test_the_end_of_a_subtask_is_kept_when_later_views_name_it_no_more() -> None:
    m = held()
    m.on_view(view(no=2, subtasks=(call("a", "open"), call("b", "completed", b"1"))), at(30))
    m.on_view(view(no=3, subtasks=(call("a", "failed", b"2"), call("b", "completed"))), at(40))
    m.on_view(view(no=4), at(50))
    assert m.subtasks == {"a": call("a", "failed", b"2"), "b": call("b", "completed", b"1")}


def test_the_checkpoint_is_that_of_the_newest_view() -> None:
    m = held()
    assert m.checkpoint is None
    one = Checkpoint(uri="u", digest="d", size_bytes=1, run_id="run-1", run_no=1, through_seq=2)
    m.on_view(view(no=3, checkpoint=one), at(30))
    m.on_view(view(no=2), at(40))
    assert m.checkpoint == one


def test_a_final_report_recorded_while_children_still_run_ends_the_workers_part() -> None:
    m = held()
    final = m.queue_final(event("run.finished", b'{"terminalStatus":"cancelled"}'))
    (report,) = m.flush(at(100))
    m.on_view(view(reason="recorded", record="report", report_no=report.no, status="cancelling"), at(120))
    assert (m.ended, final.fate) == (Reason.RECORDED, ACCEPTED)
    assert m.tick(at(9_000)) == []


def test_release_ends_the_machine() -> None:
    m = held()
    released = m.release("shutdown")
    assert isinstance(released, Release)
    assert (m.ended, released.reason, released.generation) == ("released", "shutdown", 1)
    assert m.tick(at(9_000)) == []


def test_every_record_carries_the_right_to_write() -> None:
    m = held()
    m.queue(event())
    records = [m.claim(at(1)), m.renew(at(1)), *m.flush(at(1)), m.late_report(event()), m.release("shutdown")]
    for record in records:
        assert (record.run_id, record.generation, record.token) == ("run-1", 1, "t")
        assert (record.worker_id, record.inbox) == ("w", 0)


def test_the_machine_is_a_value_of_its_inputs() -> None:
    """Two machines that see the same are in the same state: nothing in it reads a clock or draws a number."""

    def play() -> dict[str, Any]:
        m, _ = asked()
        m.tick(at(1_000))
        m.on_view(view(no=2, report_no=1, actions=permitted(1)), at(1_050))
        shown = {f.name: getattr(m, f.name) for f in dataclasses.fields(m)}
        return {name: value for name, value in shown.items() if name not in ("_queue", "_unanswered", "_final")}

    assert play() == play()
