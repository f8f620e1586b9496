"""Whole worlds under faults, from fixed seeds; what has to be seen sometimes; and defects that the worlds have to see.

`make test` plays a few, `make long` many. ONEPEN_TEST_SEED starts elsewhere and ONEPEN_TEST_WORLDS says how many; the
message of a red world says how to see it again, and how it is kept as a history.
"""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from onepen.processors import event_invariants, invariants
from onepen.processors.rules import Keys
from onepen.schemas import codec
from onepen.schemas.events import Event
from onepen.streams.reexecution import Reexecution
from tests.compat.history_file import History, load
from tests.simulation.whole import Red, play
from tests.simulation.whole_broker import Violation
from tests.simulation.whole_checks import check_at_rest
from tests.simulation.whole_histories import HISTORIES
from tests.simulation.whole_mutants import QUICK, SLOW
from tests.simulation.whole_sometimes import OFTEN, SOMETIMES
from tests.simulation.whole_world import World

FIRST_SEED = int(os.environ.get("ONEPEN_TEST_SEED", "1"))
WORLDS = int(os.environ.get("ONEPEN_TEST_WORLDS", "0"))
STEPS = 3_000


def play_many(worlds: int, steps: int, sometimes: tuple[str, ...]) -> None:
    """Plays seeds and judges what was seen in all of them together. The rate is printed; nothing depends on it."""
    worlds = WORLDS or worlds
    facts: Counter[str] = Counter()
    done = 0
    began_s, busy_s = time.perf_counter(), time.process_time()
    for seed in range(FIRST_SEED, FIRST_SEED + worlds):
        world = play(seed, steps)
        facts += world.facts
        done += world.time.total_steps
    passed_s, busy_s = time.perf_counter() - began_s, time.process_time() - busy_s
    print(f"seeds {FIRST_SEED} to {FIRST_SEED + worlds - 1}: {done} steps, {done / passed_s:,.0f} steps/s, "
          f"{done / busy_s:,.0f} per second of processor time")  # fmt: skip
    print(dict(sorted(facts.items())))
    never = [what for what in sometimes if not facts[what]]
    assert not never, f"never seen in {worlds} worlds from seed {FIRST_SEED}: {never}"


def test_whole_worlds() -> None:
    play_many(4, 2_000, OFTEN)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_whole_worlds() -> None:
    play_many(20, STEPS, SOMETIMES)


def test_a_world_without_faults_loses_nothing() -> None:
    world = play(FIRST_SEED, 1_500, faults=False)
    for never in ("run.lease_lost", "run.released", "record lost on its way", "aborted transaction with records",
                  "zombie processor fenced", "sink batch rejected by the epoch fence"):  # fmt: skip
        assert not world.facts[never], never
    assert world.facts["run completed"] > 10


def outcome(world: World) -> tuple[Counter[str], list[list[bytes | None]]]:
    topics = (world.topics.inputs, world.topics.events, world.topics.receipts, world.topics.state)
    return world.facts, [
        [entry.value for _, entry in world.broker.values(topic, partition)]
        for topic in topics
        for partition in range(world.partitions)
    ]


def test_the_same_seed_is_the_same_world() -> None:
    assert outcome(play(FIRST_SEED, 600)) == outcome(play(FIRST_SEED, 600))


# -- the worlds bite -------------------------------------------------------------------------------------------------

Mutant = Callable[[], AbstractContextManager[None]]


def first_red(mutant: Mutant, seeds: range, steps: int) -> Red | None:
    with mutant():
        for seed in seeds:
            try:
                play(seed, steps)
            except Red as found:
                return found
    return None


def judge(mutant: Mutant, seeds: range, steps: int) -> None:
    found = first_red(mutant, seeds, steps)
    assert found is not None, f"{len(seeds)} worlds survive {mutant.__name__}"
    assert isinstance(found.__cause__, Violation), f"red for another reason: {found}"
    print(f"{mutant.__name__}: {found}")


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.__name__)
def test_a_defect_soon_turns_a_world_red(mutant: Mutant) -> None:
    judge(mutant, range(1, 9), 1_500)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", SLOW, ids=lambda mutant: mutant.__name__)
def test_a_defect_turns_a_world_red(mutant: Mutant) -> None:
    judge(mutant, range(1, 25), 2_000)


def tampered(world: World, table: str, row: dict[str, object] | None = None) -> None:
    """Change the last row of a table, or take it away."""
    rows = world.database.tables[table]
    key = next(reversed(rows))
    if row is None:
        del rows[key]
    else:
        rows[key] = rows[key] | row


def effect_twice(world: World) -> None:
    world.target.effects.append(world.target.effects[-1])


def event_gone(world: World) -> None:
    [partition, *_] = [p for p in range(world.partitions) if world.broker.end(world.topics.events, p)]
    del world.broker._topics[world.topics.events][partition][0]


def last_gone(book: dict[Any, Any]) -> None:
    book.popitem()


LIES: dict[str, Callable[[World], None]] = {
    "run": lambda world: tampered(world, "runs", {"last_seq": 1_000}),
    "event": lambda world: tampered(world, "events"),
    "input": lambda world: tampered(world, "inputs", {"disposition": "expired by nobody"}),
    "action": lambda world: tampered(world, "actions", {"state": "never heard of"}),
    "refused report": lambda world: tampered(world, "refused"),
    "session": lambda world: tampered(world, "sessions"),
    "effect twice": effect_twice,
    "event gone": event_gone,
    "verdict": lambda world: last_gone(world.watch.verdicts),
    "disposition": lambda world: last_gone(world.watch.dispositions),
    "owner": lambda world: world.watch.owners.clear(),
}


@contextmanager
def put_back(*books: dict[Any, Any] | list[Any]) -> Iterator[None]:
    kept = [copy.copy(book) for book in books]
    yield
    for book, before in zip(books, kept, strict=True):
        if isinstance(book, list):
            book[:] = before
        else:
            book.clear()
            book.update(before)


@pytest.fixture(scope="module")
def good_world() -> World:
    return play(FIRST_SEED, 500)


@pytest.mark.parametrize("lie", LIES)
def test_the_checks_at_rest_see_a_lie(good_world: World, lie: str) -> None:
    world, watch = good_world, good_world.watch
    topic = world.broker._topics[world.topics.events]
    with put_back(*world.database.tables.values(), world.target.effects, watch.verdicts, watch.dispositions,
                  watch.owners, *topic):  # fmt: skip
        LIES[lie](world)
        with pytest.raises(Violation):
            check_at_rest(world)


def test_the_checks_at_rest_see_no_lie_where_there_is_none(good_world: World) -> None:
    check_at_rest(good_world)


# -- worlds that were kept -------------------------------------------------------------------------------------------

FILES = sorted(HISTORIES.glob("*.jsonl.gz"))


def decided_again(history: History, partition: int) -> tuple[list[Event], list[bytes], list[bytes]]:
    """Events, their bytes, and the receipts' bytes, with every session's predicates on the way."""
    again = Reexecution(partition, history.partitions, Keys(history.key_name, history.key))
    events: list[Event] = []
    framed: list[bytes] = []
    receipts: list[bytes] = []
    for record in history.inputs:
        if record.partition != partition or (partition, record.offset) in history.dead:
            continue
        decided = again.decide(record)
        if decided is not None:
            decision = decided.decision
            assert invariants.broken(decision.session) == [], f"input {partition}-{record.offset}"
            events += decision.events
            framed += decision.event_bytes
            receipts += [codec.encode(receipt) for receipt in decision.receipts]
    return events, framed, receipts


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_a_kept_world_is_decided_again(path: Path) -> None:
    history = load(path)
    for partition in range(history.partitions):
        events, framed, receipts = decided_again(history, partition)
        for session in {(one.tenant_id, one.session_id): None for one in events}:
            mine = [(one, data) for one, data in zip(events, framed, strict=True)
                    if (one.tenant_id, one.session_id) == session]  # fmt: skip
            assert invariants.broken(None, [one for one, _ in mine]) == []
            assert event_invariants.chain_verifies(data for _, data in mine)
        if history.events:  # of a world that was red only the inputs are kept
            assert framed == [record.value for record in history.events if record.partition == partition]
            assert receipts == [record.value for record in history.receipts if record.partition == partition]


def test_a_world_is_kept_here() -> None:
    assert FILES, "no world is kept: python -m tests.simulation.whole SEED --steps 600 --save NAME"
