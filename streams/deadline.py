"""One deadline for a whole operation, made once and handed down.

Rule: an operation that consists of several waits creates one `Deadline` and every wait takes what is left of
it, so that the sum never exceeds what the caller allowed. The clock is monotonic and can be replaced by
tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Deadline", "DeadlineExpired"]


class DeadlineExpired(TimeoutError):
    """The time that the caller allowed for an operation has passed."""


class Deadline:
    """A fixed point on a monotonic clock. It never moves once made."""

    __slots__ = ("_clock", "_end_s", "timeout_ms")

    def __init__(self, timeout_ms: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds and never goes backwards.

        A `timeout_ms` of 0 or less has expired at once.
        """
        self.timeout_ms = timeout_ms
        self._clock = clock
        self._end_s = clock() + timeout_ms / 1000

    def remaining_ms(self) -> int:
        """Whole milliseconds left, never negative. More than 0 exactly as long as `expired` is false."""
        left_s = self._end_s - self._clock()
        # Rounded up: a wait of the returned time ends at or after the deadline, so that no caller spins
        # through the last millisecond with waits of 0.
        return 0 if left_s <= 0 else -int(-left_s * 1000 // 1)

    def remaining_s(self) -> float:
        """Seconds left, never negative, for the calls that take seconds."""
        return max(0.0, self._end_s - self._clock())

    @property
    def expired(self) -> bool:
        """True from the moment the time is over, and for ever after."""
        return self._clock() >= self._end_s

    def check(self, what: str) -> None:
        """Raise `DeadlineExpired` naming `what` when the time is over."""
        if self.expired:
            raise DeadlineExpired(f"{what}: not done within {self.timeout_ms} ms")

    def __repr__(self) -> str:
        return f"Deadline({self.remaining_ms()} of {self.timeout_ms} ms left)"
