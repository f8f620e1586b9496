"""The committed events as the commands read them: of one session's partition or of all, from the start or from now on.

Rule: reading is from the log, never from tables; what is skipped is skipped by key or id, nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.schemas.errors import Retryable
from onepen.schemas.ids import output_key
from onepen.schemas.partitioning import partition_of

if TYPE_CHECKING:
    from onepen.schemas.events import Event
    from onepen.streams.settings import Settings

POLL_S = 0.2
STANDS_STILL_S = 30.0
"""Longer than a broker takes to come back; what is read of other sessions counts as going on."""


class EventLog:
    """A reader of the events topic. A context manager, for one thread."""

    def __init__(self, settings: Settings, *, session_id: str | None, from_start: bool) -> None:
        """Stands at its place when this returns. `session_id` None: all sessions, of every tenant."""
        from onepen.streams.log_tail import LogTail
        from onepen.streams.outside_reader import end_offsets

        topic = settings.topics.events
        ends = end_offsets(settings, topic)
        partitions = sorted(ends)
        if session_id is not None:
            partitions = [partition_of(session_id.encode(), len(ends))]
        self._key = output_key(settings.tenant_id, session_id) if session_id is not None else None
        self._tail = LogTail(settings)
        try:
            self._tail.open({(topic, p): None if from_start else ends[p] for p in partitions})
        except BaseException:
            self._tail.close()
            raise

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._tail.close()

    @property
    def caught_up(self) -> bool:
        """True once everything that stood in the log at the beginning was read."""
        return self._tail.caught_up

    def poll(self) -> Event | None:
        """The next event, None when none came in a moment (or one of another session)."""
        from onepen.schemas.codec import decode_as
        from onepen.schemas.events import Event

        message = self._tail.poll(POLL_S)
        if message is None or (self._key is not None and message.key() != self._key):
            return None
        return decode_as(Event, message.value())

    def present(self) -> Iterator[Event]:
        """What stands in the log now, and then no more. Raises `Retryable` when it cannot be read on."""
        at, moved_s = 0, time.monotonic()
        while not self.caught_up:
            if (event := self.poll()) is not None:
                yield event  # for as long as the reader of the output likes
            if (now_at := sum(self._tail.next_offsets.values())) != at:
                at, moved_s = now_at, time.monotonic()
            elif time.monotonic() - moved_s > STANDS_STILL_S:
                raise Retryable(f"the log is not read on for {STANDS_STILL_S:.0f} s; is a broker away?")

    def endless(self) -> Iterator[Event]:
        """What stands in the log and what comes; ends by KeyboardInterrupt only."""
        while True:
            if (event := self.poll()) is not None:
                yield event


def session_of_run(settings: Settings, run_id: str) -> str | None:
    """The session of a run by the tables, None when they do not know it or cannot be asked.

    Only saves the reading of the other partitions: what is shown comes from the log.
    """
    from onepen.cli.tables import Tables

    if settings.dsn is None and settings.dsn_file is None:
        return None
    try:
        run = Tables(settings).run(run_id)
    except Exception:  # whatever keeps the tables from answering: the log is read as a whole then
        return None
    return None if run is None else str(run["sessionId"])


def no_such_run(run_id: str) -> Failure:
    """The end of a command whose run is nowhere in the log."""
    return Failure(f"no run {run_id} in the log", ExitCode.NOT_FOUND)
