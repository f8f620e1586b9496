"""Processes that run the real engine: they start, turn, stand still, are killed, are replaced and wake up as zombies.

A `Processor` is one process. Killed, its memory is gone; whoever starts under the same slot is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onepen.processors.rules import Rules
from onepen.processors.session import Session
from onepen.schemas.errors import Fatal, Retryable
from onepen.schemas.inputs import Input
from onepen.streams.batch_size import Limits
from onepen.streams.core import SessionCore
from onepen.streams.engine import Engine
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.log import Output, Record
from onepen.streams.memory import MemoryLog
from tests.simulation.whole_broker import Link, ProcessDied, Violation
from tests.simulation.whole_clients import BUG
from tests.simulation.whole_time import LocalClock

if TYPE_CHECKING:
    from tests.simulation.whole_world import World

IDLE_MS = 100


class CoreWithBug(SessionCore):
    """The real core; one kind of input makes it fail: it is tried again alone and dead-lettered."""

    def decide(
        self, rules: Rules, session: Session, command: Any, record: Record, out: list[Output]
    ) -> tuple[Session, bool]:
        if isinstance(command, Input) and command.content is not None and command.content.data == BUG:
            raise ZeroDivisionError("a bug of the core")
        return super().decide(rules, session, command, record, out)


class Processor:
    """One process under a slot. `up` until it is dead; `still_until_ms`: it gets no processor time until then."""

    def __init__(self, world: World, slot: str, settings: EngineSettings) -> None:
        self.world, self.slot = world, slot
        self.time = world.time
        self.clock = LocalClock(world.time, drifts=world.faults)
        if world.faults:
            self.clock.cost_ms = world.random.choice([0.0, 0.5, 2.0])
        self.link = Link(world.broker, self.stand_still)
        self.log = MemoryLog(self.link, settings, monotonic=self.clock.mono_s)  # type: ignore[arg-type]
        limits = Limits(records=world.random.choice([5, 40, 1_000]), work_ms=world.random.choice([2, 2, 200]))
        core = CoreWithBug(world.keys, settings.topics, settings.partitions)
        self.engine: Engine[Session] = Engine(
            self.log, core, settings, limits=limits, clock=self.clock.mono_s, sleep=self.sleep
        )
        self.up = True
        self.subscribed = False
        self.busy = False
        self.killed = False
        self.still_until_ms = 0
        self.unseen_since_ms: int | None = None
        self._next_ms = 0
        self._wake_no = 0
        self.wake(1)

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def still(self) -> bool:
        return self.busy or self.time.now_ms < self.still_until_ms

    @property
    def silent(self) -> bool:
        """The coordinator hears nothing of it."""
        return not self.up or self.time.now_ms < self.still_until_ms or not self.link.reachable

    def stand_still(self, ms: int) -> None:
        """Inside of a call: the world goes on for `ms`. Killed meanwhile, it dies here."""
        until_ms = self.time.now_ms + ms
        self.still_until_ms = max(self.still_until_ms, until_ms)
        self.time.pass_time(ms)
        self.still_until_ms = min(self.still_until_ms, self.time.now_ms)
        if self.killed:
            raise ProcessDied("killed while it stood still")

    def sleep(self, seconds: float) -> None:
        if not self.time.pass_time(int(seconds * 1000) + 1):
            # Too many processes stand still: at least its own clock has to go on, or it would ask for ever.
            self.clock.jump(int(seconds * 1000) + 1, 0)
        if self.killed:
            raise ProcessDied("killed while it slept")

    def wake(self, after_ms: int) -> None:
        at_ms = self.time.now_ms + after_ms
        if self._next_ms > self.time.now_ms and self._next_ms <= at_ms:
            return
        self._next_ms = at_ms
        self._wake_no += 1
        number = self._wake_no
        self.time.after(after_ms, lambda: self._turn() if number == self._wake_no else None)

    # -- life ------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if not self.up:
            return
        if self.still:
            # A busy one wakes itself when it comes back; the other is asked again when it may run.
            self.wake(max(20, self.still_until_ms - self.time.now_ms))
            return
        self.busy = True
        before = self.engine.decided
        try:
            if not self.subscribed:
                self.log.subscribe(self.engine)
                self.subscribed = True
            self.engine.turn()
        except ProcessDied:
            self._gone("processor killed inside of a call")
        except Retryable:
            if self.subscribed:
                raise
        except Fatal as error:
            self.world.note_fatal(self, error)
            self._gone("processor left by a fatal error")
        finally:
            self.busy = False
        decided = self.engine.decided - before
        self.time.steps["input decided"] += decided
        self.time.facts["batch cut by its time"] += bool(self.log._held)
        if self.up:
            if self.engine._stopped:
                raise Violation(f"{self.slot}: partitions stand still: {self.engine._stopped}")
            self.wake(self.time.random.choice([5, 30, 60]) if decided else IDLE_MS)

    def kill(self) -> None:
        """Its memory is thrown away; what it sent and nobody answered stays under way."""
        if self.busy:
            self.killed = True
        elif self.up:
            self._gone("processor killed between two calls")

    def leave(self) -> bool:
        """A clean stop that gives its partitions away. False while it stands still."""
        if self.still or not self.up:
            return False
        self.log.close(leave=True)
        self._gone("processor left the group")
        return True

    def _gone(self, how: str) -> None:
        self.time.facts[how] += 1
        self.up = False
        self.world.processor_gone(self)

    def freeze(self, ms: int) -> None:
        self.still_until_ms = max(self.still_until_ms, self.time.now_ms + ms)

    def heal(self) -> None:
        self.link.cut = False
        self.link.disarm()
        self.clock.cost_ms = 0.0
        self.still_until_ms = min(self.still_until_ms, self.time.now_ms)
        self.wake(5)
