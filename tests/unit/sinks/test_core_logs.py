"""What the core really writes, folded in many orders of its two topics: settled actions, erased sessions, subtasks.

The logs come from `decide` itself; named after the public cases they belong to where there is one.
"""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from onepen.schemas.notices import Notice
from onepen.schemas.worker_records import Report
from onepen.sinks.postgres.fold import check_record
from onepen.sinks.postgres.object_uris import ALL_OBJECTS
from onepen.sinks.postgres.rows import Placed
from tests.unit.processors.stage import Stage, event_of
from tests.unit.sinks.table_model import Tables, cut, whole

SESSION = (7, "session-42")


def report(stage: Stage, worker: str, no: int, kind: str, **payload: Any) -> None:
    record = Report(**stage.worker_head(worker, {}), no=no, events=(event_of(kind, **payload),))
    stage.decide(record)


def topics(stage: Stage) -> list[list[Placed]]:
    """Events and receipts of the session, as the sink would read them. None of them is a dead letter."""
    for record in (*stage.events, *stage.receipts):
        check_record(record)
    events = [Placed(5, 2 * n, event) for n, event in enumerate(stage.events)]
    return [events, [Placed(5, 2 * n, receipt) for n, receipt in enumerate(stage.receipts)]]


def tables_of(stage: Stage) -> Tables:
    """The tables, after it was shown that every order of the topics, and a replay, gives the same."""
    sources = topics(stage)
    expected = whole(sources)
    assert whole(sources[::-1]) == expected
    draw = random.Random(1)
    for _ in range(60):
        takes = [(draw.randrange(2), draw.randrange(1, 5), draw.random() < 0.7) for _ in range(draw.randrange(40))]
        tables = cut(sources, takes)
        assert tables == expected
        for records in draw.sample(sources, 2):
            tables.write(records)
        assert tables == expected
    return expected


def in_doubt(stage: Stage) -> None:
    """A run that times out while its mail is under way; the action is in doubt."""
    stage.do("prompt p1 timeout_ms=60000")
    stage.do("claim w1")
    stage.do("report w1 1 act+k1")
    stage.do("wait 60000")
    assert stage.do("fire run")
    assert stage.do("keys") == ["mail/k1:in_doubt"]


@pytest.mark.parametrize("status", ["ok", "error", "not_performed"])
def test_an_answer_settles_what_was_in_doubt(status: str) -> None:
    stage = Stage()
    in_doubt(stage)
    stage.do(f"answer a1 k1 {status}")
    action = tables_of(stage).stored.actions[(*SESSION, "mail", "k1")]
    assert (action.state, action.settled_state, action.settled_by, action.settled_input_id) == (
        status,
        status,
        11,
        "a1",
    )
    assert action.ended_ms == stage.now_ms
    assert action.reason == "timed_out"


def test_the_evidence_of_a_late_report_settles_it_and_is_kept() -> None:
    stage = Stage()
    in_doubt(stage)
    stage.do("report w1 2 act-k1:ok run=r1 g=1")
    tables = tables_of(stage)
    action = tables.stored.actions[(*SESSION, "mail", "k1")]
    assert (action.state, action.settled_worker_id, action.settled_input_id) == ("ok", "w1", None)
    assert [row.reason for row in tables.refused.values()] == ["run_ended"]


def test_a_key_settled_as_not_performed_is_asked_for_again_by_the_retry() -> None:
    stage = Stage()
    in_doubt(stage)
    stage.do("answer a1 k1 not_performed")
    stage.decide(stage.input("prompt", "p2", retry_of=stage.run_id("r1"), content=None))
    stage.do("claim w2")
    stage.do("report w2 1 act+k1")
    stage.do("report w2 2 act-k1:ok done:completed")
    tables = tables_of(stage)
    action = tables.stored.actions[(*SESSION, "mail", "k1")]
    assert (action.state, action.settled_offset, action.last_run_no) == ("ok", None, 2)
    runs = {run.run_no: run for run in tables.stored.runs.values()}
    assert (runs[2].retry_of, runs[2].lineage) == (runs[1].run_key, runs[1].run_key)
    assert [run.recovery for run in runs.values()] == ["resume", "resume"]


def test_b56_a_session_erased_while_its_run_is_active() -> None:
    stage = Stage()
    stage.do("prompt p1")
    stage.do("claim w1")
    stage.do("report w1 1 tool+c1 act+k1,approval")
    stage.do("follow_up f1")
    stage.do("erase e1")
    during = whole(topics(stage))
    assert during.stored.runs, "nothing goes before the run has ended by the ordinary route"
    assert during.sessions[SESSION].erased_ms is None
    stage.do("report w1 2 x.late")
    stage.do("answer a1 k1 approve")
    stage.do("prompt p2")
    stage.do("erase e2")
    stage.do("report w1 3 tool-c1:cancelled done:completed")
    stage.do("erase e3")
    stage.do("report w1 4 x.later run=r1 g=1")
    tables = tables_of(stage)
    kept = [(row.input_id, row.verdict, row.disposition) for row in tables.inputs.values()]
    refused = [(name, "refused", "refused") for name in ("e2", "e3")]
    assert sorted(kept) == [("e1", "erased", "done"), *refused]
    assert tables == with_nothing_else(tables)


def test_an_erase_at_rest_is_done_at_once() -> None:
    stage = Stage()
    in_doubt(stage)
    stage.do("answer a1 k1 ok")
    stage.do("erase e1")
    stage.do("prompt p9")
    tables = tables_of(stage)
    assert [(row.input_id, row.disposition) for row in tables.inputs.values()] == [("e1", "done")]
    assert tables == with_nothing_else(tables)


def with_nothing_else(tables: Tables) -> Tables:
    """The session's row, the erase inputs and the objects, and no other row."""
    session = tables.sessions[SESSION]
    assert session.erased_ms is not None
    assert (session.user_id, session.title) == (None, None)
    alone = Tables(sessions={SESSION: session}, inputs=tables.inputs, objects=tables.objects)
    alone.stored.erased = frozenset((SESSION,))
    return alone


def test_a_compaction_and_its_checkpoint() -> None:
    stage = Stage()
    stage.do("prompt p1")
    stage.do("claim w1")
    report(stage, "w1", 1, "run.compaction_started", compactionId="k1")
    assert [run.status for run in tables_of(stage).stored.runs.values()] == ["compacting"]
    pointer = {"uri": "file:///objects/7/c1", "digest": "ab" * 32, "bytes": 10, "throughSeq": 3}
    report(stage, "w1", 2, "run.compaction_finished", compactionId="k1", checkpoint=pointer)
    tables = tables_of(stage)
    assert [run.status for run in tables.stored.runs.values()] == ["running"]
    (checkpoint,) = tables.checkpoints.values()
    assert (checkpoint.run_no, checkpoint.uri, checkpoint.through_seq) == (1, "file:///objects/7/c1", 3)
    stage.do("erase e1")
    stage.do("report w1 3 done:completed")
    assert tables_of(stage).objects == {(*SESSION, "file:///objects/7/c1"), (*SESSION, ALL_OBJECTS)}


def test_b22_the_end_of_a_child_tells_its_parent_once_and_late_is_evidence() -> None:
    stage = Stage()
    stage.do("prompt p1")
    stage.do("claim w1")
    report(stage, "w1", 1, "subtask.started", callId="c1", sessionId="child-1", content="go")
    report(stage, "w1", 2, "subtask.started", callId="c2", sessionId="child-2", content="go")
    run_id = stage.session.head.run.run_id  # type: ignore[union-attr]
    started = {
        (payload := orjson.loads(event.payload))["callId"]: payload["inputId"]
        for event in stage.events
        if event.type == "subtask.started"
    }

    def ends(call_id: str) -> None:
        stage.decide(
            Notice(tenant_id=7, session_id="session-42", run_id=run_id, call_id=call_id, child_session_id="child",
                   child_input_id=started[call_id], child_run_id="run-c", status="completed", reason=None, result=b"1")
        )  # fmt: skip

    ends("c1")
    ends("c1")
    stage.do("report w1 3 done:completed")
    ends("c2")
    tables = tables_of(stage)
    children = {key[3]: row for key, row in tables.subtasks.items()}
    assert (children["c1"].status, children["c1"].child_run_key, children["c1"].result) == ("completed", "run-c", "1")
    assert (children["c2"].status, children["c2"].child_run_key) == ("detached", None)
    late = [(row.record, row.input_id, row.reason) for row in tables.refused.values()]
    assert late == [("notice", started["c1"], "run_ended"), ("notice", started["c2"], "run_ended")]
