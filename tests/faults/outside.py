"""What is on the topics, judged from outside by a reader of committed records: one decision per input, state = events.

The counting core makes a repeat or a gap visible: each event is "<session> <count> <input offset>".
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from onepen.processors import state_keys
from onepen.schemas import codec
from onepen.schemas.inputs import Content, Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.topics import Topics
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import SAFE_WRITES
from onepen.streams.log import TX_HEADER
from onepen.streams.store import Mark
from tests.conformance.worlds import PARTITIONS, stored

LOOK_S = 0.1
SESSIONS = 20
BURST_S = 0.05


def watch(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait while others do the work; looking all the time would keep them from it."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(LOOK_S)


class Seen(NamedTuple):
    """A committed event. `slot` wrote it."""

    offset: int
    at_ms: int
    value: bytes
    slot: str


class Wrong(AssertionError):
    """What a checker found; anything else that fails is not a finding."""


class Events:
    """The committed events of a prefix so far, per partition; `read` reads on."""

    def __init__(self, bootstrap: str, topics: Topics) -> None:
        self._topic = topics.events
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "tests.outside",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
                "socket.timeout.ms": 5_000,  # a suspended broker is not waited for
            }
        )
        self._consumer.assign([TopicPartition(self._topic, p, 0) for p in range(PARTITIONS)])
        self.found: dict[int, list[Seen]] = {p: [] for p in range(PARTITIONS)}

    def read(self) -> Events:
        while messages := self._consumer.consume(1_000, 0.02):
            for one in messages:
                if one.error() is not None:
                    continue
                stamp = dict(one.headers() or [])[TX_HEADER] or b""
                slot = stamp.decode().split(":")[0].split(".")[1]  # type: ignore[union-attr]
                seen = Seen(one.offset() or 0, one.timestamp()[1], one.value() or b"", slot)
                self.found[one.partition() or 0].append(seen)
        return self

    @property
    def count(self) -> int:
        return sum(len(events) for events in self.found.values())

    def ends(self) -> dict[int, int]:
        """The offset behind the last committed event of each partition."""
        return {p: events[-1].offset + 1 if events else 0 for p, events in self.found.items()}

    def last_writers(self) -> list[str]:
        return [events[-1].slot if events else "" for events in self.found.values()]

    def close(self) -> None:
        self._consumer.close()


def once_each(events: dict[int, Sequence[Seen]]) -> None:
    """Every input offset once and in order, every session counted without gap or repeat. Raises `Wrong`."""
    for partition, found in events.items():
        counts: dict[bytes, int] = {}
        for place, one in enumerate(found):
            session, count, offset = one.value.split()
            counts[session] = counts.get(session, 0) + 1
            if int(offset) != place:
                raise Wrong(f"partition {partition}: input {offset!r} decided where {place} was due")
            if int(count) != counts[session]:
                raise Wrong(f"partition {partition}: {session!r} counted {count!r}, due was {counts[session]}")


def state_equals_events(bootstrap: str, topics: Topics, events: dict[int, Sequence[Seen]]) -> None:
    """The state counts what the events say, and its partition record says how many inputs were decided."""
    for partition, records in stored(bootstrap, topics.state, PARTITIONS).items():
        state = {record.key: record.value for record in records}
        mark = state.pop(state_keys.PARTITION_KEY, None)
        decided = Mark.decode(mark).next_input_offset if mark else 0
        if decided != len(events[partition]):
            raise Wrong(f"partition {partition}: {len(events[partition])} events, state at input {decided}")
        last = {state_keys.head_key(1, s.decode()): int(n) for s, n, _ in (e.value.split() for e in events[partition])}
        counted = {key: int(codec.decode_state(value or b"")[2]) for key, value in state.items()}
        if counted != last:
            raise Wrong(f"partition {partition}: the state says {counted}, the events {last}")


def offsets_are(bootstrap: str, settings: EngineSettings, inputs: dict[int, int]) -> None:
    """The group has committed every input."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": settings.group})
    try:
        places = [TopicPartition(settings.topics.inputs, p) for p in inputs]
        found = {tp.partition: max(0, tp.offset) for tp in consumer.committed(places, timeout=20)}
    finally:
        consumer.close()
    if found != inputs:
        raise Wrong(f"committed are {found}, decided {inputs}")


def standing(bootstrap: str, settings: EngineSettings) -> str:
    """Where everything stands, for the message of a test that waited in vain."""
    topics = settings.topics
    counts = {
        f"{topic.rpartition('.')[2]}{'' if committed else ' with uncommitted'}": {
            p: len(records) for p, records in stored(bootstrap, topic, PARTITIONS, committed=committed).items()
        }
        for topic, committed in ((topics.inputs, True), (topics.events, True), (topics.events, False))
    }
    try:
        offsets_are(bootstrap, settings, dict.fromkeys(range(PARTITIONS), -1))
    except Wrong as wrong:
        counts["offsets"] = str(wrong)  # type: ignore[assignment]
    return str(counts)


class Feed:
    """Sends inputs all the time from a thread of its own, whatever happens to the processors.

    `sent` counts what the broker has acknowledged: a topic that was just made may not be known with all its partitions
    yet, and what is meant for the others is not written. Of what was `refused`, some may be written all the same.
    """

    def __init__(self, bootstrap: str, send: Callable[[Producer, int], None], per_s: int) -> None:
        self.sent = 0
        self.refused: list[str] = []
        self._send, self._burst = send, round(per_s * BURST_S)
        self._stop = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                **SAFE_WRITES,
                "linger.ms": 2,
                "socket.timeout.ms": 5_000,
                "reconnect.backoff.max.ms": 500,
                "on_delivery": self._on_delivery,
            }
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self.sent += 1
        else:
            self.refused.append(error.name())

    def _run(self) -> None:
        numbers = itertools.count()
        while not self._stop.wait(BURST_S):
            for number in itertools.islice(numbers, self._burst):
                self._send(self._producer, number)
            self._producer.poll(0)

    def end(self) -> None:
        """Everything sent is on the topic."""
        self.halt()
        assert self._producer.flush(60) == 0

    def halt(self) -> None:
        self._stop.set()
        self._thread.join(30)


def prompts(topics: Topics, session_of: Callable[[int], str]) -> Callable[[Producer, int], None]:
    """Prompts of tenant 1 for the real core, the n-th for the session that `session_of` names."""

    def send(producer: Producer, number: int) -> None:
        session = session_of(number)
        record = Input(
            input_id=f"in-{number}",
            issued_at_ms=time.time_ns() // 1_000_000,
            tenant_id=1,
            user_id=1,
            session_id=session,
            mode="prompt",
            source="ui",
            content=Content(data=b"hello"),
        )
        key = session.encode()
        producer.produce(topics.inputs, codec.encode(record), key, partition_of(key, PARTITIONS))

    return send


def counting_inputs(topics: Topics) -> Callable[[Producer, int], None]:
    """Inputs of the counting core for `SESSIONS` sessions on all partitions."""

    def send(producer: Producer, number: int) -> None:
        session = number % SESSIONS
        producer.produce(topics.inputs, b"x", b"s%d" % session, session % PARTITIONS)

    return send
