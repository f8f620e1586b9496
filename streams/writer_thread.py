"""An event loop in a thread of its own with the PostgreSQL writer in it: the bridge from the consumer loop.

Rule: calls answer futures at once. Writes are executed one after the other, in the order of the calls; so are claims,
beside them on a connection of their own: a partition that somebody else holds keeps no other one from being written.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, TypeVar

from onepen.sinks.objects import Objects
from onepen.sinks.postgres.object_sweep import Swept, sweep_objects
from onepen.sinks.postgres.writer import Claimed, Place, Slice, Writer, Written

__all__ = ["WriterThread"]

log = logging.getLogger("onepen.sink")

T = TypeVar("T")
CLOSE_TIMEOUT_S: Final = 5.0


class WriterThread:
    """A context manager: the thread lives as long as the block; what is unfinished at its end is rolled back."""

    def __init__(self, dsn: str, *, application_name: str) -> None:
        self._dsn = dsn
        self._writer = Writer(dsn, application_name=application_name, outage=_say)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="onepen-sink-writer", daemon=True)
        self._claimer = Writer(dsn, application_name=application_name, outage=_say)
        self._turns: dict[Writer, asyncio.Lock] = {}

    def __enter__(self) -> WriterThread:
        self._turns = {self._writer: asyncio.Lock(), self._claimer: asyncio.Lock()}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ending.result(CLOSE_TIMEOUT_S)
        except Exception as failure:
            log.warning("the writer did not end in order: %s", failure)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def claim(self, places: Sequence[Place]) -> Future[list[Claimed]]:
        """Become the owner of the partitions, but for those that a batch holds; see `Writer.claim_free`.

        The future waits as long as the database is away.
        """
        return self._submit(self._claimer, self._claimer.claim_free(places))

    def write(self, slices: Sequence[Slice]) -> Future[Written]:
        """Write a batch; the future waits as long as the database is away."""
        return self._submit(self._writer, self._writer.write(slices))

    def sweep(self, objects: Objects) -> Future[Swept]:
        """Delete objects of erased sessions, beside the writing of batches and on a connection of its own."""
        return asyncio.run_coroutine_threadsafe(sweep_objects(self._dsn, objects), self._loop)

    def _submit(self, writer: Writer, work: Coroutine[Any, Any, T]) -> Future[T]:
        async def in_turn() -> T:
            async with self._turns[writer]:
                return await work

        return asyncio.run_coroutine_threadsafe(in_turn(), self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await asyncio.gather(self._writer.close(), self._claimer.close())


def _say(sentence: str | None) -> None:
    if sentence is None:
        log.info("PostgreSQL is back")
    else:
        log.warning("%s", sentence)
