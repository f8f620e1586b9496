"""A call of a library that does not return is left behind; all others return or raise as they would."""

import threading

import pytest

from onepen.streams.bounded_calls import BoundedCalls, NotReturned


def test_what_is_returned_and_raised_comes_back() -> None:
    calls = BoundedCalls("t")
    assert calls.call(lambda: 7, 10) == 7
    with pytest.raises(KeyError, match="gone"):
        calls.call(lambda: {}["gone"], 10)
    assert calls.call(threading.current_thread, 10) is not threading.current_thread()
    calls.close()


def test_what_does_not_return_is_left_behind() -> None:
    forever = threading.Event()
    calls = BoundedCalls("hung")
    with pytest.raises(NotReturned):
        calls.call(lambda: forever.wait(60), 0.05)
    calls.close()
    forever.set()
