"""History from PostgreSQL for readers that are not asynchronous: pages of events, and how far the tables reach.

Rule: `next_offset` is read before the events, so whoever tails the log from there misses nothing. The tables are a
shortcut and never the authority: when they cannot be read, everything comes from the log.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from onepen.schemas.errors import OnepenError
from onepen.schemas.events import Event
from onepen.streams.deadline import Deadline
from onepen.streams.settings import Settings

if TYPE_CHECKING:
    from onepen.sinks.postgres.history import Pool

__all__ = ["NoSnapshot", "Snapshots"]

log = logging.getLogger("onepen.subscriber")

T = TypeVar("T")

QUERY_TIMEOUT_S: Final = 60
CLOSE_TIMEOUT_S: Final = 5


class NoSnapshot(OnepenError):
    """The tables cannot be read; take everything from the log."""


class Snapshots:
    """A few reads over one small pool; close it. Works whether or not the caller's thread has an event loop."""

    def __init__(self, settings: Settings, deadline: Deadline | None = None) -> None:
        """Raises `NoSnapshot` when no database is configured or none answers.

        What is not read before `deadline` raises `DeadlineExpired`, in every call.
        """
        if settings.dsn is None and settings.dsn_file is None:
            raise NoSnapshot("no database is configured")
        self._topic = settings.topics.events
        self._deadline = deadline
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="onepen-snapshot", daemon=True)
        self._thread.start()
        self._pool: Pool | None = None
        try:
            self._pool = self._call(lambda: _open(settings.require_dsn()))
        except BaseException:
            self.close()
            raise

    def next_offset(self, partition: int) -> int:
        """Everything of that partition of the events topic below this offset is in the tables."""
        from onepen.sinks.postgres import history

        return self._call(lambda: history.next_offset(self._opened(), self._topic, partition))

    def session_of(self, tenant_id: int, run_id: str) -> str | None:
        """The session of a run, None when the tables do not have it."""
        from onepen.sinks.postgres import readers

        found = self._call(lambda: readers.get_run(self._opened(), tenant_id, run_id))
        return None if found is None else found.run.session_id

    def session_page(self, tenant_id: int, session_id: str, after: tuple[int, int], limit: int) -> list[Event]:
        """At most `limit` events of the session behind `after`, in order."""
        from onepen.sinks.postgres import history

        return self._call(lambda: history.session_events(self._opened(), tenant_id, session_id, after, limit=limit))

    def session_events(self, tenant_id: int, session_id: str, after: tuple[int, int]) -> Iterator[Event]:
        """All events of the session behind `after` that the tables have, page by page."""
        from onepen.sinks.postgres.history import PAGE_MAX

        while True:
            page = self.session_page(tenant_id, session_id, after, PAGE_MAX)
            yield from page
            if len(page) < PAGE_MAX:
                return
            after = (page[-1].run_no, page[-1].seq)

    def run_events(self, tenant_id: int, run_id: str, after_seq: int) -> Iterator[Event]:
        """All events of the run behind `after_seq` that the tables have, page by page."""
        from onepen.sinks.postgres import history

        while True:
            seq = after_seq
            page = self._call(lambda s=seq: history.run_events(self._opened(), tenant_id, run_id, s))  # type: ignore[misc]
            yield from page
            if len(page) < history.PAGE_MAX:
                return
            after_seq = page[-1].seq

    def close(self) -> None:
        """End pool, loop and thread; what does not end before the deadline ends by itself."""
        pool, self._pool = self._pool, None
        if pool is not None:
            asyncio.run_coroutine_threadsafe(_close(pool), self._loop)
        self._loop.call_soon_threadsafe(self._stop_when_quiet)
        self._thread.join(self._left_s(2 * CLOSE_TIMEOUT_S))

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _left_s(self, limit_s: float) -> float:
        return limit_s if self._deadline is None else min(limit_s, self._deadline.remaining_s())

    def _stop_when_quiet(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        if not tasks:
            self._loop.stop()
            return
        self._loop.call_later(0.02, self._stop_when_quiet)

    def _opened(self) -> Pool:
        if self._pool is None:
            raise NoSnapshot("the snapshot is closed")
        return self._pool

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        asked = asyncio.run_coroutine_threadsafe(make(), self._loop)
        try:
            return asked.result(self._left_s(QUERY_TIMEOUT_S))
        except OnepenError:
            raise
        except Exception as error:
            asked.cancel()
            if self._deadline is not None:
                self._deadline.check("history from the tables")
            # Whatever the reason is: the log has everything. The dsn is never shown.
            raise NoSnapshot(f"the tables cannot be read ({type(error).__name__})") from error


async def _open(dsn: str) -> Pool:
    from onepen.sinks.postgres.history import open_pool

    return await open_pool(dsn, application_name="onepen-subscriber", size_max=1)


async def _close(pool: Pool) -> None:
    try:
        await asyncio.wait_for(pool.close(), CLOSE_TIMEOUT_S)
    except TimeoutError:
        pool.terminate()
