"""Whole transactions by their stamps: what is complete passes, what is torn, mixed or doubled is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from onepen.streams.audit.evidence import Violation
from onepen.streams.audit.transactions import Place, Stamp, StateTrail, Transactions, stamp_of

Written = tuple[str, int, str, int, int]
"""(topic, offset, transaction, index, count)"""

GOOD: list[Written] = [
    ("events", 0, "t1", 0, 4),
    ("events", 1, "t1", 1, 4),
    ("events", 3, "t2", 0, 3),
    ("receipts", 0, "t1", 2, 4),
    ("receipts", 2, "t2", 1, 3),
    ("state", 0, "t1", 3, 4),
    ("state", 2, "t2", 2, 3),
]


def judged(
    written: Sequence[Written], settled: Sequence[str] = ("t1", "t2"), whole_from_ms: int = 0
) -> list[Violation]:
    transactions = Transactions()
    for topic, offset, name, index, count in written:
        place = Place(topic, 0, offset, 100 + offset)
        transactions.take(place, Stamp(name, index, count), one_writer=topic != "signals")
    for name in settled:
        transactions.settle(name)
    return list(transactions.end(whole_from_ms))


def test_whole_ones_pass() -> None:
    assert judged(GOOD) == []


@pytest.mark.parametrize("gone", range(len(GOOD)))
def test_a_record_that_is_missing(gone: int) -> None:
    (found,) = judged([one for n, one in enumerate(GOOD) if n != gone])
    assert f"missing: {GOOD[gone][3]}" in found.what


@pytest.mark.parametrize("twice", range(len(GOOD)))
def test_a_record_that_stands_twice(twice: int) -> None:
    assert judged([*GOOD, GOOD[twice]])


def test_a_transaction_that_goes_on_behind_another() -> None:
    """A late EndTxn committed half of the next transaction: its rest came later."""
    mixed = [*GOOD[:1], GOOD[2], ("events", 5, "t1", 1, 4), *GOOD[3:]]
    (found,) = judged(mixed)
    assert "goes on behind" in found.what


def test_on_topics_with_many_writers_they_mix() -> None:
    mixed = [("signals", 0, "t1", 0, 2), ("signals", 1, "t2", 0, 1), ("signals", 2, "t1", 1, 2)]
    assert judged(mixed) == []


def test_counts_that_disagree() -> None:
    assert judged([GOOD[0], ("events", 1, "t1", 1, 5), *GOOD[2:]])
    assert judged([*GOOD, ("events", 9, "t3", 3, 3)], settled=[])


def test_what_is_not_settled_or_may_have_been_compacted_is_not_judged() -> None:
    torn = GOOD[1:]
    assert judged(torn, settled=["t2"]) == []
    assert judged(torn, whole_from_ms=100) == []
    assert judged(torn, whole_from_ms=99)


def test_stamps_are_read_from_headers() -> None:
    assert stamp_of([("ce_id", b"x"), ("onepen-tx", b"p.slot.a:7:12:3/40")]) == Stamp("p.slot.a:7:12", 3, 40)
    assert stamp_of([("onepen-tx", b"nonsense")]) is None
    assert stamp_of([("onepen-tx", None)]) is None
    assert stamp_of([]) is None


def place(offset: int) -> Place:
    return Place("state", 0, offset, 1_000 + offset)


def test_input_ranges_follow_one_another() -> None:
    trail = StateTrail(0)
    for offset, mark, name in ((0, None, "t1"), (1, 5, "t1"), (3, 9, "t2"), (5, 12, "t3")):
        trail.take(place(offset), mark, Stamp(name, 0, 1))
    assert (trail.violations, trail.marks, trail.whole_from_ms) == ([], 3, 0)
    trail.judge_cause(place(9), 5, Stamp("t2", 0, 1))
    trail.judge_cause(place(9), 8, Stamp("t2", 0, 1))
    assert trail.violations == []
    for cause in (4, 9):
        trail.judge_cause(place(9), cause, Stamp("t2", 0, 1))
    assert len(trail.violations) == 2


@pytest.mark.parametrize("mark", [9, 8])
def test_a_range_that_does_not_advance(mark: int) -> None:
    trail = StateTrail(0)
    for offset, reached in ((0, 5), (2, 9), (4, mark)):
        trail.take(place(offset), reached, Stamp(f"t{offset}", 0, 1))
    assert len(trail.violations) == 1


def test_a_hole_in_the_state_tells_from_when_on_it_is_whole() -> None:
    trail = StateTrail(0)
    trail.take(place(0), 5, Stamp("t1", 0, 1))
    trail.take(place(7), 6, Stamp("t2", 0, 1))
    assert trail.whole_from_ms == 1_007
    trail.judge_cause(place(9), 1, Stamp("t2", 0, 1))
    assert trail.violations == [], "what came before t2 is not known"
