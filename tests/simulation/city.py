"""A small city in one thread: clients, a log, a processor that crashes, workers that freeze and die, one target.

The core and the worker's machine are the real ones; time, network and processes are simulated on one heap of
(time, ticket, what to do) with one seeded `Random`. Records get the time of the log as they are appended; the processor
decides them in batches and may lose a batch before its commit, after which it decides the same records again. There are
two sessions on the one partition: `s`, and `child`, in which runs of `s` start child runs. Who works is in agents.py,
who asks in crowd.py.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import orjson

from onepen.processors import event_invariants, invariants, timers
from onepen.processors.decide import Decision, Moment, decide
from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.schemas import events as ev
from onepen.schemas.events import Event
from onepen.schemas.inputs import Input
from onepen.schemas.notices import Notice
from onepen.schemas.offers import Offer
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.receipts import Receipt
from onepen.schemas.views import View
from onepen.schemas.worker_records import Report
from onepen.streams.worker.machine import Now
from tests.simulation.agents import Agent, Target
from tests.simulation.crowd import Crowd

START_MS = 1_790_000_000_000
WORKERS = 3
SESSIONS = ("s", "child")
STEPS = (
    ("model", "t1"), ("tool", "c1"), ("act", "a"), ("act", "b!"), ("act", "c"), ("act", "dh"), ("tool", "c2"),
    ("compact", "z"), ("sub", "q"), ("model", "t2"),
)  # fmt: skip


class City:
    """Everything, and the heap that drives it."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.now_ms = START_MS
        self.ticket = 0
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.log: list[tuple[Any, Moment]] = []
        self.next_offset = 0
        self.records: dict[str, dict[bytes, bytes]] = {name: {} for name in SESSIONS}
        self.sessions = {name: Session.load(7, name, self.records[name]) for name in SESSIONS}
        self.rules = Rules.start(Keys("k1", b"secret"))
        self.events: list[Event] = []
        self.framed: dict[str, list[bytes]] = {name: [] for name in SESSIONS}
        self.receipts: list[Receipt] = []
        self.forwards: list[Input | Notice] = []
        self.agents: dict[str, list[Agent]] = {f"w{n}": [] for n in range(WORKERS)}
        self.frozen_until: dict[str, int] = {}
        self.skew: dict[str, int] = {f"w{n}": self.random.randrange(-(10**6), 10**6) for n in range(WORKERS)}
        self.target = Target()
        self.seen: Counter[str] = Counter()
        self.crowd = Crowd(self)
        self.append(self.crowd.policy_record)
        self.every(100, self.processor)
        self.every(250, self.owner_of_timers)
        for name in self.agents:
            self.every(90, lambda name=name: self.worker(name))  # type: ignore[misc]
        self.every(700, self.crowd.client)
        self.every(900, self.crowd.person)
        self.every(7_000, self.crowd.administrator)
        self.every(800, self.crowd.nemesis)

    # -- time ------------------------------------------------------------------------------------------------------

    def after(self, ms: int, what: Callable[[], None]) -> None:
        self.ticket += 1
        heapq.heappush(self.heap, (self.now_ms + ms, self.ticket, what))

    def every(self, ms: int, what: Callable[[], None]) -> None:
        def again() -> None:
            what()
            self.after(ms + self.random.randrange(ms), again)

        self.after(self.random.randrange(ms), again)

    def run(self, for_ms: int, until: Callable[[], bool] = lambda: False) -> None:
        ends_ms = self.now_ms + for_ms
        while self.heap[0][0] <= ends_ms and not until():
            at_ms, _, what = heapq.heappop(self.heap)
            self.now_ms = max(self.now_ms, at_ms)
            what()

    def since_start_ms(self) -> int:
        return self.now_ms - START_MS

    def clock_of(self, worker: str) -> Now:
        return Now(self.now_ms + self.skew[worker], self.now_ms - self.skew[worker] // 2)

    def chance(self, p: float) -> bool:
        return self.faults and self.random.random() < p

    # -- the log and its owner -------------------------------------------------------------------------------------

    def post(self, record: Any) -> None:
        """On its way to the log: in order as a rule, sometimes late, twice or never."""
        if self.chance(0.03):
            self.seen["lost record"] += 1
            return
        self.after(self.random.randrange(800) if self.chance(0.08) else 2, lambda: self.append(record))
        if self.chance(0.05):
            self.after(self.random.randrange(2_000), lambda: self.append(record))

    def append(self, record: Any) -> None:
        self.log.append((record, Moment(0, len(self.log), self.now_ms)))

    def processor(self) -> None:
        if self.chance(0.1):
            return
        batch = self.log[self.next_offset : self.next_offset + self.random.randrange(1, 30)]
        rules, staged, decisions = self.rules, dict(self.sessions), list[Decision]()
        for record, moment in batch:
            if isinstance(record, PolicyRecord):
                rules, _ = admit_policy(rules, record)
                continue
            decision = decide(rules, staged[record.session_id], record, moment)
            staged[record.session_id] = decision.session
            decisions.append(decision)
        if self.chance(0.15) and batch:
            self.seen["batch lost before its commit"] += 1
            self.sessions = {name: Session.load(7, name, self.records[name]) for name in SESSIONS}
            return
        self.rules = rules
        for name in SESSIONS:
            self.sessions[name] = self.written(name, staged[name])
        self.next_offset += len(batch)
        for decision in decisions:
            self.committed(decision)

    def written(self, name: str, session: Session) -> Session:
        """The session behind the commit: kept in memory, or loaded again from what was written."""
        for key, value in session.changes(timers.next_deadline_ms(session)).items():
            if value is None:
                self.records[name].pop(key, None)
            else:
                self.records[name][key] = value
        return session.settled() if self.random.random() < 0.5 else Session.load(7, name, self.records[name])

    def committed(self, decision: Decision) -> None:
        self.events += decision.events
        self.framed[decision.session.session_id] += decision.event_bytes
        self.receipts += decision.receipts
        self.forwards += decision.forwards
        for record in decision.forwards:  # written in the deciding transaction: never lost, never twice
            self.append(record)
        self.count(decision)
        for offer in decision.offers:
            self.after(self.random.randrange(1, 300), lambda offer=offer: self.offered(offer))  # type: ignore[misc]
        for view in decision.views:
            if not self.chance(0.1):
                late_ms = 1_500 if self.chance(0.05) else 60
                self.after(self.random.randrange(1, late_ms), lambda view=view: self.viewed(view))  # type: ignore[misc]

    def count(self, decision: Decision) -> None:
        self.seen.update(one.type for one in decision.events)
        for one in decision.events:
            payload = orjson.loads(one.payload)
            if one.type == ev.RUN_FINISHED:
                self.seen[f"finished {payload['terminalStatus']}{' forced' if payload.get('forced') else ''}"] += 1
            elif one.type == ev.SUBTASK_FINISHED:
                self.seen[f"child {payload['status']}"] += 1
        for receipt in decision.receipts:
            if receipt.kind == "worker":
                self.seen[f"refused {receipt.reason}"] += 1
            elif receipt.kind == "action":
                self.seen["doubt settled after its run"] += 1
            elif receipt.verdict is not None:
                label = self.crowd.labels.get(receipt.input_id or "", f"{receipt.mode} of a parent")
                self.seen[f"{label}: {receipt.verdict}{f' {receipt.reason}' if receipt.reason else ''}"] += 1

    def owner_of_timers(self) -> None:
        for session in list(self.sessions.values()):
            for due in timers.due(session, self.now_ms):
                if not self.chance(0.3):
                    self.append(due.timer)

    # -- workers ---------------------------------------------------------------------------------------------------

    def frozen(self, name: str) -> bool:
        return self.frozen_until.get(name, 0) > self.now_ms

    def offered(self, offer: Offer) -> None:
        if offer.had_owner:
            self.seen[f"taken over by {offer.recovery}"] += 1
        takers = self.random.sample(sorted(self.agents), 2 if self.chance(0.2) else 1)
        for name in takers:
            if not self.frozen(name) and not self.chance(0.15):
                self.agents[name].append(Agent(self, offer, name))

    def viewed(self, view: View) -> None:
        """Views to a frozen process wait for it, in their order."""
        name = view.worker_id
        if name not in self.agents:
            return
        if self.frozen(name):
            self.after(self.frozen_until[name] - self.now_ms, lambda: self.viewed(view))
            return
        for agent in list(self.agents[name]):
            agent.on_view(view)

    def worker(self, name: str) -> None:
        if self.frozen(name):
            return
        for agent in list(self.agents[name]):
            agent.turn()
            if agent.machine.ended is not None and not agent.flying:
                self.agents[name].remove(agent)

    def plan(self, offer: Offer) -> list[tuple[str, str]]:
        """Steps of a run's body: the same in every attempt, and in every retry."""
        of_lineage = Random(offer.lineage)
        steps = of_lineage.sample(STEPS, of_lineage.randrange(1, 7))
        mine = [step for step in steps if step[0] != "sub" or offer.session_id == "s"]
        return [(kind, f"{offer.lineage[-4:]}{key}") for kind, key in mine]

    # -- what must hold --------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Faults off, no more clients: everything has to come to its end."""
        self.faults = False
        self.crowd.going_home = True
        self.frozen_until = {name: min(until, self.now_ms) for name, until in self.frozen_until.items()}

    def at_rest(self) -> bool:
        return self.next_offset == len(self.log) and all(one.head.run is None for one in self.sessions.values())

    def check(self) -> None:
        for name, session in self.sessions.items():
            assert invariants.broken(session, [one for one in self.events if one.session_id == name]) == []
            assert event_invariants.chain_verifies(self.framed[name])
        self.check_inputs()
        self.check_children()
        self.check_writers()
        self.check_effects()

    def check_children(self) -> None:
        """Each child's input was sent once, and its parent was told once what became of it."""
        asked = Counter(one.input_id for one in self.forwards if isinstance(one, Input) and one.mode == "prompt")
        told = Counter(one.child_input_id for one in self.forwards if isinstance(one, Notice))
        assert set(asked.values()) <= {1}, "a child's input was sent twice"
        assert told == asked, f"asked and not told, or told and not asked: {asked - told} {told - asked}"

    def check_inputs(self) -> None:
        inputs = Counter(moment.offset for record, moment in self.log if isinstance(record, Input))
        ours = [receipt for receipt in self.receipts if receipt.kind == "input"]
        assert Counter(r.offset for r in ours if r.verdict) == inputs, "verdicts"
        assert Counter(r.offset for r in ours if r.disposition) == inputs, "dispositions"

    def check_writers(self) -> None:
        """Whatever a report wrote was written by the owner of its generation, and once."""
        owners: dict[tuple[str, int], str] = {}
        written: Counter[tuple[str, int, str, bytes]] = Counter()
        for one in self.events:
            if one.type == ev.RUN_LEASED:
                owners[one.run_id, one.generation] = orjson.loads(one.payload)["workerId"]
            record = self.log[one.cause.offset][0]
            if isinstance(record, Report) and record.run_id == one.run_id:
                assert record.generation == one.generation, "a report wrote under another generation"
                assert record.worker_id == owners.get((one.run_id, one.generation)), "somebody else wrote into the run"
                if one.type in (ev.MODEL_STARTED, ev.TOOL_STARTED, ev.INPUT_APPLIED, ev.TOOL_FINISHED):
                    written[one.run_id, one.generation, one.type, one.payload] += 1
        assert set(written.values()) <= {1}, "a report was decided twice"

    def check_effects(self) -> None:
        """At most one effect per key, each behind its committed permit and before the end of its run; and every
        permit ever given has a recorded end or is named as in doubt."""
        keys = Counter(key for _, _, key in self.target.effects)
        assert all(count == 1 for count in keys.values()), f"an effect took place twice: {keys}"
        payloads = [(one, orjson.loads(one.payload)) for one in self.events]
        for at_ms, run_id, key in self.target.effects:
            mine = [(one, p) for one, p in payloads if one.run_id == run_id]
            permits = [one for one, p in mine if one.type == ev.ACTION_PERMITTED and p["actionKey"] == key]
            assert permits, "an effect without a committed permit"
            assert permits[0].at_ms <= at_ms
            terminal = [(one, p) for one, p in mine if one.type == ev.RUN_FINISHED]
            for one, p in terminal:
                assert at_ms <= one.at_ms, "an effect behind the end of its run"
                ended = any(
                    o.type == ev.ACTION_FINISHED and q["actionKey"] == key and q["status"] == "ok" for o, q in mine
                )
                doubted = any(each["actionKey"] == key for each in p.get("inDoubt", []))
                assert ended or doubted, "an effect that nobody names"
