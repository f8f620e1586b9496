"""A world with brokers, topics and members: the same for the log in memory and for real Kafka.

A `Member_` polls its log, starts what it is assigned and notes what it saw; nothing here waits a fixed time, every wait
is for a condition and has a deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from onepen.schemas.topics import Topics, plan
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka import KafkaLog
from onepen.streams.log import Batch, Log, Member, Outcome, Output, Record
from onepen.streams.memory import MemoryBroker, MemoryLog

PARTITIONS = 4
WAIT_S = 30.0


class Stored(Protocol):
    """A record as an outside reader sees it."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class _Stored:
    def __init__(
        self,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]],
    ) -> None:
        self.offset, self.key, self.value, self.headers = offset, key, value, headers


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Call `condition` until it holds; it does the work of one step itself."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"


class Participant:
    """One member that starts every partition it is assigned where it left off."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.owned: set[int] = set()
        self.waiting: set[int] = set()
        self.next: dict[int, int] = {}
        self.seen: list[Record] = []
        self.last: Batch = Batch([], None)
        self.changes: list[str] = []
        log.subscribe(self)

    def assigned(self, partitions: Sequence[int]) -> None:
        self.owned.update(partitions)
        self.waiting.update(partitions)
        self.changes.append(f"assigned {sorted(partitions)}")

    def revoked(self, partitions: Sequence[int]) -> None:
        self.owned.difference_update(partitions)
        self.waiting.difference_update(partitions)
        self.changes.append(f"revoked {sorted(partitions)}")

    def poll(self, records_max: int = 1_000, bytes_max: int = 1 << 20) -> list[Record]:
        for partition in list(self.waiting):
            if self.log.start(partition, self.next.get(partition, 0)):
                self.waiting.discard(partition)
        batch = self.log.poll(records_max=records_max, bytes_max=bytes_max, wait_ms=20)
        self.last = batch
        self.seen += batch.records
        for record in batch.records:
            self.next[record.partition] = record.offset + 1
        return batch.records

    def poll_for(self, count: int) -> list[Record]:
        """Poll until so many records have come since the call."""
        before = len(self.seen)

        def enough() -> bool:
            self.poll()
            return len(self.seen) - before >= count

        wait_for(enough, f"{count} records")
        return self.seen[before:]

    def poll_nothing(self, rounds: int = 25) -> list[Record]:
        """What comes in some rounds of polling; used where nothing may come."""
        return [record for _ in range(rounds) for record in self.poll()]

    def member(self) -> Member:
        assert self.last.member is not None
        return self.last.member

    def commit(self, outputs: Sequence[Output], offsets: dict[int, int], member: Member | None = None) -> Outcome:
        transaction = self.log.begin(len(outputs))
        transaction.produce(outputs)
        return transaction.commit(offsets, member or self.member())


def settle(*members: Participant) -> None:
    """Poll until every partition is owned and started by exactly one member, and nobody's share is empty."""

    def settled() -> bool:
        for member in members:
            member.poll()
        owned = [partition for member in members for partition in member.owned]
        return sorted(owned) == list(range(PARTITIONS)) and all(m.owned and not m.waiting for m in members)

    wait_for(settled, "a settled group")


class World(Protocol):
    topics: Topics

    def log(self, slot: str) -> Log: ...

    def member(self, slot: str) -> Participant: ...

    def append(self, partition: int, value: bytes | None, key: bytes | None = b"k") -> None: ...

    def stored(self, topic: str, partition: int, *, committed: bool = True) -> Sequence[Stored]: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.topics = Topics("memory")
        self.now_ms = 1_700_000_000_000
        self.mono_s = 100.0
        self.broker = MemoryBroker(plan(self.topics, PARTITIONS), lambda: self.now_ms)

    def settings(self, slot: str) -> EngineSettings:
        return EngineSettings("", "memory", PARTITIONS, slot)

    def log(self, slot: str) -> MemoryLog:
        return MemoryLog(self.broker, self.settings(slot), monotonic=lambda: self.mono_s)

    def member(self, slot: str) -> Participant:
        return Participant(self.log(slot))

    def append(self, partition: int, value: bytes | None, key: bytes | None = b"k") -> None:
        self.broker.append(self.topics.inputs, partition, key, value)

    def stored(self, topic: str, partition: int, *, committed: bool = True) -> Sequence[Stored]:
        return [
            _Stored(offset, entry.key, entry.value, entry.headers)
            for offset, entry in self.broker.visible(topic, partition, 0, committed=committed)
        ]


def create_topics(bootstrap: str, topics: Topics, partitions: int) -> None:
    """The topics of the plan, without the partition settings that `topic_admin.apply` writes."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    missing = {t.name: NewTopic(t.name, t.partitions, 1, config=dict(t.settings)) for t in plan(topics, partitions)}

    def created() -> bool:
        for name, future in admin.create_topics(list(missing.values()), operation_timeout=20).items():
            # On a crowded machine the only broker is fenced for a moment and cannot take topics.
            with contextlib.suppress(KafkaException):
                future.result(30)
                del missing[name]
        return not missing

    wait_for(created, "the topics")


def delete_topics(bootstrap: str, topics: Topics) -> None:
    """Hundreds of partitions that nobody needs any more would slow the broker that all tests share."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_topics([t.name for t in plan(topics, PARTITIONS)]).values():
        with contextlib.suppress(KafkaException):
            future.result(30)


class OutsideReader:
    """Reads whole topics from outside; asked again it reads on, so that waiting for something is cheap."""

    def __init__(self, bootstrap: str, topics: Sequence[str], partitions: int, *, committed: bool = True) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "tests.outside-reader",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,
                "check.crcs": False,
            }
        )
        places = [TopicPartition(topic, partition, 0) for topic in topics for partition in range(partitions)]
        self._consumer.assign(places)
        self._unread = {(tp.topic, tp.partition) for tp in places}
        self.records: dict[tuple[str, int], list[Stored]] = {place: [] for place in self._unread}

    def read(self, *, to_the_end: bool = False) -> list[tuple[str, int, Stored]]:
        """What has come since; `to_the_end`: not before the end of every partition was seen once."""
        found: list[tuple[str, int, Stored]] = []

        def step() -> bool:
            message = self._consumer.poll(0.02)
            for one in [message, *self._consumer.consume(2_000, 0.0)] if message else []:
                place = (str(one.topic()), int(one.partition() or 0))
                if one.error() is not None:
                    self._unread.discard(place)
                    continue
                headers = one.headers() or []
                record = _Stored(one.offset() or 0, one.key(), one.value(), headers)  # type: ignore[arg-type]
                self.records[place].append(record)
                found.append((*place, record))
            return not (to_the_end and self._unread)

        wait_for(step, "the end of the topics")
        return found

    def close(self) -> None:
        self._consumer.close()


def stored(bootstrap: str, topic: str, partitions: int, *, committed: bool = True) -> dict[int, list[Stored]]:
    """All records of a topic, read from outside."""
    reader = OutsideReader(bootstrap, [topic], partitions, committed=committed)
    try:
        reader.read(to_the_end=True)
        return {partition: records for (_, partition), records in reader.records.items()}
    finally:
        reader.close()


class OpenTransactions:
    """Whether a topic has records that are neither committed nor aborted yet, asked again and again."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._places = [TopicPartition(topic, partition) for partition in range(partitions)]
        self._consumers = [
            Consumer({"bootstrap.servers": bootstrap, "group.id": "tests.open", "isolation.level": isolation})
            for isolation in ("read_committed", "read_uncommitted")
        ]

    def any(self) -> bool:
        stable, written = (
            [consumer.get_watermark_offsets(place, timeout=10)[1] for place in self._places]
            for consumer in self._consumers
        )
        return stable != written

    def close(self) -> None:
        for consumer in self._consumers:
            consumer.close()


class KafkaWorld:
    def __init__(self, bootstrap: str, prefix: str, protocol: str, *, members_bootstrap: str = "") -> None:
        self.bootstrap, self.prefix, self.protocol = bootstrap, prefix, protocol
        self._members_bootstrap = members_bootstrap or bootstrap
        self.topics = Topics(prefix)
        self.logs: list[KafkaLog] = []
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
        create_topics(bootstrap, self.topics, PARTITIONS)

    def settings(self, slot: str) -> EngineSettings:
        return EngineSettings(self._members_bootstrap, self.prefix, PARTITIONS, slot, self.protocol)

    def log(self, slot: str) -> KafkaLog:
        log = KafkaLog(self.settings(slot))
        self.logs.append(log)
        return log

    def member(self, slot: str) -> Participant:
        return Participant(self.log(slot))

    def append(self, partition: int, value: bytes | None, key: bytes | None = b"k") -> None:
        self._producer.produce(self.topics.inputs, value, key, partition)
        assert self._producer.flush(10) == 0

    def stored(self, topic: str, partition: int, *, committed: bool = True) -> Sequence[Stored]:
        return stored(self.bootstrap, topic, PARTITIONS, committed=committed)[partition]

    def close(self) -> None:
        for log in self.logs:
            try:
                log.close(leave=True)
            except (KafkaException, RuntimeError):
                continue  # a test has closed it already
        delete_topics(self.bootstrap, self.topics)


def output(topic: str, partition: int, value: bytes, *, track: bool = False) -> Output:
    return Output(topic, partition, b"k", value, None, track)


def shown(world: World, topic: str, partition: int, values: list[bytes]) -> None:
    """Wait until exactly these values are there. A commit is acknowledged before its markers are written everywhere."""
    found: list[bytes | None] = []

    def read() -> bool:
        found[:] = [record.value for record in world.stored(topic, partition)]
        return len(found) >= len(values)

    wait_for(read, f"{values} on {topic}-{partition}")
    assert found == values, found
