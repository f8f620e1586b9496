"""Receipts for the inputs this process sent: one background consumer per process, broker and prefix.

Rule: it stands at the end of every receipts partition *before* the first input is produced, so that no
answer can be missed. It reads committed records only and keeps those that somebody still waits for: whoever
drops the handle drops its receipts. When reading ends for good, those who wait are told so, and the next input begins
with a new consumer.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, TopicPartition

from onepen.schemas import codec
from onepen.schemas.errors import OnepenError, Poison, Retryable, UnknownOutcome
from onepen.schemas.receipts import Receipt
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline
from onepen.streams.settings import Settings
from onepen.streams.topic_ends import ends, partition_counts

log = logging.getLogger("onepen.receipts")

T = TypeVar("T")
Key = tuple[int, str, str]

POLL_S: Final = 0.1
CLOSE_S: Final = 5.0
_GONE = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError._FATAL,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._AUTHENTICATION,
    }
)


class Watched:
    """What is known of one input: its receipts in log order, or why none can come. Thread-safe."""

    __slots__ = ("__weakref__", "_condition", "_failure", "_listeners", "_receipts")

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._receipts: list[Receipt] = []
        self._failure: OnepenError | None = None
        self._listeners: list[Callable[[], None]] = []

    def add(self, receipt: Receipt) -> None:
        with self._condition:
            self._receipts.append(receipt)
            self._changed()

    def fail(self, error: OnepenError | None) -> None:
        """Waiters get `error` unless the answer is there; None takes the failure back (sent again)."""
        with self._condition:
            self._failure = error
            self._changed()

    def touch(self) -> None:
        """Let waiters look again: what they know besides the receipts has changed."""
        with self._condition:
            self._changed()

    def _changed(self) -> None:
        self._condition.notify_all()
        for listener in self._listeners:
            listener()

    def look(self, find: Callable[[list[Receipt]], T | None]) -> T | None:
        """What `find` makes of the receipts so far. Raises the failure when there is one and no answer."""
        with self._condition:
            found = find(self._receipts)
            if found is None and self._failure is not None:
                raise self._failure
            return found

    def wait(self, find: Callable[[list[Receipt]], T | None], deadline: Deadline) -> T | None:
        """Like `look`, but waits until the deadline for an answer; None when it has passed."""
        with self._condition:
            while True:
                found = self.look(find)
                if found is not None or deadline.expired:
                    return found
                self._condition.wait(deadline.remaining_s())

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` (from any thread, it must be quick) at each change; answers how to stop that."""
        with self._condition:
            self._listeners.append(listener)
            listener()

        def stop() -> None:
            with self._condition:
                self._listeners.remove(listener)

        return stop


_readers: dict[tuple[int, str, str], ReceiptsReader] = {}
_readers_lock = threading.Lock()


class ReceiptsReader:
    """Get it by `shared`, give it back by `release`. One thread, one consumer, no group."""

    def __init__(self, settings: Settings) -> None:
        self.partitions = 0
        self._settings = settings
        self._users = 0
        self._start_lock = threading.Lock()
        self._consumer: Consumer | None = None
        self._thread: threading.Thread | None = None
        self._reading = False
        self._stop = threading.Event()
        # Re-entrant: a weak reference may be collected while this very thread holds the lock.
        self._lock = threading.RLock()
        self._watched: weakref.WeakValueDictionary[Key, Watched] = weakref.WeakValueDictionary()

    @classmethod
    def shared(cls, settings: Settings) -> ReceiptsReader:
        """The reader of this process for these addresses. Each call needs one `release`."""
        name = (os.getpid(), settings.bootstrap, settings.prefix)
        with _readers_lock:
            reader = _readers.get(name)
            if reader is None:
                reader = _readers[name] = cls(settings)
            reader._users += 1
            return reader

    def release(self) -> None:
        """The last user's call ends thread and consumer."""
        with _readers_lock:
            self._users -= 1
            if self._users > 0:
                return
            for name, reader in list(_readers.items()):
                if reader is self:
                    del _readers[name]
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def watch(self, tenant_id: int, session_id: str, input_id: str) -> Watched:
        """The receipts of one input from now on; the same object for the same input while one is held."""
        with self._lock:
            key = (tenant_id, session_id, input_id)
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = Watched()
            return watched

    def start(self, deadline: Deadline, watched: Watched) -> None:
        """Stand at the end of every partition, so that `watched` misses nothing from now on. Raises `Retryable`."""
        with self._start_lock:
            if not self._reading:
                self._stand(deadline)
            # It was told of a reader that is no more, before anything of it was sent.
            watched.fail(None)

    def _stand(self, deadline: Deadline) -> None:
        consumer = self._consumer or kafka_clients.consumer(self._properties(), logger=log)
        self._consumer = consumer
        topics, bootstrap = self._settings.topics, self._settings.bootstrap
        counts = partition_counts(consumer, [topics.inputs, topics.receipts], deadline, bootstrap)
        if counts[topics.inputs] != counts[topics.receipts]:
            raise Retryable(f"{topics.inputs} and {topics.receipts} have different partition counts")
        consumer.assign(
            [TopicPartition(topics.receipts, p, ends(consumer, topics.receipts, p, deadline, bootstrap)[1])
             for p in range(counts[topics.receipts])]
        )  # fmt: skip
        self.partitions = counts[topics.inputs]
        self._consumer = None  # the thread's own from here on
        self._reading = True
        self._thread = threading.Thread(target=self._read, args=(consumer,), name="onepen-receipts", daemon=True)
        self._thread.start()

    def _properties(self) -> dict[str, Any]:
        return self._settings.kafka_client(
            {
                "client.id": "onepen-receipts",
                "group.id": f"{self._settings.prefix}.receipts.{uuid.uuid4().hex}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
                "reconnect.backoff.max.ms": 1_000,
            }
        )

    def _read(self, consumer: Consumer) -> None:
        try:
            while not self._stop.is_set():
                message = consumer.poll(POLL_S)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    self._take(message.value())
                elif error.fatal() or error.code() in _GONE:
                    self._break(f"receipts cannot be read any more: {error.str()}")
                    return
                else:
                    log.info("receipts: %s", error.str())
        except Exception as error:
            log.exception("the receipts reader failed")
            self._break(f"receipts cannot be read any more: {error}")
        finally:
            consumer.close()

    def _take(self, value: bytes | None) -> None:
        try:
            receipt = codec.decode_as(Receipt, value)
        except Poison as error:
            log.error("a record of the receipts topic is no receipt: %s", error)
            return
        if receipt.kind != "input" or receipt.input_id is None:
            return
        with self._lock:
            watched = self._watched.get((receipt.tenant_id, receipt.session_id, receipt.input_id))
        if watched is not None:
            watched.add(receipt)

    def _break(self, sentence: str) -> None:
        with self._start_lock:  # who is told here was sent before, and who starts anew was not
            self._reading = False
            with self._lock:
                waiting = list(self._watched.values())
            for watched in waiting:
                watched.fail(UnknownOutcome(sentence))
