"""Several sessions in one world: runs that start child runs in each other's sessions, and everything on its way.

Every session is a `World` (tests/property): the real core, all invariants and the fold after every record. What a
decision sends to another session is delivered in order per session, later or at once; clients, workers and time are
drawn from one seed. In the end each session comes to rest by aborts and timers alone, while the rest is delivered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random

from onepen.processors.decide import Command, Decision
from onepen.schemas.inputs import Input
from onepen.schemas.notices import Notice
from onepen.schemas.statuses import BranchKind
from onepen.schemas.worker_records import Report
from tests.property.world import Finished, World
from tests.unit.processors.stage import report_event

OTHERS_END = (BranchKind.APPROVAL, BranchKind.SUBTASK)
SESSIONS = ("alpha", "beta", "gamma", "delta")


class Member(World):
    """One session of a family."""

    def __init__(self, family: Family, script: bytes, session_id: str) -> None:
        self.family = family
        super().__init__(script, family.seen, session_id)
        self.sub_extras = tuple(f",to={name}" for name in SESSIONS)

    def turns(self) -> Sequence[Callable[[], None]]:
        return (
            self.client, self.holder, self.holder, self.holder, self.holder, self.holder, self.holder, self.person,
            self.time, self.stranger, self.abort, self.repeat, self.retry, self.rarely, self.family.deliver,
            self.family.deliver, self.family.deliver, self.completes,
        )  # fmt: skip

    def completes(self) -> None:
        """The holder ends what it has open, and the run: of a child always, of others sometimes."""
        run = self.stage.session.head.run
        if run is None or not run.owner or (run.parent is None and self.one_of((True, True, True, False))):
            return
        open_now = [branch for _, branch in self.stage.session.branches.items() if branch.kind not in OTHERS_END]
        words = [*(self.end_of(branch) for branch in open_now), "done:completed"]
        events = tuple(report_event(word) for word in words)
        self.step(Report(**self.head(run.owner, run.generation), no=run.report_no + 1, events=events))

    def step(self, command: Command) -> Decision:
        decision = super().step(command)
        for record in decision.forwards:
            self.family.on_the_way[record.session_id].append(record)
        return decision


class Family:
    """Sessions that share a clock and send each other records."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.random = Random(seed)
        self.seen = seen
        self.on_the_way: dict[str, deque[Input | Notice]] = {name: deque() for name in SESSIONS}
        self.members = {name: Member(self, self.random.randbytes(260), name) for name in SESSIONS}

    def deliver(self) -> None:
        """The next record on its way to some session is consumed there."""
        waiting = [name for name, records in self.on_the_way.items() if records]
        if waiting:
            name = self.random.choice(waiting)
            record = self.on_the_way[name].popleft()
            self.seen[f"delivered {type(record).__name__}"] += 1
            self.members[name].step(record)

    def play(self) -> None:
        awake = dict(self.members)
        while awake:
            name = self.random.choice(sorted(awake))
            member = awake[name]
            self._same_time(member)
            try:
                member.one_of(member.turns())()
            except Finished:
                del awake[name]
        self.come_to_rest()
        for member in self.members.values():
            member.check_end()
        self.check_calls()

    def _same_time(self, member: Member) -> None:
        member.stage.now_ms = max(one.stage.now_ms for one in self.members.values())

    def come_to_rest(self) -> None:
        for _ in range(2_000):
            if any(self.on_the_way.values()):
                for member in self.members.values():
                    self._same_time(member)
                self.deliver()
                continue
            active = [one for one in self.members.values() if one.stage.session.head.run is not None]
            if not active:
                return
            member = self.random.choice(active)
            self._same_time(member)
            member.towards_the_end()
        raise AssertionError("a family that does not come to rest")

    def check_calls(self) -> None:
        """Each child's input was asked for once, and what became of it was told once, to whoever asked."""
        asked = Counter(
            (record.parent.session_id, record.parent.call_id, record.input_id)
            for member in self.members.values()
            for record in member.children
            if record.parent is not None
        )
        told = Counter(
            (notice.session_id, notice.call_id, notice.child_input_id)
            for member in self.members.values()
            for notice in member.told
        )
        assert set(asked.values()) <= {1}, "a child's input was sent twice"
        assert told == asked, f"asked and not told, or told and not asked: {asked - told} {told - asked}"
