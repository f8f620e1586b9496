"""Records put on topics before the clock of a benchmark starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer

from onepen.streams.kafka_config import SAFE_WRITES

FLUSH_S: Final = 120.0
FULL_WAIT_S: Final = 0.05
LARGE_BATCHES: Final[Mapping[str, Any]] = {"batch.size": 500_000}


class Written(NamedTuple):
    topic: str
    key: str | bytes
    value: bytes | None
    partition: int
    headers: Sequence[tuple[str, str | bytes | None]] = ()


def write_all(bootstrap: str, records: Iterable[Written], properties: Mapping[str, Any] = LARGE_BATCHES) -> int:
    """Hand them over as fast as they are taken; how many there were. Raises `TimeoutError` when some stay unwritten."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, **properties, **SAFE_WRITES})
    count = 0
    for one in records:
        while True:
            try:
                producer.produce(one.topic, one.value, one.key, one.partition, headers=list(one.headers))
                break
            except BufferError:
                producer.poll(FULL_WAIT_S)
        count += 1
    if producer.flush(FLUSH_S):
        raise TimeoutError("the records of the benchmark could not be written")
    return count
