"""Time of a whole world: one heap of (time, ticket, what to do), one seeded `Random`, clocks that drift and jump.

Rule: nothing here or above waits. Whoever would wait in a process lets the world go on (`pass_time`) and comes back
when that time is over, so a process can stand still in the middle of whatever it does, while all others move.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random

START_MS = 1_790_000_000_000
NESTED_MAX = 3
"""So many processes may stand still inside of a call at once; the next one that would is let on."""


class Timeline:
    """The heap. `steps` counts what happened, by kind; `facts` what has been seen to happen sometimes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = START_MS
        self.steps: Counter[str] = Counter()
        self.facts: Counter[str] = Counter()
        self.after_each: list[Callable[[], None]] = []
        self.nested = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._ticket = 0

    def after(self, ms: int, what: Callable[[], None]) -> None:
        self._ticket += 1
        heapq.heappush(self._heap, (self.now_ms + ms, self._ticket, what))

    def every(self, ms: int, what: Callable[[], None]) -> None:
        def again() -> None:
            what()
            self.after(ms // 2 + self.random.randrange(ms), again)

        self.after(self.random.randrange(ms), again)

    def run_until(self, until_ms: int, enough: Callable[[], bool] = lambda: False) -> None:
        while self._heap and self._heap[0][0] <= until_ms and not enough():
            at_ms, _, what = heapq.heappop(self._heap)
            if at_ms > self.now_ms:
                self.now_ms = at_ms
            what()
            for look in self.after_each:
                look()
        if not enough():
            self.now_ms = max(self.now_ms, until_ms)

    def pass_time(self, ms: int) -> bool:
        """The world goes on for `ms` while the caller stands still. False: not possible now, nothing happened."""
        if self.nested >= NESTED_MAX:
            return False
        self.nested += 1
        try:
            self.run_until(self.now_ms + ms)
        finally:
            self.nested -= 1
        return True

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    @property
    def total_steps(self) -> int:
        return sum(self.steps.values())


class LocalClock:
    """The clocks of one process: a monotonic one that drifts and may jump ahead, a wall clock that is wrong anyway."""

    def __init__(self, time: Timeline, *, drifts: bool) -> None:
        self._time = time
        self._began_ms = time.now_ms
        self._mono_ms = float(time.random.randrange(1_000, 10_000_000))
        self._rate = time.random.uniform(0.97, 1.03) if drifts else 1.0
        self._wall_off_ms = time.random.randrange(-600_000, 600_000) if drifts else 0
        self.cost_ms = 0.0
        """What each look at the clock costs: a process that is short of processor time."""

    def mono_ms(self) -> float:
        passed_ms = self._time.now_ms - self._began_ms
        self._mono_ms += passed_ms * self._rate + self.cost_ms
        self._began_ms = self._time.now_ms
        return self._mono_ms

    def mono_s(self) -> float:
        return self.mono_ms() / 1000

    def wall_ms(self) -> int:
        return self._time.now_ms + self._wall_off_ms

    def jump(self, mono_ms: int, wall_ms: int) -> None:
        """The monotonic clock never goes back; the wall clock may."""
        self._mono_ms += max(0, mono_ms)
        self._wall_off_ms += wall_ms
