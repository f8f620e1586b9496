"""When to append which timer: broker time as the owner reckons it, and one heap of deadlines per partition.

Rule: broker time is the largest (record time seen + own monotonic time since), never a wall clock. A timer may be late,
never early: when it is consumed the state judges it again, so one that is repeated, late or foreign is harmless. Offers
and leases wait one full length more, counted by the monotonic clock, so that claims and renewals already in the log are
seen first: since publication (offers), since the takeover, and since the brokers were last found unreachable.

A timer is repeated only when the earlier one must have been consumed (a younger record was) or the partition is idle.
Otherwise a backlog of more than REPEAT_MS would be fed by the repeats of the timers that wait in it. By the same rule
it is known how many are on their way, so that the owner can stop before other inputs wait behind all that is due.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Final

from onepen.streams.core import DueTimer, SessionKey

REPEAT_MS: Final = 5_000
IDLE_MS: Final = 2_000
_SLACK: Final = 1_000


class BrokerClock:
    """Times are ms; `mono_ms` is the owner's monotonic clock."""

    __slots__ = ("_ahead_ms",)

    def __init__(self) -> None:
        self._ahead_ms: float | None = None

    def seen(self, record_ms: int, mono_ms: float) -> None:
        """A record with this broker timestamp exists at this moment."""
        ahead_ms = record_ms - mono_ms
        if record_ms > 0 and (self._ahead_ms is None or ahead_ms > self._ahead_ms):
            self._ahead_ms = ahead_ms

    def now_ms(self, mono_ms: float) -> int:
        """0 until a record was seen: nothing is due before that."""
        return 0 if self._ahead_ms is None else int(self._ahead_ms + mono_ms)


class TimerHeap:
    """The armed deadlines of one partition. A session has one entry: its earliest deadline, or when to look again."""

    def __init__(self) -> None:
        self.clock = BrokerClock()
        self._heap: list[tuple[int, SessionKey]] = []
        self._wakes: dict[SessionKey, int] = {}
        self._published: dict[SessionKey, float] = {}
        self._sent: dict[SessionKey, dict[bytes, tuple[float, int]]] = {}
        """When each was last appended: monotonic time, and broker time as reckoned then."""
        self._awaited: dict[SessionKey, tuple[float, int]] = {}
        """The same of the last timer of each session of which nothing was decided since; the oldest come first."""
        self._taken_over_ms = 0.0
        self._consumed_record_ms = 0
        self._consumed_at_ms = 0.0

    def __len__(self) -> int:
        return len(self._wakes)

    @property
    def consumed_record_ms(self) -> int:
        """Broker timestamp of the newest decided record; 0: none was decided here yet."""
        return self._consumed_record_ms

    def due_count(self, mono_ms: float, count_max: int) -> int:
        """How many sessions have a deadline that has passed, counted up to `count_max`. May be called on any thread:
        what the owner moves meanwhile may be missed."""
        now_ms = self.clock.now_ms(mono_ms)
        count, places, heap = 0, [0], self._heap
        while places and now_ms and count < count_max:
            place = places.pop()
            try:
                wake_ms, key = heap[place]
            except IndexError:
                continue
            if wake_ms <= now_ms:
                # What lies below a deadline that has not passed has not passed either.
                places += (2 * place + 1, 2 * place + 2)
                count += self._wakes.get(key) == wake_ms
        return count

    def taken_over(self, mono_ms: float) -> None:
        """The owner begins now; what it published earlier is no longer known to it."""
        self._taken_over_ms = mono_ms
        self._published.clear()
        self._sent.clear()
        self._awaited.clear()

    def awaited(self, mono_ms: float) -> int:
        """How many sessions have a timer on its way: appended, and not consumed as far as is known."""
        awaited = self._awaited
        while awaited:
            key = next(iter(awaited))
            if self._on_its_way_ms(awaited[key], mono_ms) > 0:
                break
            del awaited[key]
        return len(awaited)

    def consumed(self, record_ms: int, mono_ms: float) -> None:
        """Everything up to a record with this broker timestamp was decided and committed."""
        self.clock.seen(record_ms, mono_ms)
        self._consumed_record_ms = max(self._consumed_record_ms, record_ms)
        self._consumed_at_ms = mono_ms

    def published(self, key: SessionKey, mono_ms: float) -> None:
        """An offer of this session was committed now."""
        self._published[key] = mono_ms

    def arm(self, key: SessionKey, deadline_ms: int) -> None:
        """Something of the session was decided: its earliest deadline is this now; 0 = it has none."""
        self._awaited.pop(key, None)
        if deadline_ms == 0:
            self._wakes.pop(key, None)
            self._published.pop(key, None)
            self._sent.pop(key, None)
        elif self._wakes.get(key) != deadline_ms:
            self._push(key, deadline_ms)

    def _push(self, key: SessionKey, wake_ms: int) -> None:
        self._wakes[key] = wake_ms
        heapq.heappush(self._heap, (wake_ms, key))
        # Entries that were replaced stay until they surface; rebuilt before they outnumber the valid ones.
        if len(self._heap) > 2 * len(self._wakes) + _SLACK:
            self._heap = [(wake, session) for session, wake in self._wakes.items()]
            heapq.heapify(self._heap)

    def next_wake_in_ms(self, mono_ms: float) -> int | None:
        """How long until there may be something to do; None: nothing is armed, or the time is not known."""
        now_ms = self.clock.now_ms(mono_ms)
        if not self._heap or now_ms == 0:
            return None
        return max(0, self._heap[0][0] - now_ms)

    def take(
        self,
        mono_ms: float,
        unreachable_ms: float,
        sessions_max: int,
        due_of: Callable[[SessionKey, int], tuple[Iterable[DueTimer], int]],
    ) -> list[tuple[SessionKey, bytes]]:
        """Timers to append now, of at most `sessions_max` sessions; each comes again after REPEAT_MS until the state
        changes. Sessions that have to wait count as well: to look at one costs more than to append its timer.

        `due_of(session, now_ms)` answers what is due of a session, and its next deadline.
        """
        now_ms = self.clock.now_ms(mono_ms)
        found: list[tuple[SessionKey, bytes]] = []
        since_ms = max(self._taken_over_ms, unreachable_ms)
        looked = 0
        while self._heap and self._heap[0][0] <= now_ms and looked < sessions_max:
            wake_ms, key = heapq.heappop(self._heap)
            if self._wakes.get(key) != wake_ms:
                continue
            looked += 1
            due, next_ms = due_of(key, now_ms)
            wake_ms = now_ms + REPEAT_MS
            for timer in due:
                wait_ms = self._repeat_in_ms(key, timer, mono_ms) or self._length_left_ms(key, timer, mono_ms, since_ms)
                if wait_ms > 0:
                    wake_ms = min(wake_ms, now_ms + int(wait_ms) + 1)
                else:
                    self._remember_sent(key, timer.value, mono_ms, now_ms)
                    found.append((key, timer.value))
            if next_ms == 0:
                self.arm(key, 0)
            else:
                self._push(key, next_ms if next_ms > now_ms else max(wake_ms, now_ms + 1))
        return found

    def _remember_sent(self, key: SessionKey, value: bytes, mono_ms: float, now_ms: int) -> None:
        sent = self._sent.get(key, {})
        recent = {v: when for v, when in sent.items() if when[0] + 10 * REPEAT_MS > mono_ms}
        self._sent[key] = recent | {value: (mono_ms, now_ms)}
        self._awaited.pop(key, None)
        self._awaited[key] = (mono_ms, now_ms)

    def _repeat_in_ms(self, key: SessionKey, timer: DueTimer, mono_ms: float) -> float:
        """How long this timer has to wait because it was appended already; 0 = not at all."""
        sent = self._sent.get(key)
        if sent is None or timer.value not in sent:
            return 0.0
        return self._on_its_way_ms(sent[timer.value], mono_ms)

    def _on_its_way_ms(self, appended: tuple[float, int], mono_ms: float) -> float:
        """How long a timer appended then is taken to be on its way at least; 0: it was consumed, or is lost."""
        at_ms, at_broker_ms = appended
        if at_ms + REPEAT_MS > mono_ms:
            return at_ms + REPEAT_MS - mono_ms
        passed = self._consumed_record_ms > at_broker_ms + IDLE_MS
        idle = mono_ms - self._consumed_at_ms >= IDLE_MS
        return 0.0 if passed or idle else float(REPEAT_MS)

    def _length_left_ms(self, key: SessionKey, timer: DueTimer, mono_ms: float, since_ms: float) -> float:
        """How much of an offer's or lease's additional length is left; not positive: none."""
        if timer.length_ms == 0:
            return 0.0
        if timer.is_offer:
            since_ms = max(since_ms, self._published.get(key, 0.0))
        return since_ms + timer.length_ms - mono_ms
