"""A whole onepen in one thread: clients, broker, processors, workers, sinks, tables, and what goes wrong between them.

The engine with its core, the worker's machine and the sink's writer are the product's own; broker, network, clocks,
processes and database are simulated. Two phases: faults on, where nothing wrong may ever be seen; faults off, where
everything has to come to its end. The same seed is the same world, byte for byte.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from random import Random
from typing import Any

from onepen.processors.rules import Keys
from onepen.processors.session import Session
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Retryable
from onepen.schemas.offers import Offer
from onepen.schemas.topics import Topics, plan
from onepen.schemas.views import View
from onepen.streams.engine_settings import EngineSettings
from tests.simulation.whole_broker import SESSION_TIMEOUT_MS, Broker
from tests.simulation.whole_checks import check_prefix
from tests.simulation.whole_clients import TENANTS, Clients, partition_for
from tests.simulation.whole_database import Database
from tests.simulation.whole_faults import Nemesis
from tests.simulation.whole_processors import Processor
from tests.simulation.whole_sinks import Sink, simulated_sleep
from tests.simulation.whole_time import Timeline
from tests.simulation.whole_watch import Watch
from tests.simulation.whole_workers import Target, Worker

KEY_NAME, KEY = "k1", b"a token key of a simulated world"
SLOTS = ("p0", "p1", "p2")
SESSIONS = [*(f"s{n}" for n in range(8)), *(f"m{n}" for n in range(6)), "c0", "c1", "d0", "d1"]
"""Those with an m are mortal: they may be erased. Children run in c and d."""
LOOK_EVERY_STEPS = 400


class World:
    """`faults`: whether anything goes wrong. `run` plays both phases and checks; see `whole_checks` for the end."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.seed, self.faults = seed, faults
        self.time = Timeline(seed)
        self.random: Random = self.time.random
        self.facts = self.time.facts
        self.partitions = self.random.choice([1, 2, 3, 3, 4])
        self.slots = SLOTS[: self.random.choice([2, 3, 3])]
        self.topics = Topics("whole")
        self.keys = Keys(KEY_NAME, KEY)
        self.sessions = SESSIONS
        self.broker = Broker(plan(self.topics, self.partitions), self.topics, self.time)
        self.broker.on_records = self._records_came
        self.group = self._settings("p0").group
        self.database = Database(self.time)
        self.target = Target()
        self.watch = Watch(self)
        self.fatals: list[str] = []
        self.asking = True
        self.green = False
        self._delivered: dict[tuple[str, int], int] = {}
        self._delivering: set[tuple[str, int]] = set()
        self._looked_at = 0
        self._silent_since: dict[str, tuple[str, int]] = {}
        self.processors: list[Processor] = []
        self.clients = Clients(self)
        for slot in self.slots:
            self.start_processor(slot)
        self.incarnations = 0
        self.workers = [self._worker(index) for index in range(self.random.choice([2, 4, 6]))]
        sinks = self.random.choice([2, 3])
        self.placing = {(topic, p): f"sink{p % sinks}" for topic in (self.topics.events, self.topics.receipts)
                        for p in range(self.partitions)}  # fmt: skip
        self.sinks = [Sink(self, f"sink{n}") for n in range(sinks)]
        self.nemesis = Nemesis(self)
        self.time.every(90, self._ask)
        self.time.every(400, self.clients.answer)
        self.time.every(500, self._supervise)
        self.time.after_each.append(self._after_step)

    def _settings(self, slot: str) -> EngineSettings:
        return EngineSettings("", self.topics.prefix, self.partitions, slot)

    # -- processes -------------------------------------------------------------------------------------------------

    def start_processor(self, slot: str) -> None:
        self.processors.append(Processor(self, slot, self._settings(slot)))

    def _worker(self, index: int) -> Worker:
        self.incarnations += 1
        return Worker(self, f"w{index}", index % self.partitions, self.incarnations)

    def places_of(self, sink: str) -> list[tuple[str, int]]:
        return [place for place, name in self.placing.items() if name == sink]

    def processor_gone(self, gone: Processor) -> None:
        self.processors.remove(gone)
        if not any(one.slot == gone.slot for one in self.processors):
            later_ms = self.random.choice([100, 1_000, 9_000]) if self.faults else 50
            self.time.after(later_ms, lambda: self._restart(gone.slot))

    def _restart(self, slot: str) -> None:
        if not any(one.slot == slot for one in self.processors):
            self.start_processor(slot)

    def note_fatal(self, processor: Processor, error: Fatal) -> None:
        self.fatals.append(f"{self.time.now_ms}: {processor.slot}: {error}")

    def _supervise(self) -> None:
        """Sessions of silent members end; dead workers and sinks are started again."""
        for slot in self.slots:
            member = self.broker.member_of(self.group, slot)
            current = [p for p in self.processors if p.slot == slot and p.log._member_id == member]
            if member is None or any(not p.silent for p in current):
                self._silent_since.pop(slot, None)
                continue
            since = self._silent_since.setdefault(slot, (member, self.time.now_ms))
            if since[0] != member:
                del self._silent_since[slot]
            elif self.time.now_ms - since[1] >= SESSION_TIMEOUT_MS:
                self.facts["group session ended"] += 1
                self.broker.leave(self.group, slot, self.partitions)
        for index, worker in enumerate(self.workers):
            if not worker.up:
                self.workers[index] = self._worker(index)
        for index, sink in enumerate(self.sinks):
            if not sink.up:
                self.sinks[index] = Sink(self, sink.name)

    # -- records on their way --------------------------------------------------------------------------------------

    def post(self, record: Any) -> None:
        """To the inputs topic: in order as a rule, sometimes late, twice or never."""
        key = record.session_id.encode()
        partition = partition_for(record.session_id, self.partitions)
        value = codec.encode(record)

        def land() -> None:
            if self.broker.reachable:
                self.broker.append(self.topics.inputs, partition, key, value)
            else:
                self.time.after(300, land)

        if self.faults:
            roll = self.random.random()
            if roll < 0.02:
                self.facts["record lost on its way"] += 1
                return
            if roll < 0.06:
                self.time.after(self.random.randrange(2_500), land)
            if roll > 0.95:
                self.time.after(self.random.randrange(800), land)
                return
        self.time.after(2, land)

    def _records_came(self, topic: str, partition: int) -> None:
        if topic == self.topics.inputs:
            for processor in self.processors:
                processor.wake(self.random.choice([5, 30, 80]))
        elif topic in (self.topics.events, self.topics.receipts):
            self.watch.dirty(topic, partition)
        elif topic in (self.topics.offers, self.topics.signals) and (topic, partition) not in self._delivering:
            self._delivering.add((topic, partition))
            self.time.after(self.random.choice([1, 4]), lambda: self._deliver(topic, partition))

    def _deliver(self, topic: str, partition: int) -> None:
        self._delivering.discard((topic, partition))
        place = topic, partition
        for offset, entry in self.broker.visible(topic, partition, self._delivered.get(place, 0)):
            self._delivered[place] = offset + 1
            message = codec.decode(entry.value)
            if isinstance(message, Offer):
                takers = self.random.sample(self.workers, 2 if self.faults and self.time.chance(0.1) else 1)
                for worker in takers:
                    worker.take(message)
            else:
                assert isinstance(message, View)
                if self.faults and self.time.chance(0.03):
                    continue
                for worker in self.workers:
                    if worker.inbox == partition and worker.worker_id == message.worker_id:
                        worker.take(message)

    # -- looking ---------------------------------------------------------------------------------------------------

    def owned_session(self, key: tuple[int, str]) -> Session | None:
        """The session as its rightful owner has published it, when that and the visible events are of one moment."""
        partition = partition_for(key[1], self.partitions)
        slot = self.broker.owner_of(self.group, partition)
        events = self.topics.events
        if self.broker.stable_end(events, partition) != self.broker.end(events, partition):
            return None
        try:
            committed = self.broker.committed(self.group, partition)
        except Retryable:
            return None
        for one in self.processors:
            store = one.engine._running.get(partition)
            if one.slot == slot and not one.busy and store is not None and store.next_offset == committed:
                return store.load(key).session
        return None

    def _after_step(self) -> None:
        self.watch.read()
        if self.time.total_steps - self._looked_at >= LOOK_EVERY_STEPS:
            self._looked_at = self.time.total_steps
            self.watch.look_at_sessions(1)
            if self.random.random() < 0.25:
                check_prefix(self)

    def _ask(self) -> None:
        if self.asking:
            self.time.steps["client asked"] += 1
            self.clients.ask()

    # -- the two phases --------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """No more faults, no more questions: all processes live, and everything has to come to its end."""
        self.faults = self.asking = False
        self.broker.reachable = self.database.reachable = True
        for processor in self.processors:
            processor.heal()
        for worker in self.workers:
            worker.still_until_ms = min(worker.still_until_ms, self.time.now_ms)
        for sink in self.sinks:
            sink.heal()

    def undecided(self) -> list[str]:
        """What has not come to its end yet."""
        inputs, found = self.topics.inputs, []
        for p in range(self.partitions):
            last = self.broker.end(inputs, p)
            while last > 0 and not self.broker.visible(inputs, p, last - 1):
                last -= 1
            try:
                committed = self.broker.committed(self.group, p) or 0
            except Retryable as error:
                committed = -1
                found.append(str(error))
            if committed < last:
                found.append(f"partition {p}: {committed} of {last} inputs decided")
        found += [f"{key}: run {one.run_no} is active" for key, one in self.watch.sessions.items() if one.active]
        if len(self.watch.dispositions) != len(self.watch.verdicts):
            found.append("inputs without a disposition")
        for place in self.placing:
            row = self.database.tables["partitions"].get(place)
            if row is None or self.broker.visible(*place, row["next_offset"]):
                found.append(f"the sink is behind at {place}")
        found += [f"{a.worker.worker_id} believes to hold {a.offer.run_id}" for w in self.workers for a in w.agents]
        return found

    @property
    def at_rest(self) -> bool:
        return not self.undecided()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The product's warnings and alarms are expected by the thousand; the sink's pauses are time of the world."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with simulated_sleep():
            yield
    finally:
        logging.disable(before)


__all__ = ["KEY", "KEY_NAME", "TENANTS", "World", "quiet"]
