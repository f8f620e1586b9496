"""Polled inputs are shared out by partition: order within one, no partition waits behind another's backlog."""

from __future__ import annotations

from onepen.streams.held_inputs import HeldInputs
from onepen.streams.log import Record


def record(partition: int, offset: int, size_bytes: int = 10) -> Record:
    return Record(partition, offset, b"", b"x" * size_bytes, (), 1, True, 1)


def held(*counts: int, records_full: int = 100, bytes_full: int = 10_000) -> HeldInputs:
    """So many records of partition 0, 1, ..."""
    inputs = HeldInputs(records_full, bytes_full)
    for partition, count in enumerate(counts):
        for offset in range(count):
            inputs.append(record(partition, offset))
    return inputs


def wanted(_: Record) -> bool:
    return True


def places(taken: list[Record]) -> list[tuple[int, int]]:
    return [(one.partition, one.offset) for one in taken]


def offsets(taken: list[Record], partition: int) -> list[int]:
    return [one.offset for one in taken if one.partition == partition]


def test_b54_what_is_few_comes_first_and_the_backlog_takes_the_rest() -> None:
    inputs = held(90, 2, 90, 1)
    taken = inputs.take(40, 10_000, wanted)
    assert places(taken)[:3] == [(1, 0), (1, 1), (3, 0)]
    assert len(taken) == 40
    assert len(offsets(taken, 0)) in (18, 19)
    assert len(inputs) == 183 - 40


def test_partitions_with_backlogs_take_turns_though_batches_are_cut() -> None:
    """The engine puts back what its time does not allow: whoever was cut is served before the others again."""
    inputs, done = held(90, 90, 90), [0, 0, 0]
    for _ in range(10):
        taken = inputs.take(12, 10_000, wanted)
        inputs.put_back(taken[5:])
        for one in taken[:5]:
            assert one.offset == done[one.partition], "in order, and nothing left out"
            done[one.partition] += 1
    assert sum(done) == 50
    assert max(done) - min(done) <= 4, done


def test_order_is_kept_where_records_were_put_back() -> None:
    inputs = held(5, 3)
    taken = inputs.take(8, 10_000, wanted)
    inputs.put_back(taken[2:])
    rest = inputs.take(8, 10_000, wanted)
    assert sorted(places(taken[:2] + rest)) == [(0, n) for n in range(5)] + [(1, n) for n in range(3)]
    for partition in (0, 1):
        assert offsets(taken[:2] + rest, partition) == sorted(offsets(taken[:2] + rest, partition))


def test_a_record_that_is_to_be_tried_alone_is_the_one_that_was_put_back() -> None:
    inputs = held(50, 1, 50)
    taken = inputs.take(30, 10_000, wanted)
    suspect = next(index for index, one in enumerate(taken) if one.partition == 2 and one.offset == 3)
    inputs.put_back(taken[suspect:])
    assert places(inputs.take(1, 10_000, wanted)) == [(2, 3)]


def test_bytes_are_shared_as_well() -> None:
    inputs = HeldInputs()
    for offset in range(10):
        inputs.append(record(0, offset, 1_000))
    inputs.append(record(1, 0, 10))
    taken = inputs.take(100, 3_000, wanted)
    assert (1, 0) in places(taken)
    assert len(offsets(taken, 0)) == 3
    assert len(inputs.take(100, 1, wanted)) == 1, "a record that is larger than the limit goes alone"


def test_what_is_not_wanted_is_dropped_and_takes_no_place() -> None:
    inputs = held(50, 50)
    taken = inputs.take(10, 10_000, lambda one: one.partition == 1 or one.offset >= 40)
    assert len(taken) == 10
    assert offsets(taken, 0) == [40, 41, 42, 43, 44]
    assert len(inputs) == 100 - 40 - 10


def test_of_many_partitions_each_may_hold_less_and_more_again_when_they_are_few() -> None:
    inputs = HeldInputs(100, 10_000)
    for partition in range(8):
        inputs.append(record(partition, 0))
    assert not any(inputs.append(record(0, offset)) for offset in range(1, 50))
    assert inputs.append(record(0, 50)), "8 partitions share what 4 may hold"
    while len(inputs) > 40:
        inputs.take(8, 10_000, lambda one: one.partition == 0)
    assert not inputs.append(record(0, 51))
    headers = HeldInputs(100, 1_000)
    assert headers.append(Record(0, 0, b"", b"", (("h", b"x" * 1_001),), 1, True, 1)), "headers count"


def test_full_and_low_by_records_and_by_bytes() -> None:
    inputs = held(99, records_full=100)
    assert not inputs.append(record(0, 99))
    assert inputs.append(record(0, 100))
    assert not inputs.low(0)
    while not inputs.low(0):
        assert inputs.take(7, 10_000, wanted)
    assert len(inputs) <= 50
    large = HeldInputs(100, 10_000)
    assert large.append(record(3, 0, 10_001))
    assert large.low(4)
    large.put_back(taken := large.take(1, 1, wanted))
    assert not large.low(3)
    assert large.take(1, 1, wanted) == taken
    assert large.low(3)
    assert not large
