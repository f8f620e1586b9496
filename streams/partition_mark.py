"""How far a partition has been decided: the `partition` record of the state topic, read from outside."""

from __future__ import annotations

from typing import Final

from onepen.processors.state_keys import PARTITION_KEY
from onepen.schemas.errors import Fatal
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.streams.store import Mark
from onepen.streams.topic_scan import TopicScan

__all__ = ["decode_mark", "read_mark"]

TAIL_RECORDS: Final = 64
"""The record is the last one of every transaction, so it is looked for from the end on, in growing steps."""


def read_mark(state: TopicScan, partition: int) -> Mark | None:
    """The last committed partition record; None when nothing was ever decided there. Raises `Retryable`, `Fatal`."""
    first, end = state.ends(partition)
    length = TAIL_RECORDS
    while True:
        start = max(first, end - length)
        found: bytes | None = None
        for record in state.read(partition, start, end):
            if record.key == PARTITION_KEY:
                found = record.value
        if found is not None:
            return decode_mark(found, partition)
        if start == first:
            return None
        length *= 32


def decode_mark(value: bytes, partition: int) -> Mark:
    """The record as a value. Raises `Fatal` for a form or a protocol that this release does not know."""
    mark = Mark.decode(value)
    if mark.protocol > PROTOCOL_VERSION:
        raise Fatal(
            f"partition {partition} was decided under protocol {mark.protocol}; "
            f"this release speaks {PROTOCOL_VERSION}. Upgrade"
        )
    return mark
