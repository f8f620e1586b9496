"""Where history from the tables ends and the log begins, for one run or one session.

Rule: the offset is read before the events. What the tables have is a prefix of the session; the log is tailed from
the offset, and repeats at the seam are dropped by (run_no, seq). Without tables the seam is the log's beginning.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from onepen.schemas import events as ev
from onepen.schemas.events import Event
from onepen.schemas.partitioning import partition_of
from onepen.streams.deadline import Deadline
from onepen.streams.settings import Settings
from onepen.streams.snapshots import NoSnapshot, Snapshots

__all__ = ["Cursor", "Seam", "run_seam", "session_seam"]

log = logging.getLogger("onepen.subscriber")

Cursor = tuple[int, int]
"""(run_no, seq) of the last event the reader has; (0, 0) before the first."""
BEGINNING: Final[Cursor] = (0, 0)


@dataclass(frozen=True, slots=True)
class Seam:
    """`events` come from the tables, then the log from `starts` on (no entry: its beginning).

    `last` is the last event known from the tables, also one before the cursor; `judged`: the cursor's event is there;
    `before` is the event just before the first of `events`; `partition`: the only one where more can be;
    `complete`: the run has ended and the log is not needed.
    """

    events: tuple[Event, ...] = ()
    starts: dict[int, int] = field(default_factory=dict)
    last: Event | None = None
    before: Event | None = None
    partition: int | None = None
    judged: bool = False
    complete: bool = False


def session_seam(
    settings: Settings, partition: int, session_id: str, at: Cursor, deadline: Deadline | None = None
) -> Seam:
    """The seam of a session for a reader that has everything up to the cursor `at`. Raises `DeadlineExpired`."""
    try:
        snapshots = Snapshots(settings, deadline)
    except NoSnapshot as error:
        log.debug("history comes from the log: %s", error)
        return Seam()
    try:
        return _session(snapshots, settings.tenant_id, partition, session_id, at)
    except NoSnapshot as error:
        log.warning("history comes from the log: %s", error)
        return Seam()
    finally:
        snapshots.close()


def _session(snapshots: Snapshots, tenant_id: int, partition: int, session_id: str, at: Cursor) -> Seam:
    start = snapshots.next_offset(partition)
    before: Event | None = None
    if at > BEGINNING and at[1] > 0:
        page = snapshots.session_page(tenant_id, session_id, (at[0], at[1] - 1), 1)
        if page and (page[0].run_no, page[0].seq) == at:
            before = page[0]
        elif not page:
            # Either nobody has that event, or the tables lag behind the reader: the log knows.
            return Seam()
    events = tuple(snapshots.session_events(tenant_id, session_id, at))
    return Seam(
        events=events,
        starts={partition: start} if start else {},
        last=events[-1] if events else before,
        before=before,
        judged=before is not None,
    )


def run_seam(
    settings: Settings, partitions: list[int], run_id: str, after_seq: int, deadline: Deadline | None = None
) -> Seam:
    """The seam of a run; `partitions` are those that it may be on. Raises `DeadlineExpired`."""
    try:
        snapshots = Snapshots(settings, deadline)
    except NoSnapshot as error:
        log.debug("history comes from the log: %s", error)
        return Seam()
    try:
        return _run(snapshots, settings, partitions, run_id, after_seq)
    except NoSnapshot as error:
        log.warning("history comes from the log: %s", error)
        return Seam()
    finally:
        snapshots.close()


def _run(snapshots: Snapshots, settings: Settings, partitions: list[int], run_id: str, after_seq: int) -> Seam:
    starts = {partition: snapshots.next_offset(partition) for partition in partitions}
    starts = {partition: offset for partition, offset in starts.items() if offset}
    session_id = snapshots.session_of(settings.tenant_id, run_id)
    if session_id is None:
        return Seam(starts=starts)  # whatever there is of it stands behind the offsets
    # All its events, so that the seam can be checked and a cursor beyond the end is seen.
    known = tuple(snapshots.run_events(settings.tenant_id, run_id, 0))
    own = partitions[0] if len(partitions) == 1 else partition_of(session_id.encode(), len(partitions))
    return Seam(
        partition=own,
        events=tuple(event for event in known if event.seq > after_seq),
        starts=starts,
        last=known[-1] if known else None,
        complete=bool(known) and known[-1].type == ev.RUN_FINISHED,
    )
