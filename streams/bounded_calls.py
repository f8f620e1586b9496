"""Calls of a client library on a thread of their own, each with a limit that holds whatever the library does.

Rule: a call that has not returned in time is left behind with its thread and with everything it uses. Seen with
librdkafka 2.16: `send_offsets_to_transaction` with a limit of 2 s, under way when the only broker was killed, never
returned, though the broker was back after seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Final, TypeVar

__all__ = ["BoundedCalls", "NotReturned", "unless_stopped"]

T = TypeVar("T")

LOOK_S: Final = 0.05
"""How soon a wish to stop is seen beside a call."""


class NotReturned(Exception):
    """The call is still under way; whatever it was made on is not to be used again."""


class BoundedCalls:
    """For one thread, and one call at a time. `close` when it is not needed any more."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, work: Callable[[], T], limit_s: float) -> T:
        """What `work` returns or raises. Raises `NotReturned`."""
        try:
            return self.begin(work).result(limit_s)
        except TimeoutError:
            raise NotReturned(f"a call has not returned within {limit_s:.1f} s") from None

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """What `work` will return or raise."""
        answer: Future[T] = Future()
        self._work.put((answer, work))
        return answer

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            answer, work = item
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)
            del answer, work, item


def unless_stopped(work: Callable[[], T], stop: threading.Event) -> T | None:
    """What `work` returns or raises, or None as soon as `stop` is set: a call under way is left behind then."""
    calls = BoundedCalls("until-stopped")
    try:
        answer = calls.begin(work)
        while not stop.is_set():
            if wait([answer], LOOK_S).done:
                return answer.result()
    finally:
        calls.close()
    return None
