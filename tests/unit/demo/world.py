"""A good piece of history for the checks to judge: the real core decides, this file only plays the other parts.

What the log, the workers and the mail target would do is done by hand, so that a test may damage any of it. The rows of
the tables are those of the fold: whether the real sink writes the same is shown by the acceptance tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from onepen.demo.checks import Effect, Evidence, LoggedEvent, LoggedInput, LoggedReceipt, Tables
from onepen.processors.decide import Command, Moment, decide
from onepen.processors.rules import Keys, Rules
from onepen.processors.session import Session
from onepen.processors.timers import due
from onepen.schemas.inputs import Content, Input
from onepen.schemas.offers import Offer
from onepen.schemas.worker_records import Claim, Report, ReportEvent
from onepen.streams.audit import fold

TENANT = 7
FROZEN_PID = 4711


@dataclass
class World:
    """One partition, any number of sessions, a clock that the test moves."""

    now_ms: int = 1_800_000_000_000
    offset: int = 100
    evidence_events: list[LoggedEvent] = field(default_factory=list)
    receipts: list[LoggedReceipt] = field(default_factory=list)
    inputs: list[LoggedInput] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)
    offers: dict[str, Offer] = field(default_factory=dict)
    report_no: dict[tuple[str, int], int] = field(default_factory=dict)
    rules: Rules = field(default_factory=lambda: Rules.start(Keys("k", b"s" * 32)))

    def put(self, session_id: str, command: Command) -> None:
        self.offset += 3
        self.now_ms += 7
        self.inputs.append(LoggedInput(0, self.offset, self.now_ms, command))
        before = self.sessions.get(session_id) or Session.load(TENANT, session_id, {})
        decision = decide(self.rules, before, command, Moment(0, self.offset, self.now_ms))
        self.sessions[session_id] = decision.session
        for event, data in zip(decision.events, decision.event_bytes, strict=True):
            self.evidence_events.append(LoggedEvent(0, 2 * len(self.evidence_events), data, event))
        for receipt in decision.receipts:
            self.receipts.append(LoggedReceipt(0, 2 * len(self.receipts), receipt))
        for offer in decision.offers:
            self.offers[session_id] = offer

    def send(self, session_id: str, input_id: str, mode: str = "prompt", **fields: Any) -> Input:
        content = Content(data=b"do it") if mode in ("prompt", "steer", "follow_up") else None
        record = Input(
            input_id=input_id, issued_at_ms=self.now_ms, tenant_id=TENANT, user_id=1, session_id=session_id,
            mode=mode, source="ui", content=content, **fields,
        )  # fmt: skip
        self.put(session_id, record)
        return record

    def claim(self, session_id: str, worker_id: str) -> Offer:
        offer = self.offers[session_id]
        self.put(session_id, Claim(**head(offer, worker_id)))
        return offer

    def report(self, offer: Offer, worker_id: str, *events: tuple[str, dict[str, Any]]) -> None:
        key = offer.run_id, offer.generation
        self.report_no[key] = self.report_no.get(key, 0) + 1
        made = tuple(ReportEvent(type=kind, payload=orjson.dumps(payload)) for kind, payload in events)
        self.put(offer.session_id, Report(**head(offer, worker_id), no=self.report_no[key], events=made))

    def wait(self, session_id: str, ms: int) -> None:
        """Let time pass, then append the timers that are due, as the owner of the partition would."""
        self.now_ms += ms
        for one in due(self.sessions[session_id], self.now_ms):
            self.put(session_id, one.timer)

    def mail(self, offer: Offer, key: str, effective: bool = True) -> None:
        self.effects.append(
            Effect(
                len(self.effects) + 1,
                offer.session_id,
                offer.run_id,
                offer.generation,
                "send_mail",
                key,
                "d1",
                effective,
            )
        )

    def evidence(self) -> Evidence:
        made = Evidence(list(self.evidence_events), list(self.receipts), list(self.inputs), list(self.effects), None)
        return with_changes(made, tables=rows_of(made))


def with_changes(evidence: Evidence, **changes: Any) -> Evidence:
    """`dataclasses.replace` that starts with empty caches."""
    fields = {
        name: getattr(evidence, name)
        for name in (
            "events",
            "receipts",
            "inputs",
            "effects",
            "tables",
            "quiet",
            "queries",
            "dead",
            "unreadable",
            "decided",
            "kept_from",
            "policies",
            "dead_from_ms",
        )
    }
    return Evidence(**(fields | changes))


def rows_of(evidence: Evidence) -> Tables:
    return Tables(
        runs=list(fold.expected_runs(evidence).values()),
        events=list(fold.expected_events(evidence).values()),
        inputs=list(fold.expected_inputs(evidence).values()),
        actions=list(fold.expected_actions(evidence).values()),
        refused=list(fold.expected_refused(evidence).values()),
    )


def head(offer: Offer, worker_id: str) -> dict[str, Any]:
    return {
        "tenant_id": offer.tenant_id,
        "session_id": offer.session_id,
        "run_id": offer.run_id,
        "generation": offer.generation,
        "token": offer.token,
        "worker_id": worker_id,
        "inbox": 0,
    }


def action(key: str, **more: Any) -> dict[str, Any]:
    return {"actionKey": key, "name": "send_mail", "argsDigest": "d1", **more}


def founding_story() -> World:
    """Everything that the real story shows, small: see `onepen.demo.story`."""
    world = World()
    _desk(world)
    _frozen(world)
    _timed_out(world)
    return world


def _desk(world: World) -> None:
    world.send("desk", "in-1")
    world.send("desk", "in-2")
    offer = world.claim("desk", "w-1")
    world.report(offer, "w-1", ("model.request.started", {"turnId": "t1"}))
    world.send("desk", "in-3", "steer")
    world.report(
        offer, "w-1", ("model.request.finished", {"turnId": "t1", "status": "ok"}),
        ("message.completed", {"content": "one moment"}), ("input.applied", {"inputId": "in-3"}),
    )  # fmt: skip
    world.send("desk", "in-4", "follow_up")
    world.report(offer, "w-1", ("tool.started", {"toolCallId": "c1", "toolName": "look_up"}))
    world.report(offer, "w-1", ("action.requested", action("m1", approval=True)))
    world.send("desk", "in-5", "abort", target_kind="active")
    world.report(offer, "w-1", ("tool.finished", {"toolCallId": "c1", "toolName": "look_up", "status": "cancelled"}))
    world.report(offer, "w-1", ("run.finished", {"terminalStatus": "completed"}))
    offer = world.claim("desk", "w-2")
    world.report(offer, "w-2", ("action.requested", action("m2", approval=True)))
    world.send("desk", "in-6", "answer", action_key="m2", action_name="send_mail", args_digest="d1", decision="approve")
    world.report(offer, "w-2", ("action.requested", action("m2", approval=True)))
    world.mail(offer, "m2")
    world.mail(offer, "m2", effective=False)
    world.report(offer, "w-2", ("action.finished", action("m2", status="ok", result={"mail": "mail-1"})))
    world.report(offer, "w-2", ("run.finished", {"terminalStatus": "completed"}))
    offer = world.claim("desk", "w-1")
    world.report(offer, "w-1", ("run.finished", {"terminalStatus": "completed"}))
    repeat = next(i.record for i in world.inputs if isinstance(i.record, Input) and i.record.input_id == "in-1")
    world.put("desk", repeat)


def _frozen(world: World) -> None:
    first, second = f"w-host-{FROZEN_PID}-ab", "w-host-4712-cd"
    world.send("errand", "in-7")
    late = world.claim("errand", first)
    world.report(late, first, ("tool.started", {"toolCallId": "c2", "toolName": "search"}))
    world.wait("errand", 31_000)
    offer = world.claim("errand", second)
    world.report(late, first, ("tool.finished", {"toolCallId": "c2", "toolName": "search", "status": "ok"}))
    world.report(offer, second, ("run.finished", {"terminalStatus": "completed"}))


def _timed_out(world: World) -> None:
    world.send("slow", "in-8", timeout_ms=2_000)
    offer = world.claim("slow", "w-3")
    world.report(offer, "w-3", ("model.request.started", {"turnId": "t9"}))
    world.wait("slow", 2_500)


def changed(item: Any, **fields: Any) -> Any:
    """A copy of an event, receipt or record with other fields (the framed bytes stay as they were)."""
    return msgspec.structs.replace(item, **fields)
