"""One combination of point and action: two processors under load, the first one is struck, and what it left is judged.

A trial has a prefix of its own, so many run at the same time on one broker. `run` raises what is wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec
from pydantic import SecretStr

from onepen.schemas import codec
from onepen.schemas.receipts import Receipt
from onepen.schemas.topics import Topics
from onepen.streams import failpoints, topic_admin
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import SESSION_TIMEOUT_MS, TRANSACTION_TIMEOUT_MS
from onepen.streams.settings import Settings, load_settings
from onepen.streams.verifying import Target, verify
from tests.conformance.worlds import PARTITIONS, create_topics, delete_topics, stored
from tests.faults.outside import (
    Events,
    Feed,
    Wrong,
    counting_inputs,
    offsets_are,
    once_each,
    prompts,
    standing,
    state_equals_events,
    watch,
)
from tests.faults.process import KEY, Spec, run
from tests.faults.slot_log import SlotLog
from tests.faults.wire import END_TXN, Fault, Verdict, Wire, once
from tests.services import fresh_topic_prefix

# Forked from a process that has imported everything and runs no thread: a start costs no import.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.faults.process"])
START_S = 90
FREEZE_S = (SESSION_TIMEOUT_MS + TRANSACTION_TIMEOUT_MS) / 1000 + 0.5
COUNTING, SESSION = "counting", "session"
HITS = {
    failpoints.IN_DOUBT: 1,
    failpoints.AFTER_PRODUCE: 3,
    failpoints.IN_RECOVERY: 2,
    failpoints.IN_ASSIGNED: 1,
    failpoints.IN_REVOKED: 1,
}
LATER_HIT = 10


class Combination(msgspec.Struct, frozen=True):
    point: str
    action: str
    protocol: str
    core: str = COUNTING

    @property
    def comes_back(self) -> bool:
        """Whether what was killed is started again at once: half of the combinations, in each protocol the others."""
        return (failpoints.POINTS.index(self.point) + (self.protocol == "classic")) % 2 == 0

    def __str__(self) -> str:
        return f"{self.point}-{self.action}-{self.protocol}-{self.core}"


class Processor:
    """A slot: one process at a time, all of its log in one file."""

    def __init__(self, spec: Spec, path: Path) -> None:
        self.spec, self.log = spec, SlotLog(path)
        self._process: ForkServerProcess | None = None
        self.kept = 0

    def start(self, *, armed: bool = False, bare: bool = False) -> None:
        self._armed = armed
        spec = msgspec.structs.replace(self.spec, armed=armed, point="" if bare else self.spec.point)
        self._process = FORKS.Process(target=run, args=(spec, self.log.path))
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        self._armed = self._armed or number == signal.SIGUSR1
        os.kill(self._process.pid, number)

    def ended(self, timeout_s: float = 0.0) -> int | None:
        """Its exit code (minus the signal that ended it); None while it runs."""
        assert self._process is not None
        self._process.join(timeout_s)
        return self._process.exitcode

    def keep(self) -> None:
        """Start it again, as a supervisor does, when it was fenced before it was struck: a broker that stands still for
        seconds may put a member out of the group, and a late heartbeat of its former self is taken for a rival's."""
        if self._process is None or self.ended() is None or self.log.said("STRUCK") is not None:
            return
        assert self.was_fenced(), f"it ended by itself: {self.ended()}"
        self.kept += 1
        self.start(armed=self._armed)

    def was_fenced(self) -> bool:
        """Whether its last life ended because the brokers took it for another's."""
        return "Static consumer fenced" in self.log.text().rpartition(" begins on ")[2]

    def tell(self) -> None:
        """Its threads and where it stands, into its log."""
        if self._process is not None and self.ended() is None:
            self.send(signal.SIGUSR2)
            self.ended(1.0)

    def end(self) -> None:
        """Stopped in order; killed when it does not end."""
        if self.ended() is None:
            self.send(signal.SIGTERM)
        if self.ended(20) is None:
            self.kill()

    def kill(self) -> None:
        if self._process is not None and self.ended() is None:
            self.send(signal.SIGKILL)
            self.ended(10)

    def tail(self) -> str:
        return self.log.tail(60)


class Trial:
    """See `run`."""

    def __init__(self, bootstrap: str, combination: Combination, folder: Path, wire: Wire | None = None) -> None:
        """With a `wire` the processors are behind it, and when the point is armed an answer to EndTxn is lost."""
        self.combination, self._wire = combination, wire
        self._bootstrap, self._folder = bootstrap, folder
        self._prefix = fresh_topic_prefix()
        self._topics = Topics(self._prefix)
        spec = Spec(
            wire.bootstrap if wire else bootstrap,
            self._prefix,
            PARTITIONS,
            "s0",
            combination.protocol,
            core=combination.core,
            point=combination.point,
            action=combination.action,
            hit=HITS.get(combination.point, LATER_HIT),
        )
        self._engine_settings = EngineSettings(bootstrap, self._prefix, PARTITIONS, "s0", combination.protocol)
        folder.mkdir(parents=True)
        self._struck = Processor(spec, folder / "s0.log")
        self._other = Processor(msgspec.structs.replace(spec, slot="s1", point=""), folder / "s1.log")
        self.note = ""

    def run(self) -> None:
        with self._world() as (events, feed):
            self._strike(events)
            handed_over = getattr(self, f"_after_{self.combination.action}")(events)
            feed.end()
            self._wait_for_all(events, feed)
            self._other.end()
            self._struck.end()
            self._judge(events, feed)
            if kept := self._struck.kept + self._other.kept:
                self.note += f" {kept} fenced before the strike"
            if handed_over is not None:
                self._judge_silence(events, *handed_over)

    @contextmanager
    def _world(self) -> Iterator[tuple[Events, Feed]]:
        if self.combination.core == COUNTING:
            create_topics(self._bootstrap, self._topics, PARTITIONS)
        else:
            topic_admin.apply(self._settings())
        with ExitStack() as stack:
            stack.callback(delete_topics, self._bootstrap, self._topics)
            events = Events(self._bootstrap, self._topics)
            stack.callback(events.close)
            stack.callback(self._struck.kill)
            stack.callback(self._other.kill)
            counting = self.combination.core == COUNTING
            # New sessions all the time: a full queue refuses without an event.
            send = counting_inputs(self._topics) if counting else prompts(self._topics, lambda n: f"s-{n // 3}")
            feed = Feed(self._bootstrap, send, 200 if counting else 100)
            stack.callback(feed.halt)
            yield events, feed

    # -- the strike ------------------------------------------------------------------------------------------------

    def _strike(self, events: Events) -> None:
        """Both work, the first one meets its point."""
        point = self.combination.point
        first, second = self._struck, self._other
        if point in (failpoints.IN_ASSIGNED, failpoints.IN_RECOVERY):
            first, second = second, first
        first.start(armed=point == failpoints.IN_REVOKED)
        self._watch(lambda: events.read().count > 50, "first decisions")
        second.start(armed=second is self._struck)
        if point not in (failpoints.IN_ASSIGNED, failpoints.IN_RECOVERY, failpoints.IN_REVOKED):
            self._watch(lambda: bool(first.log.owns() and second.log.owns()), "both own partitions")
            before = events.read().count
            self._watch(lambda: events.read().count > before + 20, "decisions of both")
            self._struck.send(signal.SIGUSR1)
            if self._wire is not None:
                self._wire.plan(self._prefix, once(END_TXN, Verdict(Fault.LOSE_ANSWER), "s0"))
        self._watch(lambda: self._struck.log.said("STRUCK") is not None, "the strike")
        self._at_s = self._struck.log.said("STRUCK") or 0.0

    def _watch(self, condition: Callable[[], bool], what: str) -> None:
        def kept() -> bool:
            self._struck.keep()
            self._other.keep()
            return condition()

        try:
            watch(kept, what, START_S)
        except AssertionError as late:
            self._struck.tell()
            self._other.tell()
            where = standing(self._bootstrap, self._engine_settings) if self.combination.core == COUNTING else ""
            raise AssertionError(f"{late}: {where}") from late

    def _after_kill(self, events: Events) -> None:
        assert self._struck.ended(20) == -signal.SIGKILL
        self._again(events, comes_back=self.combination.comes_back)

    def _after_exception(self, events: Events) -> None:
        assert self._struck.ended(40) == 1, "an exception of the loop ends the process"
        self._again(events, comes_back=True)

    def _again(self, events: Events, *, comes_back: bool) -> None:
        if comes_back:
            self._struck.start(bare=True)
        before = events.read().ends()
        # Every partition goes on, whoever owns it now.
        self._watch(lambda: all(events.read().ends()[p] > before[p] for p in before), "work in every partition")

    def _after_stop(self, events: Events) -> tuple[dict[int, int], float]:
        """Frozen until another member owns and decides everything, and longer than session and transaction."""
        self._watch(
            lambda: (
                time.time() - self._at_s > FREEZE_S
                and self._other.log.owns() == set(range(PARTITIONS))
                and events.read().last_writers() == ["s1"] * PARTITIONS
            ),
            "the other one owns every partition",
        )
        later = self._other.log.lines(self._at_s)
        taken = [f"{text[:11]} after {at - self._at_s:.1f} s" for at, text in later if "read in" in text]
        assert self._struck.log.said("RESUMED") is None
        ends, woken_s = events.read().ends(), time.time()
        self.note = f"frozen {woken_s - self._at_s:.1f} s; meanwhile at s1: {'; '.join(taken) or 'it owned all before'}"
        self._struck.send(signal.SIGCONT)
        self._watch(self._is_back, "the frozen one owns partitions again")
        before = events.read().ends()
        self._watch(lambda: all(events.read().ends()[p] > before[p] for p in before), "work in every partition")
        return ends, woken_s

    def _is_back(self) -> bool:
        """It goes on by itself, or leaves and is started again, as a supervisor does."""
        if self._struck.ended() is not None:
            self._struck.start(bare=True)
        return any(text.startswith("partition ") and "read in" in text for _, text in self._since_resumed())

    def _since_resumed(self) -> list[tuple[float, str]]:
        resumed_s = self._struck.log.said("RESUMED")
        return [] if resumed_s is None else list(self._struck.log.lines(resumed_s))

    # -- the judgement ---------------------------------------------------------------------------------------------

    def _wait_for_all(self, events: Events, feed: Feed) -> None:
        if self.combination.core == COUNTING:
            self._watch(lambda: events.read().count >= feed.sent, f"{feed.sent} events")
            return
        inputs = self._inputs()

        def all_committed() -> bool:
            try:
                offsets_are(self._bootstrap, self._engine_settings, inputs)
            except Wrong:
                inputs.update(self._inputs())  # hints come in all the time
                return False
            return True

        self._watch(all_committed, "all inputs")

    def _inputs(self) -> dict[int, int]:
        return {p: len(records) for p, records in stored(self._bootstrap, self._topics.inputs, PARTITIONS).items()}

    def _judge(self, events: Events, feed: Feed) -> None:
        if self.combination.core == COUNTING:
            found = events.read().found
            once_each(dict(found))
            state_equals_events(self._bootstrap, self._topics, dict(found))
            offsets_are(self._bootstrap, self._engine_settings, self._inputs())
            if events.count != feed.sent:
                raise Wrong(f"{feed.sent} inputs, {events.count} events")
            return
        self._judge_sessions(feed.sent)

    def _judge_silence(self, events: Events, ends: dict[int, int], woken_s: float) -> None:
        """What the frozen one wrote behind the work of the other belongs to partitions that it was given again."""
        again: dict[int, float] = {}
        for at, text in self._since_resumed():
            if match := re.match(r"partition (\d+): .* read in", text):
                again.setdefault(int(match[1]), at)
        for partition, found in events.found.items():
            for one in found:
                given_s = again.get(partition, float("inf")) - 0.002
                if one.slot == "s0" and one.offset >= ends[partition] and one.at_ms / 1000 < given_s:
                    raise Wrong(f"partition {partition}: the frozen one wrote {one} when woken at {woken_s}")

    # -- the real core ---------------------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        return load_settings(
            bootstrap=self._bootstrap,
            prefix=self._prefix,
            partitions=PARTITIONS,
            slot="s0",
            group_protocol=self.combination.protocol,
            data_dir=self._folder,
            token_key_name="k",
            token_key=SecretStr(KEY.decode()),
        )

    def _judge_sessions(self, sent: int) -> None:
        """One verdict per input, and everything as a re-execution of the inputs says."""
        verdicts: dict[str, int] = {}
        for records in stored(self._bootstrap, self._topics.receipts, PARTITIONS).values():
            for record in records:
                receipt = codec.decode_as(Receipt, record.value)
                if receipt.kind == "input" and receipt.verdict and receipt.input_id:
                    verdicts[receipt.input_id] = verdicts.get(receipt.input_id, 0) + 1
        if len(verdicts) != sent or set(verdicts.values()) != {1}:
            raise Wrong(f"{sent} inputs, {len(verdicts)} with a verdict, most {max(verdicts.values(), default=0)}")
        findings, _ = verify(self._settings(), Target())
        if not findings.clean or not findings.events:
            raise Wrong(f"verify: {findings.mismatches[:3]} {findings.chain_errors[:3]}")


def tails(trial: Trial) -> str:
    return "\n".join(f"-- {one.spec.slot}\n{one.tail()}" for one in (trial._struck, trial._other))
