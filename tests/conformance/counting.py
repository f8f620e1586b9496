"""A core that counts, for tests of the engine alone: the inputs of a session are counted in its head.

Value of an input: `poison` and `bug` do what they say, `big:<n>` has an output of n bytes, `fatal` stops the partition;
anything else is counted and answered by one event "<session> <count> <offset>". Key: the session id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from onepen.processors import state_keys
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Poison
from onepen.schemas.topics import Topics
from onepen.streams.core import DueTimer, SessionKey
from onepen.streams.log import Output, Record


class Counter(NamedTuple):
    key: SessionKey
    total: int
    changed: bool = False


class Command(NamedTuple):
    key: SessionKey
    value: bytes


class CountingCore:
    def __init__(self, topics: Topics) -> None:
        self.topics = topics
        self.decided: list[tuple[int, int]] = []

    def rules(self, policies: Mapping[bytes, bytes]) -> None:
        return None

    def read(self, record: Record) -> Command:
        if record.value is None or record.value == b"poison":
            raise Poison("poison")
        return Command((1, (record.key or b"-").decode()), record.value)

    def session_key(self, command: Command) -> SessionKey | None:
        return command.key

    def admit(self, rules: None, command: Command) -> tuple[None, dict[bytes, bytes]]:
        raise AssertionError("no policies here")

    def load(self, key: SessionKey, records: Mapping[bytes, bytes]) -> Counter:
        raw = records.get(state_keys.head_key(*key))
        return Counter(key, 0 if raw is None else int(codec.decode_state(raw)[2]))

    def decide(
        self, rules: None, session: Counter, command: Command, record: Record, out: list[Output]
    ) -> tuple[Counter, bool]:
        if command.value == b"bug":
            raise ZeroDivisionError("a bug")
        if command.value == b"fatal":
            raise Fatal("unknown protocol")
        self.decided.append((record.partition, record.offset))
        count = session.total + 1
        value = b"%s %d %d" % (command.key[1].encode(), count, record.offset)
        if command.value.startswith(b"big:"):
            value = value.ljust(int(command.value[4:]), b".")
        out.append(Output(self.topics.events, record.partition, record.key, value))
        return Counter(command.key, count, True), False

    def changes(self, session: Counter) -> tuple[dict[bytes, bytes | None], int]:
        if not session.changed:
            return {}, 0
        value = codec.encode_state(0, 1, b"%d" % session.total)
        return {state_keys.head_key(*session.key): value}, 0

    def settled(self, session: Counter) -> Counter:
        return session._replace(changed=False)

    def active(self, session: Counter) -> bool:
        return False

    def active_head(self, value: bytes) -> bool:
        return False

    def due(self, session: Counter, now_ms: int) -> tuple[list[DueTimer], int]:
        return [], 0
