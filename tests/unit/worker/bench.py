"""The worker's SDK against the pure core, without Kafka: records are decided in the same event loop, views come back.

A test holds records back (`bench.hold = True`), moves the worker's clocks (`bench.skew_ms`) and the log's
(`bench.log_ms`) by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from onepen.processors import timers
from onepen.processors.decide import Moment, decide
from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.schemas.edge import parse_request
from onepen.schemas.events import Event
from onepen.schemas.inputs import Input
from onepen.schemas.notices import Notice
from onepen.schemas.offers import Offer
from onepen.schemas.policies import Policy, PolicyRecord, policy_body
from onepen.schemas.receipts import Receipt
from onepen.schemas.timers import Timer
from onepen.schemas.worker_records import WorkerRecord
from onepen.streams.objects import FileStore
from onepen.streams.worker.cancel_token import CancelToken
from onepen.streams.worker.contents import Contents
from onepen.streams.worker.context import RunContext
from onepen.streams.worker.execution import Execution
from onepen.streams.worker.machine import Machine, Now
from onepen.streams.worker.session import HeldRun, read_clocks

POLICY = Policy(version=1, lease_ms=3_000, renew_ms=1_000, permit_ms=1_500, cancel_ms=4_000)
START_MS = 1_800_000_000_000

Body = Callable[[RunContext], Awaitable[Any]]


class Bench:
    """The sessions of one tenant in memory and the workers that hold their runs. Session `s` is the one shown."""

    def __init__(self) -> None:
        record = PolicyRecord(tenant_id=1, version=1, body=policy_body(POLICY))
        self.rules, _ = admit_policy(Rules.start(Keys("k", b"x" * 32)), record)
        self.sessions: dict[str, Session] = {}
        self.events: list[Event] = []
        self.receipts: list[Receipt] = []
        self.offers: list[Offer] = []
        self.helds: list[HeldRun] = []
        self.sent: list[WorkerRecord] = []
        self.waiting: list[WorkerRecord] = []
        self.hold = False
        self.log_ms = START_MS
        self.skew_ms = 0
        self.store: FileStore | None = None
        self.erasable = False
        self._offset = 0

    @property
    def session(self) -> Session:
        return self.session_named("s")

    def session_named(self, session_id: str) -> Session:
        return self.sessions.get(session_id) or Session.load(1, session_id, {})

    def clocks(self) -> Now:
        now = read_clocks()
        return Now(now.mono_ms + self.skew_ms, now.wall_ms + self.skew_ms)

    def put(self, command: Input | WorkerRecord | Timer | Notice) -> None:
        """Decide a record at the end of the log; views reach their worker, what it sends to other sessions follows."""
        self._offset += 1
        name = command.session_id
        decision = decide(self.rules, self.session_named(name), command, Moment(0, self._offset, self.log_ms))
        self.sessions[name] = decision.session
        self.events += decision.events
        self.receipts += decision.receipts
        self.offers += decision.offers
        for view in decision.views:
            for held in self.helds:
                held.on_view(view)
        for record in decision.forwards:
            self.put(record)

    def ask(self, mode: str = "prompt", **fields: Any) -> Input:
        request = parse_request({"mode": mode, "session_id": "s", "issued_at_ms": self.log_ms, **fields})
        record = request.to_input(tenant_id=1, user_id=1)
        self.put(record)
        return record

    def send(self, record: WorkerRecord) -> None:
        self.sent.append(record)
        if self.hold:
            self.waiting.append(record)
        else:
            asyncio.get_running_loop().call_soon(self.put, record)

    def let_go(self) -> None:
        """Decide what was held back, in its order."""
        self.hold = False
        waiting, self.waiting = self.waiting, []
        for record in waiting:
            self.put(record)

    def take(
        self, body: Body, *, optimistic: bool = True, worker_id: str = "w", session_id: str | None = None
    ) -> Running:
        """A worker takes the newest offer (of a session) and runs its body."""
        offer = next(o for o in reversed(self.offers) if session_id in (None, o.session_id))
        machine = Machine(offer, worker_id, 0, optimistic=optimistic)
        held = HeldRun(machine, self.send, asyncio.get_running_loop(), self.clocks)
        held.claim()
        return self.execute(held, body)

    def execute(self, held: HeldRun, body: Body) -> Running:
        """Run the body of a run that was claimed."""
        self.helds.append(held)
        cancelled = CancelToken()
        context = RunContext(held, cancelled, self, Contents(1, self.store, erasable=self.erasable))
        execution = Execution(held, body, context, cancelled)
        return Running(held, execution, asyncio.ensure_future(execution.run()))

    def before(self, offer: Offer, timeout_ms: int) -> list[Event]:
        return list(self.events)

    def event(self, offer: Offer, run_id: str, seq: int, timeout_ms: int) -> Event:
        return next(e for e in self.events if (e.run_id, e.seq) == (run_id, seq))

    def last(self, offer: Offer, session_id: str, run_id: str, timeout_ms: int) -> Event:
        return next(e for e in reversed(self.events) if (e.session_id, e.run_id) == (session_id, run_id))

    def fire(self, kind: str, after_ms: int, session_id: str = "s") -> None:
        """Let time pass and the timer of that kind be consumed."""
        self.log_ms += after_ms
        due = timers.due(self.session_named(session_id), self.log_ms)
        self.put(next(found.timer for found in due if found.timer.kind == kind))

    def types(self, session_id: str = "s") -> list[str]:
        return [event.type for event in self.events if event.session_id == session_id]

    def named(self, event_type: str, session_id: str = "s") -> list[dict[str, Any]]:
        return [
            orjson.loads(event.payload)
            for event in self.events
            if (event.type, event.session_id) == (event_type, session_id)
        ]

    def ends(self, session_id: str = "s") -> list[dict[str, Any]]:
        return self.named("run.finished", session_id)

    def end(self, session_id: str = "s") -> dict[str, Any]:
        (found,) = self.ends(session_id)
        return found


class Running:
    """A run that a worker of the bench executes."""

    def __init__(self, held: HeldRun, execution: Execution, task: asyncio.Future[None]) -> None:
        self.held = held
        self.execution = execution
        self.task = task

    async def over(self, timeout_s: float = 5) -> None:
        await asyncio.wait_for(asyncio.shield(self.task), timeout_s)


async def until(look: Callable[[], Any], timeout_s: float = 5) -> None:
    """Let the loop turn until `look` is true."""
    async with asyncio.timeout(timeout_s):
        while not look():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.001)


def played(scene: Callable[[Bench], Awaitable[None]]) -> Bench:
    """Run a scene on a bench; answers the bench for a last look."""

    async def go() -> Bench:
        bench = Bench()
        await scene(bench)
        return bench

    return asyncio.run(go())
