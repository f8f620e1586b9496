"""Doubt near a commit, on real Kafka: an EndTxn that comes late, and one whose answer is lost.

librdkafka repeats EndTxn silently, after a time-out and after a disconnect; `commit_transaction` succeeds with the
second copy. The first one may still arrive, and it says which producer it is from but not which transaction it ends: it
commits what that producer has open by then, also half of a transaction whose process dies. Without the guard the
checker must see that; with it the broker must refuse the late copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from onepen.schemas.errors import Fatal
from onepen.streams import failpoints, kafka_transactions
from onepen.streams.engine import Engine
from onepen.streams.kafka import KafkaLog
from onepen.streams.kafka_config import DoubtLogger
from tests.conformance.counting import Counter, CountingCore
from tests.conformance.worlds import PARTITIONS, KafkaWorld, OutsideReader
from tests.faults.outside import (
    Events,
    Feed,
    Wrong,
    counting_inputs,
    offsets_are,
    once_each,
    state_equals_events,
    watch,
)
from tests.faults.process import Struck
from tests.faults.wire import END_TXN, INIT_PRODUCER_ID, Fault, Plan, Request, Verdict, Wire, once

pytestmark = pytest.mark.timeout(180)

WAIT_S = 60
TAKEN, FENCED = 0, frozenset({47, 90})
"""Error codes of EndTxn: carried out; INVALID_PRODUCER_EPOCH, PRODUCER_FENCED."""


class Scene:
    """One engine on a thread, behind the wire, under a steady feed; started again when it leaves."""

    def __init__(self, bootstrap: str, wire: Wire, prefix: str) -> None:
        self.bootstrap, self.wire, self.prefix = bootstrap, wire, prefix
        self.world = KafkaWorld(bootstrap, prefix, "classic", members_bootstrap=wire.bootstrap)
        self.events = Events(bootstrap, self.world.topics)
        self.feed = Feed(bootstrap, counting_inputs(self.world.topics), 400)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        settings = self.world.settings("s0")
        while not self._stop.is_set():
            log = KafkaLog(settings)
            engine: Engine[Counter] = Engine(log, CountingCore(self.world.topics), settings)
            try:
                engine.run(self._stop)
            except (Fatal, Struck) as error:
                print(f"left: {error!r}")
            finally:
                log.close(leave=self._stop.is_set())

    def works(self, more: int = 40) -> None:
        before = self.events.read().count
        watch(lambda: self.events.read().count > before + more, "decisions", WAIT_S)

    def judge(self) -> None:
        """Everything that was sent is decided once, and the state says the same. Raises `Wrong`."""
        self.feed.end()
        try:
            watch(lambda: self._judged_so_far() >= self.feed.sent, f"{self.feed.sent} events", WAIT_S)
        finally:
            self.end()
        found = dict(self.events.read().found)
        once_each(found)
        state_equals_events(self.bootstrap, self.world.topics, found)
        offsets_are(self.bootstrap, self.world.settings("s0"), {p: len(events) for p, events in found.items()})

    def _judged_so_far(self) -> int:
        once_each(dict(self.events.read().found))
        return self.events.count

    def end(self) -> None:
        self.wire.plan(self.prefix, None)
        self.feed.halt()
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.end()
        self.events.close()
        self.world.close()


@pytest.fixture
def scene(wired: tuple[str, Wire], topic_prefix: str) -> Iterator[Scene]:
    scene = Scene(*wired, topic_prefix)
    try:
        scene.works()
        yield scene
    finally:
        failpoints.strike = None
        scene.close()


def believe(monkeypatch: pytest.MonkeyPatch) -> None:
    """No guard: return values count, and a commit is waited for until it has one."""
    monkeypatch.setattr(DoubtLogger, "FACILITIES", frozenset())
    monkeypatch.setattr(kafka_transactions, "_COMMIT_S", 10.0)


@contextmanager
def reading_all(scene: Scene) -> Iterator[Callable[[], int]]:
    """How many events there are, committed or not."""
    reader = OutsideReader(scene.bootstrap, [scene.world.topics.events], PARTITIONS, committed=False)
    seen = len(reader.read(to_the_end=True))

    def count() -> int:
        nonlocal seen
        seen += len(reader.read())
        return seen

    try:
        yield count
    finally:
        reader.close()


def release_into_the_next_but_one(scene: Scene, fault: Fault) -> int:
    """Hold an EndTxn; deliver it when the same producer has half of its next transaction on the topics; then that
    process dies. Returns what the broker said to the late copy."""
    wire = scene.wire
    before = len(wire.held)
    answers: list[int] = []
    begun = records = present = 0

    def strike(point: str) -> None:
        nonlocal begun, records, present
        if len(wire.held) == before or answers:
            return
        if point == failpoints.AFTER_DECIDE:
            begun, records, present = begun + 1, 0, count()
        elif point == failpoints.AFTER_PRODUCE and begun == 2:
            records += 1
            if records == 3:
                watch(lambda: count() > present, "half of it", WAIT_S)
                answers.append(wire.held[before].release())
                raise Struck("in the middle of a transaction")

    with reading_all(scene) as count:
        failpoints.strike = strike
        wire.plan(scene.prefix, once(END_TXN, Verdict(fault)))
        watch(lambda: bool(answers), "the late copy", WAIT_S)
    failpoints.strike = None
    scene.works()
    return answers[0]


def lost_until_replaced() -> Plan:
    """Every EndTxn of one producer is lost until its successor speaks: also the silent repetition of a slow moment."""
    client, over = "", False

    def plan(request: Request) -> Verdict | None:
        nonlocal client, over
        if request.api == END_TXN and not over and request.client_id == (client or request.client_id):
            client = request.client_id
            return Verdict(Fault.SILENCE)
        over = over or (request.api == INIT_PRODUCER_ID and request.client_id == client)
        return None

    return plan


LATE = [pytest.param(Fault.HOLD, marks=pytest.mark.long, id="timed-out"), pytest.param(Fault.HOLD_AND_CUT, id="cut")]


@pytest.mark.parametrize("fault", LATE)
def test_a_late_copy_is_fenced(scene: Scene, fault: Fault) -> None:
    assert release_into_the_next_but_one(scene, fault) in FENCED
    scene.judge()


@pytest.mark.parametrize("fault", LATE)
def test_believing_return_values_the_checker_goes_red(
    scene: Scene, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(monkeypatch)
    # On a slow moment the broker ends the transaction at its time-out, which fences the copy; then once more.
    answers: list[int] = []
    while TAKEN not in answers and len(answers) < 4:
        answers.append(release_into_the_next_but_one(scene, fault))
    assert answers[-1] == TAKEN, answers
    with pytest.raises(Wrong, match=r"decided where|counted"):
        scene.judge()


@pytest.mark.parametrize(
    ("plan", "became"),
    [
        pytest.param(once(END_TXN, Verdict(Fault.LOSE_ANSWER)), "committed", id="answer-lost"),
        pytest.param(once(END_TXN, Verdict(Fault.CUT_ANSWER)), "committed", id="answer-lost-with-its-connection"),
        pytest.param(lost_until_replaced(), "not committed", id="request-lost"),
    ],
)
def test_the_outcome_is_learnt_from_the_brokers(
    scene: Scene, plan: Plan, became: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="onepen.processor")
    scene.wire.plan(scene.prefix, plan)
    watch(lambda: "; reading its state" in caplog.text, "the doubt", WAIT_S)
    said = [record.getMessage() for record in caplog.records if "reading its state" in record.getMessage()]
    assert all(f": {became}; reading its state" in line for line in said), said
    scene.works()
    scene.judge()
