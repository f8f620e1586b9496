"""Recorded sessions through the real pipeline: every turn one completed run, also when processes are killed."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from onepen.demo.checks import Evidence, answer_all, exit_code
from onepen.demo.recorded import read_recordings
from onepen.demo.recording import SHIPPED, Summary, re_enact, verify
from onepen.sinks.postgres_outside import read_rolled_back
from onepen.streams.outside_reader import read_topic
from tests.acceptance.damage import damaged
from tests.acceptance.pipeline import Pipeline
from tests.seeds import drawn_seed

AIRLINE = Path(__file__).parents[3] / "shared" / "data" / "airline-agent-trajectories.jsonl"
RECORDING = AIRLINE if AIRLINE.exists() else SHIPPED
PROCESSOR_KILLS, SINK_KILLS = 8, 6
LAST_KILL = 0.88
PACE = 5.0
"""Speed of the re-enactment under kills: slow enough that they fall between 10 and 90 % of the runs."""


def judged(pipeline: Pipeline, summary: Summary) -> Evidence:
    """Everything the note on the main job asks of a re-enactment."""
    print(summary)
    recordings = read_recordings(RECORDING if len(summary.sessions) > 4 else SHIPPED)
    turns = sum(len(one.turns) for one in recordings)
    assert summary.turns == turns
    assert summary.ends == {"completed": turns}
    evidence, answers = verify(pipeline.settings, summary)
    wrong = [f"{a.question}: {v}" for a in answers for v in a.violations]
    assert wrong == []
    starts = Counter(e.event.run_id for e in evidence.events if e.event.type == "run.started")
    assert len(starts) == turns, "a run is missing"
    assert set(starts.values()) == {1}, "a run stands twice"
    assert evidence.tables is not None
    assert len(evidence.tables.runs) == turns
    return evidence


def test_the_shipped_recording(pipeline: Pipeline) -> None:
    """And damaged copies of what topics and tables really hold: each turns its answer red and the exit code to 1."""
    evidence = judged(pipeline, re_enact(pipeline.settings, SHIPPED, speed=0))
    for what, question, copy in damaged(evidence):
        answers = answer_all(copy)
        assert not answers[question - 1].green, f"{what} was not noticed by question {question}"
        assert exit_code(answers) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not AIRLINE.exists(), reason="the recorded airline sessions are not here")
def test_all_recorded_sessions(pipeline: Pipeline) -> None:
    summary = re_enact(pipeline.settings, AIRLINE, speed=0)
    assert (len(summary.sessions), summary.turns) == (200, 1490)
    judged(pipeline, summary)


class Killer:
    """Kills processor and sink when the re-enactment has come to random places between 10 and 90 %; the sink more often
    when none of the kills has hit it in the middle of a batch."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        chance = self._chance = random.Random(seed)
        plan = [(chance.uniform(0.1, 0.8), "processor") for _ in range(PROCESSOR_KILLS)]
        plan += [(chance.uniform(0.1, 0.7), "sink") for _ in range(SINK_KILLS)]
        self._rolled_back = read_rolled_back(pipeline.settings.require_dsn())
        self.plan = sorted(plan)
        self.done_at: list[tuple[float, str]] = []
        self._pipeline = pipeline
        self._pause_s = [chance.uniform(0, 0.5) for _ in plan]
        self._reached = 0.0
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.failure: BaseException | None = None

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(60)

    def progress(self, done: int, total: int) -> None:
        with self._changed:
            self._reached = done / total
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for (place, name), pause_s in zip(self.plan, self._pause_s, strict=True):
                if not self._wait(lambda place=place: self._reached >= place):  # type: ignore[misc]
                    return
                if self._over.wait(pause_s):
                    return
                self._kill(name)
            while not self._hit_a_batch() and self._reached < LAST_KILL and not self._over.wait(self._chance.random()):
                self._kill("sink")
        except BaseException as error:
            self.failure = error

    def _kill(self, name: str) -> None:
        self.done_at.append((self._reached, name))
        kills = self._pipeline.kills[name]
        # Transactions are short: of the kills at any moment none may hit one.
        self._pipeline.kill(name, amid_transaction=self._chance if kills % 2 else None)

    def _hit_a_batch(self) -> bool:
        return read_rolled_back(self._pipeline.settings.require_dsn()) > self._rolled_back

    def _wait(self, there: Callable[[], bool]) -> bool:
        with self._changed:
            while not there():
                if self._over.is_set():
                    return False
                self._changed.wait(0.05)
        return True


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_recorded_sessions_under_kills(pipeline: Pipeline) -> None:
    before = read_rolled_back(pipeline.settings.require_dsn())
    with Killer(pipeline, drawn_seed()) as killer:
        summary = re_enact(pipeline.settings, RECORDING, speed=PACE, progress=killer.progress)
    assert killer.failure is None
    print("killed", ", ".join(f"{name} at {at:.0%}" for at, name in killer.done_at))
    assert pipeline.kills["processor"] >= 5
    assert pipeline.kills["sink"] >= 3
    assert all(0.1 <= at <= 0.9 for at, _ in killer.done_at)
    judged(pipeline, summary)
    hidden = aborted_records(pipeline)
    rolled_back = read_rolled_back(pipeline.settings.require_dsn()) - before
    print(f"{sum(hidden.values())} records of aborted transactions: {dict(hidden)}; {rolled_back} rolled back")
    assert sum(hidden.values()) >= 1, "no kill hit an open transaction"
    assert rolled_back >= 1, "no kill hit a batch of the sink"


def aborted_records(pipeline: Pipeline) -> Counter[str]:
    """Records that a read_uncommitted reader sees and a read_committed one does not, by topic."""
    settings = pipeline.settings
    found: Counter[str] = Counter()
    for topic in (settings.topics.events, settings.topics.receipts, settings.topics.state, settings.topics.offers):
        committed = {(r.partition, r.offset) for r in read_topic(settings, topic)}
        uncommitted = read_topic(settings, topic, isolation="read_uncommitted")
        found[topic] = sum((r.partition, r.offset) not in committed for r in uncommitted)
    return found
