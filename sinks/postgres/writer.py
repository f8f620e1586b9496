"""The writer: batches with their positions in one database transaction, fenced by the epoch of each partition.

Rule 1: the position in the database is the only one. `claim` raises the epoch and answers it; from then on nobody
with an earlier epoch changes anything.
Rule 2: a batch whose outcome is unknown is written again: its first statement finds the position that it expects,
or the new one, which means that it had been written.
Rule 3: loss of the connection, restarts and failovers are waited out; refused rows park their own partition only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import asyncpg

from onepen.schemas.errors import Fatal, OnepenError
from onepen.sinks.postgres import migrate
from onepen.sinks.postgres.connecting import Connection, Consequence, connect, consequence, discard
from onepen.sinks.postgres.queries import sql
from onepen.sinks.postgres.rows import Changes, Placed
from onepen.sinks.postgres.store import TwoActiveRuns, store

__all__ = ["Claimed", "Place", "Slice", "Writer", "Written"]

log = logging.getLogger(__name__)

Place = tuple[str, int]
"""(topic, partition)"""

LOCK_WAIT_S: Final = 1.0
"""So long a round of claims waits for batches that are being committed."""
LOCK_WAIT_LEAST_S: Final = 0.02
FROZEN_S: Final = 20.0
"""An owner that is silent in the middle of its batch, which is older than this, is ended by the next owner."""
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim gives: write under this epoch, read from this offset."""

    place: Place
    epoch: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Records of one partition from `first_offset` (the stored position) up to `next_offset`, in log order.

    There may be none (all were dead-lettered): the position moves all the same.
    """

    place: Place
    epoch: int
    first_offset: int
    next_offset: int
    records: Sequence[Placed]


@dataclass(slots=True)
class Written:
    """Outcome per partition. `fenced`: another owner, claim again if it is still yours. `parked`: needs a person.

    `objects`: how many objects of erased sessions wait to be deleted because of this batch (see `object_sweep`).
    """

    done: set[Place] = field(default_factory=set)
    fenced: set[Place] = field(default_factory=set)
    parked: dict[Place, str] = field(default_factory=dict)
    events: int = 0
    objects: int = 0

    def _add(self, other: Written) -> None:
        self.done |= other.done
        self.fenced |= other.fenced
        self.parked |= other.parked
        self.events += other.events
        self.objects += other.objects


class _PositionMoved(OnepenError):
    """The conditional update of the positions did not find all of its rows."""


class Writer:
    """One connection, used by one task at a time. Every call waits until the database has answered it."""

    def __init__(
        self,
        dsn: str,
        *,
        application_name: str = "onepen-sink",
        outage: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        """`outage` gets a sentence when the database is lost, and None when it is back."""
        self._dsn = dsn
        self._application_name = application_name
        self._outage = outage
        self._connection: Connection | None = None
        self._failures = 0

    async def claim(self, place: Place) -> Claimed:
        """Become the owner of a partition. Waits for a batch of the former owner that is being committed."""
        while True:
            for claimed in await self.claim_free([place]):
                return claimed

    async def claim_free(self, places: Sequence[Place]) -> list[Claimed]:
        """Become the owner of partitions, but for those that a batch of the former owner holds: ask for them again.

        A former owner that is frozen or lost inside of its batch is ended after FROZEN_S.
        """
        claimed = []
        until_s = time.monotonic() + LOCK_WAIT_S
        for place in places:
            one = await self._claim_within(place, max(LOCK_WAIT_LEAST_S, until_s - time.monotonic()))
            if one is not None:
                claimed.append(one)
        return claimed

    async def _claim_within(self, place: Place, wait_s: float) -> Claimed | None:
        while True:
            try:
                connection = await self._connected()
                try:
                    async with connection.transaction():
                        await connection.execute(sql("wait_for_locks"), f"{wait_s * 1_000:.0f}ms")
                        row = await connection.fetchrow(sql("claim_partition"), *place)
                except asyncpg.LockNotAvailableError:
                    await _end_frozen(connection, place)
                    return None
                assert row is not None, "an upsert answers its row"
                return Claimed(place, row["epoch"], row["next_offset"])
            except Exception as error:
                await self._wait_out(error)

    async def write(self, slices: Sequence[Slice]) -> Written:
        """Write a batch in one transaction. Raises `Fatal` only when a person has to look at the database itself."""
        written = Written()
        waiting = list(slices)
        while waiting:
            try:
                connection = await self._connected()
                try:
                    changes = await _write_all(connection, waiting)
                    written.events += len(changes.events)
                    written.objects += len(changes.objects)
                    written.done.update(part.place for part in waiting)
                    return written
                except _PositionMoved:
                    waiting = await _still_waiting(connection, waiting, written)
            except TwoActiveRuns as error:
                waiting = await self._isolate(waiting, written, await self._both_named(error))
            except Exception as error:
                if consequence(error) is Consequence.DATA:
                    waiting = await self._isolate(waiting, written, f"{type(error).__name__}: {error}")
                else:
                    await self._wait_out(error)
        return written

    async def close(self) -> None:
        """Give the connection back; nothing is pending in it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=2)
            except Exception as error:
                log.debug("closing the connection: %s", error)
                await discard(connection)

    async def _isolate(self, waiting: list[Slice], written: Written, reason: str) -> list[Slice]:
        """Refused rows: find their partition by writing each partition for itself, and park that one."""
        if len(waiting) == 1:
            place = waiting[0].place
            log.error("ALARM: partition %s/%d is parked at offset %d: %s", *place, waiting[0].first_offset, reason)
            written.parked[place] = reason
        else:
            for part in waiting:
                written._add(await self.write([part]))
        return []

    async def _both_named(self, error: TwoActiveRuns) -> str:
        """The alarm names the run that holds the place and those that want it."""
        named = list(error.entering)
        try:
            connection = await self._connected()
            rows = await connection.fetch(sql("active_run_of_session"), error.session_id)
            named = sorted({row["run_key"] for row in rows} | set(named))
        except Exception as failure:
            await self._wait_out(failure)
        return f"{error}: both active: {' and '.join(named)}"

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            connection = await connect(self._dsn, application_name=self._application_name)
            try:
                lacking = await migrate.pending(connection)
                if lacking:
                    raise Fatal(f"the database lacks migrations ({', '.join(lacking)}); to mend: onepen migrate")
                await connection.execute(sql("limits_of_a_writer"))
                await connection.execute(sql("staging_table"))
            except BaseException:
                await discard(connection)
                raise
            self._connection = connection
            if self._failures:
                self._failures = 0
                self._outage(None)
        return self._connection

    async def _wait_out(self, error: Exception) -> None:
        """Discard the connection and pause, longer each time; or raise when waiting does not help."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await discard(connection)
        if consequence(error) is not Consequence.PASSES:
            if isinstance(error, OnepenError):
                raise error
            raise Fatal(f"PostgreSQL: {type(error).__name__}: {error}") from error
        if self._failures == 0:
            self._outage(f"PostgreSQL: {type(error).__name__}: {error}; waiting for it")
        pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 10))
        self._failures += 1
        await asyncio.sleep(pause_s)


async def _end_frozen(connection: Connection, place: Place) -> None:
    for row in await connection.fetch(sql("end_frozen_owner"), *place, FROZEN_S):
        log.warning("%s/%d: ended the frozen session %d of %s", *place, row["pid"], row["application_name"])


async def _write_all(connection: Connection, slices: Sequence[Slice]) -> Changes:
    """All or nothing. Answers what was changed; raises `_PositionMoved` when a position is not as expected."""
    ordered = sorted(slices, key=lambda part: part.place)
    async with connection.transaction():
        moved = await connection.fetch(
            sql("advance_partitions"),
            [part.place[0] for part in ordered],
            [part.place[1] for part in ordered],
            [part.epoch for part in ordered],
            [part.first_offset for part in ordered],
            [part.next_offset for part in ordered],
        )
        if len(moved) != len(ordered):
            raise _PositionMoved
        records = [record for part in ordered for record in part.records]
        return await store(connection, records)


async def _still_waiting(connection: Connection, slices: Sequence[Slice], written: Written) -> list[Slice]:
    """Judge each partition by its stored row: written by an earlier try, lost to another owner, or still to do."""
    waiting = []
    for part in slices:
        row = await connection.fetchrow(sql("read_partition"), *part.place)
        if row is not None and row["epoch"] == part.epoch and row["next_offset"] == part.next_offset:
            written.done.add(part.place)
        elif row is not None and row["epoch"] == part.epoch and row["next_offset"] == part.first_offset:
            waiting.append(part)
        else:
            written.fenced.add(part.place)
    return waiting
