"""When a process that ended without being asked to is started again: one policy for all that look after processes."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Restarts"]

FIRST_BACKOFF_S: Final = 0.2
LAST_BACKOFF_S: Final = 5.0
CRASH_LIMIT: Final = 5
CRASH_WINDOW_S: Final = 60.0


class Restarts:
    """The unasked ends of one process. It is started again after 0.2 s, doubling up to 5 s with each end within a
    minute; the fifth such end is one too many."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque()

    def __len__(self) -> int:
        """Ends within the last minute, as of the last one."""
        return len(self._times_s)

    def ended(self, now_s: float) -> float | None:
        """It ended: the seconds after which to start it again, None to give up. `now_s` is monotonic."""
        times_s = self._times_s
        times_s.append(now_s)
        while times_s[0] < now_s - CRASH_WINDOW_S:
            times_s.popleft()
        if len(times_s) >= CRASH_LIMIT:
            return None
        return min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (len(times_s) - 1))
