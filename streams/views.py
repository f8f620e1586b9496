"""Live views over the committed event log: active runs per tenant, outcomes per minute. One Faust application.

Rule 1: it decides nothing and owns nothing. Tables live in memory, no offset is committed, no topic is created; each
start reads the log from its beginning, so a view is as disposable as a cache and each process has the whole of it.
Rule 2: only committed records count. Faust's driver reads uncommitted ones outside its own transactions, so the
consumer is told otherwise before it starts and the start fails if it was not heard.
Rule 3: an event counts once, by (session, run number, seq), and in the minute of the event's own time.

What it shows is written to `<data_dir>/views.json`, replaced as a whole, together with the offsets that it rests on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import faust
import msgspec
import orjson
from aiokafka.consumer.fetcher import READ_COMMITTED  # type: ignore[import-untyped]
from aiokafka.errors import KafkaError  # type: ignore[import-untyped]
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from mode.threads import ServiceThread, WorkerThread
from yarl import URL

from onepen.schemas.codec import decode_as
from onepen.schemas.errors import Fatal, Poison, Retryable
from onepen.schemas.events import RUN_FINISHED, RUN_STARTED, Event
from onepen.streams.settings import Settings

__all__ = ["VIEWS_FILE", "Views", "read_views", "run_views"]

log = logging.getLogger(__name__)

VIEWS_FILE: Final = "views.json"
WRITE_EVERY_S: Final = 0.2
BEAT_EVERY_S: Final = 1.0
"""Written at least so often, so that a reader can tell a live view from an old file."""
RETRY_S: Final = 2.0
STOP_TIMEOUT_S: Final = 3.0
CHATTY_LOGGERS: Final = ("aiokafka", "faust", "mode")
"""Fifty lines per start at level INFO, none of them about us."""
MINUTE_MS: Final = 60_000


class Outcome(msgspec.Struct, frozen=True, rename="camel"):
    """How many runs of a tenant ended so in one minute (`minute_at_ms` is its first millisecond)."""

    tenant_id: int
    minute_at_ms: int
    status: str
    runs: int


class Active(msgspec.Struct, frozen=True, rename="camel"):
    """How many runs of a tenant are active."""

    tenant_id: int
    runs: int


class Views(msgspec.Struct, frozen=True, rename="camel"):
    """One snapshot. `offsets`: the next offset of each partition of the events topic that has not been counted yet."""

    written_at_ms: int
    pid: int
    events_topic: str
    isolation: str
    offsets: dict[int, int]
    active: tuple[Active, ...]
    outcomes: tuple[Outcome, ...]
    repeats_dropped: int
    undecodable: int


def read_views(path: Path) -> Views | None:
    """The last snapshot, or None when there is none. Never half a file: it is replaced as a whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Views, strict=False)
    except FileNotFoundError:
        return None


class _PassingThread(WorkerThread):
    """Ends with the process, whatever it waits for then."""

    def __init__(self, service: ServiceThread, **kwargs: Any) -> None:
        super().__init__(service, **kwargs)
        self.daemon = True


class _CommittedConsumerThread(AIOKafkaConsumerThread):
    """Reads committed records only, whatever Faust's own processing guarantee is, and commits nothing."""

    Worker = _PassingThread

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        # aiokafka hands this to its fetcher when the consumer starts; Faust offers no setting for it.
        consumer._isolation_level = "read_committed"
        return consumer

    async def on_start(self) -> None:
        await super().on_start()
        consumer: Any = self._consumer
        heard = consumer._fetcher._isolation_level
        if heard != READ_COMMITTED:
            raise Fatal("the views' consumer does not read committed records only; this aiokafka is not supported")

    async def stop(self) -> None:
        await super().stop()
        if self._thread is None:
            self.thread_loop.close()  # which a thread that began does itself

    async def on_thread_stop(self) -> None:
        try:
            await super().on_thread_stop()
        except asyncio.CancelledError:
            # While no broker answers aiokafka raises here the cancel of a fetch of its own, and would leave this
            # thread without the word that it is down, which the application waits for.
            consumer: Any = self._consumer
            await consumer._client.close()

    async def _commit(self, offsets: Mapping[Any, int]) -> bool:
        now = time.monotonic()
        self.tp_last_committed_at.update(dict.fromkeys(offsets, now))
        return True


class _CommittedConsumer(Consumer):
    def _new_consumer_thread(self) -> AIOKafkaConsumerThread:
        return _CommittedConsumerThread(self, loop=self.loop, beacon=self.beacon)


class _CommittedTransport(Transport):
    Consumer = _CommittedConsumer


class _MemoryTable(faust.Table):  # type: ignore[type-arg, misc, unused-ignore]
    """A Faust table without a changelog topic: nothing is declared, sent or recovered."""

    def on_key_set(self, key: Any, value: Any) -> None:
        self._sensor_on_set(self, key, value)

    def on_key_del(self, key: Any) -> None:
        self._sensor_on_del(self, key)


class _Counters:
    """The tables and the only code that changes them."""

    def __init__(self, app: faust.App) -> None:
        self.active = _MemoryTable(app, name="active-runs", default=int, store="memory://")
        self.outcomes = _MemoryTable(app, name="outcomes", default=int, store="memory://")
        self.seen = _MemoryTable(app, name="seen", default=lambda: (0, 0), store="memory://")
        self.offsets: dict[int, int] = {}
        self.repeats_dropped = 0
        self.undecodable = 0

    def take(self, partition: int, offset: int, value: bytes | None) -> None:
        try:
            self._count(decode_as(Event, value))
        except Poison as error:
            self.undecodable += 1
            log.error("events %d:%d cannot be decoded: %s", partition, offset, error)
        self.offsets[partition] = max(offset + 1, self.offsets.get(partition, 0))

    def _count(self, event: Event) -> None:
        # Within a session events are in order, so the highest (run, seq) says which were counted.
        session = (event.tenant_id, event.session_id)
        if (event.run_no, event.seq) <= self.seen[session]:
            self.repeats_dropped += 1
            return
        self.seen[session] = (event.run_no, event.seq)
        if event.type == RUN_STARTED:
            self.active[event.tenant_id] += 1
        elif event.type == RUN_FINISHED:
            self.active[event.tenant_id] -= 1
            status = str(orjson.loads(event.payload).get("terminalStatus"))
            self.outcomes[event.tenant_id, event.at_ms // MINUTE_MS * MINUTE_MS, status] += 1

    def snapshot(self, topic: str) -> Views:
        return Views(
            written_at_ms=time.time_ns() // 1_000_000,
            pid=os.getpid(),
            events_topic=topic,
            isolation="read_committed",
            offsets=dict(sorted(self.offsets.items())),
            active=tuple(Active(tenant, runs) for tenant, runs in sorted(self.active.items())),
            outcomes=tuple(
                Outcome(tenant, minute, status, runs)
                for (tenant, minute, status), runs in sorted(self.outcomes.items())
            ),
            repeats_dropped=self.repeats_dropped,
            undecodable=self.undecodable,
        )


def _build(settings: Settings) -> tuple[faust.App, _Counters]:
    brokers = [URL(f"kafka://{address.strip()}") for address in settings.bootstrap.split(",")]
    app = faust.App(
        # A group of its own per process: each view is whole, and with no offsets the broker forgets the group.
        f"{settings.prefix}-views-{uuid.uuid4().hex[:12]}",
        broker=brokers,
        store="memory://",
        web_enabled=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
        broker_max_poll_records=2_000,
        stream_wait_empty=False,
        key_serializer="raw",
        value_serializer="raw",
        datadir=settings.data_dir / "views",
    )
    app.transport = _CommittedTransport(brokers, app)
    counters = _Counters(app)
    topic = app.topic(
        settings.topics.events, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
    )

    @app.agent(topic)
    async def count(stream: Any) -> None:
        async for event in stream.events():
            counters.take(event.message.partition, event.message.offset, event.value)

    return app, counters


def _write(path: Path, counters: _Counters, topic: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(counters.snapshot(topic)))
    draft.replace(path)


async def _serve(settings: Settings, stop: threading.Event, ready: Callable[[], None], path: Path) -> None:
    while not stop.is_set():
        # A new application each time: its tables begin empty, and the log is read from its beginning.
        app, counters = _build(settings)
        try:
            if await _started(app, stop):
                log.info("views of %s, written to %s", settings.topics.events, path)
                write = partial(_write, path, counters, settings.topics.events)
                write()
                ready()
                await _follow(app, counters, stop, write)
        except KafkaError as error:
            log.warning("Kafka at %s: %s; waiting for it", settings.bootstrap, error)
        finally:
            # Nothing is committed and nothing kept: what a suspended broker does not answer is left behind.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await app.stop()
        await asyncio.to_thread(stop.wait, RETRY_S)


async def _started(app: faust.App, stop: threading.Event) -> bool:
    """False when `stop` came first. Raises `KafkaError`."""
    starting = asyncio.ensure_future(app.start())
    while not stop.is_set():
        if (await asyncio.wait([starting], timeout=WRITE_EVERY_S))[0]:
            await starting
            return True
    starting.cancel()
    return False


async def _follow(app: faust.App, counters: _Counters, stop: threading.Event, write: Callable[[], None]) -> None:
    """Write what is counted until `stop`. Raises the `KafkaError` that the application stopped for, or `Retryable`."""
    written: tuple[Any, ...] = ()
    beat = 0.0
    while not stop.is_set():
        if app.crashed:
            reason = app.crash_reason
            raise reason if isinstance(reason, KafkaError) else Retryable(f"the views stopped: {reason!r}")
        counted = tuple(sorted(counters.offsets.items()))
        if counted != written or time.monotonic() - beat >= BEAT_EVERY_S:
            write()
            written, beat = counted, time.monotonic()
        await asyncio.sleep(WRITE_EVERY_S)


def run_views(
    settings: Settings, stop: threading.Event | None = None, *, ready: Callable[[], None] = lambda: None
) -> None:
    """Count until `stop` is set, writing `<data_dir>/views.json`; blocks. `ready` is called once the log is read and
    the file is there. A broker that is away is waited for.

    Raises `Fatal` when committed reading cannot be had, `Retryable` when the application ended for a reason of its own.
    """
    for name in CHATTY_LOGGERS:
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.WARNING)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    asyncio.run(_serve(settings, stop or threading.Event(), ready, settings.data_dir / VIEWS_FILE))
