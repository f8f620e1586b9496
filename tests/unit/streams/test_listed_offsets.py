"""An offset that the brokers did not tell is asked for again, not believed."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
from confluent_kafka import OFFSET_INVALID, TopicPartition

from onepen.streams import topic_offsets


class Answer(NamedTuple):
    offset: int
    timestamp: int = -1


class Admin:
    """Answers as librdkafka's admin client does while a leader is replaced: a result like any other."""

    def __init__(self, *offsets: int) -> None:
        self._offsets = offsets

    def list_offsets(self, specs: dict[TopicPartition, Any], **_: Any) -> dict[TopicPartition, Future[Answer]]:
        answers: dict[TopicPartition, Future[Answer]] = {}
        for place, offset in zip(specs, self._offsets, strict=True):
            answers[place] = Future()
            answers[place].set_result(Answer(offset))
        return answers


def listed(*offsets: int) -> list[int]:
    specs = {TopicPartition("t", partition): topic_offsets.LATEST for partition in range(len(offsets))}
    admin: Any = Admin(*offsets)
    return [answer.offset for answer in topic_offsets._list(admin, specs, 2.0).values()]


def test_what_was_told_is_handed_on_also_of_an_empty_partition() -> None:
    assert listed(0, 7, -1) == [0, 7, -1]


def test_what_was_not_told_is_not_known() -> None:
    with pytest.raises(TimeoutError, match="t-1: no offset"):
        listed(5, OFFSET_INVALID)
