"""The store: bytes are the truth, a stage is invisible until published, the frame is read without its body."""

from __future__ import annotations

import pytest

from onepen.processors.state_keys import PARTITION_KEY, head_key, prefix
from onepen.schemas import codec
from onepen.schemas.errors import Fatal
from onepen.schemas.topics import Topics
from onepen.streams.log import Record
from onepen.streams.store import Mark, PartitionStage, PartitionStore, deadline_of
from tests.conformance.counting import Command, Counter, CountingCore

KEY = (1, "a/b%")
TOPICS = Topics("t")


def mark(offset: int) -> Mark:
    return Mark(1, offset, 0, 4, "s0", ("t.s0.a", "t.s0.b"))


def record(offset: int) -> Record:
    return Record(0, offset, b"a/b%", b"x", (), 1_000, True, 1)


def store() -> PartitionStore[Counter]:
    return PartitionStore(0, CountingCore(TOPICS))


def count_one(target: PartitionStore[Counter], offset: int) -> PartitionStage[Counter]:
    core = CountingCore(TOPICS)
    stage = PartitionStage(target)
    loaded = stage.load(KEY)
    session, offered = core.decide(None, loaded.session, Command(KEY, b"x"), record(offset), stage.outputs)
    stage.put(KEY, session, loaded, offered=offered)
    stage.took(record(offset))
    stage.write(core, TOPICS.state, mark(offset + 1))
    return stage


@pytest.mark.parametrize("deadline_ms", [0, 1, 63, 64, 8_191, 1_700_000_000_000, 2**62, -1, -(2**40)])
def test_the_deadline_is_read_from_the_first_number(deadline_ms: int) -> None:
    assert deadline_of(codec.encode_state(deadline_ms, 3, b"body")) == deadline_ms


@pytest.mark.parametrize("value", [b"", b"\x00", b"\x00\x00\x00\x03\xe7\x00", codec.encode_state(0, 1, b"")[:5]])
def test_an_unknown_frame_is_fatal(value: bytes) -> None:
    with pytest.raises(Fatal):
        deadline_of(value)


def test_a_stage_is_invisible_until_it_is_published() -> None:
    target = store()
    stage = count_one(target, 0)
    assert target.load(KEY).session.total == 0
    assert target.empty
    assert target.next_offset == 0
    target.publish(stage, 7, 0.0)
    assert target.load(KEY).session.total == 1
    assert (target.next_offset, target.committed, target.position) == (1, 1, 7)
    target.publish(count_one(target, 1), None, 0.0)
    target.forget_decoded()
    assert target.load(KEY).session.total == 2, "and the bytes say the same"
    assert target.position == 7


def test_what_is_published_can_be_restored() -> None:
    first = store()
    for offset in range(3):
        first.publish(count_one(first, offset), None, 0.0)
    second = store()
    for key, value in first.records():
        second.restore(key, value)
    assert dict(second.records()) == dict(first.records())
    assert second.load(KEY).session.total == 3
    assert second.mark == mark(3)


def test_a_session_of_several_records_shrinks_again() -> None:
    target = store()
    head, part = head_key(*KEY), prefix("i", *KEY) + b"in-1"
    value = codec.encode_state(5, 1, b"1")
    for key in (part, head):
        target.restore(key, value)
    assert set(target.load(KEY).base) == {head, part}
    assert (target.sessions, len(target.timers)) == (1, 1)
    target.restore(part, None)
    assert set(target.load(KEY).base) == {head}
    target.restore(head, None)
    assert target.empty
    assert len(target.timers) == 0


def test_an_unknown_key_and_a_foreign_partition_record_are_fatal() -> None:
    with pytest.raises(Fatal, match="unknown key"):
        store().restore(b"z/1/s", b"")
    with pytest.raises(Fatal, match="version 9"):
        store().restore(PARTITION_KEY, codec.encode_state(0, 9, b""))
    with pytest.raises(Fatal, match="cannot be read"):
        store().restore(PARTITION_KEY, codec.encode_state(0, 1, b"\xc1"))


def test_pieces_of_the_state_are_cut_by_sessions_and_by_bytes() -> None:
    target = store()
    for number in range(10):
        key = (1, f"s{number}")
        target.restore(head_key(*key), codec.encode_state(0, 1, b"x" * (500 if number == 4 else 10)))
        if number >= 7:
            target.restore(prefix("i", *key) + b"in-1", codec.encode_state(5, 1, b"x" * 300))
    heads = [len(piece) for piece in target.single_records(3, 400)]
    assert heads == [3, 2, 2], "the large one ends its piece"
    assert [len(piece) for piece in target.grouped_records(100, 400)] == [2, 1]
    assert [len(piece) for piece in target.grouped_records(1, 1_000_000)] == [1, 1, 1]
    assert sum(len(piece) for piece in target.single_records(1, 1)) == 7


def test_a_stage_that_is_dropped_leaves_the_cached_session_alone() -> None:
    """Stages change a session in their own place: what the store has decoded is another one."""
    target = store()
    target.publish(count_one(target, 0), None, 0.0)
    cached = target.load(KEY)
    stage = count_one(target, 1)
    loaded = stage.load(KEY)
    stage.put(KEY, loaded.session._replace(total=99), loaded, offered=False)
    assert stage.load(KEY).session.total == 99
    assert target.load(KEY) is cached
    assert cached.session.total == 1
