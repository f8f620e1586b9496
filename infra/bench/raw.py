"""What plain confluent-kafka does with the same bytes: the ceiling of any processor written in Python on this machine.

Read the inputs topic with read_committed, write as many records of the same sizes to the same topics and partitions,
with the offsets, in transactions of the same number of inputs, two producers in turn. Nothing is decided, kept or
checked.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from confluent_kafka import Consumer, Message, Producer, TopicPartition

BATCH: Final = 1_000
LIMIT_S: Final = 300.0

Sizes = Sequence[tuple[str, int, int]]
"""(topic, bytes of the key, bytes of the value) of the records that were written for one input, over and over."""


def pass_through(
    bootstrap: str, inputs: str, total: int, batch: int, per_input: float, sizes: Sizes, *, name: str = "raw"
) -> float:
    """Inputs per second, from the first record read to the last commit. `per_input` records are written for each, to
    its partition, `batch` inputs in a transaction. `name`: one that has not read these inputs yet."""
    # By default a consumer that has enough looks again after a second, which is half of the time measured here.
    consumer = _consumer(bootstrap, inputs, name, {"fetch.queue.backoff.ms": 2})
    producers = [_producer(bootstrap, f"{inputs}.{name}.{turn}") for turn in "ab"]
    consumer.subscribe([inputs])
    try:
        return _run(consumer, producers, total, batch, per_input, sizes)
    finally:
        consumer.close()


def _run(
    consumer: Consumer, producers: Sequence[Producer], total: int, batch: int, per_input: float, sizes: Sizes
) -> float:
    outputs = itertools.cycle([(topic, b"k" * key, b"v" * value) for topic, key, value in sizes])
    turns, done, owed, began = itertools.cycle(producers), 0, 0.0, 0.0
    deadline = time.monotonic() + LIMIT_S
    while done < total:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {done} of {total} inputs in {LIMIT_S:.0f} s")
        messages = [m for m in consumer.consume(batch, 0.05) if m.error() is None]
        if not messages:
            continue
        began = began or time.perf_counter()
        producer, positions = next(turns), _positions(messages)
        producer.begin_transaction()
        for message in messages:
            partition, owed = message.partition(), owed + per_input
            for topic, key, value in itertools.islice(outputs, int(owed)):
                producer.produce(topic, value, key, partition)  # type: ignore[arg-type]
            owed -= int(owed)
        _commit(consumer, producer, positions)
        done += len(messages)
    return done / (time.perf_counter() - began)


def echo(bootstrap: str, inputs: str, outputs: str, stop: threading.Event) -> None:
    """One record out for one in, as soon as it comes: what exactly-once costs in time without anything to decide."""
    consumer = _consumer(bootstrap, inputs, "plain", {"fetch.wait.max.ms": 100})
    producer = _producer(bootstrap, f"{inputs}.plain")
    consumer.subscribe([inputs])
    try:
        while not stop.is_set():
            first = consumer.poll(0.05)
            messages = [] if first is None else [first, *consumer.consume(BATCH, 0.0)]
            messages = [m for m in messages if m.error() is None]
            if messages:
                _echo(consumer, producer, outputs, messages)
    finally:
        consumer.close()


def _echo(consumer: Consumer, producer: Producer, outputs: str, messages: Sequence[Message]) -> None:
    producer.begin_transaction()
    for message in messages:
        partition = message.partition()
        assert partition is not None
        producer.produce(outputs, message.value(), message.key(), partition=partition)
    _commit(consumer, producer, _positions(messages))


def _consumer(bootstrap: str, inputs: str, name: str, more: Mapping[str, int] | None = None) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{inputs}.{name}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            **(more or {}),
        }
    )


def _producer(bootstrap: str, transactional_id: str) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": 10_000,
            "linger.ms": 0,
        }
    )
    producer.init_transactions(30)
    return producer


def _positions(messages: Sequence[Message]) -> list[TopicPartition]:
    """Behind the last one of each partition."""
    ends: dict[tuple[str, int], int] = {}
    for message in messages:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        ends[topic, partition] = offset + 1
    return [TopicPartition(topic, partition, end) for (topic, partition), end in ends.items()]


def _commit(consumer: Consumer, producer: Producer, positions: list[TopicPartition]) -> None:
    producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 10)
    producer.commit_transaction(10)
