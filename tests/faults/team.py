"""Slots of one prefix under a feed of countable inputs, each started again when it ends by itself, as supervisors do.

`judge` ends the feed and says from outside whether everything acknowledged was decided once.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from onepen.schemas.topics import Topics
from onepen.streams import topic_admin
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.settings import load_settings
from tests.conformance.worlds import PARTITIONS, delete_topics, stored
from tests.faults.outside import (
    Events,
    Feed,
    Wrong,
    counting_inputs,
    offsets_are,
    once_each,
    standing,
    state_equals_events,
    watch,
)
from tests.faults.process import KEY, Spec
from tests.faults.trial import Processor
from tests.services import fresh_topic_prefix

WORK_S = 90.0
_READ = re.compile(r"partition (\d+): \d+ sessions, (\d+) records read in \d+ ms, next input (\d+)")


class Restored(NamedTuple):
    """A partition was restored by a process; `again`: which had it before, so its state was parked there."""

    slot: str
    partition: int
    records: int
    next_input: int
    again: bool


class Team:
    """See above. Used by one thread; `close` in every case."""

    def __init__(
        self, bootstrap: str, protocol: str, folder: Path, slots: Iterable[str], per_s: int, *, replication: int = 1
    ) -> None:
        folder.mkdir(parents=True)
        self.prefix, self.protocol, self._bootstrap = fresh_topic_prefix(), protocol, bootstrap
        self.topics = Topics(self.prefix)
        self.settings = EngineSettings(bootstrap, self.prefix, PARTITIONS, "s0", protocol)
        topic_admin.apply(
            load_settings(
                bootstrap=bootstrap,
                prefix=self.prefix,
                partitions=PARTITIONS,
                replication=replication,
                slot="s0",
                data_dir=folder,
                token_key=SecretStr(KEY.decode()),
            )
        )
        self.slots = {
            slot: Processor(Spec(bootstrap, self.prefix, PARTITIONS, slot, protocol), folder / f"{slot}.log")
            for slot in slots
        }
        self.running: set[str] = set()
        self.restarted: list[str] = []
        self.events = Events(bootstrap, self.topics)
        self.feed = Feed(bootstrap, counting_inputs(self.topics), per_s)

    def close(self) -> None:
        self.feed.halt()
        for processor in self.slots.values():
            processor.kill()
        self.events.close()
        delete_topics(self._bootstrap, self.topics)

    # -- slots -----------------------------------------------------------------------------------------------------

    def join(self, slot: str) -> None:
        self.slots[slot].start()
        self.running.add(slot)

    def leave(self, slot: str) -> None:
        """In order, giving its partitions away."""
        self.running.discard(slot)
        self.slots[slot].send(signal.SIGHUP)
        if self.slots[slot].ended(30) != 0:
            raise Wrong(f"{slot} did not leave in order: {self.slots[slot].ended()}")

    def kill(self, slot: str) -> None:
        self.running.discard(slot)
        self.slots[slot].kill()

    def freeze(self, slot: str) -> None:
        self.running.discard(slot)
        self.slots[slot].send(signal.SIGSTOP)

    def wake(self, slot: str) -> None:
        self.slots[slot].send(signal.SIGCONT)
        self.running.add(slot)

    def tend(self) -> None:
        """Start again what ended by itself, as a supervisor does. Raises `Wrong` for what a signal ended: a crash."""
        for slot in self.running:
            code = self.slots[slot].ended()
            if code is not None:
                if code < 0:
                    raise Wrong(f"{slot} was ended by signal {-code}: {self.slots[slot].tail()[-600:]}")
                self.restarted.append(slot)
                self.slots[slot].start()

    # -- what is waited for ----------------------------------------------------------------------------------------

    def watch(self, condition: Callable[[], bool], what: str, timeout_s: float = WORK_S) -> None:
        def tended() -> bool:
            self.tend()
            return condition()

        try:
            watch(tended, what, timeout_s)
        except AssertionError as late:
            for slot in self.running:
                self.slots[slot].send(signal.SIGUSR2)
            raise AssertionError(f"{self.protocol}: {late}: {self.standing()}\n{self.tails()}") from late

    def goes_on(self) -> Callable[[], bool]:
        """Whether every partition was decided in since this call, by a slot that runs."""
        before = self.events.read().ends()

        def worked() -> bool:
            now = self.events.read()
            behind = all(end > before[p] for p, end in now.ends().items())
            return behind and all(writer in self.running for writer in now.last_writers())

        return worked

    def shared(self) -> bool:
        """Each slot that runs has partitions, and each partition one slot."""
        owned = [self.slots[slot].log.owns() for slot in self.running]
        return all(owned) and sorted(p for one in owned for p in one) == list(range(PARTITIONS))

    # -- the judgement ---------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Raises `Wrong`."""
        self.feed.end()
        self.watch(lambda: self.events.read().count >= self.feed.sent + PARTITIONS, f"{self.feed.sent} events")
        for slot in sorted(self.running):
            self.slots[slot].end()
        self.running.clear()
        found = dict(self.events.read().found)
        inputs = stored(self._bootstrap, self.topics.inputs, PARTITIONS)
        once_each(dict(found))
        state_equals_events(self._bootstrap, self.topics, dict(found))
        offsets_are(self._bootstrap, self.settings, {p: len(records) for p, records in inputs.items()})
        sent, refused = self.feed.sent + PARTITIONS, self.feed.refused  # with the settings of each partition
        if not sent <= self.events.count <= sent + len(refused):
            raise Wrong(f"{sent} inputs acknowledged, {refused} refused, {self.events.count} events")

    def restored(self) -> list[Restored]:
        """Every time a partition was read, in the order of each log."""
        found: list[Restored] = []
        for slot, processor in self.slots.items():
            had: set[int] = set()
            for _, text in processor.log.lines():
                if text.startswith("processor of slot") and "begins" in text:
                    had.clear()
                elif match := _READ.match(text):
                    partition = int(match[1])
                    found.append(Restored(slot, partition, int(match[2]), int(match[3]), partition in had))
                    had.add(partition)
        return found

    def pauses_ms(self, least_ms: int) -> dict[int, list[int]]:
        """Per partition the times between two decisions that were longer, in their order."""
        return {
            p: [b.at_ms - a.at_ms for a, b in itertools.pairwise(seen) if b.at_ms - a.at_ms > least_ms]
            for p, seen in self.events.found.items()
        }

    def standing(self) -> str:
        return standing(self._bootstrap, self.settings)

    def tails(self) -> str:
        return "\n".join(f"-- {slot}\n{processor.tail()}" for slot, processor in self.slots.items())
