"""The fold: any cut of a log gives the same rows, rows only move forward, foreign members never fail it.

Both topics in any interleaving: settled actions end the same, and of an erased session nothing comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from onepen.schemas import codec
from onepen.schemas.errors import Poison
from onepen.schemas.events import Cause, Event, EventDraft
from onepen.schemas.receipts import Receipt
from onepen.sinks.postgres.fold import check_record, fold
from onepen.sinks.postgres.object_uris import ALL_OBJECTS, object_uri
from onepen.sinks.postgres.rows import ActionRow, Placed, Stored
from tests.event_streams import START_MS, Generator
from tests.unit.sinks.table_model import Tables, cut, owner, records_of, whole


def nested(depth: int, inner: bytes = b"1") -> bytes:
    return b"[" * depth + inner + b"]" * depth


def worker_receipt(detail: bytes) -> Receipt:
    return Receipt(kind="worker", tenant_id=1, session_id="s", partition=0, offset=1, at_ms=1, detail=detail)


SEEDS = st.integers(0, 10_000)
TAKES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.booleans()), max_size=60)


@hypothesis_settings(max_examples=60)
@given(SEEDS, TAKES)
def test_any_cut_gives_the_same_rows(seed: int, takes: list[tuple[int, int, bool]]) -> None:
    sources = records_of(Generator(seed).make(12))
    assert cut(sources, takes) == whole(sources)


@hypothesis_settings(max_examples=60)
@given(SEEDS, TAKES)
def test_erased_sessions_are_the_same_in_any_cut(seed: int, takes: list[tuple[int, int, bool]]) -> None:
    streams = Generator(seed, sessions=4, erase=0.4).make(12)
    sources = records_of(streams)
    tables = cut(sources, takes)
    assert tables == whole(sources) == whole(sources[::-1])
    left = {owner(run) for run in tables.stored.runs.values()} | {owner(row) for row in tables.refused.values()}
    left |= {(e.event.tenant_id, e.event.session_id) for e in tables.events.values()}
    left |= {key[:2] for rows in (tables.stored.actions, tables.subtasks) for key in rows}
    assert not left & streams.erased
    for key in streams.erased:
        session = tables.sessions[key]
        assert (session.user_id, session.title) == (None, None)
        assert session.erased_ms is not None
        assert {i.mode for i in tables.inputs.values() if owner(i) == key} == {"erase"}
    pointed = {
        (e.tenant_id, e.session_id, uri)
        for e in streams.all_events()
        if (e.tenant_id, e.session_id) in streams.erased
        and (uri := object_uri(e.type, orjson.loads(e.payload))) is not None
    }
    assert tables.objects == pointed | {(*key, ALL_OBJECTS) for key in streams.erased}


@hypothesis_settings(max_examples=20)
@given(SEEDS, st.integers(1, 200))
def test_b48_a_replay_changes_nothing(seed: int, again: int) -> None:
    sources = records_of(Generator(seed, erase=0.2).make(10))
    tables = whole(sources)
    for records in sources:
        tables.write(records[:again])
        tables.write(records)
    assert tables == whole(sources)


def test_the_streams_show_what_the_properties_are_about() -> None:
    """Else the properties above would hold of nothing."""
    tables = whole(records_of(Generator(5).make(60)))
    actions = tables.stored.actions.values()
    assert any(a.settled_offset is not None and a.state == a.settled_state for a in actions)
    assert any(a.state == "in_doubt" for a in actions)
    assert tables.checkpoints
    assert {t.status for t in tables.subtasks.values()} == {"completed", "detached"}
    assert "notice" in {f.record for f in tables.refused.values()}
    erased = Generator(5, erase=0.3).make(30)
    assert len(erased.erased) > 2
    assert whole(records_of(erased)).objects


def event(kind: str, payload: bytes, seq: int = 1, run_no: int = 1, **fields: Any) -> Event:
    draft = EventDraft(
        **{"tenant_id": 1, "session_id": "s", "run_id": f"run-{run_no}", "generation": 1, "at_ms": START_MS + seq}
        | {"cause": Cause(0, 1, 0), "run_no": run_no, "seq": seq, "type": kind, "payload": payload}
        | fields
    )
    return codec.seal(draft, bytes(32))[0]


def test_the_end_of_one_run_and_the_start_of_the_next_in_one_batch() -> None:
    tables = Tables()
    tables.write([Placed(0, 0, event("run.started", b"{}"))])
    tables.write(
        [
            Placed(0, 1, event("run.finished", b'{"terminalStatus":"completed"}', 2)),
            Placed(0, 2, event("run.started", b"{}", 1, run_no=2)),
        ]
    )
    assert [(run.run_no, run.status) for run in tables.stored.runs.values()] == [(1, "completed"), (2, "running")]


@pytest.mark.parametrize(
    "wrong", [b"[]", b'"x"', b"true", b'{"a":1}', b"1.5", b"123456789012345678901234567890", b"-1"]
)
def test_b37_foreign_members_never_fail_the_batch(wrong: bytes) -> None:
    """Every member of every type of ours with a value of a wrong kind."""
    members = (b"timeoutAt", b"inputId", b"userId", b"inputPosition", b"attempt", b"leaseExpiresAt", b"name",
               b"actionKey", b"content", b"reason", b"status", b"decision",
               b"checkpoint", b"deadlineAt", b"result")  # fmt: skip
    payload = b"{" + b",".join(b'"%s":%s' % (member, wrong) for member in members) + b"}"
    kinds = ("run.started", "run.leased", "run.lease_lost", "action.requested", "action.permitted", "action.finished",
             "approval.answered", "run.compaction_finished", "run.cancel_requested", "x.foreign",
             "unheard.of")  # fmt: skip
    records = [Placed(0, n, event(kind, payload, n + 1)) for n, kind in enumerate(kinds)]
    for record in records:
        check_record(record.record)
    changes = fold(Stored(), records)
    assert len(changes.events) == len(kinds)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (event("x.y", b"{"), "payload_not_json"),
        (event("x.y", b"[]"), "payload_not_json"),
        (event("run.finished", b'{"terminalStatus":"melted"}'), "unknown_status"),
        (event("run.finished", b"{}"), "unknown_status"),
        (event("run.finished", b'{"terminalStatus":["completed"]}'), "unknown_status"),
        (event("x.y", b'{"a":%s}' % nested(254)), "payload_too_deep"),
        (event("x.y", b'{"a\\u0000":%s}' % nested(1000)), "payload_too_deep"),
        (event("x.\x00y", b"{}"), "invalid_type"),
        (event("x.y", b"{}", run_id="run\x00"), "invalid_id"),
        (event("x.y", b"{}", session_id="a\x00b"), "invalid_id"),
        (event("x.y", b"{}", at_ms=2**62), "invalid_time"),
        (event("x.y", b"{}", seq=0), "no_sequence"),
        (
            Receipt(kind="action", tenant_id=1, session_id="s", partition=0, offset=1, at_ms=1, detail=b'{"name":"n"}'),
            "settles_nothing",
        ),
        (Receipt(kind="action", tenant_id=1, session_id="s", partition=0, offset=1, at_ms=1), "settles_nothing"),
        (Receipt(kind="future", tenant_id=1, session_id="s", partition=0, offset=1, at_ms=1), "unknown_kind"),
        (
            Receipt(kind="input", tenant_id=1, session_id="s", partition=0, offset=1, at_ms=1, detail=b"{"),
            "payload_not_json",
        ),
        (worker_receipt(b'{"a":%s}' % nested(254)), "payload_too_deep"),
        (worker_receipt(nested(1000)), "payload_too_deep"),
    ],
)
def test_what_no_row_can_be_made_of_is_poison(record: Event | Receipt, reason: str) -> None:
    with pytest.raises(Poison) as caught:
        check_record(record)
    assert caught.value.reason == reason


@pytest.mark.parametrize("kind", ["run.finished", "action.finished", "subtask.finished", "x.y"])
@pytest.mark.parametrize(
    "inner", [b'"\\u0000"', b"-0.0", b"1e300", nested(200), b'{"\\u0000":[]}', b"18446744073709551616"]
)
def test_what_is_not_poison_is_folded(kind: str, inner: bytes) -> None:
    """Members of every kind, and nesting as deep as can be written."""
    for depth in (0, 253 - inner.count(b"[") - inner.count(b"{")):
        payload = b'{"terminalStatus":"failed","name":"n","actionKey":"k","callId":"c","result":%s}' % nested(
            depth, inner
        )
        records = event(kind, payload), worker_receipt(payload)
        for record in records:
            check_record(record)
        changes = fold(Stored(), [Placed(0, n, record) for n, record in enumerate(records)])
        assert (len(changes.events), len(changes.refused)) == (1, 1)


def test_a_deadline_moves_only_by_events_of_ours() -> None:
    records = [
        event("run.started", b'{"timeoutAt":1000}', 1),
        event("x.mine", b'{"timeoutAt":5}', 2),
        event("approval.answered", b'{"name":"n","actionKey":"k","decision":"approve","timeoutAt":null}', 3),
    ]
    changes = fold(Stored(), [Placed(0, n, record) for n, record in enumerate(records[:2])])
    assert changes.runs["run-1"].timeout_ms == 1000
    changes = fold(Stored(), [Placed(0, n, record) for n, record in enumerate(records)])
    assert changes.runs["run-1"].timeout_ms is None


def test_a_key_requested_anew_begins_anew() -> None:
    about = b'"name":"n","actionKey":"k"'
    records = [
        event("action.requested", b"{%s}" % about, 1),
        event("action.permitted", b'{%s,"deadlineAt":9}' % about, 2),
        event("action.finished", b'{%s,"status":"not_performed","result":1}' % about, 3),
        event("action.requested", b'{%s,"argsDigest":"d2"}' % about, 4),
    ]
    row = fold(Stored(), [Placed(0, n, record) for n, record in enumerate(records)]).actions[1, "s", "n", "k"]
    assert (row.state, row.args_digest, row.permitted_ms, row.result) == ("waiting", "d2", None, None)


# -- settling after the run


def about_key(kind: str, offset: int, run_no: int, seq: int, **more: Any) -> Placed:
    payload = orjson.dumps({"name": "mail", "actionKey": "k", **more})
    return Placed(0, offset, event(kind, payload, seq, run_no, cause=Cause(0, offset, 0), at_ms=START_MS + offset))


def settlement(offset: int, status: str, **by: Any) -> Placed:
    detail = orjson.dumps({"name": "mail", "actionKey": "k", "status": status, **(by or {"by": 7, "inputId": "an"})})
    receipt = Receipt(
        kind="action", tenant_id=1, session_id="s", partition=0, offset=offset, at_ms=START_MS + offset,
        run_id="run-1", detail=detail,
    )  # fmt: skip
    check_record(receipt)
    return Placed(0, offset, receipt)


def first_life() -> list[Placed]:
    """A run that leaves its action in doubt."""
    return [
        about_key("action.requested", 10, 1, 1, argsDigest="d1"),
        about_key("action.permitted", 11, 1, 2, deadlineAt=9),
        about_key("action.in_doubt", 12, 1, 3, reason="expired"),
        about_key("run.finished", 13, 1, 4, terminalStatus="timed_out"),
    ]


def second_life() -> list[Placed]:
    """A later run that asks again for the same key, and leaves it in doubt again."""
    return [
        about_key("action.requested", 30, 2, 1, argsDigest="d1"),
        about_key("action.permitted", 31, 2, 2, deadlineAt=99),
        about_key("action.in_doubt", 32, 2, 3, reason="expired"),
    ]


def interleaved(left: list[Placed], right: list[Placed]) -> Iterator[list[Placed]]:
    """Every merge of two lists that keeps the order of each."""
    for places in combinations(range(len(left) + len(right)), len(left)):
        one, other = iter(left), iter(right)
        yield [next(one) if place in places else next(other) for place in range(len(left) + len(right))]


def action_after(records: list[Placed]) -> ActionRow:
    tables = Tables()
    for record in records:
        tables.write([record])
    return tables.stored.actions[1, "s", "mail", "k"]


@pytest.mark.parametrize(
    ("events", "settlements", "state", "ended", "settled"),
    [
        (first_life(), [settlement(20, "ok")], "ok", 20, 20),
        (first_life(), [settlement(20, "error", workerId="w-1")], "error", 20, 20),
        (first_life() + second_life(), [settlement(20, "not_performed")], "in_doubt", 32, None),
        (first_life() + second_life(), [settlement(20, "not_performed"), settlement(40, "ok")], "ok", 40, 40),
        (first_life() + second_life()[:2], [settlement(20, "not_performed")], "permitted", None, None),
    ],
)
def test_a_settlement_and_the_events_in_every_order(
    events: list[Placed], settlements: list[Placed], state: str, ended: int | None, settled: int | None
) -> None:
    """The row is that of the order on the inputs topic, however the sink came to read the two topics."""
    expected = action_after(sorted(events + settlements, key=lambda placed: placed.offset))
    assert (expected.state, expected.settled_offset) == (state, settled)
    assert expected.ended_ms == (None if ended is None else START_MS + ended)
    for records in interleaved(events, settlements):
        assert action_after(records) == expected
        assert action_after(records + settlements + events) == expected


def test_an_older_settlement_read_again_changes_nothing() -> None:
    """Not even for a moment: rows only move forward, also while the events lag behind."""
    ahead = [*first_life(), settlement(20, "not_performed"), settlement(40, "ok")]
    assert action_after([*ahead, settlement(20, "not_performed")]) == action_after(ahead)


def test_a_settlement_names_who_told() -> None:
    row = action_after([*first_life(), settlement(20, "ok")])
    assert (row.settled_by, row.settled_input_id, row.settled_worker_id) == (7, "an", None)
    row = action_after([*first_life(), settlement(20, "ok", workerId="w-1")])
    assert (row.settled_by, row.settled_input_id, row.settled_worker_id) == (None, None, "w-1")


# -- compaction, subtasks, notices


def test_compaction_is_a_status_and_leaves_a_pointer() -> None:
    pointer = {"uri": "file:///o/1", "digest": "ab", "bytes": 3, "throughSeq": 1}
    records = [
        event("run.started", b'{"lineage":"run-0","retryOf":"run-0","recovery":"rerun"}', 1),
        event("run.compaction_started", b'{"compactionId":"k"}', 2),
        event("run.compaction_finished", orjson.dumps({"compactionId": "k", "checkpoint": pointer}), 3),
    ]
    placed_records = [Placed(0, n, record) for n, record in enumerate(records)]
    tables = Tables()
    tables.write(placed_records[:2])
    assert tables.stored.runs["run-1"].status == "compacting"
    tables.write(placed_records[2:])
    run = tables.stored.runs["run-1"]
    assert (run.status, run.lineage, run.retry_of, run.recovery) == ("running", "run-0", "run-0", "rerun")
    (checkpoint,) = tables.checkpoints.values()
    assert (checkpoint.run_no, checkpoint.uri, checkpoint.through_seq) == (1, "file:///o/1", 1)


def test_a_compaction_that_a_cancel_closes_leaves_the_status_cancelling() -> None:
    kinds = ("run.started", "run.compaction_started", "run.cancel_requested", "run.compaction_failed")
    records = [Placed(0, n, event(kind, b"{}", n + 1)) for n, kind in enumerate(kinds)]
    assert fold(Stored(), records).runs["run-1"].status == "cancelling"


def test_a_child_that_ends_starts_the_clock_of_its_parent() -> None:
    records = [
        event("run.started", b'{"timeoutAt":1000,"parent":{"sessionId":"p","runId":"r","callId":"c"}}', 1),
        event("subtask.started", b'{"callId":"c-1","sessionId":"child","inputId":"sub-1"}', 2),
        event("subtask.finished", b'{"callId":"c-1","status":"failed","runId":"run-c","timeoutAt":2000}', 3),
    ]
    changes = fold(Stored(), [Placed(0, n, record) for n, record in enumerate(records)])
    run = changes.runs["run-1"]
    assert run.timeout_ms == 2000
    assert (run.parent_session_key, run.parent_run_key, run.parent_call_id) == ("p", "r", "c")
    child = changes.subtasks[1, "s", "run-1", "c-1"]
    assert (child.child_session_key, child.status, child.child_run_key) == ("child", "failed", "run-c")


def test_a_late_notice_is_evidence() -> None:
    receipt = Receipt(
        kind="notice", tenant_id=1, session_id="s", partition=0, offset=5, at_ms=START_MS, input_id="sub-1",
        run_id="run-1", reason="run_ended", detail=b'{"callId":"c-1"}',
    )  # fmt: skip
    check_record(receipt)
    row = fold(Stored(), [Placed(0, 0, receipt)]).refused[0, 5]
    assert (row.record, row.run_key, row.input_id, row.reason) == ("notice", "run-1", "sub-1", "run_ended")
