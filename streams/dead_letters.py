"""A record that never works, as a dead letter: raw bytes, where it stood, and why. In the batch's transaction."""

from __future__ import annotations

from typing import Final

from onepen.schemas.topics import Topics
from onepen.streams.log import Output, Record

REASON: Final = "onepen-reason"
TOPIC: Final = "onepen-topic"
PARTITION: Final = "onepen-partition"
OFFSET: Final = "onepen-offset"
NULL: Final = "onepen-null"


def dead_letter(record: Record, reason: str, topics: Topics, partitions: int) -> Output:
    """Key and value are those of the record, byte for byte; a value that was null says so in its headers."""
    headers: list[tuple[str, bytes | None]] = [
        (REASON, reason.encode()),
        (TOPIC, topics.inputs.encode()),
        (PARTITION, str(record.partition).encode()),
        (OFFSET, str(record.offset).encode()),
    ]
    if record.value is None:
        headers.append((NULL, b"1"))
    return Output(topics.deadletters, record.partition % partitions, record.key, record.value, headers)
