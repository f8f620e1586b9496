"""A backlog on one partition: very many small inputs, encoded once and filled in.

Rule: session and input ids have a fixed width, so that a record is a template with other bytes in two places. Each
session sends the same few ids again and again: the first decides, the others are repeats and refusals, so what the
processor knows stops growing long before the backlog ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Final

from infra.bench.live import prompt
from infra.bench.writing import Written, write_all
from onepen.schemas.partitioning import partition_of

NAME: Final = "backlog-%08d"
INPUT: Final = "input-%06d"


def names_of(partition: int, partitions: int, how_many: int) -> list[bytes]:
    """Session ids that lie on this partition."""
    names = (b"backlog-%08d" % number for number in count())
    return list(islice((name for name in names if partition_of(name, partitions) == partition), how_many))


class Backlog:
    """Prompts of these sessions in turn on one partition; each session uses `ids` input ids over and over.

    It can be put in one piece, or be continued while it is worked off: `total` is what was put so far.
    """

    def __init__(
        self, bootstrap: str, topic: str, tenant_id: int, partition: int, names: list[bytes], ids: int
    ) -> None:
        self._bootstrap, self._topic, self._partition = bootstrap, topic, partition
        self._records = _records(tenant_id, names, ids)
        self.total = 0

    def put(self, how_many: int) -> None:
        """So many more, written when it returns. Raises `TimeoutError`."""
        records = islice(self._records, how_many)
        write_all(self._bootstrap, (Written(self._topic, name, value, self._partition) for name, value in records))
        self.total += how_many


def _records(tenant_id: int, names: list[bytes], ids: int) -> Iterator[tuple[bytes, bytes]]:
    name, input_id = NAME % 99_999_999, INPUT % 999_999
    template = prompt(tenant_id, name, input_id)
    parts = template.replace(input_id.encode(), b"\0id\0").replace(name.encode(), b"\0name\0")
    for number in count():
        filled = parts.replace(b"\0id\0", b"input-%06d" % (number % ids))
        before, after = filled.split(b"\0name\0")
        for own in names:
            yield own, before + own + after
