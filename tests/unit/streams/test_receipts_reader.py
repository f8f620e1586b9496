"""Receipts that cannot be read any more: what was sent is in doubt, what was not is sent with a new reader."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from onepen.schemas import codec
from onepen.schemas.errors import Retryable, UnknownOutcome
from onepen.schemas.receipts import Receipt
from onepen.streams import client as client_module
from onepen.streams import kafka_clients
from onepen.streams.client import Client

WAIT_MS = 30_000


class Broker:
    """Topics of one partition; every input is answered, to the consumer that was made last."""

    def __init__(self) -> None:
        self.away = False
        self.consumers: list[FakeConsumer] = []
        self.closed = threading.Semaphore(0)
        self.offset = 0

    def consumer(self, *_: Any, **__: Any) -> FakeConsumer:
        self.consumers.append(FakeConsumer(self))
        return self.consumers[-1]

    def deny(self) -> None:
        """What an access list that is changed for a moment leads to."""
        error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "receipts: denied")
        self.consumers[-1].messages.put(SimpleNamespace(error=lambda: error))
        assert self.closed.acquire(timeout=WAIT_MS / 1000)

    def answer(self, key: bytes, value: bytes, on_delivery: Callable[..., None]) -> None:
        offset = self.offset = self.offset + 1
        on_delivery(None, SimpleNamespace(partition=lambda: 0, offset=lambda: offset))
        receipt = codec.encode(
            Receipt(
                kind="input", tenant_id=1, session_id=key.decode(), partition=0, offset=offset, at_ms=1,
                input_id=codec.decode(value).input_id, verdict="started",
            )
        )  # fmt: skip
        self.consumers[-1].messages.put(SimpleNamespace(error=lambda: None, value=lambda: receipt))


class FakeConsumer:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.messages: queue.Queue[Any] = queue.Queue()

    def list_topics(self, topic: str, timeout: float) -> Any:
        if self._broker.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None})})

    def get_watermark_offsets(self, _: Any, timeout: float) -> tuple[int, int]:
        return 0, 0

    def assign(self, places: Any) -> None:
        """It reads whatever is put into `messages`."""

    def poll(self, timeout_s: float) -> Any:
        try:
            return self.messages.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._broker.closed.release()


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker()

    class Producer:
        def __init__(self, *_: Any, **__: Any) -> None:
            """Needs nothing."""

        def send(self, _: str, __: int, *, key: bytes, value: bytes, on_delivery: Any, **___: Any) -> None:
            broker.answer(key, value, on_delivery)

        def close(self, _: int) -> None:
            """Has nothing to close."""

    monkeypatch.setattr(kafka_clients, "consumer", broker.consumer)
    monkeypatch.setattr(client_module, "PlainProducer", Producer)
    return broker


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    with Client("nowhere:1", tenant_id=1, prefix="receipts-reader") as found:
        yield found


def test_the_next_input_is_sent_with_a_new_reader(client: Client, broker: Broker) -> None:
    first = client.prompt("s", "one")
    assert first.verdict(WAIT_MS).verdict == "started"
    broker.deny()
    with pytest.raises(UnknownOutcome, match="cannot be read any more"):
        first.disposition(WAIT_MS)
    for _ in range(2):
        assert client.prompt("s", "two").verdict(WAIT_MS).verdict == "started"
    assert len(broker.consumers) == 2


def test_without_a_new_reader_nothing_is_sent_and_it_may_be_tried_again(
    client: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SEND_WITHIN_MS", 0)
    assert client.prompt("s", "one").verdict(WAIT_MS).verdict == "started"
    broker.deny()
    broker.away = True
    sent = client.prompt("s", "two")
    with pytest.raises(Retryable):
        sent.verdict(WAIT_MS)
    broker.away = False
    assert client.resend(sent).verdict(WAIT_MS).verdict == "started"
    assert broker.offset == 2


def test_an_input_that_waits_to_be_sent_is_not_in_doubt(client: Client, broker: Broker) -> None:
    """It was known, and nothing of it was sent, when the reader ended."""
    assert client.prompt("s", "one").verdict(WAIT_MS).verdict == "started"
    begun, go_on = threading.Event(), threading.Event()
    store = client._sender._store_content

    def held(sent: Any) -> None:
        begun.set()
        assert go_on.wait(WAIT_MS / 1000)
        store(sent)

    client._sender._store_content = held  # type: ignore[method-assign]
    sent = client.prompt("s", "two")
    assert begun.wait(WAIT_MS / 1000)
    broker.deny()
    go_on.set()
    assert client.flush(WAIT_MS)
    assert sent.verdict(WAIT_MS).verdict == "started"
