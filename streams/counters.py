"""What the processor and the sink count about themselves: plain numbers, written by one thread, read by another.

Rule: counting costs the loop an addition. Nothing here locks, formats or knows who reads; a reader may be one step
behind. Reasons are from closed sets (names of errors, reasons of dead letters), never ids.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

TIMES_MS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0)
SIZES: Final = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 50_000.0
)  # fmt: skip
RECOVERY_MS: Final = (100.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 60_000.0, 300_000.0)


class Histogram:
    """Observations counted by bounds; `counts` has one entry more than `bounds`: what lies above all of them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, observations up to it), the last one with the bound infinity."""
        found: list[tuple[float, int]] = []
        count = 0
        for bound, more in zip((*self.bounds, float("inf")), list(self.counts), strict=True):
            count += more
            found.append((bound, count))
        return found


class EngineCounters:
    """Of one engine. `turned_s` is its clock at the last turn of the loop, 0.0 before the first."""

    __slots__ = (
        "assignments",
        "dead_letters",
        "in_flight",
        "outcomes",
        "recovery_ms",
        "restored",
        "revocations",
        "timers",
        "transaction_inputs",
        "transaction_ms",
        "transaction_outputs",
        "turned_s",
    )

    def __init__(self) -> None:
        self.turned_s = 0.0
        self.assignments = 0
        """Assignments, those of nothing included: a standby has one."""
        self.revocations = 0
        self.in_flight = 0
        """Inputs whose transaction has begun and whose fate is not settled."""
        self.outcomes: Counter[str] = Counter()
        self.transaction_ms = Histogram(TIMES_MS)
        self.transaction_inputs = Histogram(SIZES)
        self.transaction_outputs = Histogram(SIZES)
        self.dead_letters: Counter[str] = Counter()
        self.timers = 0
        self.restored = 0
        self.recovery_ms = Histogram(RECOVERY_MS)

    def ended(self, outcome: str, time_ms: float) -> None:
        """The transaction of what is in flight ended, committed or not."""
        self.outcomes[outcome] += 1
        self.transaction_ms.observe(time_ms)
        self.transaction_inputs.observe(self.in_flight)


class LogCounters:
    """Of one log: why transactions were not committed, by the name of the error."""

    __slots__ = ("aborts", "doubts")

    def __init__(self) -> None:
        self.aborts: Counter[str] = Counter()
        self.doubts: Counter[str] = Counter()


class SinkCounters:
    """Of one sink. `turned_s` is the monotonic clock at the last turn of its loop."""

    __slots__ = ("assigned", "batch_ms", "batch_records", "dead_letters", "fenced", "records", "turned_s")

    def __init__(self) -> None:
        self.turned_s = 0.0
        self.records = 0
        """Records that were written, or found written, with their position."""
        self.batch_ms = Histogram(TIMES_MS)
        self.batch_records = Histogram(SIZES)
        self.fenced = 0
        self.dead_letters: Counter[str] = Counter()
        self.assigned = -1
        """Partitions of this member; -1 before the first assignment."""
