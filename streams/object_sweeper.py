"""When the sink deletes objects of erased sessions: after it has started, after a batch that erased, and again later.

Rule: deleting never holds up the writing of batches, and no failure of it ends the sink; what is left is tried again.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Final

from onepen.sinks.objects import FileObjects
from onepen.sinks.postgres.object_sweep import Swept
from onepen.streams.settings import Settings
from onepen.streams.writer_thread import WriterThread

__all__ = ["ObjectSweeper"]

log = logging.getLogger("onepen.sink")

RETRY_S: Final = 60.0


class ObjectSweeper:
    """Belongs to one feed and is called from its loop only. Without a configured root it does nothing."""

    def __init__(self, settings: Settings, writer: WriterThread) -> None:
        root = settings.objects_root
        self._objects = None if root is None else FileObjects(root)
        self._writer = writer
        self._next_s: float | None = time.monotonic()
        self._sweep: Future[Swept] | None = None

    def wanted(self) -> None:
        """A batch was committed that leaves objects to delete."""
        self._next_s = time.monotonic()

    def tick(self) -> None:
        """Settle the sweep under way, begin the next one when it is time; never waits."""
        if self._objects is None:
            return
        if self._sweep is not None:
            if not self._sweep.done():
                return
            sweep, self._sweep = self._sweep, None
            self._settle(sweep)
        if self._next_s is not None and time.monotonic() >= self._next_s:
            self._next_s = None
            self._sweep = self._writer.sweep(self._objects)

    def _settle(self, sweep: Future[Swept]) -> None:
        try:
            swept = sweep.result()
        except Exception as error:
            log.warning("objects of erased sessions: %s: %s; trying again", type(error).__name__, error)
            self._later()
            return
        if swept.gone or swept.refused:
            log.info("objects of erased sessions: %d deleted, %d refused", swept.gone, swept.refused)
        if swept.left:
            self._later()

    def _later(self) -> None:
        if self._next_s is None:
            self._next_s = time.monotonic() + RETRY_S
