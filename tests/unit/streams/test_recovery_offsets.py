"""Where a partition begins, and when it must not: every combination of offset, partition record and what is left."""

from __future__ import annotations

import pytest

from onepen.schemas.errors import Fatal
from onepen.schemas.topics import Topics
from onepen.streams.log import Survey
from onepen.streams.recovery import StateDisagrees, first_offset
from onepen.streams.store import Mark, PartitionStore
from tests.conformance.counting import CountingCore

PARTITIONS = 4


def begin(
    *, committed: int | None, marked: int | None, start: int = 0, end: int = 100, protocol: int = 0, partitions: int = 4
) -> int:
    store = PartitionStore(0, CountingCore(Topics("t")))
    if marked is not None:
        store.mark = Mark(1, marked, protocol, partitions, "s0", ("a", "b"))
    return first_offset(store, Survey(committed, 0, start, end, 0), PARTITIONS)


def test_b39_the_first_start_begins_at_0() -> None:
    assert begin(committed=None, marked=None) == 0


def test_offset_and_record_that_agree() -> None:
    assert begin(committed=7, marked=7) == 7
    assert begin(committed=100, marked=100) == 100


def test_an_expired_offset_is_replaced_while_the_inputs_reach_back() -> None:
    assert begin(committed=None, marked=7, start=7) == 7


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"committed": None, "marked": None, "start": 1}, "are gone"),
        ({"committed": None, "marked": 7, "start": 8}, "are gone"),
        ({"committed": 7, "marked": 7, "start": 8}, "are gone"),
        ({"committed": 7, "marked": 7, "end": 6}, "Another topic"),
        ({"committed": 7, "marked": 7, "protocol": 1}, "Upgrade"),
        ({"committed": 7, "marked": 7, "partitions": 5}, "5 partitions"),
    ],
)
def test_b39_what_cannot_be_mended_by_reading_again(fault: dict[str, int], said: str) -> None:
    with pytest.raises(Fatal, match=said) as caught:
        begin(**fault)  # type: ignore[arg-type]
    assert not isinstance(caught.value, StateDisagrees)


@pytest.mark.parametrize(("committed", "marked"), [(7, None), (7, 6), (7, 8)])
def test_a_torn_transaction_is_refused(committed: int, marked: int | None) -> None:
    with pytest.raises(StateDisagrees):
        begin(committed=committed, marked=marked)


def test_b33_state_without_a_partition_record_is_refused() -> None:
    store = PartitionStore(0, CountingCore(Topics("t")))
    store.policies[b"p/1/1"] = b""
    with pytest.raises(StateDisagrees):
        first_offset(store, Survey(None, 1, 0, 0, 0), PARTITIONS)
