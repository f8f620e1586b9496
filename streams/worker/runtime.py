"""The worker on Kafka: offers in, views in, records out, renewals in a thread of their own.

Rule: no thread here waits for a body and no body delays a renewal. The inbox is read before the first claim goes
out. Offers come through a consumer group; views through a consumer that is assigned to this worker's inbox
partition; records leave by one plain producer, in the order in which they were decided.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from onepen.schemas import codec
from onepen.schemas.errors import OnepenError, Poison, Retryable
from onepen.schemas.limits import OFFER_HOPS_MAX
from onepen.schemas.offers import Offer
from onepen.schemas.partitioning import partition_of
from onepen.schemas.views import View
from onepen.schemas.worker_records import Release, WorkerRecord
from onepen.streams import kafka_clients
from onepen.streams.bounded_calls import unless_stopped
from onepen.streams.deadline import Deadline
from onepen.streams.plain_producer import PlainProducer
from onepen.streams.settings import Settings
from onepen.streams.topic_ends import ends, partition_counts
from onepen.streams.worker.machine import Machine
from onepen.streams.worker.session import HeldRun

log = logging.getLogger("onepen.worker")

POLL_S: Final = 0.1
TICK_S: Final = 0.05
START_TRY_MS: Final = 5_000
RETRY_S: Final = 0.5
PARKED_MAX: Final = 200
STALE_SLACK_MS: Final = 10_000
NO_ROOM: Final = "no_room"


class BrokerClock:
    """Broker time, reckoned from the stamps of our own records: never from this machine's wall clock."""

    def __init__(self) -> None:
        self._ahead_ms: int | None = None

    def observe(self, stamp_ms: int) -> None:
        """A record of ours was stamped `stamp_ms` not later than now."""
        ahead_ms = stamp_ms - time.monotonic_ns() // 1_000_000
        if self._ahead_ms is None or ahead_ms > self._ahead_ms:
            self._ahead_ms = ahead_ms

    def now_ms(self) -> int | None:
        """At most the broker's time; None before the first record was acknowledged."""
        return None if self._ahead_ms is None else time.monotonic_ns() // 1_000_000 + self._ahead_ms


class Runtime:
    """`start` and `close` come from the worker; `begin` is called in the event loop for each claimed run."""

    def __init__(
        self,
        settings: Settings,
        *,
        worker_id: str,
        group: str,
        tenant_id: int | None,
        max_runs: int,
        loop: asyncio.AbstractEventLoop,
        begin: Callable[[HeldRun], None],
        failed: Callable[[str], None],
    ) -> None:
        self.worker_id = worker_id
        self.inbox = 0
        self.ready = threading.Event()
        """Set when the group has given this worker its share of the offers for the first time."""
        self._settings = settings
        self._topics = settings.topics
        self._group = group
        self._tenant_id = tenant_id
        self._max_runs = max_runs
        self._loop = loop
        self._begin = begin
        self._failed = failed
        self._clock = BrokerClock()
        self._stop = threading.Event()
        self._no_offers = threading.Event()
        self._lock = threading.RLock()
        self._held: dict[tuple[str, int], HeldRun] = {}
        self._parked: deque[tuple[Offer, Deadline]] = deque()
        self._assigned: set[int] = set()
        self._counts: dict[str, int] = {}
        self._producer: PlainProducer | None = None
        self._threads: list[threading.Thread] = []

    # -- start and stop ----------------------------------------------------------------------------------------

    def start(self, stop: threading.Event) -> bool:
        """Connect, stand at the end of the inbox, then join the group. Tries until `stop`; False when it came."""
        inbox = kafka_clients.consumer(
            self._consumer_properties(f"{self._group}.{self.worker_id}", "error"), logger=log
        )
        while not (connected := unless_stopped(lambda: self._connect(inbox), stop)):
            if connected is None:  # it is being asked: left behind with that question
                return False
            if stop.wait(RETRY_S):
                inbox.close()
                return False
        self._producer = PlainProducer(self._settings.kafka_client(), client_id=self.worker_id)
        for name, target in (
            ("inbox", lambda: self._read_inbox(inbox)),
            ("renewals", self._renew),
            ("offers", self._read_offers),
        ):
            thread = threading.Thread(target=target, name=f"onepen-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return True

    def _connect(self, inbox: Consumer) -> bool:
        topics, bootstrap = self._topics, self._settings.bootstrap
        deadline = Deadline(START_TRY_MS)
        try:
            self._counts = partition_counts(inbox, [topics.inputs, topics.offers, topics.signals], deadline, bootstrap)
            self.inbox = partition_of(self.worker_id.encode(), self._counts[topics.signals])
            end = ends(inbox, topics.signals, self.inbox, deadline, bootstrap)[1]
        except Retryable as error:
            log.warning("worker %s cannot start yet: %s", self.worker_id, error)
            return False
        inbox.assign([TopicPartition(topics.signals, self.inbox, end)])
        return True

    def stop_offers(self) -> None:
        """Take no more runs; those held go on."""
        self._no_offers.set()
        with self._lock:
            self._parked.clear()

    def close(self, timeout_ms: int) -> None:
        """End all threads; what was handed to the producer is flushed."""
        deadline = Deadline(timeout_ms)
        self.stop_offers()
        if self._producer is not None:
            self._producer.flush(deadline.remaining_ms())
        self._stop.set()
        for thread in self._threads:
            thread.join(max(1.0, deadline.remaining_s()))
        if self._producer is not None:
            self._producer.close(deadline.remaining_ms())

    def done(self, held: HeldRun) -> None:
        """A run has ended for this worker: its place is free."""
        offer = held.offer
        with self._lock:
            self._held.pop((offer.run_id, offer.generation), None)
        self._take_parked()

    def held_count(self) -> int:
        with self._lock:
            return len(self._held)

    def _consumer_properties(self, group: str, reset: str) -> dict[str, Any]:
        # Round robin: the next offer of a run goes to the next partition, and so to another worker.
        classic = {
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 500,
            "partition.assignment.strategy": "roundrobin",
        }
        return self._settings.kafka_client(
            {
                "client.id": self.worker_id,
                "group.id": group,
                "isolation.level": "read_committed",
                "auto.offset.reset": reset,
                "enable.auto.commit": reset != "error",
                "auto.commit.interval.ms": 1_000,
                "fetch.wait.max.ms": 100,
                "reconnect.backoff.max.ms": 1_000,
                "group.protocol": self._settings.group_protocol,
                **(classic if self._settings.group_protocol == "classic" else {}),
            }
        )

    # -- records out -------------------------------------------------------------------------------------------

    def send(self, record: WorkerRecord) -> None:
        """Hand a record to the producer. What cannot be handed over is sent again by the machine's clock."""
        producer = self._producer
        assert producer is not None
        key = record.session_id.encode()
        try:
            producer.send(
                self._topics.inputs,
                partition_of(key, self._counts[self._topics.inputs]),
                key=key,
                value=codec.encode(record),
                on_delivery=self._delivered,
            )
        except OnepenError as error:
            log.warning("a %s was not sent: %s", type(record).__name__.lower(), error)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            log.warning("a worker record was not acknowledged: %s", error.str())
            return
        stamp_ms = message.timestamp()[1]
        if stamp_ms > 0:
            self._clock.observe(stamp_ms)

    # -- renewals ----------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        while not self._stop.wait(TICK_S):
            self._take_parked()
            with self._lock:
                held_runs = list(self._held.values())
            for held in held_runs:
                try:
                    held.tick()
                except Exception:  # one run's trouble must not end the renewals of the others
                    log.exception("a renewal failed")

    # -- views in ----------------------------------------------------------------------------------------------

    def _read_inbox(self, consumer: Consumer) -> None:
        me = self.worker_id.encode()
        try:
            while not self._stop.is_set():
                message = _poll(consumer, "inbox")
                if message is not None and message.key() == me:
                    self._dispatch(message)
        except Exception as error:
            self._fail("the inbox cannot be read any more", error)
        finally:
            consumer.close()

    def _dispatch(self, message: Message) -> None:
        try:
            view = codec.decode_as(View, message.value())
        except Poison as error:
            log.error("a record of the signals topic is no view: %s", error)
            return
        with self._lock:
            concerned = [held for (run_id, _), held in self._held.items() if run_id == view.run_id]
        for held in concerned:
            held.on_view(view)

    def _fail(self, sentence: str, error: Exception) -> None:
        """A reader is lost for good: the process ends, and whoever runs it starts it anew."""
        log.error("%s", sentence, exc_info=error)
        try:
            self._loop.call_soon_threadsafe(self._failed, f"{sentence}: {error}")
        except RuntimeError:
            log.debug("the loop was closed already")

    # -- offers in ---------------------------------------------------------------------------------------------

    def _read_offers(self) -> None:
        consumer = kafka_clients.consumer(self._consumer_properties(self._group, "earliest"), logger=log)

        def assigned(_: Consumer, partitions: list[TopicPartition]) -> None:
            self._assigned.update(p.partition for p in partitions)
            self.ready.set()

        def revoked(_: Consumer, partitions: list[TopicPartition]) -> None:
            self._assigned.difference_update(p.partition for p in partitions)

        consumer.subscribe([self._topics.offers], on_assign=assigned, on_revoke=revoked, on_lost=revoked)
        try:
            while not self._stop.is_set() and not self._no_offers.is_set():
                message = _poll(consumer, "offers")
                if message is None:
                    continue
                try:
                    self._consider(codec.decode_as(Offer, message.value()), message.partition() or 0)
                except Poison as error:
                    log.error("a record of the offers topic is no offer: %s", error)
        except Exception as error:
            self._fail("offers cannot be read any more", error)
        finally:
            consumer.close()

    def _consider(self, offer: Offer, partition: int) -> None:
        if self._tenant_id is not None and offer.tenant_id != self._tenant_id:
            return  # another tenant's workers are another group, and see it themselves
        now_ms = self._clock.now_ms()
        if now_ms is not None and now_ms > offer.expires_at_ms + STALE_SLACK_MS:
            return  # long over; the log would refuse the claim anyway
        # A new group begins with old offers. As long as the time is not known, only the log can tell what is over.
        if self._take(offer, optimistic=now_ms is not None):
            return
        with self._lock:
            length_ms = offer.expires_at_ms - offer.at_ms
            if len(self._parked) < PARKED_MAX:
                self._parked.append((offer, Deadline(length_ms)))
        self._pass_on(offer, partition)
        self.send(
            Release(
                tenant_id=offer.tenant_id,
                session_id=offer.session_id,
                run_id=offer.run_id,
                generation=offer.generation,
                token=offer.token,
                worker_id=self.worker_id,
                inbox=self.inbox,
                reason=NO_ROOM,
            )
        )
        self._take_parked()

    def _take(self, offer: Offer, *, optimistic: bool) -> bool:
        """Claim the run and let its body begin; False when there is no room."""
        name = (offer.run_id, offer.generation)
        with self._lock:
            if name in self._held or self._no_offers.is_set():
                return True
            older = [h for (run_id, g), h in self._held.items() if run_id == offer.run_id and g < offer.generation]
            if not self._has_room():
                held = None
            else:
                machine = Machine(offer, self.worker_id, self.inbox, optimistic=optimistic)
                held = self._held[name] = HeldRun(machine, self.send, self._loop)
        for other in older:
            other.give_up("stale_generation")
        if held is None:
            return False
        held.claim()
        try:
            self._loop.call_soon_threadsafe(self._begin, held)
        except RuntimeError:
            log.debug("an offer came after the loop was closed")
        return True

    def _has_room(self) -> bool:
        """Runs that only wait for a person or a child take no place: a parent must not keep its own child out."""
        return sum(not held.only_waits for held in self._held.values()) < self._max_runs

    def _take_parked(self) -> None:
        """Claim what waited for room and is not over yet; others may have claimed it, so no optimistic start."""
        while True:
            with self._lock:
                if not self._parked or not self._has_room():
                    return
                offer, deadline = self._parked.popleft()
            if not deadline.expired:
                self._take(offer, optimistic=False)

    def _pass_on(self, offer: Offer, partition: int) -> None:
        """To the next partition that is not ours, so that another worker sees it; at most three times."""
        if offer.hops >= OFFER_HOPS_MAX:
            return
        count = self._counts[self._topics.offers]
        following = [(partition + step) % count for step in range(1, count)]
        target = next((p for p in following if p not in self._assigned), None)
        if target is None:
            return
        passed = msgspec.structs.replace(offer, hops=offer.hops + 1)
        assert self._producer is not None
        try:
            self._producer.send(self._topics.offers, target, key=offer.run_id.encode(), value=codec.encode(passed))
        except OnepenError as error:
            log.warning("an offer was not passed on: %s", error)


def _poll(consumer: Consumer, what: str) -> Message | None:
    message = consumer.poll(POLL_S)
    if message is None:
        return None
    error = message.error()
    if error is None:
        return message
    if error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
        raise RuntimeError(f"{what}: {error.str()}")
    log.info("%s: %s", what, error.str())
    return None
