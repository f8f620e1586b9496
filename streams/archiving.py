"""Takes the state of partitions from the state topic, at the last partition record, into archives.

Rule: only what a partition record closes counts, so that half a transaction is never in an archive. The topic is read
on until a pass over what has come meanwhile was short: compaction may take an old value only when its successor has
been in the log for a while, so the successor is read too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from onepen.processors import state_keys
from onepen.schemas.errors import Fatal, Invalid, Retryable
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.streams.archive import FORMAT, ArchiveHeader, write_archive
from onepen.streams.partition_mark import decode_mark
from onepen.streams.settings import Settings
from onepen.streams.store import Mark
from onepen.streams.topic_scan import TopicScan, stable_end

__all__ = ["Archived", "StateRead", "archive_partitions"]

SHORT_PASS_S: Final = 2.0
PASSES_MAX: Final = 20


@dataclass(frozen=True)
class Archived:
    """An archive that was written."""

    path: Path
    partition: int
    next_input_offset: int
    records: int
    sessions: int
    file_bytes: int


@dataclass
class StateRead:
    """The state of a partition up to its last partition record. Fed with records of the state topic in order."""

    partition: int
    records: dict[bytes, bytes] = field(default_factory=dict)
    mark: Mark | None = None
    _open: list[tuple[bytes, bytes | None]] = field(default_factory=list)

    def take(self, key: bytes, value: bytes | None) -> None:
        """The next record. Raises `Fatal` for one that this release does not know."""
        if key != state_keys.PARTITION_KEY:
            if state_keys.session_of(key) is None and state_keys.policy_of(key) is None:
                raise Fatal(f"a record of the state topic has the unknown key {key[:64]!r}. Upgrade")
            self._open.append((key, value))
            return
        if value is None:
            raise Fatal(f"the partition record of partition {self.partition} was deleted")
        self.mark = decode_mark(value, self.partition)
        for name, change in self._open:
            if change is None:
                self.records.pop(name, None)
            else:
                self.records[name] = change
        self._open.clear()


def archive_partitions(
    settings: Settings,
    folder: Path,
    partitions: Iterable[int] | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Archived]:
    """Write an archive of each partition (all, when none is named). Raises `Retryable`, `Fatal`."""
    topics = settings.topics
    with TopicScan(settings, topics.state) as state, TopicScan(settings, topics.receipts) as receipts:
        count = state.partitions()
        for partition in range(count) if partitions is None else partitions:
            if not 0 <= partition < count:
                raise Invalid(
                    f"partition: there is no partition {partition}; the topics have {count}", field="partition"
                )
            progress(f"reading the state of partition {partition}")
            events_from = stable_end(settings, topics.events, partition)
            receipts_from = stable_end(settings, topics.receipts, partition)
            read = _read(state, partition)
            mark = read.mark
            header = ArchiveHeader(
                format=FORMAT,
                prefix=settings.prefix,
                partition=partition,
                partitions=count,
                protocol=PROTOCOL_VERSION if mark is None else mark.protocol,
                next_input_offset=0 if mark is None else mark.next_input_offset,
                events_from=0 if mark is None else events_from,
                receipts_from=0 if mark is None else receipts_from,
                receipts_until=0 if mark is None else receipts.ends(partition)[1],
            )
            path = write_archive(folder, header, read.records)
            owners = {state_keys.session_of(key) for key in read.records} - {None}
            yield Archived(
                path, partition, header.next_input_offset, len(read.records), len(owners), path.stat().st_size
            )


def _read(state: TopicScan, partition: int) -> StateRead:
    read = StateRead(partition)
    start, end = state.ends(partition)
    for _ in range(PASSES_MAX):
        began = time.monotonic()
        for record in state.read(partition, start, end):
            read.take(record.key or b"", record.value)
        start, end = end, state.ends(partition)[1]
        if start == end or time.monotonic() - began < SHORT_PASS_S:
            return read
    raise Retryable(f"partition {partition}: its state grows faster than it can be read")
