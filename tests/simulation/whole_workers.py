"""Worker processes over the real machine: they hold runs, freeze past their lease, die, and wake up as zombies.

A body is a list of steps drawn from the run's lineage, so every attempt does the same. The target refuses a call whose
permit is over and remembers what it did: it is the only place where an effect can be seen twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from onepen.schemas import events as ev
from onepen.schemas.offers import Offer
from onepen.schemas.views import View
from onepen.schemas.worker_records import ReportEvent
from onepen.streams.worker.machine import Machine, Now, Ticket
from tests.simulation.action_steps import step_of
from tests.simulation.whole_time import LocalClock

if TYPE_CHECKING:
    from tests.simulation.whole_world import World

DIGEST = "d1"
Session = tuple[int, str]
RUNS_MAX = 6
HOPS_MAX = 3


def event(kind: str, **payload: Any) -> ReportEvent:
    return ReportEvent(type=kind, payload=orjson.dumps(payload))


@dataclass
class Target:
    """The outside system, with the time of the log. It heeds fencing tokens: who looks something up, or calls, under
    a newer one has every call under an older one refused, however long its permit would have been valid."""

    effects: list[tuple[int, str, Session, str]] = field(default_factory=list)
    """(when, run id, (tenant id, session id), action key)"""
    refused: int = 0
    done: set[tuple[Session, str]] = field(default_factory=set)
    fences: dict[Session, tuple[int, int]] = field(default_factory=dict)

    def _fence(self, offer: Offer) -> bool:
        token = (offer.run_no, offer.generation)
        session = offer.tenant_id, offer.session_id
        newest = self.fences[session] = max(token, self.fences.get(session, token))
        return token == newest

    def did(self, offer: Offer, key: str) -> bool:
        return not self._fence(offer) or ((offer.tenant_id, offer.session_id), key) in self.done

    def end_of(self, session: Session, run_no: int, key: str) -> str:
        """What a person finds who looks: how the action ended, for good. Nothing comes of any run so far after that."""
        if (session, key) in self.done:
            return "ok"
        self.fences[session] = (run_no, 1 << 30)
        return "not_performed"

    def call(self, now_ms: int, offer: Offer, key: str, deadline_ms: int) -> bool:
        if not self._fence(offer) or now_ms >= deadline_ms:
            self.refused += 1
            return False
        session = offer.tenant_id, offer.session_id
        self.effects.append((now_ms, offer.run_id, session, key))
        self.done.add((session, key))
        return True


class Agent:
    """One held run in one worker: the machine, and a body of one or two lanes that work side by side."""

    def __init__(self, worker: Worker, offer: Offer) -> None:
        self.worker, self.world, self.offer = worker, worker.world, offer
        self.machine = Machine(offer, worker.worker_id, worker.inbox, optimistic=self.world.random.random() < 0.5)
        self.lanes = [Lane(self, steps) for steps in plan(offer.lineage, offer.session_id)]
        self.applied: set[str] = set()
        self.ending: Ticket | None = None
        self.send(self.machine.claim(worker.now))

    def send(self, *records: Any) -> None:
        for record in records:
            self.world.post(record)

    def report(self, *events: ReportEvent) -> Ticket:
        tickets = [self.machine.queue(one) for one in events]
        self.send(*self.machine.flush(self.worker.now))
        return tickets[-1]

    @property
    def flying(self) -> bool:
        return any(lane.flying for lane in self.lanes)

    def on_view(self, view: View) -> None:
        before = self.machine.ended
        self.send(*self.machine.on_view(view, self.worker.now))
        if before is None and self.machine.ended not in (None, "recorded"):
            self.world.facts[f"worker told: {self.machine.ended}"] += 1

    def turn(self) -> None:
        """Housekeeping, then the next step of each lane."""
        machine, now = self.machine, self.worker.now
        self.send(*machine.tick(now))
        if machine.ended is not None:
            return
        if self.ending is not None:
            if self.ending.fate not in (None, "accepted"):
                self._finish("failed")
        elif machine.cancelling:
            if not self.flying:
                self._finish("cancelled")
        elif not machine.trusted(now):
            self.world.facts["worker suspended"] += machine.granted
        else:
            self._work()

    def _finish(self, status: str) -> None:
        more = {"retryable": True} if status == "failed" else {}
        self.ending = self.machine.queue_final(event(ev.RUN_FINISHED, terminalStatus=status, **more))
        self.send(*self.machine.flush(self.worker.now))

    def _work(self) -> None:
        for steer in self.machine.pending:
            if steer.input_id not in self.applied and self.machine.status == "running":
                self.applied.add(steer.input_id)
                self.report(event(ev.INPUT_APPLIED, inputId=steer.input_id))
                return
        for lane in self.lanes:
            lane.work()
        if not any(lane.steps for lane in self.lanes) and self.machine.unsettled == 0:
            self._finish(self.world.random.choice(["completed"] * 4 + ["failed"]))


class Lane:
    """Steps that a body does one after the other."""

    def __init__(self, agent: Agent, steps: list[tuple[str, str]]) -> None:
        self.agent, self.steps = agent, steps
        self.world, self.offer, self.machine = agent.world, agent.offer, agent.machine
        self.random = agent.world.random
        self.opened = False
        self.request: Ticket | None = None
        self.flying = False
        self.pause_until_ms = 0.0
        self.asked: Counter[str] = Counter()

    def work(self) -> None:
        if not self.steps or self.flying or self.agent.worker.now.mono_ms < self.pause_until_ms:
            return
        kind, key = self.steps[0]
        match kind:
            case "act":
                self._act(key)
            case "compact":
                self._compact()
            case "child":
                self._child(key)
            case "say":
                self.agent.report(event("message.completed", text=key), event("x.note", about=key))
                if self.random.random() < 0.3:
                    self.agent.report(event("nonsense"), event(ev.TOOL_FINISHED, toolCallId="never begun", status="ok"))
                self._next()
            case _:
                self._branch(kind, key)

    def _pause(self) -> None:
        self.pause_until_ms = self.agent.worker.now.mono_ms + self.random.choice([0, 20, 100, 400])

    def _next(self) -> None:
        self.steps.pop(0)
        self.request, self.opened = None, False
        self._pause()

    def _branch(self, kind: str, key: str) -> None:
        """A model request or a tool: it starts, takes a while, and ends."""
        start, end, member = {"model": (ev.MODEL_STARTED, ev.MODEL_FINISHED, "turnId"),
                              "tool": (ev.TOOL_STARTED, ev.TOOL_FINISHED, "toolCallId")}[kind]  # fmt: skip
        if not self.opened:
            self.opened = True
            self.agent.report(event(start, **{member: key, "toolName": "look_up"}))
            self._pause()
        else:
            self.agent.report(event(end, **{member: key, "status": "ok"}))
            self._next()

    def _compact(self) -> None:
        name = f"k{self.offer.generation}-{len(self.steps)}"
        if self.request is None:
            self.request = self.agent.report(event(ev.COMPACTION_STARTED, compactionId=name))
            self._pause()
        elif self.request.fate == "accepted":
            pointer = {"uri": f"mem:{name}", "digest": "0" * 64, "bytes": 10, "throughSeq": self.machine.last_seq}
            if self.random.random() < 0.8:
                self.agent.report(event(ev.COMPACTION_FINISHED, compactionId=name, checkpoint=pointer))
            else:
                self.agent.report(event(ev.COMPACTION_FAILED, compactionId=name, reason="too large"))
            self._next()
        elif self.request.fate is not None:
            self._next()

    def _child(self, session_id: str) -> None:
        call = f"{self.offer.lineage[-6:]}-{len(self.steps)}"
        if self.request is None:
            self.request = self.agent.report(
                event(ev.SUBTASK_STARTED, callId=call, name="child", sessionId=session_id, content="help",
                      timeoutMs=6_000)
            )  # fmt: skip
        elif self.request.fate == "accepted":
            child = self.machine.subtasks.get(call)
            if child is not None and child.status != "open":
                self.world.facts[f"child {child.status}"] += 1
                self._next()
        elif self.request.fate is not None:
            self._next()

    # -- actions ---------------------------------------------------------------------------------------------------

    def _act(self, key: str) -> None:
        if self.request is None:
            self._ask(key)
            return
        view = self.machine.actions.get(("mail", key))
        step = step_of(self.request.fate, None if view is None else view.state, self.asked[key])
        if step == "ask":
            self._ask(key)
        elif step == "begin":
            self._begin(key)
        elif step == "resolve" and not self.world.target.did(self.offer, key):
            # Looked up at the target under our token: it did nothing, and now will not.
            self._ask(key, resolution="reconciled_not_performed")
        elif step != "wait":
            self._next()

    def _ask(self, key: str, **more: Any) -> None:
        self.asked[key] += 1
        self.request = self.agent.report(
            event(ev.ACTION_REQUESTED, actionKey=key, name="mail", argsDigest=DIGEST, approval=key.endswith("!"),
                  **more)
        )  # fmt: skip

    def _begin(self, key: str) -> None:
        assert self.request is not None
        permit = self.machine.permit(self.request, "mail", key, self.agent.worker.now)
        if permit is None:
            self.agent.report(event(ev.ACTION_FINISHED, actionKey=key, name="mail", status="not_performed"))
            self._next()
            return
        self.flying = True
        late_ms = self.random.choice([0, 0, 20, 300, 1_200, 2_500, 6_000])
        self.world.time.after(late_ms, lambda: self._effect(key, permit.deadline_ms))

    def _effect(self, key: str, deadline_ms: int) -> None:
        """The call reaches the target even when the process that sent it has been frozen or has died meanwhile."""
        done = self.world.target.call(self.world.time.now_ms, self.offer, key, deadline_ms)
        self.flying = False
        if not self.agent.worker.up:
            return
        status = "ok" if done else "not_performed"
        end = event(ev.ACTION_FINISHED, actionKey=key, name="mail", status=status)
        if self.machine.ended is None:
            self.agent.report(end)
            self._next()
        else:
            self.world.facts["late evidence of an action"] += 1
            self.agent.send(self.machine.late_report(end))


def plan(lineage: str, session_id: str) -> list[list[tuple[str, str]]]:
    """Steps of a body, in one lane or in two: the same in every attempt and in a retry.

    Children are only started downwards (s and m, then c, then d): two sessions whose runs wait for a child that is
    queued behind the other's run would wait for each other, and no deadline counts while a run only waits.
    """
    of_run = Random(lineage)
    steps = [("model", "t1"), ("tool", "c1"), ("act", "a"), ("act", "b!"), ("act", "c"), ("tool", "c2"),
             ("model", "t2"), ("say", "hello"), ("compact", ""), ("model", "t3")]  # fmt: skip
    below = {"s": "c", "m": "c", "c": "d"}.get(session_id[0])
    if below is not None:
        steps.append(("child", f"{below}{of_run.randrange(2)}"))
    chosen = of_run.sample(steps, of_run.randrange(1, 6))
    whole = [(kind, key if kind == "child" else f"{lineage[-4:]}{key}") for kind, key in chosen]
    cut = of_run.choice([0, 0, len(whole) // 2])
    return [whole[:cut], whole[cut:]] if cut else [whole]


class Worker:
    """One worker process. `worker_id` is minted at each start; its inbox is a partition of the signals topic."""

    def __init__(self, world: World, name: str, inbox: int, incarnation: int) -> None:
        self.world, self.name, self.inbox = world, name, inbox
        self.worker_id = f"{name}-{incarnation}"
        self.incarnation = incarnation
        self.clock = LocalClock(world.time, drifts=world.faults)
        self.agents: list[Agent] = []
        self.waiting: list[Offer | View] = []
        self.up = True
        self.still_until_ms = 0
        self._turn_soon = False
        world.time.after(self.world.random.randrange(100), self._beat)

    @property
    def now(self) -> Now:
        return Now(int(self.clock.mono_ms()), self.clock.wall_ms())

    @property
    def still(self) -> bool:
        return self.world.time.now_ms < self.still_until_ms

    def take(self, message: Offer | View) -> None:
        """A record was delivered; one to a frozen process waits for it, in its order."""
        if not self.up:
            return
        self.waiting.append(message)
        if not self.still and not self._turn_soon:
            self._turn_soon = True
            self.world.time.after(self.world.random.choice([1, 3, 15]), self._turn)

    def _beat(self) -> None:
        if self.up:
            if not self.still and self.agents:
                self.world.time.steps["timer fired in a worker"] += 1
                self._turn()
            self.world.time.after(60 + self.world.random.randrange(120), self._beat)

    def _turn(self) -> None:
        self._turn_soon = False
        if not self.up or self.still:
            return
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self.world.time.steps["record delivered to a worker"] += 1
            if isinstance(message, View):
                for agent in list(self.agents):
                    if agent.offer.run_id == message.run_id:
                        agent.on_view(message)
            else:
                self._offered(message)
        for agent in list(self.agents):
            agent.turn()
            if agent.machine.ended is not None and not agent.flying:
                self.agents.remove(agent)

    def _offered(self, offer: Offer) -> None:
        """As the runtime does it: one that is held already is known, and an older generation of the run is over."""
        held = [agent for agent in self.agents if agent.offer.run_id == offer.run_id]
        if any(agent.offer.generation == offer.generation for agent in held):
            self.world.facts["offer delivered again"] += 1
            return
        for agent in held:
            if agent.offer.generation < offer.generation and agent.machine.ended is None:
                agent.machine.give_up("stale_generation")
        if len(self.agents) < RUNS_MAX:
            self.agents.append(Agent(self, offer))
        else:
            self._pass_on(offer)

    def _pass_on(self, offer: Offer) -> None:
        """Without room: the offer goes to another worker, and the log is told that it does not count."""
        self.world.facts["worker without room"] += 1
        if offer.hops < HOPS_MAX:
            other = self.world.random.choice(self.world.workers)
            other.take(msgspec.structs.replace(offer, hops=offer.hops + 1))
        self.world.post(Machine(offer, self.worker_id, self.inbox).release("no_room"))

    def freeze(self, ms: int) -> None:
        self.still_until_ms = max(self.still_until_ms, self.world.time.now_ms + ms)

    def kill(self) -> None:
        self.up = False

    def shut_down(self) -> None:
        """A clean stop: what it holds is released."""
        for agent in self.agents:
            if agent.machine.ended is None:
                self.world.post(agent.machine.release("shutdown"))
        self.up = False
