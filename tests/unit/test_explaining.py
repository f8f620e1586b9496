"""What `onepen why` says, on histories decided by the real core: every verdict, every end, every reason has words."""

from __future__ import annotations

from typing import Any

import pytest

from onepen.schemas.inputs import Input
from onepen.schemas.statuses import Reason
from onepen.streams.audit import LoggedInput
from onepen.streams.explaining import REASONS, Facts, explain
from tests.unit.audit.test_random_histories import SESSIONS, lived
from tests.unit.demo.world import TENANT, World, founding_story

STORY = founding_story()


def facts_of(world: World, session: str, input_id: str) -> Facts:
    return Facts(
        TENANT,
        session,
        input_id,
        inputs=[i for i in world.inputs if isinstance(i.record, Input) and i.record.session_id == session],
        receipts=[r for r in world.receipts if r.receipt.kind == "input" and r.receipt.session_id == session],
        events=[e for e in world.evidence_events if e.event.session_id == session],
    )


def told(world: World, session: str, input_id: str) -> dict[str, Any]:
    return explain(facts_of(world, session, input_id))[0]


@pytest.mark.parametrize(
    ("session", "input_id", "phrases"),
    [
        ("desk", "in-1", ["no active run", "it started run 1", "Run 1", "ended cancelled"]),
        ("desk", "in-2", ["run 1", "was active", "list of waiting inputs", "It began run 2", "ended completed"]),
        ("desk", "in-3", ["handed to run 1", "applied it as its event 7"]),
        ("desk", "in-5", ["told to stop", "It was done when run 1", "ended cancelled"]),
        ("desk", "in-6", ["decided what was asked"]),
        ("slow", "in-8", ["it started run 1", "ended timed_out (deadline)"]),
    ],
)
def test_the_story_told(session: str, input_id: str, phrases: list[str]) -> None:
    text = " ".join(told(STORY, session, input_id)["told"])
    assert not [phrase for phrase in phrases if phrase not in text], text


def test_a_repeat_is_told_behind_the_first() -> None:
    first, second = explain(facts_of(STORY, "desk", "in-1"))
    assert (first["verdict"], second["verdict"]) == ("started", "duplicate")
    where = first["position"]
    assert f"repeats the input at inputs 0:{where['offset']}, which was started" in " ".join(second["told"])


def test_positions_lead_to_the_records() -> None:
    account = told(STORY, "desk", "in-3")
    assert [event["type"] for event in account["events"]] == ["input.steered", "input.applied"]
    offsets = {one.offset for one in STORY.receipts if one.receipt.input_id == "in-3"}
    assert {one["offset"] for one in account["receipts"]} == offsets
    assert account["activeRunId"] == account["runId"]


def test_withdrawn_and_discarded_name_who_did_it() -> None:
    world = World()
    world.send("s", "p-1")
    world.claim("s", "w-1")
    world.send("s", "a-0", "abort", target_kind="input", target_id="p-2")  # too early: refused
    world.send("s", "p-2")
    world.send("s", "p-3")
    world.send("s", "a-1", "abort", target_kind="input", target_id="p-2")
    world.send("s", "a-2", "abort", target_kind="active", scope="run_and_queue")
    assert "withdrawn by input a-1" in " ".join(told(world, "s", "p-2")["told"])
    assert "discarded (aborted)" in " ".join(told(world, "s", "p-3")["told"])
    assert "took input p-2 out" in " ".join(told(world, "s", "a-1")["told"])
    assert "waits for the end of run 1" in " ".join(told(world, "s", "a-2")["told"])


def test_undecided_and_dead_letters() -> None:
    world = World()
    record = world.send("s", "p-1")
    facts = Facts(TENANT, "s", "p-1", inputs=[LoggedInput(0, 5, 1, record)])
    assert "has not been decided yet" in " ".join(explain(facts)[0]["told"])
    facts.dead[0, 5] = "internal_error"
    account = explain(facts)[0]
    assert account["deadLetter"] == "internal_error"
    assert "dead letter: internal_error" in " ".join(account["told"])


def test_nothing_is_told_of_what_is_not_there() -> None:
    assert explain(Facts(TENANT, "s", "p-1")) == []


def test_whatever_happens_can_be_told() -> None:
    """Every input of many random lives; and every reason that they give has its words."""
    reasons = set()
    for seed in range(25):
        life = lived(seed)
        for session in (*SESSIONS, "child-1", "child-2"):
            inputs = [i for i in life.inputs if isinstance(i.record, Input) and i.record.session_id == session]
            receipts = [r for r in life.receipts if r.receipt.kind == "input" and r.receipt.session_id == session]
            events = [e for e in life.events if e.event.session_id == session]
            reasons |= {r.receipt.reason for r in receipts if r.receipt.reason is not None}
            for one in inputs:
                assert isinstance(one.record, Input)
                for account in explain(Facts(TENANT, session, one.record.input_id, inputs, receipts, events)):
                    assert len(account["told"]) >= 3
                    assert "None" not in " ".join(account["told"]), account
    assert len(reasons) >= 10
    assert not reasons - REASONS.keys()


def test_every_reason_of_an_input_has_words() -> None:
    names = list(Reason)
    of_inputs = names[: names.index(Reason.NO_INBOX)]
    assert not set(of_inputs) - REASONS.keys()
