"""Damaged copies of a good history: each one breaks one promise, and names the checks that must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson

from onepen.demo.checks import Effect, Evidence, LoggedEvent, LoggedInput, LoggedReceipt, Tables
from onepen.schemas import codec
from onepen.schemas.events import EventDraft
from onepen.schemas.inputs import Input
from onepen.streams.audit.evidence import Unreadable
from tests.unit.demo.world import rows_of, with_changes

Damage = Callable[[Evidence], Evidence]
MUTANTS: dict[str, tuple[Damage, tuple[str, ...]]] = {}
"""name -> (what it does to the evidence, the names of the check functions that must find it)"""


def mutant(*checks: str) -> Callable[[Damage], Damage]:
    def book(damage: Damage) -> Damage:
        MUTANTS[damage.__name__] = (damage, checks)
        return damage

    return book


def find(evidence: Evidence, kind: str, **members: Any) -> LoggedEvent:
    return next(
        e for e in evidence.events
        if e.event.type == kind and all(e.payload.get(k) == v for k, v in members.items())
    )  # fmt: skip


def rebuilt(one: LoggedEvent, **fields: Any) -> LoggedEvent:
    """The event with other fields and bytes that agree with them, chained as before."""
    payload = fields.pop("payload", None)
    kept = {name: getattr(one.event, name) for name in EventDraft.__struct_fields__} | fields
    if payload is not None:
        kept["payload"] = orjson.dumps(one.payload | payload)
    event, data = codec.seal(EventDraft(**kept), one.event.prev_hash)
    return LoggedEvent(one.partition, one.offset, data, event)


def rechained(events: Sequence[LoggedEvent]) -> list[LoggedEvent]:
    """The events with an intact chain and new offsets: a forger's log, which only its content gives away."""
    last: dict[object, bytes] = {}
    made = []
    for index, one in enumerate(events):
        draft = EventDraft(**{name: getattr(one.event, name) for name in EventDraft.__struct_fields__})
        event, data = codec.seal(draft, last.get(one.session, bytes(32)))
        last[one.session] = event.hash
        made.append(LoggedEvent(one.partition, 2 * index, data, event))
    return made


def swap(evidence: Evidence, old: LoggedEvent, *new: LoggedEvent, tables_follow: bool = True) -> Evidence:
    """Put `new` in the place of `old`, forge the chain, and let the tables agree with the forged log."""
    events: list[LoggedEvent] = []
    for one in evidence.events:
        events.extend(new if one is old else (one,))
    made = with_changes(evidence, events=rechained(events))
    return with_changes(made, tables=rows_of(made)) if tables_follow else made


def other_receipt(evidence: Evidence, index: int, **fields: Any) -> Evidence:
    receipts = list(evidence.receipts)
    one = receipts[index]
    receipts[index] = LoggedReceipt(one.partition, one.offset, msgspec.structs.replace(one.receipt, **fields))
    made = with_changes(evidence, receipts=receipts)
    return with_changes(made, tables=rows_of(made))


def index_of(evidence: Evidence, **fields: Any) -> int:
    return next(
        i for i, r in enumerate(evidence.receipts)
        if all(getattr(r.receipt, name) == value for name, value in fields.items())
    )  # fmt: skip


@mutant("gapless", "chained", "equal_to_fold", "replay_by_run")
def one_event_dropped(evidence: Evidence) -> Evidence:
    gone = find(evidence, "message.completed")
    return with_changes(evidence, events=[e for e in evidence.events if e is not gone])


@mutant("gapless", "chained", "causes_in_order")
def one_event_doubled(evidence: Evidence) -> Evidence:
    twice = find(evidence, "message.completed")
    return with_changes(evidence, events=[x for e in evidence.events for x in ((e, e) if e is twice else (e,))])


@mutant("gapless", "chained")
def two_events_swapped(evidence: Evidence) -> Evidence:
    events = list(evidence.events)
    at = events.index(find(evidence, "message.completed"))
    events[at], events[at - 1] = events[at - 1], events[at]
    return with_changes(evidence, events=events)


@mutant("one_active_run")
def a_second_active_run(evidence: Evidence) -> Evidence:
    start = find(evidence, "run.started", inputId="in-2")
    first = find(evidence, "run.started", inputId="in-1")
    events = [e for e in evidence.events if e is not start]
    events.insert(events.index(first) + 1, start)
    return with_changes(evidence, events=rechained(events))


@mutant("one_active_run", "final", "one_active_in_table")
def a_run_without_end(evidence: Evidence) -> Evidence:
    last = find(evidence, "run.finished", terminalStatus="timed_out")
    made = with_changes(evidence, events=[e for e in evidence.events if e is not last])
    return with_changes(made, tables=rows_of(made))


@mutant("one_active_in_table", "equal_to_fold")
def two_active_rows(evidence: Evidence) -> Evidence:
    return _rows(evidence, runs=[dict(r, status="running") for r in _tables(evidence).runs])


@mutant("final")
def an_event_after_the_end(evidence: Evidence) -> Evidence:
    end = find(evidence, "run.finished", terminalStatus="timed_out")
    more = rebuilt(end, type="message.completed", seq=end.event.seq + 1)
    return swap(evidence, end, end, more)


@mutant("chained")
def one_payload_edited(evidence: Evidence) -> Evidence:
    one = find(evidence, "message.completed")
    edited = rebuilt(one, payload={"content": "something else"})
    return with_changes(evidence, events=[edited if e is one else e for e in evidence.events])


@mutant("chained")
def bytes_that_say_something_else(evidence: Evidence) -> Evidence:
    one = find(evidence, "message.completed")
    data = one.data.replace(b"one moment", b"two moment")
    assert data != one.data
    lying = LoggedEvent(one.partition, one.offset, data, one.event)
    return with_changes(evidence, events=[lying if e is one else e for e in evidence.events])


@mutant("chained")
def half_a_chain(evidence: Evidence) -> Evidence:
    """The second half of the events was forged from a chain of its own."""
    half = len(evidence.events) // 2
    return with_changes(evidence, events=[*evidence.events[:half], *rechained(evidence.events[half:])])


@mutant("causes_exist")
def a_cause_that_is_no_record(evidence: Evidence) -> Evidence:
    one = find(evidence, "message.completed")
    return with_changes(evidence, inputs=[i for i in evidence.inputs if i.position != one.cause])


@mutant("causes_in_order")
def time_that_runs_backwards(evidence: Evidence) -> Evidence:
    one = find(evidence, "message.completed")
    return swap(evidence, one, rebuilt(one, at_ms=one.event.at_ms - 60_000))


@mutant("legal_steps")
def completed_while_cancelling(evidence: Evidence) -> Evidence:
    end = find(evidence, "run.finished", terminalStatus="cancelled")
    return swap(evidence, end, rebuilt(end, payload={"terminalStatus": "completed"}))


@mutant("balanced")
def a_tool_without_end(evidence: Evidence) -> Evidence:
    one = find(evidence, "tool.finished", toolCallId="c1")
    return swap(evidence, one, rebuilt(one, type="message.completed"))


@mutant("balanced")
def an_end_without_start(evidence: Evidence) -> Evidence:
    one = find(evidence, "tool.started", toolCallId="c1")
    return swap(evidence, one, rebuilt(one, type="message.completed"))


@mutant("conserved")
def an_input_without_verdict(evidence: Evidence) -> Evidence:
    gone = evidence.receipts[index_of(evidence, input_id="in-2", verdict="queued")]
    made = with_changes(evidence, receipts=[r for r in evidence.receipts if r is not gone])
    return with_changes(made, tables=rows_of(made))


@mutant("conserved")
def an_input_with_two_verdicts(evidence: Evidence) -> Evidence:
    twice = evidence.receipts[index_of(evidence, input_id="in-2", verdict="queued")]
    return with_changes(evidence, receipts=[*evidence.receipts, twice])


@mutant("conserved", "consumed_once")
def an_input_without_disposition(evidence: Evidence) -> Evidence:
    gone = evidence.receipts[index_of(evidence, input_id="in-2", disposition="consumed")]
    made = with_changes(evidence, receipts=[r for r in evidence.receipts if r is not gone])
    return with_changes(made, tables=rows_of(made))


@mutant("consumed_once")
def an_input_consumed_by_another_run(evidence: Evidence) -> Evidence:
    at = index_of(evidence, input_id="in-2", disposition="consumed")
    return other_receipt(evidence, at, run_id="run-" + "0" * 32)


@mutant("verdicts_follow_rules")
def a_prompt_steered_instead_of_queued(evidence: Evidence) -> Evidence:
    return other_receipt(evidence, index_of(evidence, input_id="in-2", verdict="queued"), verdict="steered")


@mutant("verdicts_follow_rules")
def a_repeat_that_is_new(evidence: Evidence) -> Evidence:
    return other_receipt(evidence, index_of(evidence, verdict="duplicate"), verdict="started")


@mutant("verdicts_follow_rules")
def a_refused_input_with_an_event(evidence: Evidence) -> Evidence:
    at = index_of(evidence, input_id="in-8", verdict="started")
    return other_receipt(evidence, at, verdict="refused", reason="busy")


@mutant("queue_in_order")
def the_later_input_first(evidence: Evidence) -> Evidence:
    """The second one in the queue stood there first."""
    receipts = list(evidence.receipts)
    first = index_of(evidence, input_id="in-2", verdict="queued")
    receipts.insert(first, receipts.pop(index_of(evidence, input_id="in-4", verdict="queued")))
    return with_changes(evidence, receipts=receipts)


@mutant("bounded_list")
def more_waiting_than_may(evidence: Evidence) -> Evidence:
    one = evidence.receipts[index_of(evidence, input_id="in-2", verdict="queued")]
    more = [
        LoggedReceipt(0, one.offset, msgspec.structs.replace(one.receipt, offset=10_000 + n, input_id=f"in-{n}"))
        for n in range(100, 121)
    ]
    return with_changes(evidence, receipts=[*evidence.receipts, *more])


@mutant("bounded_events")
def more_open_than_may(evidence: Evidence) -> Evidence:
    one = find(evidence, "tool.started", toolCallId="c1")
    more = [rebuilt(one, seq=one.event.seq + n, payload={"toolCallId": f"d{n}"}) for n in range(101)]
    return swap(evidence, one, *more)


@mutant("steers_settled")
def a_steer_that_is_stranded(evidence: Evidence) -> Evidence:
    one = find(evidence, "input.applied")
    return swap(evidence, one, rebuilt(one, type="message.completed"))


@mutant("steers_settled")
def a_steer_of_nobody(evidence: Evidence) -> Evidence:
    one = find(evidence, "input.applied")
    return swap(evidence, one, rebuilt(one, payload={"inputId": "in-99"}))


@mutant("timers_on_time")
def a_lease_lost_before_its_time(evidence: Evidence) -> Evidence:
    one = find(evidence, "run.lease_lost")
    return swap(evidence, one, rebuilt(one, at_ms=one.event.at_ms - 5_000))


@mutant("timers_on_time")
def a_lease_lost_without_a_timer(evidence: Evidence) -> Evidence:
    one = find(evidence, "run.lease_lost")
    prompt = next(i for i in evidence.inputs if isinstance(i.record, Input))
    inputs = [
        LoggedInput(0, i.offset, i.at_ms, prompt.record) if i.position == one.cause else i for i in evidence.inputs
    ]
    return with_changes(evidence, inputs=inputs)


@mutant("unreadable_set_aside")
def garbage_without_a_dead_letter(evidence: Evidence) -> Evidence:
    return with_changes(evidence, unreadable=[Unreadable(0, 1, "no_frame")])


@mutant("disposed_in_tables", "equal_to_fold")
def an_input_row_without_disposition(evidence: Evidence) -> Evidence:
    rows = [dict(r) for r in _tables(evidence).inputs]
    rows[1]["disposition"] = None
    return _rows(evidence, inputs=rows)


@mutant("below_offset")
def a_row_ahead_of_its_offset(evidence: Evidence) -> Evidence:
    return _rows(evidence, events_until={0: _tables(evidence).events[-1]["log_offset"]})


@mutant("cancel_is_a_barrier")
def a_tool_begun_after_the_abort(evidence: Evidence) -> Evidence:
    one = find(evidence, "tool.finished", toolCallId="c1")
    begun = rebuilt(one, type="tool.started", seq=one.event.seq)
    return swap(evidence, one, begun, one)


@mutant("cancel_is_a_barrier")
def an_action_not_voided_by_the_abort(evidence: Evidence) -> Evidence:
    voided = find(evidence, "action.voided")
    return swap(evidence, voided, rebuilt(voided, type="message.completed"))


@mutant("cancel_is_a_barrier")
def cancelled_without_abort(evidence: Evidence) -> Evidence:
    end = find(evidence, "run.finished", terminalStatus="timed_out")
    return swap(evidence, end, rebuilt(end, payload={"terminalStatus": "cancelled"}))


@mutant("cancel_is_a_barrier")
def a_doubt_that_is_not_named(evidence: Evidence) -> Evidence:
    one = find(evidence, "tool.finished", toolCallId="c1")
    doubt = rebuilt(one, type="action.in_doubt", payload={"name": "send_mail", "actionKey": "m0"})
    return swap(evidence, one, doubt)


@mutant("doubts_stand")
def an_action_in_doubt_asked_for_as_if_it_were_new(evidence: Evidence) -> Evidence:
    asked = find(evidence, "action.requested")
    return swap(evidence, asked, rebuilt(asked, type="action.in_doubt"), asked)


@mutant("deadlines")
def timed_out_too_early(evidence: Evidence) -> Evidence:
    end = find(evidence, "run.finished", terminalStatus="timed_out")
    return swap(evidence, end, rebuilt(end, at_ms=end.event.at_ms - 2_000))


@mutant("deadlines")
def timed_out_without_a_timer(evidence: Evidence) -> Evidence:
    end = find(evidence, "run.finished", terminalStatus="timed_out")
    prompt = next(i for i in evidence.inputs if isinstance(i.record, Input))
    inputs = [
        LoggedInput(0, i.offset, i.at_ms, prompt.record) if i.position == end.cause else i for i in evidence.inputs
    ]
    return with_changes(evidence, inputs=inputs)


@mutant("generations")
def a_generation_that_falls(evidence: Evidence) -> Evidence:
    end = [e for e in evidence.events if e.event.session_id == "errand"][-1]
    return swap(evidence, end, rebuilt(end, generation=1))


@mutant("generations", "leases_follow_claims")
def two_workers_in_one_generation(evidence: Evidence) -> Evidence:
    lease = find(evidence, "run.leased")
    again = rebuilt(lease, seq=lease.event.seq + 1, payload={"workerId": "somebody-else"})
    return swap(evidence, lease, lease, again)


@mutant("only_the_owner_writes", "refused_records_wrote_nothing")
def a_late_report_that_was_accepted(evidence: Evidence) -> Evidence:
    refused = evidence.receipts[index_of(evidence, reason="stale_generation")]
    end = [e for e in evidence.events if e.event.session_id == "errand"][-1]
    cause = msgspec.structs.replace(end.event.cause, offset=refused.receipt.offset)
    late = rebuilt(end, type="message.completed", cause=cause)
    return swap(evidence, end, late, rebuilt(end, seq=end.event.seq + 1))


@mutant("permits")
def a_permit_without_approval(evidence: Evidence) -> Evidence:
    answered = find(evidence, "approval.answered")
    return swap(evidence, answered, rebuilt(answered, payload={"decision": "deny"}))


@mutant("permits")
def a_second_permit(evidence: Evidence) -> Evidence:
    permit = find(evidence, "action.permitted")
    return swap(evidence, permit, permit, rebuilt(permit, seq=permit.event.seq + 1))


@mutant("effects_once")
def a_mail_sent_twice(evidence: Evidence) -> Evidence:
    return with_changes(evidence, effects=[_effect(e, effective=True) for e in evidence.effects])


@mutant("effects_once")
def a_mail_without_permit(evidence: Evidence) -> Evidence:
    more = _effect(evidence.effects[0], number=3, action_key="m9")
    return with_changes(evidence, effects=[*evidence.effects, more])


@mutant("effects_once")
def a_mail_by_an_older_generation(evidence: Evidence) -> Evidence:
    return with_changes(evidence, effects=[_effect(e, generation=0) for e in evidence.effects])


@mutant("effects_once")
def a_mail_with_other_arguments(evidence: Evidence) -> Evidence:
    return with_changes(evidence, effects=[_effect(e, args_digest="d2") for e in evidence.effects])


@mutant("done_means_done")
def a_mail_that_was_never_sent(evidence: Evidence) -> Evidence:
    return with_changes(evidence, effects=[])


@mutant("equal_to_fold")
def one_row_off_by_one(evidence: Evidence) -> Evidence:
    rows = [dict(r) for r in _tables(evidence).runs]
    rows[0]["last_seq"] += 1
    return _rows(evidence, runs=rows)


@mutant("equal_to_fold")
def one_input_row_missing(evidence: Evidence) -> Evidence:
    return _rows(evidence, inputs=_tables(evidence).inputs[1:])


@mutant("equal_to_fold")
def one_action_row_too_many(evidence: Evidence) -> Evidence:
    rows = _tables(evidence).actions
    return _rows(evidence, actions=[*rows, dict(rows[0], action_key="m9")])


@mutant("equal_to_fold")
def one_refused_report_forgotten(evidence: Evidence) -> Evidence:
    return _rows(evidence, refused=[])


@mutant("equal_to_fold", "replay_by_run")
def one_event_row_twice(evidence: Evidence) -> Evidence:
    return _rows(evidence, events=[*_tables(evidence).events, _tables(evidence).events[3]])


@mutant("equal_to_fold", "replay_by_run")
def one_payload_differs_in_its_row(evidence: Evidence) -> Evidence:
    rows = [dict(r) for r in _tables(evidence).events]
    rows[5]["payload"] = {"edited": True}
    return _rows(evidence, events=rows)


@mutant("one_active_in_table", "equal_to_fold", "replay_by_run")
def tables_that_were_not_read(evidence: Evidence) -> Evidence:
    return with_changes(evidence, tables=None)


def _tables(evidence: Evidence) -> Tables:
    assert evidence.tables is not None
    return evidence.tables


def _rows(evidence: Evidence, **rows: Any) -> Evidence:
    return with_changes(evidence, tables=dataclasses.replace(_tables(evidence), **rows))


def _effect(effect: Effect, **fields: Any) -> Effect:
    return dataclasses.replace(effect, **fields)
