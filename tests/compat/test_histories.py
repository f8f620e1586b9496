"""A recorded inputs topic of each released version re-executes to the same bytes of events and receipts."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepen.processors.rules import Keys
from onepen.schemas import codec
from onepen.streams.reexecution import Reexecution
from tests.compat.history_file import HISTORIES, History, load

FILES = sorted(HISTORIES.glob("*.jsonl.gz"))


def decided_again(history: History) -> tuple[dict[int, list[bytes]], dict[int, list[bytes]]]:
    """Values of events and receipts per partition, in order, as this version decides them."""
    keys = Keys(history.key_name, history.key)
    partitions = {p: Reexecution(p, history.partitions, keys) for p in range(history.partitions)}
    events: dict[int, list[bytes]] = {p: [] for p in partitions}
    receipts: dict[int, list[bytes]] = {p: [] for p in partitions}
    for record in history.inputs:
        if (record.partition, record.offset) in history.dead:
            continue
        decided = partitions[record.partition].decide(record)
        if decided is not None:
            events[record.partition] += decided.decision.event_bytes
            receipts[record.partition] += [codec.encode(receipt) for receipt in decided.decision.receipts]
    return events, receipts


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_a_recorded_history_comes_to_the_same_bytes(path: Path) -> None:
    history = load(path)
    events, receipts = decided_again(history)
    for partition in range(history.partitions):
        assert events[partition] == [r.value for r in history.events if r.partition == partition]
        assert receipts[partition] == [r.value for r in history.receipts if r.partition == partition]


def test_there_is_a_history_and_it_says_something() -> None:
    """The check can fail: with another token key the workers' records are refused."""
    assert FILES, "a released version leaves its history here"
    history = load(FILES[0])
    events, _ = decided_again(history._replace(key=b"another key, as long as the real one is"))
    assert sum(map(len, events.values())) < len(history.events)
