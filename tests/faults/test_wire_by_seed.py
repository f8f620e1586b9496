"""Transactional and group requests delayed, lost, repeated and delivered late by seed, while processes are killed.

Two processors work behind the wire under a steady feed. When the storm is over every input has been decided once. The
same storm with late EndTxn against processors that believe return values must be found out by the same checker.
"""

from __future__ import annotations

import random
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from onepen.schemas.topics import Topics
from onepen.streams.engine_settings import EngineSettings
from tests.conformance.worlds import PARTITIONS, create_topics, delete_topics
from tests.faults import wire as w
from tests.faults.outside import Events, Feed, Wrong, counting_inputs, offsets_are, once_each, state_equals_events
from tests.faults.process import Spec
from tests.faults.trial import Processor
from tests.faults.wire import Fault, Request, Verdict, Wire
from tests.seeds import drawn_seed
from tests.services import fresh_topic_prefix

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SEEDS = 5
STORM_S = 25
CALM_S = 120
TURN_S = 0.1
LATEST_S = 5.0
EVERY_S = 4.0
LATE_S = 0.3
"""An aimed EndTxn is delivered so long after a part of the transaction's records is on its way."""
SLOW_S = (0.8, 1.5)
"""And so long that part takes: the process is killed before it is there."""

ESCAPED = re.compile(r"^(SystemError|\S*KafkaException|NotReturned).*", re.MULTILINE)
"""The end of a traceback of what is to be a doubt, not the end of a process."""

WRITING = {w.PRODUCE, w.INIT_PRODUCER_ID, w.ADD_PARTITIONS, w.ADD_OFFSETS, w.END_TXN, w.TXN_OFFSET_COMMIT}
GROUP = {w.HEARTBEAT, w.JOIN_GROUP, w.SYNC_GROUP, w.OFFSET_FETCH, w.CONSUMER_GROUP_HEARTBEAT}
SELDOM_SENT = {w.INIT_PRODUCER_ID, w.JOIN_GROUP, w.SYNC_GROUP, w.OFFSET_FETCH}
REPEATABLE = WRITING | {w.HEARTBEAT, w.OFFSET_FETCH}
"""A member that joins twice on one connection is no network's doing."""


class Kills:
    """Which process is killed when: any of them about every so many seconds, and whoever is aimed at."""

    def __init__(self, seed: int, every_s: float) -> None:
        self._rng = random.Random(seed + 1)
        self._every_s = every_s
        self._next_s: float | None = None
        self._lock = threading.Lock()
        self._aimed: list[tuple[float, str]] = []

    def _later(self) -> float:
        return time.monotonic() + self._rng.uniform(0.5, 1.5) * self._every_s

    def aim(self, slot: str, at_s: float) -> None:
        with self._lock:
            self._aimed.append((at_s, slot))

    def due(self, slots: list[str]) -> set[str]:
        """The slots to be killed now."""
        now_s = time.monotonic()
        with self._lock:
            aimed, self._aimed = self._aimed, [one for one in self._aimed if one[0] > now_s]
        self._next_s = self._next_s or self._later()
        due = {slot for at_s, slot in aimed if at_s <= now_s}
        if now_s > self._next_s:
            self._next_s = self._later()
            due.add(self._rng.choice(slots))
        return due


class Storm:
    """Everything a network may do; each kind of request is struck now and then, however often it is sent."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._next_s: dict[int, float] = {}
        self.kills = Kills(seed, 6.0)

    def __call__(self, request: Request) -> Verdict | None:
        rng, api = self._rng, request.api
        if api not in WRITING | GROUP:
            return None
        now_s = time.monotonic()
        due_s = self._next_s.setdefault(api, now_s + (0.0 if api in SELDOM_SENT else rng.uniform(0.0, EVERY_S)))
        if now_s < due_s:
            return None
        self._next_s[api] = now_s + rng.uniform(0.3, 1.7) * EVERY_S
        kinds = [Fault.DELAY, Fault.LOSE, Fault.CUT_ANSWER, Fault.HOLD_AND_CUT]
        if api in WRITING:
            kinds += [Fault.SILENCE, Fault.LOSE_ANSWER, Fault.HOLD]  # these clients wait 3 s, the others a minute
        if api in REPEATABLE:
            kinds.append(Fault.TWICE)
        fault = rng.choice(kinds)
        return Verdict(fault, rng.uniform(0.05, 1.5) if fault is Fault.DELAY else rng.uniform(0.1, LATEST_S))


class LateEnds:
    """EndTxn comes late, into transactions that are slow because their offsets or some of their records are.

    They are aimed into the next transaction of the same producer, when some of its records are on the topics and others
    under way; then, now and then, its process is killed. Half of them come at any time if that is sooner.
    """

    def __init__(self, seed: int, wire: Wire) -> None:
        self._rng = random.Random(seed)
        self._wire = wire
        self._aimed: set[int] = set()
        self._produces: Counter[str] = Counter()
        self.kills = Kills(seed, 5.0)

    def __call__(self, request: Request) -> Verdict | None:
        rng, client_id = self._rng, request.client_id
        if request.api == w.INIT_PRODUCER_ID:
            self._produces[client_id] = 0
        if request.api == w.END_TXN:
            self._produces[client_id] = 0
            return Verdict(Fault.HOLD_AND_CUT, rng.choice((0.0, rng.uniform(0.2, 3.0)))) if rng.random() < 0.5 else None
        if request.api == w.PRODUCE:
            self._produces[client_id] += 1
            if self._produces[client_id] > 1 and self._aim(client_id):
                return Verdict(Fault.DELAY, rng.uniform(*SLOW_S))
        if request.api == w.ADD_OFFSETS and rng.random() < 0.3:
            return Verdict(Fault.DELAY, rng.uniform(0.3, 1.5))
        return None

    def _aim(self, client_id: str) -> bool:
        """Deliver what is held of this producer, soon."""
        late = [
            held
            for held in self._wire.held
            if held.request.client_id == client_id and not held.delivered and id(held) not in self._aimed
        ]
        for held in late:
            self._aimed.add(id(held))
            self._wire.deliver_after(held, LATE_S)
        if late and self._rng.random() < 0.5:
            self.kills.aim(client_id.split(".")[1], time.monotonic() + LATE_S + TURN_S)
        return bool(late)


class World:
    """Two processors of the counting core behind the wire; whoever leaves or is killed is started again."""

    def __init__(self, bootstrap: str, wire: Wire, folder: Path, protocol: str, *, guard: bool) -> None:
        self.prefix = fresh_topic_prefix()
        self._bootstrap, self._wire = bootstrap, wire
        self._topics = Topics(self.prefix)
        self._settings = EngineSettings(bootstrap, self.prefix, PARTITIONS, "s0", protocol)
        folder.mkdir(parents=True)
        spec = Spec(wire.bootstrap, self.prefix, PARTITIONS, "s0", protocol, guard=guard)
        self.slots = {
            slot: Processor(msgspec.structs.replace(spec, slot=slot), folder / f"{slot}.log") for slot in ("s0", "s1")
        }
        self.kills = self.starts = 0

    @contextmanager
    def running(self) -> Iterator[tuple[Events, Feed]]:
        create_topics(self._bootstrap, self._topics, PARTITIONS)
        with ExitStack() as stack:
            stack.callback(delete_topics, self._bootstrap, self._topics)
            events = Events(self._bootstrap, self._topics)
            stack.callback(events.close)
            for slot in self.slots.values():
                stack.callback(slot.kill)
                slot.start()
            stack.callback(self._wire.plan, self.prefix, None)
            feed = Feed(self._bootstrap, counting_inputs(self._topics), 200)
            stack.callback(feed.halt)
            yield events, feed

    def storm(self, plan: Storm | LateEnds, events: Events) -> None:
        self._work_until(lambda: events.count > 100, events, CALM_S)
        self._wire.plan(self.prefix, plan)
        end_s = time.monotonic() + STORM_S
        while time.monotonic() < end_s:
            for name in plan.kills.due(list(self.slots)):
                self.slots[name].kill()
                self.kills += 1
            self._turn(events)
        self._wire.plan(self.prefix, None)

    def calm(self, events: Events, feed: Feed) -> None:
        """Everything that was sent is decided once. Raises `Wrong`."""
        feed.end()
        self._work_until(lambda: events.count >= feed.sent, events, CALM_S)
        for slot in self.slots.values():
            slot.end()
            if escaped := ESCAPED.search(slot.log.text()):
                raise Wrong(f"{slot.spec.slot} died of {escaped[0]}")
        found = dict(events.read().found)
        once_each(found)
        state_equals_events(self._bootstrap, self._topics, found)
        offsets_are(self._bootstrap, self._settings, {p: len(one) for p, one in found.items()})

    def _work_until(self, condition: w.Callable[[], bool], events: Events, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, f"{events.count} events after {limit_s} s"
            self._turn(events)

    def _turn(self, events: Events) -> None:
        for slot in self.slots.values():
            if slot.ended(TURN_S / 2) is not None:
                slot.start()
                self.starts += 1
            if stopped := slot.log.said("ALARM partition_stopped"):
                raise Wrong(f"a partition was stopped at {stopped}: {slot.tail()[-400:]}")
        once_each(dict(events.read().found))


def weather(bootstrap: str, wire: Wire, folder: Path, seed: int, *, late: bool, guard: bool) -> Wrong | None:
    """One seed; what the checker found. Anything else that fails is raised with the ends of the logs."""
    world = World(bootstrap, wire, folder, ("classic", "consumer")[seed % 2], guard=guard)
    plan = LateEnds(seed, wire) if late else Storm(seed)
    try:
        with world.running() as (events, feed):
            world.storm(plan, events)
            world.calm(events, feed)
            print(f"seed {seed}: {feed.sent} inputs, {world.kills} kills, {world.starts} starts", flush=True)
    except Wrong as wrong:
        print(f"seed {seed}: red: {str(wrong)[:200]}", flush=True)
        return wrong
    except Exception:
        tails = "\n".join(slot.tail() for slot in world.slots.values())
        raise AssertionError(f"seed {seed}: {traceback.format_exc()}\n{tails}") from None
    return None


def all_seeds(wired: tuple[str, Wire], folder: Path, *, late: bool, guard: bool) -> list[Wrong | None]:
    first = drawn_seed()
    wired[1].done = Counter()
    with ThreadPoolExecutor(SEEDS) as pool:
        work = [
            pool.submit(weather, *wired, folder / str(seed), seed, late=late, guard=guard)
            for seed in range(first, first + SEEDS)
        ]
        found = [one.result() for one in work]
    print({f"{api} {fault}": times for (api, fault), times in sorted(wired[1].done.items())})
    return found


def test_a_storm_on_every_kind_of_request(wired: tuple[str, Wire], tmp_path: Path) -> None:
    assert all_seeds(wired, tmp_path, late=False, guard=True) == [None] * SEEDS
    struck = {api for api, _ in wired[1].done}
    assert struck >= {w.NAMES[api] for api in WRITING | GROUP}, struck


def test_late_ends(wired: tuple[str, Wire], tmp_path: Path) -> None:
    assert all_seeds(wired, tmp_path, late=True, guard=True) == [None] * SEEDS


def test_late_ends_are_found_where_return_values_are_believed(wired: tuple[str, Wire], tmp_path: Path) -> None:
    assert any(all_seeds(wired, tmp_path, late=True, guard=False)), "the checker has not seen one of them"
