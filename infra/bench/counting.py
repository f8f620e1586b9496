"""The engine with a core that counts, in JSON: what the loop costs when there is next to nothing to decide.

An input is JSON with `session` and `number`; the answer is one event with session, count and number.
"""

from __future__ import annotations

import signal
import threading
from typing import Any, NamedTuple

import orjson

from onepen.streams.core import SessionKey
from onepen.streams.engine import Engine
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka import KafkaLog
from onepen.streams.log import Output, Record
from onepen.streams.processor import patient_collector
from tests.conformance.counting import Counter, CountingCore


class Command(NamedTuple):
    key: SessionKey
    number: int


class JsonCountingCore(CountingCore):
    """The counting core of the engine's tests with other inputs and events."""

    def read(self, record: Record) -> Command | None:  # type: ignore[override]
        if record.key == b"policy":
            return None
        command = orjson.loads(record.value or b"")
        return Command((1, command["session"]), command["number"])

    def session_key(self, command: Command | None) -> SessionKey | None:  # type: ignore[override]
        return None if command is None else command.key

    def admit(self, rules: None, command: Any) -> tuple[None, dict[bytes, bytes]]:
        return None, {}

    def decide(  # type: ignore[override]
        self, rules: None, session: Counter, command: Command, record: Record, out: list[Output]
    ) -> tuple[Counter, bool]:
        count = session.total + 1
        value = orjson.dumps({"session": command.key[1], "count": count, "number": command.number})
        out.append(Output(self.topics.events, record.partition, record.key, value))
        return Counter(command.key, count, True), False

    def settled(self, session: Counter) -> Counter:
        return Counter(session.key, session.total)


def counter(bootstrap: str, prefix: str, partitions: int) -> None:
    """The target of a process; SIGTERM ends it."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    settings = EngineSettings(bootstrap, prefix, partitions, "s0")
    log = KafkaLog(settings)
    try:
        with patient_collector():
            Engine(log, JsonCountingCore(settings.topics), settings).run(stop)
    finally:
        log.close(leave=True)
