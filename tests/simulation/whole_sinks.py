"""Sink processes: the real writer, its coroutines driven by the heap, on the tables of `whole_database`.

A sink reads committed records of the partitions it was given, behind the position that its claim answered. One that
stands still keeps its claims while others take its partitions: when it goes on it has to find itself fenced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from onepen.schemas import codec
from onepen.schemas.errors import Fatal
from onepen.sinks.postgres import connecting, fold, writer
from onepen.sinks.postgres.rows import Placed
from onepen.sinks.postgres.writer import Claimed, Place, Slice, Writer
from tests.simulation.whole_broker import Violation
from tests.simulation.whole_database import Database, Pause, Session

if TYPE_CHECKING:
    from tests.simulation.whole_world import World

BATCH_MAX = 60


async def _sleep(seconds: float) -> None:
    await Pause(int(seconds * 1000))


@contextlib.contextmanager
def simulated_sleep() -> Iterator[None]:
    """The writer's pauses are time of the world."""
    shim = SimpleNamespace(sleep=_sleep)
    with mock.patch.object(writer, "asyncio", shim), mock.patch.object(connecting, "asyncio", shim):
        yield


class TableWriter(Writer):
    """The real writer but for where its connections come from."""

    def __init__(self, database: Database) -> None:
        super().__init__("")
        self.database = database
        self.session: Session | None = None

    async def _connected(self) -> Any:
        if self.session is None or self._connection is None or self.session.is_closed():
            await Pause(1)
            if not self.database.reachable:
                raise ConnectionRefusedError("the database is away")
            self.session = Session(self.database)
            self._connection = self.session  # type: ignore[assignment]
            self._failures = 0
        return self.session


class Sink:
    """One process."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.time = world, name, world.time
        self.writer = TableWriter(world.database)
        self.claims: dict[Place, Claimed] = {}
        self.positions: dict[Place, int] = {}
        self.up = True
        self.still_until_ms = 0
        self._task: Coroutine[Any, Any, None] = self._live()
        self._step(None)

    # -- the process -----------------------------------------------------------------------------------------------

    @property
    def still(self) -> bool:
        return self.time.now_ms < self.still_until_ms

    def freeze(self, ms: int) -> None:
        self.still_until_ms = max(self.still_until_ms, self.time.now_ms + ms)

    def kill(self) -> None:
        self.up = False
        if self.writer.session is not None:
            self.writer.session.terminate()

    def _step(self, pause: Pause | None) -> None:
        if not self.up:
            self._task.close()
            return
        if self.still:
            self.time.after(self.still_until_ms - self.time.now_ms + 1, lambda: self._step(pause))
            return
        if pause is not None and pause.until is not None and not pause.until():
            self.time.after(pause.ms, lambda: self._step(pause))
            return
        try:
            again = self._task.send(None)
        except StopIteration:
            raise AssertionError("a sink ended by itself") from None
        except Fatal as error:
            # The writer stops for what it does not know, and the trigger is such a thing.
            raise (error.__cause__ if isinstance(error.__cause__, Violation) else error) from None
        self.time.after(again.ms, lambda: self._step(again))

    # -- what it does ----------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        while True:
            mine = self.world.places_of(self.name)
            for place in [one for one in self.claims if one not in mine]:
                del self.claims[place]
            for place in mine:
                if place not in self.claims:
                    await self._claim(place)
            slices = self._read()
            if slices:
                await Pause(self.world.random.choice([0, 5, 30]))
                await self._write(slices)
                await Pause(self.world.random.choice([1, 20, 60]))
            else:
                await Pause(80)

    async def _claim(self, place: Place) -> None:
        claimed = await self.writer.claim(place)
        self.claims[place] = claimed
        self.positions[place] = claimed.next_offset

    def _read(self) -> list[Slice]:
        slices = []
        for place, claim in self.claims.items():
            first = self.positions[place]
            found = self.world.broker.visible(*place, first, records_max=BATCH_MAX)
            if not found:
                continue
            records = []
            for offset, entry in found:
                record = self.world.watch.decoded.get((*place, offset)) or codec.decode(entry.value)
                fold.check_record(record)
                records.append(Placed(place[1], offset, record))
            slices.append(Slice(place, claim.epoch, first, found[-1][0] + 1, records))
        return slices

    async def _write(self, slices: list[Slice]) -> None:
        self._unlucky()
        written = await self.writer.write(slices)
        if written.parked:
            raise Violation(f"I20: a partition was parked: {written.parked}")
        for part in slices:
            if part.place in written.done:
                self.time.steps["record delivered to a sink"] += len(part.records)
                self.positions[part.place] = part.next_offset
            elif part.place in written.fenced:
                self.time.facts["sink batch rejected by the epoch fence"] += 1
                self.claims.pop(part.place, None)

    def _unlucky(self) -> None:
        """Faults of the connection, drawn for the next batch."""
        session = self.writer.session
        if session is None or not self.world.faults or not self.world.time.chance(0.03):
            return
        session.fault = self.world.random.choice(["", "die_before_commit", "die_after_commit"])
        if not session.fault:
            session.still_ms = self.world.random.choice([500, 3_000, 12_000])

    def heal(self) -> None:
        self.still_until_ms = min(self.still_until_ms, self.time.now_ms)
        if self.writer.session is not None:
            self.writer.session.fault, self.writer.session.still_ms = "", 0
