"""A running processor on a real broker for the tests of clients, subscribers and workers."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import orjson
from confluent_kafka import Producer
from pydantic import SecretStr

from onepen.schemas import codec
from onepen.schemas.events import Event
from onepen.schemas.policies import Policy, PolicyRecord, policy_body
from onepen.streams import topic_admin
from onepen.streams.client import Client
from onepen.streams.processor import run_processor
from onepen.streams.settings import Settings
from onepen.streams.subscriber import Subscriber
from onepen.streams.worker import Worker

PARTITIONS = 3
LEASE_MS, RENEW_MS = 3_000, 1_000
QUICK = Policy(
    version=1,
    offer_ms=1_000,
    offer_max_ms=4_000,
    lease_ms=LEASE_MS,
    renew_ms=RENEW_MS,
    permit_ms=1_500,
    cancel_ms=4_000,
)

UNHURRIED = msgspec.structs.replace(QUICK, offer_ms=60_000, offer_max_ms=60_000, lease_ms=9_000, cancel_ms=30_000)
"""Where no offer, lease or cancel is to run out: renewals come as often as ever, and eight of them may be late."""

T = TypeVar("T")


def eventually(look: Callable[[], T | None], timeout_s: float = 20, what: str = "condition") -> T:
    """Wait until `look` answers something true."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout_s} s")


@dataclass
class Pipeline:
    """Topics of their own, one processor in a thread; make as many clients and workers on it as needed."""

    settings: Settings
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    failure: list[BaseException] = field(default_factory=list)

    def start(self) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._process, daemon=True)
        self.thread.start()

    def _process(self) -> None:
        try:
            run_processor(self.settings, self.stop)
        except BaseException as error:
            self.failure.append(error)
            raise

    def halt(self) -> None:
        if self.thread is not None:
            self.stop.set()
            self.thread.join(20)
            assert not self.thread.is_alive()
            self.thread = None
        assert not self.failure

    def put_policy(self, policy: Policy, tenant_id: int = 1) -> None:
        record = PolicyRecord(tenant_id=tenant_id, version=policy.version, body=policy_body(policy))
        producer = Producer(self.settings.kafka_client({"acks": "all"}))
        for partition in range(self.settings.partitions):
            producer.produce(
                self.settings.topics.inputs, partition=partition, key=b"policy", value=codec.encode(record)
            )
        assert producer.flush(10) == 0

    def client(self, **changes: Any) -> Client:
        return Client(settings=self.settings.model_copy(update=changes))

    def subscriber(self) -> Subscriber:
        return Subscriber(settings=self.settings)

    def worker(self, **options: Any) -> Worker:
        return Worker(options.pop("name", "test"), settings=self.settings, **options)

    def run_of(self, run_id: str, session_id: str | None = None, timeout_ms: int = 30_000) -> list[Event]:
        return list(self.subscriber().run(run_id, session_id=session_id, timeout_ms=timeout_ms))


@contextmanager
def running(bootstrap: str, prefix: str, policy: Policy = QUICK, **options: Any) -> Iterator[Pipeline]:
    settings = Settings(
        bootstrap=bootstrap,
        prefix=prefix,
        partitions=PARTITIONS,
        token_key=SecretStr(secrets.token_hex(32)),
        slot=f"{prefix}-0",
        **options,
    )
    topic_admin.apply(settings)
    pipeline = Pipeline(settings)
    pipeline.put_policy(policy)
    pipeline.start()
    try:
        yield pipeline
    finally:
        pipeline.halt()


@contextmanager
def serving(worker: Worker, timeout_ms: int = 20_000) -> Iterator[Worker]:
    """`worker.serve` in a thread, ready; stopped afterwards."""
    stop = threading.Event()
    thread = threading.Thread(target=worker.serve, args=(stop,), daemon=True)
    thread.start()
    try:
        assert worker.wait_ready(timeout_ms)
        yield worker
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def types(events: list[Event]) -> list[str]:
    return [event.type for event in events]


def payload(event: Event) -> dict[str, Any]:
    found = orjson.loads(event.payload)
    assert isinstance(found, dict)
    return found


def named(events: list[Event], event_type: str) -> list[dict[str, Any]]:
    return [payload(event) for event in events if event.type == event_type]


async def nothing(_: Any) -> None:
    await asyncio.sleep(0)
