"""What runs in the workers of the city: bodies of a few steps over the real machine, and the target of their actions.

A body is the same in every attempt of a lineage: steps of a model, of tools, of actions (some with an approval, some at
a target that honours keys), a compaction, a child run in the other session.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from onepen.schemas import events as ev
from onepen.schemas.offers import Offer
from onepen.schemas.statuses import RunStatus
from onepen.schemas.views import View
from onepen.schemas.worker_records import ReportEvent
from onepen.streams.worker.machine import Machine, Now
from tests.simulation.action_steps import step_of

if TYPE_CHECKING:
    from tests.simulation.city import City

CHECKPOINT = {"uri": "s3://b/checkpoint", "digest": "ab" * 32, "bytes": 10, "throughSeq": 1}


def event(kind: str, **payload: Any) -> ReportEvent:
    return ReportEvent(type=kind, payload=orjson.dumps(payload))


@dataclass
class Target:
    """The outside system. It refuses a call whose permit is over, and remembers what it did; a call that says it
    honours keys is done once, however often it is asked for."""

    effects: list[tuple[int, str, str]] = field(default_factory=list)
    refused: int = 0

    def call(self, now_ms: int, run_id: str, key: str, deadline_ms: int, honours: bool) -> bool:
        if now_ms >= deadline_ms:
            self.refused += 1
            return False
        if not (honours and self.did(key)):
            self.effects.append((now_ms, run_id, key))
        return True

    def did(self, key: str) -> bool:
        return any(done == key for _, _, done in self.effects)


class Agent:
    """One held run in one worker."""

    def __init__(self, city: City, offer: Offer, name: str) -> None:
        self.city = city
        self.machine = Machine(offer, name, int(name[1:]), optimistic=city.random.random() < 0.5)
        self.steps = list(city.plan(offer))
        self.request: Any = None
        self.flying = False
        self.applied: set[str] = set()
        self.ending: Any = None
        self.asked: Counter[str] = Counter()
        self.send(self.machine.claim(self.now))

    @property
    def now(self) -> Now:
        return self.city.clock_of(self.machine.worker_id)

    def send(self, *records: Any) -> None:
        for record in records:
            self.city.post(record)

    def report(self, *events: ReportEvent) -> Any:
        tickets = [self.machine.queue(one) for one in events]
        self.send(*self.machine.flush(self.now))
        return tickets[-1]

    def on_view(self, view: View) -> None:
        self.send(*self.machine.on_view(view, self.now))

    def turn(self) -> None:
        """What the process does when it gets to run: housekeeping, then the next step of the body."""
        machine = self.machine
        self.send(*machine.tick(self.now))
        if machine.ended is not None or self.flying:
            return
        if self.ending is not None:
            if self.ending.fate not in (None, "accepted"):
                self.finish("failed")
            return
        if machine.cancelling:
            self.finish("cancelled")
        elif machine.trusted(self.now):
            self.work()

    def finish(self, status: str, **more: Any) -> None:
        self.ending = self.machine.queue_final(event(ev.RUN_FINISHED, terminalStatus=status, **more))
        self.send(*self.machine.flush(self.now))

    def work(self) -> None:
        if self.machine.status != RunStatus.COMPACTING:
            for steer in self.machine.pending:
                if steer.input_id not in self.applied:
                    self.applied.add(steer.input_id)
                    self.report(event(ev.INPUT_APPLIED, inputId=steer.input_id))
                    return
        if not self.steps:
            if self.machine.unsettled == 0:
                self.finish_work()
            return
        kind, key = self.steps[0]
        match kind:
            case "act":
                self.act(key)
            case "compact":
                self.compact(f"{key}{self.machine.offer.generation}")
            case "sub":
                self.call_child(key)
            case _:
                self.one_step(kind, key)

    def finish_work(self) -> None:
        status = self.city.random.choice(["completed"] * 5 + ["failed", "retryable"])
        self.finish("failed", retryable=True) if status == "retryable" else self.finish(status)

    def next_step(self) -> None:
        self.request = None
        self.steps.pop(0)

    def one_step(self, kind: str, key: str) -> None:
        self.next_step()
        start, end, member = {"model": (ev.MODEL_STARTED, ev.MODEL_FINISHED, "turnId"),
                              "tool": (ev.TOOL_STARTED, ev.TOOL_FINISHED, "toolCallId")}[kind]  # fmt: skip
        self.report(event(start, **{member: key, "toolName": "look_up"}))
        self.report(event(end, **{member: key, "status": "ok"}))

    # -- compaction, child runs --------------------------------------------------------------------------------------

    def compact(self, key: str) -> None:
        """Starts, takes its time (at times more than its deadline allows), ends well or badly."""
        if self.request is None:
            self.request = self.report(event(ev.COMPACTION_STARTED, compactionId=key))
        elif self.request.fate == "accepted" and self.city.random.random() < 0.2:
            if self.city.random.random() < 0.6:
                self.report(event(ev.COMPACTION_FINISHED, compactionId=key, checkpoint=CHECKPOINT))
            else:
                self.report(event(ev.COMPACTION_FAILED, compactionId=key, reason="no room"))
            self.next_step()
        elif self.request.fate not in (None, "accepted"):
            self.next_step()

    def call_child(self, call_id: str) -> None:
        """Waits for the child's end, as a rule; at times it goes on without."""
        if self.request is None:
            self.request = self.report(event(ev.SUBTASK_STARTED, callId=call_id, sessionId="child", content="help"))
            return
        known = self.machine.subtasks.get(call_id)
        over = known is not None and known.status != "open"
        if self.request.fate not in (None, "accepted") or over or self.city.random.random() < 0.02:
            self.next_step()

    # -- actions -----------------------------------------------------------------------------------------------------

    def act(self, key: str) -> None:
        if self.request is None:
            self.ask(key)
            return
        view = self.machine.actions.get(("mail", key))
        step = step_of(self.request.fate, None if view is None else view.state, self.asked[key])
        if step == "ask":
            self.ask(key)
        elif step == "begin":
            self.begin(key)
        elif step == "resolve" and self.may_resolve(key):
            self.ask(key, resolution="repeat" if self.honours(key) else "reconciled_not_performed")
        elif step != "wait":
            self.next_step()

    @staticmethod
    def honours(key: str) -> bool:
        return key.endswith("h")

    def may_resolve(self, key: str) -> bool:
        """A target that honours keys may be asked again. Another is looked up: it did nothing, and will not, the permit
        being over."""
        return self.honours(key) or not self.city.target.did(key)

    def ask(self, key: str, **more: Any) -> None:
        self.asked[key] += 1
        if "resolution" in more:
            self.city.seen[f"resolution {more['resolution']}"] += 1
        self.request = self.report(
            event(
                ev.ACTION_REQUESTED,
                actionKey=key,
                name="mail",
                argsDigest="d1",
                approval=key.endswith("!"),
                honoursKeys=self.honours(key),
                **more,
            )
        )

    def begin(self, key: str) -> None:
        permit = self.machine.permit(self.request, "mail", key, self.now)
        if permit is None:
            self.report(event(ev.ACTION_FINISHED, actionKey=key, name="mail", status="not_performed"))
            self.next_step()
            return
        self.flying = True
        self.city.after(
            self.city.random.choice([0, 20, 300, 2_500, 5_000]), lambda: self.effect(key, permit.deadline_ms)
        )

    def effect(self, key: str, deadline_ms: int) -> None:
        """The call reaches the target even when the process that sent it has been frozen or has died meanwhile."""
        city, run_id = self.city, self.machine.offer.run_id
        done = city.target.call(city.now_ms, run_id, key, deadline_ms, self.honours(key))
        self.flying = False
        if self in city.agents[self.machine.worker_id] and self.machine.ended is None:
            status = "ok" if done else "not_performed"
            self.report(event(ev.ACTION_FINISHED, actionKey=key, name="mail", status=status))
            self.next_step()
