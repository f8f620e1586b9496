"""The cancellation of a run, as bodies and tools see it: a flag that any thread may read, a wait for the loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class CancelToken:
    """Set once, when the run has to stop (a cancel, a lost lease, a shutdown); `reason` says why."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._event = asyncio.Event()
        self.reason: str | None = None
        self.abandoned = False
        """The run was given back and the process is to end: what still works for it is not waited for any more."""

    def is_set(self) -> bool:
        """True from the moment the run has to stop. Any thread may ask; tools in threads should, now and then."""
        return self._flag.is_set()

    async def wait(self) -> None:
        """Wait (in the event loop) until the run has to stop."""
        await self._event.wait()

    def wait_in_thread(self, timeout_s: float) -> bool:
        """Wait in a tool's thread; True when the run has to stop. Serves as a sleep that a cancel ends."""
        return self._flag.wait(timeout_s)

    def set(self, reason: str) -> None:
        """Called by the worker, in the event loop."""
        if not self._flag.is_set():
            self.reason = reason
            self._flag.set()
            self._event.set()


_token: contextvars.ContextVar[CancelToken] = contextvars.ContextVar("onepen_cancellation")


def cancellation() -> CancelToken:
    """The token of the run whose body or tool calls this. Raises `LookupError` outside of a run."""
    return _token.get()


def enter(token: CancelToken) -> None:
    """Make `token` the one of this context; tasks and tool threads made from here inherit it."""
    _token.set(token)


def thread_of(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call in a thread of its own, with this context; the future is completed in this loop.

    Daemon threads: a tool that never returns must not keep a stopped process alive.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def done(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        try:
            setter, value = future.set_result, context.run(call)
        except StopIteration as error:  # a future cannot carry it
            setter, value = future.set_exception, RuntimeError(f"StopIteration: {error}")  # type: ignore[assignment]
        except BaseException as error:
            setter, value = future.set_exception, error  # type: ignore[assignment]
        try:
            loop.call_soon_threadsafe(done, setter, value)
        except RuntimeError:
            return  # the loop is closed: nobody asks any more

    threading.Thread(target=run, name="onepen-tool", daemon=True).start()
    return future


async def to_its_end(future: asyncio.Future[T]) -> bool:
    """Wait until `future` is done even when this task is cancelled meanwhile; True when it was.

    Raises `CancelledError` when it is cancelled after its run was abandoned: a thread that never returns would keep the
    loop, and so the process, for ever.
    """
    token = _token.get(None)
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            if token is not None and token.abandoned:
                raise
            cancelled = True
    return cancelled
