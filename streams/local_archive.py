"""Local archives: the state a processor had when it was stopped, kept in its data directory for its next start.

Rule: an archive saves time and nothing else. It is used only when nothing speaks against it, and then once; whatever
is wrong with it is said in a sentence, it is removed and the state is read from the brokers. What compaction may take
away of the topic behind its position are records with a younger one of the same key, and deletions that are older than
`delete.retention.ms`: so an archive is stale after half of that. A clock that was set back by less than the other half
does no harm.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from onepen.processors import state_keys
from onepen.schemas.errors import Fatal
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.log import Survey
from onepen.streams.state_file import FORMAT, SUFFIX, StateFile, StateHeader, Unusable, write_state
from onepen.streams.store import Mark, PartitionStore

__all__ = ["Loading", "LocalArchives", "StateTopic", "TopicFacts"]

log = logging.getLogger("onepen.processor.archive")

KEPT_MS_MAX: Final = 24 * 3600 * 1000
SWEEP_EVERY_MS: Final = 3600 * 1000
WRITE_S: Final = 3
"""After so long no further archive is begun: a static member away for the group session loses its partitions."""
FACTS_LIMIT_S: Final = 10.0


class StateTopic(msgspec.Struct, frozen=True):
    """What an archive must agree with. `tombstones_ms`: how long deletions surely stay, `delete.retention.ms`."""

    topic_id: str
    tombstones_ms: int


class TopicFacts(Protocol):
    """What the brokers tell of the state topic."""

    def state_topic(self) -> Future[StateTopic | None]:
        """Asked on another thread; None: no answer."""
        ...

    def state_ends(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """The high watermarks; empty when they are not told within some seconds."""
        ...


class LocalArchives:
    """The archives of one data directory, which may serve several processors. For one thread."""

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings,
        facts: TopicFacts,
        now_ms: Callable[[], float] = lambda: time.time() * 1000,
    ) -> None:
        self._folder, self._settings, self._facts, self._now_ms = folder, settings, facts, now_ms
        self._topic = facts.state_topic()
        self._sweep_at_ms = 0.0

    def sweep(self) -> None:
        """Now and then: remove what no start will use any more, and drafts of processes killed while they wrote."""
        now_ms = self._now_ms()
        if now_ms < self._sweep_at_ms:
            return
        self._sweep_at_ms = now_ms + SWEEP_EVERY_MS
        for path in self._folder.glob(f"*{SUFFIX}*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime * 1000 + KEPT_MS_MAX < now_ms:
                    path.unlink(missing_ok=True)

    def place(self, partition: int) -> Path:
        return self._folder / f"{self._settings.prefix}-{partition:05d}{SUFFIX}"

    # -- reading ---------------------------------------------------------------------------------------------------

    def open(self, store: PartitionStore[Any]) -> Loading | None:
        """The archive of an empty store's partition, if there is one."""
        place = self.place(store.partition)
        try:
            return Loading(self, store, place) if place.exists() else None
        except OSError as error:
            log.warning("%s is not looked at: %s", place, error.strerror)
            return None

    @property
    def answered(self) -> bool:
        """Whether the brokers have told about the topic, or will not. Asked once in the life of a processor."""
        return self._topic.done()

    def facts(self) -> StateTopic | None:
        return self._topic.result() if self._topic.done() else None

    def check(self, header: StateHeader, partition: int, topic: StateTopic) -> None:
        """Raise `Unusable` unless the archive is of this partition, and young enough."""
        settings = self._settings
        if header.prefix != settings.prefix:
            raise Unusable(f"is of the topics {header.prefix}.*, not of {settings.prefix}.*")
        if header.partition != partition:
            raise Unusable(f"is of partition {header.partition}")
        if header.topic_id != topic.topic_id:
            raise Unusable("is of another cluster, or of a topic of the same name that was deleted since")
        if header.partitions != settings.partitions:
            raise Unusable(f"was written for {header.partitions} partitions")
        if header.protocol > PROTOCOL_VERSION:
            raise Unusable(f"was written under protocol {header.protocol}; this release speaks {PROTOCOL_VERSION}")
        limit_ms = min(topic.tombstones_ms // 2, KEPT_MS_MAX)
        age_ms = self._now_ms() - header.current_ms
        if not 0 <= age_ms <= limit_ms:
            raise Unusable(
                f"is {age_ms / 1000:.0f} s old: only from 0 to {limit_ms // 1000} s (half of the topic's "
                "delete.retention.ms) no deletion behind it can be missing"
            )

    def drop(self, partition: int, why: object) -> None:
        """Remove an archive that is wrong, stale or torn; the caller reads the state from the brokers."""
        self._remove(partition)
        log.warning(
            "partition %d: the local archive %s. It is dropped and the state is read from the brokers", partition, why
        )

    def used(self, partition: int) -> None:
        """Its state is live: from now on the archive only grows old, with content that may be erased meanwhile."""
        self._remove(partition)

    def _remove(self, partition: int) -> None:
        try:
            self.place(partition).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", self.place(partition), error.strerror)

    # -- writing ---------------------------------------------------------------------------------------------------

    def headers(self, stores: Sequence[PartitionStore[Any]]) -> list[tuple[StateHeader, PartitionStore[Any]]]:
        """What may be written of live partitions: where nobody has written behind us. To be asked before the group is
        left; afterwards it is a new owner's turn."""
        topic, now_ms = self.facts(), int(self._now_ms())
        if topic is None or not stores:
            return []
        ends = self._facts.state_ends([store.partition for store in stores])
        found = []
        for store in stores:
            mark, end = store.mark, ends.get(store.partition)
            if mark is None or end is None or mark.next_input_offset != store.next_offset:
                continue
            # Behind our last record stands at most the marker that ended its transaction.
            if not store.position <= end <= store.position + 1:
                log.info("partition %d: no local archive, its position is not the end", store.partition)
                continue
            header = StateHeader(
                format=FORMAT,
                prefix=self._settings.prefix,
                topic_id=topic.topic_id,
                partition=store.partition,
                partitions=self._settings.partitions,
                protocol=mark.protocol,
                position=store.position,
                next_input_offset=mark.next_input_offset,
                current_ms=now_ms,
            )
            found.append((header, store))
        return found

    def write(self, wanted: Sequence[tuple[StateHeader, PartitionStore[Any]]]) -> None:
        """A disk that does not take them, or not in time, costs the time they would have saved."""
        deadline = time.monotonic() + WRITE_S
        for header, store in wanted:
            began = time.monotonic()
            if began > deadline:
                log.info("partition %d: no local archive, the others took %d s", store.partition, WRITE_S)
                continue
            try:
                size = write_state(self.place(store.partition), header, store)
            except OSError as error:
                log.warning("partition %d: no local archive: %s", store.partition, error)
                continue
            took_ms = (time.monotonic() - began) * 1000
            log.info("partition %d: local archive of %d bytes written in %d ms", store.partition, size, took_ms)


class Loading:
    """An archive on its way into a store."""

    def __init__(self, archives: LocalArchives, store: PartitionStore[Any], place: Path) -> None:
        self._archives, self._store, self._place = archives, store, place
        self._give_up = time.monotonic() + FACTS_LIMIT_S
        self._file: StateFile | None = None
        self._frames: Iterator[None] | None = None

    def step(self) -> bool | None:
        """A piece of some ms. True: the store is whole up to its position; None: nothing can be done just now.

        Raises `Unusable`; then the store is not to be used.
        """
        if self._frames is None:
            return self._begin()
        return next(self._frames, self) is self

    def _begin(self) -> bool | None:
        topic = self._archives.facts()
        if topic is None:
            if self._archives.answered or time.monotonic() > self._give_up:
                raise Unusable("cannot be judged, since the brokers do not tell about the topic")
            return None
        self._file = StateFile(self._place)
        self._archives.check(self._file.header, self._store.partition, topic)
        self._frames = self._file.load(self._store)
        return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def check_position(position: int, survey: Survey) -> None:
    """Raise `Unusable` when the topic does not reach from the record in front of this position on."""
    if position > survey.state_end:
        raise Unusable(f"is of position {position}, but the state topic ends at {survey.state_end}")
    if position - 1 < survey.state_start and survey.state_start > 0:
        raise Unusable(f"is of position {position}, but the state topic begins at {survey.state_start}")


def check_marks(before: Mark, records: Sequence[tuple[int, bytes, bytes | None]]) -> None:
    """Raise `Unusable` when the partition records behind an archive do not follow from its own: the topic has another
    past than the one the archive was taken from."""
    next_offset = before.next_input_offset
    for _, key, value in records:
        if key != state_keys.PARTITION_KEY or value is None:
            continue
        with contextlib.suppress(Fatal):
            mark = Mark.decode(value)
            if mark.next_input_offset < next_offset or (mark.next_input_offset == next_offset and mark != before):
                raise Unusable(f"knows inputs up to {next_offset}; behind it the state topic says {mark}")
            next_offset, before = mark.next_input_offset, mark
