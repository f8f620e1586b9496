"""However many deadlines have passed, few timers are on their way at once: no input waits behind all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from onepen.processors import state_keys
from onepen.schemas import codec
from onepen.schemas.topics import Topics
from onepen.streams.batch_size import Limits
from onepen.streams.core import DueTimer, SessionKey
from onepen.streams.engine import TIMERS_AWAITED, Engine
from onepen.streams.log import Output, Record
from onepen.streams.memory import MemoryLog
from onepen.streams.timer_heap import REPEAT_MS
from tests.conformance.counting import Command, CountingCore
from tests.conformance.worlds import PARTITIONS, MemoryWorld

SESSIONS = 4_000
PER_TURN = 50
TURN_MS = 10
TURNS = 2_000
DEADLINE_MS = 5_000


class Alarm(NamedTuple):
    key: SessionKey
    deadline_ms: int
    changed: bool = False


class AlarmCore(CountingCore):
    """`arm` sets the deadline of a session, `timer` takes it away, anything else is only answered."""

    def __init__(self, topics: Topics) -> None:
        super().__init__(topics)
        self.consumed: Counter[tuple[str, int]] = Counter()
        """What was decided, by partition; nothing is decided twice here."""

    def load(self, key: SessionKey, records: Mapping[bytes, bytes]) -> Alarm:  # type: ignore[override]
        raw = records.get(state_keys.head_key(*key))
        return Alarm(key, 0 if raw is None else codec.decode_state(raw)[0])

    def decide(  # type: ignore[override]
        self, rules: None, session: Alarm, command: Command, record: Record, out: list[Output]
    ) -> tuple[Alarm, bool]:
        deadline_ms = {b"arm": record.timestamp_ms + DEADLINE_MS, b"timer": 0}.get(command.value, session.deadline_ms)
        what = "repeat" if command.value == b"timer" and not session.deadline_ms else command.value.decode()
        self.consumed[what, record.partition] += 1
        return Alarm(session.key, deadline_ms, True), False

    def changes(self, session: Alarm) -> tuple[dict[bytes, bytes | None], int]:  # type: ignore[override]
        if not session.changed:
            return {}, session.deadline_ms
        value = codec.encode_state(session.deadline_ms, 1, b"1")
        return {state_keys.head_key(*session.key): value}, session.deadline_ms

    def settled(self, session: Alarm) -> Alarm:  # type: ignore[override]
        return session._replace(changed=False)

    def due(self, session: Alarm, now_ms: int) -> tuple[list[DueTimer], int]:  # type: ignore[override]
        passed = 0 < session.deadline_ms <= now_ms
        return [DueTimer(b"timer", 0, False)] if passed else [], session.deadline_ms


class Node:
    """An engine that decides PER_TURN inputs in a turn, ten times fewer than it may append timers."""

    def __init__(self, world: MemoryWorld, limits: Limits) -> None:
        self.world = world
        self.log: MemoryLog = world.log("s0")
        self.core = AlarmCore(world.topics)
        self.engine: Engine[Alarm] = Engine(
            self.log,
            self.core,  # type: ignore[arg-type]
            world.settings("s0"),
            limits=limits,
            clock=lambda: world.mono_s,
        )
        self.log.subscribe(self.engine)

    def turn(self) -> None:
        self.world.mono_s += TURN_MS / 1_000
        self.world.now_ms += TURN_MS
        self.engine.turn()

    def of(self, what: str) -> list[int]:
        return [self.core.consumed[what, partition] for partition in range(PARTITIONS)]


def after_an_outage(partitions: int, per_turn: int) -> tuple[MemoryWorld, Node]:
    """Deadlines on so many partitions, all passed while nobody worked; the node that finds them."""
    world = MemoryWorld()
    for number in range(SESSIONS):
        world.append(number % partitions, b"arm", b"s%d" % number)
    before = Node(world, Limits())
    for _ in range(TURNS):
        if before.engine.decided >= SESSIONS:
            break
        before.turn()
    assert before.engine.decided >= SESSIONS
    assert before.engine.counters.timers == 0
    before.log.close(leave=True)
    world.now_ms += 2 * DEADLINE_MS
    return world, Node(world, Limits(records=per_turn))


def test_however_much_is_due_few_timers_are_on_their_way_and_live_inputs_come_through() -> None:
    world, node = after_an_outage(PARTITIONS, PER_TURN)
    turns, most = 0, 0
    while sum(node.of("timer")) < SESSIONS:
        turns += 1
        assert turns < 3 * SESSIONS // PER_TURN
        for partition in range(PARTITIONS):
            world.append(partition, b"live", b"live")
        node.turn()
        most = max(most, node.engine.counters.timers - sum(node.of("timer")))
    assert 0 < most <= PER_TURN
    # A live input waits behind the timers of its partition that are on their way, and the live ones of that time.
    assert turns - min(node.of("live")) <= 20, (turns, node.of("live"))
    # Repeats are harmless, and none is needed where nothing was lost.
    assert node.engine.counters.timers == SESSIONS
    assert sum(node.of("repeat")) == 0


def test_partitions_with_timers_take_turns() -> None:
    world, node = after_an_outage(2, 1_000)
    world.append(0, b"live", b"live")
    world.append(1, b"live", b"live")
    for _ in range(TURNS):
        if max(node.of("timer")) >= SESSIONS // 4:
            break
        node.turn()
    first, second, *_ = node.of("timer")
    assert max(first, second) >= SESSIONS // 4
    assert min(first, second) > max(first, second) // 2, node.of("timer")


def test_timers_that_were_lost_on_their_way_are_appended_again() -> None:
    """What was not written does not count as being on its way for ever."""
    world, node = after_an_outage(1, 1_000)
    lost: list[Output] = []
    write, node.log.append = node.log.append, lost.append  # type: ignore[method-assign]
    world.append(0, b"live", b"live")
    for _ in range(TURNS):
        if len(lost) >= TIMERS_AWAITED // PARTITIONS:
            break
        node.turn()
    for _ in range(10):
        node.turn()
    assert len(lost) == TIMERS_AWAITED // PARTITIONS, "no more than may be on their way"
    node.log.append = write  # type: ignore[method-assign]
    ends_s = world.mono_s + 3 * REPEAT_MS / 1_000
    while sum(node.of("timer")) < SESSIONS:
        node.turn()
        assert world.mono_s < ends_s
