"""Inputs that were polled and not handed out yet, by partition, so that none waits behind another's backlog.

Rule: librdkafka hands records out in order of arrival, whole batches of one partition after the other, so everything is
taken from it at once and sorted here. A partition that is full is to be stopped until it is `low`; what a batch gets
is shared out evenly, and what a partition does not need of its share is left to the others. Order is kept within a
partition only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from onepen.streams.log import Record

__all__ = ["BYTES_FULL", "RECORDS_FULL", "HeldInputs"]

RECORDS_FULL: Final = 12_000
BYTES_FULL: Final = 8 * 1024 * 1024
"""Two batches of the engine and more are left at half of it: a fetch that waits elsewhere takes up to 0.1 s."""
PARTITIONS_FULL: Final = 4
"""So many partitions may be full; of more, each may hold less. A record takes about 400 bytes beside its content."""


def _size(record: Record) -> int:
    size = len(record.value or b"") + len(record.key or b"")
    return size + sum(len(value or b"") for _, value in record.headers) if record.headers else size


class _Queue:
    """Of one partition."""

    __slots__ = ("records", "size_bytes")

    def __init__(self) -> None:
        self.records: deque[Record] = deque()
        self.size_bytes = 0

    def above(self, records: int, size_bytes: int) -> bool:
        return len(self.records) > records or self.size_bytes > size_bytes


class HeldInputs:
    """Not for several threads."""

    def __init__(self, records_full: int = RECORDS_FULL, bytes_full: int = BYTES_FULL) -> None:
        self._records_full, self._bytes_full = records_full, bytes_full
        self._records_of_each, self._bytes_of_each = records_full, bytes_full
        self._queues: dict[int, _Queue] = {}
        self._next_up = 0

    def __len__(self) -> int:
        return sum(len(queue.records) for queue in self._queues.values())

    def append(self, record: Record) -> bool:
        """True: its partition is full."""
        queue = self._queue(record.partition)
        queue.records.append(record)
        queue.size_bytes += _size(record)
        return queue.above(self._records_of_each, self._bytes_of_each)

    def put_back(self, records: Sequence[Record]) -> None:
        """In the order in which they were taken; their partition is the next one to be served."""
        for record in reversed(records):
            queue = self._queue(record.partition)
            queue.records.appendleft(record)
            queue.size_bytes += _size(record)
        if records:
            self._next_up = records[0].partition

    def _queue(self, partition: int) -> _Queue:
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = _Queue()
            self._share_out()
        return queue

    def _share_out(self) -> None:
        parts = max(1.0, len(self._queues) / PARTITIONS_FULL)
        self._records_of_each, self._bytes_of_each = int(self._records_full / parts), int(self._bytes_full / parts)

    def ahead(self, records_max: int) -> Iterator[Record]:
        """The next ones of each partition, so many in all; they stay."""
        for queue in self._queues.values():
            yield from islice(queue.records, -(-records_max // len(self._queues)))

    def drop(self, partition: int) -> None:
        if self._queues.pop(partition, None) is not None:
            self._share_out()

    def low(self, partition: int) -> bool:
        queue = self._queues.get(partition)
        return queue is None or not queue.above(self._records_of_each // 2, self._bytes_of_each // 2)

    def take(self, records_max: int, bytes_max: int, wanted: Callable[[Record], bool]) -> list[Record]:
        """A batch; what is not wanted is dropped on the way. The bytes may be exceeded by one record of a partition."""
        taken: list[Record] = []
        order = self._order(records_max, bytes_max)
        bytes_left = bytes_max
        for index, partition in enumerate(order):
            parts = len(order) - index
            records_share = -(-(records_max - len(taken)) // parts)
            bytes_left -= self._take_of(partition, records_share, bytes_left // parts, wanted, taken)
        return taken

    def _order(self, records_max: int, bytes_max: int) -> list[int]:
        """Those that need less than their share come first, whatever else fills the batch or its time; the others in
        turns. A batch of one record is the one that was put back: it is to be tried alone."""
        places = sorted(self._queues)
        if not places:
            return places
        first = next((index for index, place in enumerate(places) if place >= self._next_up), 0)
        places = places[first:] + places[:first]
        self._next_up = places[0] + 1
        if records_max == 1:
            return places
        records, size_bytes = records_max // len(places), bytes_max // len(places)
        return sorted(places, key=lambda place: self._queues[place].above(records, size_bytes))

    def _take_of(
        self, partition: int, records: int, size_bytes: int, wanted: Callable[[Record], bool], taken: list[Record]
    ) -> int:
        queue, size = self._queues[partition], 0
        left = queue.records
        while left and records > 0 and size < size_bytes:
            record = left.popleft()
            bytes_of_it = _size(record)
            queue.size_bytes -= bytes_of_it
            if wanted(record):
                size += bytes_of_it
                records -= 1
                taken.append(record)
        if not left:
            self.drop(partition)
        return size
