"""The consumer loop that drives a sink: Kafka hands out partitions, the database says where to read on.

Rule 1: positions come from the database at each assignment, never from the group; what the group has committed is
for monitoring only.
Rule 2: a record is either written with its position in one transaction, or is in the dead letters before its
position moves.
Rule 3: polling goes on while the database is slow or away; what is held in memory is bounded.

The loop runs in the caller's thread, the writer in an event loop of its own thread (`writer_thread.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Poison
from onepen.schemas.events import Event
from onepen.schemas.receipts import Receipt
from onepen.sinks.postgres.fold import check_record
from onepen.sinks.postgres.rows import Placed
from onepen.sinks.postgres.writer import Claimed, Place, Slice, Written
from onepen.streams import kafka_clients
from onepen.streams.counters import SinkCounters
from onepen.streams.deadline import Deadline
from onepen.streams.engine_settings import STATISTICS_MS
from onepen.streams.feed_dead_letters import DeadLetters
from onepen.streams.kafka_statistics import StatisticsTexts
from onepen.streams.object_sweeper import ObjectSweeper
from onepen.streams.readiness import say_ready
from onepen.streams.settings import Settings
from onepen.streams.topic_admin import await_topics
from onepen.streams.watch_extra import require_extra
from onepen.streams.writer_thread import WriterThread

__all__ = ["BATCH_RECORDS_MAX", "run_sink"]

log = logging.getLogger("onepen.sink")

BATCH_RECORDS_MAX: Final = 2_000
HELD_RECORDS_MAX: Final = 2 * BATCH_RECORDS_MAX
"""Two batches: one is being written while the next one fills."""
HELD_BYTES_MAX: Final = 32 * 1024 * 1024
PAUSE_AFTER_S: Final = 2.0
"""A pause throws the client's prefetched records away, so it is kept for a database that is slow or gone."""
IDLE_POLL_S: Final = 0.2
BUSY_POLL_S: Final = 0.005
MONITORING_COMMIT_S: Final = 1.0
RECLAIM_AFTER_S: Final = 1.0
STOP_TIMEOUT_MS: Final = 10_000


def run_sink(settings: Settings, stop: threading.Event, *, ready: Callable[[], None] = say_ready) -> None:
    """Write events and receipts into PostgreSQL until `stop` is set. `ready` is called once partitions are read.

    Raises `Fatal` with a sentence for a person: topics not as planned, migrations missing, slot used twice. A
    database or broker that is away is waited for.
    """
    dsn = settings.require_dsn()
    if settings.metrics_port is not None:
        require_extra()
    if not await_topics(settings, stop):
        return
    with WriterThread(dsn, application_name=f"onepen-sink {settings.slot}"[:63]) as writer:
        feed = Feed(settings, writer, ready)
        try:
            with _watched(settings, feed):
                feed.run(stop)
        finally:
            feed.close()


def _watched(settings: Settings, feed: Feed) -> contextlib.AbstractContextManager[Any]:
    """What shows the sink to others while it runs, if anybody asked for it."""
    if settings.metrics_port is None:
        return contextlib.nullcontext()
    from onepen.streams.feed_watch import watching  # `run_sink` has looked for its extra

    return watching(settings, feed)


@dataclass(slots=True, eq=False)
class _Owned:
    """A partition under one claim. Records polled under another claim are not written under this one."""

    claim: Claimed
    position: int
    """Where the last batch that was handed to the writer ends."""
    parked: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    owned: _Owned
    offset: int
    size_bytes: int
    record: Event | Receipt | None


@dataclass(slots=True)
class _InFlight:
    future: Future[Written]
    began_s: float
    parts: list[tuple[_Owned, Slice]] = field(default_factory=list)


class Feed:
    """One member of the sinks' group. Not shared between threads."""

    def __init__(self, settings: Settings, writer: WriterThread, ready: Callable[[], None]) -> None:
        self._settings = settings
        self._writer = writer
        self._ready: Callable[[], None] | None = ready
        self._topics = settings.topics
        self._assigned: set[Place] = set()
        self._owned: dict[Place, _Owned] = {}
        self._claims: Future[list[Claimed]] | None = None
        self._claim_from_s: float | None = None
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._full_since_s: float | None = None
        self._paused = False
        self._in_flight: _InFlight | None = None
        self._monitored: dict[Place, int] = {}
        self._monitored_s = 0.0
        self.counters = SinkCounters()
        self.statistics = StatisticsTexts(STATISTICS_MS if settings.metrics_port is not None else 0)
        self._dead_letters = DeadLetters(settings)
        self._sweeper = ObjectSweeper(settings, writer)
        properties = _properties(settings) | self.statistics.of("sink")
        self._consumer = kafka_clients.consumer(properties, logger=logging.getLogger("onepen.sink.kafka"))

    def run(self, stop: threading.Event) -> None:
        """Read and write until `stop`; then wait a moment for the batch that is being written."""
        self._consumer.subscribe(
            [self._topics.events, self._topics.receipts],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_revoke,
        )
        while not stop.is_set():
            self.counters.turned_s = time.monotonic()
            self._take()
            self._settle_claims()
            self._settle_batch()
            self._submit()
            self._commit_for_monitoring()
            self._sweeper.tick()
        deadline = Deadline(STOP_TIMEOUT_MS)
        while self._in_flight is not None and not deadline.expired:
            wait([self._in_flight.future], timeout=deadline.remaining_s())
            self._settle_batch()

    def close(self) -> None:
        """Leave the group's partitions to the next start of this slot, or to others after the session time-out."""
        self._dead_letters.close()
        self._consumer.close()

    def places(self) -> dict[Place, tuple[int, bool]]:
        """What is claimed: (place -> position, parked). May be called on any thread."""
        return {place: (owned.position, owned.parked) for place, owned in list(self._owned.items())}

    @property
    def busy(self) -> bool:
        """Whether records are held or being written. May be called on any thread."""
        return bool(self._held) or self._in_flight is not None

    # -- partitions: called inside of poll and consume

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._assigned = {(partition.topic, partition.partition) for partition in partitions}
        self.counters.assigned = len(self._assigned)
        # Nothing is fetched before the database has said from where.
        consumer.assign([])
        self._claim_from_s = time.monotonic()

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            self._assigned.discard((partition.topic, partition.partition))
            self._owned.pop((partition.topic, partition.partition), None)
        self.counters.assigned = len(self._assigned)
        self._drop_strangers()

    def _settle_claims(self) -> None:
        """Ask for claims of what is assigned and not owned; when they are there, read on from their positions."""
        if self._claims is not None:
            if not self._claims.done():
                return
            claims, self._claims = self._claims.result(), None
            for claim in claims:
                if claim.place in self._assigned and claim.place not in self._owned:
                    self._owned[claim.place] = _Owned(claim, claim.next_offset)
            if self._claim_from_s is None and self._assigned - self._owned.keys():
                self._claim_from_s = time.monotonic() + RECLAIM_AFTER_S  # a batch of the former owner holds them
            if claims:
                self._read_from_positions()
        if self._claim_from_s is None or time.monotonic() < self._claim_from_s:
            return
        self._claim_from_s = None
        lacking = sorted(self._assigned - self._owned.keys())
        if lacking:
            self._claims = self._writer.claim(lacking)
        else:
            self._say_ready()

    def _read_from_positions(self) -> None:
        places = []
        for place, owned in self._owned.items():
            if not owned.parked:
                held = [record.offset + 1 for record in self._held if record.owned is owned]
                places.append(TopicPartition(*place, max(held, default=owned.position)))
        self._consumer.assign(places)
        if places:
            self._consumer.resume(places)  # an assignment does not end a pause
        self._paused = False
        if self._claim_from_s is None:
            self._say_ready()

    def _say_ready(self) -> None:
        log.info(
            "ready: reading %d partitions of %s and %s", len(self._owned), self._topics.events, self._topics.receipts
        )
        if self._ready is not None:
            ready, self._ready = self._ready, None
            ready()

    def _drop_strangers(self) -> None:
        """Forget what was read of partitions that are owned no longer, or under another claim."""
        self._held = deque(held for held in self._held if self._owned.get(held.owned.claim.place) is held.owned)
        self._held_bytes = sum(held.size_bytes for held in self._held)

    # -- reading

    def _take(self) -> None:
        room = HELD_RECORDS_MAX - len(self._held)
        full = room <= 0 or self._held_bytes >= HELD_BYTES_MAX
        if full and not self._paused:
            self._wait_for_room()
            return
        if self._paused and not full and len(self._held) <= HELD_RECORDS_MAX // 2:
            self._set_paused(False)
        busy = self._in_flight is not None or self._claims is not None or bool(self._held)
        first = self._consumer.poll(BUSY_POLL_S if busy and not self._paused else IDLE_POLL_S)
        if first is None:
            return
        self._hold(first)
        if room > 1:
            for message in self._consumer.consume(min(room - 1, BATCH_RECORDS_MAX), 0):
                self._hold(message)

    def _wait_for_room(self) -> None:
        """The client's own queue holds the rest for a while; then the partitions are paused, and polling goes on."""
        now_s = time.monotonic()
        if self._full_since_s is None:
            self._full_since_s = now_s
        if now_s - self._full_since_s > PAUSE_AFTER_S:
            self._set_paused(True)
        elif self._in_flight is not None:
            wait([self._in_flight.future], timeout=0.05)
        else:  # dead letters are on their way
            time.sleep(0.01)

    def _set_paused(self, paused: bool) -> None:
        self._paused, self._full_since_s = paused, None
        places = [TopicPartition(*place) for place, owned in self._owned.items() if not owned.parked]
        if places:
            (self._consumer.pause if paused else self._consumer.resume)(places)

    def _hold(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            self._on_error(error, message)
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if topic is None or partition is None or offset is None:
            return
        owned = self._owned.get((topic, partition))
        if owned is None or owned.parked:
            return
        value = message.value()
        record: Event | Receipt | None = None
        try:
            record = self._decode(topic, value)
        except Poison as poison:
            self.counters.dead_letters[poison.reason] += 1
            self._dead_letters.send(message, poison.reason)
            log.warning("%s/%d offset %d goes to the dead letters: %s", topic, partition, offset, poison)
        size_bytes = len(value) if value is not None else 0
        self._held.append(_Held(owned, offset, size_bytes, record))
        self._held_bytes += size_bytes

    def _decode(self, topic: str, value: bytes | None) -> Event | Receipt:
        record: Event | Receipt
        if topic == self._topics.events:
            record = codec.decode_as(Event, value)
        else:
            record = codec.decode_as(Receipt, value)
        check_record(record)
        return record

    def _on_error(self, error: KafkaError, message: Message) -> None:
        if error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID) or error.fatal():
            raise Fatal(f"Kafka: {error.str()}; if another sink runs as slot {self._settings.slot}, set ONEPEN_SLOT")
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            place = (str(message.topic()), int(message.partition() or 0))
            owned = self._owned.get(place)
            at = owned.position if owned else "?"
            self._park(
                place, f"the log does not hold offset {at}: the topic was emptied or made anew under these tables"
            )
            return
        log.warning("Kafka: %s", error.str())

    # -- writing

    def _submit(self) -> None:
        if self._in_flight is not None or not self._held or not self._dead_letters.settled():
            return
        batches: dict[_Owned, list[_Held]] = {}
        for _ in range(min(len(self._held), BATCH_RECORDS_MAX)):
            held = self._held.popleft()
            self._held_bytes -= held.size_bytes
            batches.setdefault(held.owned, []).append(held)
        parts = []
        for owned, records in batches.items():
            place = owned.claim.place
            end = records[-1].offset + 1
            placed = [Placed(place[1], held.offset, held.record) for held in records if held.record is not None]
            parts.append((owned, Slice(place, owned.claim.epoch, owned.position, end, placed)))
            owned.position = end
        self._full_since_s = None
        self._in_flight = _InFlight(self._writer.write([part for _, part in parts]), time.monotonic(), parts)

    def _settle_batch(self) -> None:
        if self._in_flight is None or not self._in_flight.future.done():
            return
        flight, self._in_flight = self._in_flight, None
        written = flight.future.result()
        self.counters.batch_ms.observe((time.monotonic() - flight.began_s) * 1_000)
        self.counters.batch_records.observe(sum(len(part.records) for _, part in flight.parts))
        self.counters.fenced += len(written.fenced)
        self.counters.records += sum(len(part.records) for _, part in flight.parts if part.place in written.done)
        if written.objects:
            self._sweeper.wanted()
        for owned, part in flight.parts:
            if self._owned.get(part.place) is not owned:
                continue
            if part.place in written.done:
                self._monitored[part.place] = part.next_offset
            elif part.place in written.parked:
                self._park(part.place, written.parked[part.place])
            else:
                log.warning("%s/%d: another owner has written; claiming it again if it stays ours", *part.place)
                self._give_up(part.place)

    def _park(self, place: Place, reason: str) -> None:
        """Read and write nothing more of a partition until the next assignment; the others go on."""
        owned = self._owned.get(place)
        log.error("ALARM: %s/%d is parked: %s", *place, reason)
        if owned is not None and not owned.parked:
            owned.parked = True
            self._consumer.pause([TopicPartition(*place)])
            self._held = deque(held for held in self._held if held.owned is not owned)
            self._held_bytes = sum(held.size_bytes for held in self._held)

    def _give_up(self, place: Place) -> None:
        """Fenced. Two members may both believe that they own it during a rebalance: wait a moment before the claim."""
        self._owned.pop(place, None)
        self._drop_strangers()
        self._consumer.pause([TopicPartition(*place)])
        self._claim_from_s = time.monotonic() + RECLAIM_AFTER_S

    def _commit_for_monitoring(self) -> None:
        now_s = time.monotonic()
        if not self._monitored or now_s - self._monitored_s < MONITORING_COMMIT_S:
            return
        offsets = [TopicPartition(*place, offset) for place, offset in self._monitored.items()]
        self._monitored, self._monitored_s = {}, now_s
        with contextlib.suppress(KafkaException):
            self._consumer.commit(offsets=offsets, asynchronous=True)


def _properties(settings: Settings) -> dict[str, Any]:
    return {
        "queued.min.messages": 5_000,
        "queued.max.messages.kbytes": 16_384,
        "fetch.wait.max.ms": 100,
        "fetch.queue.backoff.ms": 5,
        "reconnect.backoff.max.ms": 500,
        "socket.keepalive.enable": True,
        **settings.kafka_client(),
        "client.id": f"{settings.prefix}.{settings.slot}.sink",
        "group.id": f"{settings.prefix}.sink",
        "group.instance.id": settings.slot,
        "group.protocol": "classic",
        "partition.assignment.strategy": "range",
        "session.timeout.ms": 6_000,
        "heartbeat.interval.ms": 500,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
    }
