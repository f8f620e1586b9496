"""One deadline for a whole operation:

It never moves, never goes below zero, and never makes a caller spin.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepen.streams.deadline import Deadline, DeadlineExpired


class Clock:
    """A clock that goes only when told."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def test_the_time_left_goes_down_with_the_clock_and_stops_at_zero() -> None:
    clock = Clock()
    deadline = Deadline(1_500, clock=clock)
    assert deadline.remaining_ms() == 1_500
    clock.now_s += 1.0
    assert deadline.remaining_ms() == 500
    assert not deadline.expired
    clock.now_s += 0.5
    assert deadline.expired
    assert deadline.remaining_ms() == 0
    clock.now_s += 100
    assert deadline.remaining_ms() == 0
    assert deadline.remaining_s() == 0.0


@pytest.mark.parametrize("timeout_ms", [0, -1])
def test_no_time_at_all_has_expired_at_once(timeout_ms: int) -> None:
    deadline = Deadline(timeout_ms, clock=Clock())
    assert deadline.expired
    assert deadline.remaining_ms() == 0


def test_check_names_what_was_not_done() -> None:
    clock = Clock()
    deadline = Deadline(10, clock=clock)
    deadline.check("waiting for the broker")
    clock.now_s += 1
    with pytest.raises(DeadlineExpired, match=r"waiting for the broker: not done within 10 ms"):
        deadline.check("waiting for the broker")


@given(
    timeout_ms=st.integers(1, 10_000_000),
    start_s=st.floats(0, 1e9),
    passed_s=st.floats(0, 20_000),
)
def test_milliseconds_are_left_exactly_as_long_as_it_has_not_expired(
    timeout_ms: int, start_s: float, passed_s: float
) -> None:
    clock = Clock(start_s)
    deadline = Deadline(timeout_ms, clock=clock)
    clock.now_s = start_s + passed_s
    assert (deadline.remaining_ms() > 0) == (not deadline.expired)
    # A wait of the time that is said to be left ends at or after the deadline (up to the clock's own grain).
    if not deadline.expired:
        clock.now_s += deadline.remaining_ms() / 1000 + 1e-6
        assert deadline.remaining_s() <= 1e-6


def test_the_real_clock_is_monotonic() -> None:
    deadline = Deadline(60_000)
    first = deadline.remaining_ms()
    assert 59_000 < deadline.remaining_ms() <= first <= 60_000
