"""Cases that others have met in public, where log, ownership and transactions meet: on the log in memory and, in
`world`, on real Kafka as well."""

from __future__ import annotations

import logging

import orjson
import pytest

from onepen.processors.rules import Keys
from onepen.processors.session import Session
from onepen.schemas import codec, ids
from onepen.schemas.edge import parse_request
from onepen.schemas.events import Event
from onepen.schemas.partitioning import partition_of
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.receipts import Receipt
from onepen.schemas.views import View
from onepen.schemas.worker_records import Claim, Report, ReportEvent
from onepen.streams.batch_size import Limits
from onepen.streams.core import SessionCore
from onepen.streams.dead_letters import REASON
from onepen.streams.engine import Engine
from onepen.streams.log import Outcome
from onepen.streams.memory import MemoryLog
from onepen.streams.memory_broker import Refused
from tests.conformance.counting import CountingCore
from tests.conformance.worlds import (
    PARTITIONS,
    MemoryWorld,
    Participant,
    World,
    output,
    settle,
    shown,
    wait_for,
)

KEYS = Keys("k1", b"a secret of the tests")
TENANT = 7


class Node:
    """An engine over the real core, under a slot; `turns` drives it."""

    def __init__(self, world: MemoryWorld, slot: str = "s0", limits: Limits | None = None) -> None:
        self.world = world
        self.log: MemoryLog = world.log(slot)
        core = SessionCore(KEYS, world.topics, PARTITIONS)
        self.engine: Engine[Session] = Engine(
            self.log, core, world.settings(slot), limits=limits, clock=lambda: world.mono_s
        )
        self.log.subscribe(self.engine)

    def turns(self, count: int = 10) -> None:
        turn_all(self, count=count)


def turn_all(*nodes: Node, count: int = 10) -> None:
    for _ in range(count):
        for node in nodes:
            node.world.mono_s += 0.01
            node.engine.turn()


class Sessions:
    """Clients and workers of the memory world: what they write, and what came of it."""

    def __init__(self, world: MemoryWorld) -> None:
        self.world = world

    def ask(self, session_id: str, input_id: str, mode: str = "prompt", **fields: object) -> None:
        if mode not in ("abort", "answer", "erase"):
            fields.setdefault("content", "hello")
        request = parse_request({
            "mode": mode, "session_id": session_id, "input_id": input_id, "issued_at_ms": self.world.now_ms, **fields
        })  # fmt: skip
        record = request.to_input(tenant_id=TENANT, user_id=1)
        self.append(session_id, codec.encode(record))

    def append(self, session_id: str, value: bytes | None) -> None:
        key = session_id.encode()
        self.world.append(partition_of(key, PARTITIONS), value, key)

    def claim(self, session_id: str, run_no: int = 1) -> None:
        self.append(session_id, codec.encode(Claim(**self._head(session_id, run_no))))  # type: ignore[arg-type]

    def end(self, session_id: str, run_no: int = 1) -> None:
        last = ReportEvent(type="run.finished", payload=b'{"terminalStatus":"completed"}')
        head = self._head(session_id, run_no)
        self.append(session_id, codec.encode(Report(**head, no=1, events=(last,))))  # type: ignore[arg-type]

    @staticmethod
    def _head(session_id: str, run_no: int) -> dict[str, object]:
        run_id = ids.run_id(TENANT, session_id, run_no)
        token = KEYS.token(TENANT, session_id, run_id, 1)
        return {"tenant_id": TENANT, "session_id": session_id, "run_id": run_id, "generation": 1,
                "token": token, "worker_id": "w1", "inbox": 0}  # fmt: skip

    def verdicts(self, session_id: str) -> list[tuple[str | None, str | None]]:
        return [
            (receipt.input_id, receipt.verdict)
            for receipt in self._all(self.world.topics.receipts, session_id, Receipt)
            if receipt.verdict is not None
        ]

    def events(self, session_id: str) -> list[str]:
        return [f"{event.run_no}:{event.type}" for event in self._all(self.world.topics.events, session_id, Event)]

    def _all(self, topic: str, session_id: str, kind: type) -> list:  # type: ignore[type-arg]
        stored = self.world.stored(topic, partition_of(session_id.encode(), PARTITIONS))
        read = [codec.decode_as(kind, record.value) for record in stored]
        return [one for one in read if one.session_id == session_id]

    def letters(self, session_id: str) -> list[bytes | None]:
        stored = self.world.stored(self.world.topics.deadletters, partition_of(session_id.encode(), PARTITIONS))
        return [dict(record.headers)[REASON] for record in stored]


@pytest.fixture
def memory() -> MemoryWorld:
    return MemoryWorld()


@pytest.fixture
def sessions(memory: MemoryWorld) -> Sessions:
    return Sessions(memory)


def named(partition: int) -> str:
    """A session id of this partition."""
    return next(f"s{n}" for n in range(1_000) if partition_of(f"s{n}".encode(), PARTITIONS) == partition)


# -- B04: what an owner remembers


def test_b04b_a_run_that_ended_elsewhere_is_not_active_for_its_former_owner(
    memory: MemoryWorld, sessions: Sessions
) -> None:
    first = Node(memory, "s0")
    session_id = named(PARTITIONS - 1)  # the last partition moves to the second member
    sessions.ask(session_id, "p1")
    sessions.claim(session_id)
    first.turns()
    assert sessions.events(session_id) == ["1:run.started", "1:run.leased"]
    second = Node(memory, "s1")
    turn_all(first, second)
    assert first.log.number(PARTITIONS - 1) == 0, "the partition has moved"
    sessions.end(session_id)
    turn_all(first, second)
    assert sessions.events(session_id)[-1] == "1:run.finished"
    second.log.close(leave=True)
    first.turns()
    sessions.ask(session_id, "p2", on_busy="reject")
    first.turns()
    assert sessions.verdicts(session_id) == [("p1", "started"), ("p2", "started")]
    assert sessions.events(session_id)[-1] == "2:run.started"


# -- B32: two owners


def test_b32_a_frozen_owner_that_wakes_commits_nothing_and_answers_nobody(
    memory: MemoryWorld, sessions: Sessions
) -> None:
    session_id = named(PARTITIONS - 1)
    frozen = Node(memory, "s0")
    frozen.turns()
    sessions.ask(session_id, "p1")
    sessions.claim(session_id)
    batch = frozen.log.poll(records_max=10, bytes_max=1 << 20, wait_ms=0)  # read, and frozen before its commit
    stages = frozen.engine._decide(batch.records)
    assert batch.member is not None
    memory.broker.leave(frozen.log.group, "s0", PARTITIONS)  # its session ends
    other = Node(memory, "s1")
    other.turns()
    sessions.ask(session_id, "st1", "steer")
    other.turns()
    before = (sessions.verdicts(session_id), sessions.events(session_id))
    assert before[0] == [("p1", "started"), ("st1", "steered")]
    written = frozen.engine._write(stages, batch.member)
    assert written[0] is Outcome.ABORTED, "a commit is bound to the generation of the group"
    views = [r for r in memory.stored(memory.topics.signals, 0) if codec.decode_as(View, r.value).worker_id == "w1"]
    frozen.engine._finish(stages, written)
    assert (sessions.verdicts(session_id), sessions.events(session_id)) == before
    assert len(memory.stored(memory.topics.signals, 0)) == len(views), "the claim was answered once, by the owner"
    sessions.ask(session_id, "p2")
    other.turns()
    assert sessions.verdicts(session_id)[-1] == ("p2", "queued"), "the owner goes on"


def test_b32_an_owner_fenced_by_a_waking_double_checks_and_goes_on(memory: MemoryWorld, sessions: Sessions) -> None:
    session_id = named(0)
    owner = Node(memory, "s0")
    owner.turns()
    for transactional_id in owner.log.transactional_ids:
        memory.broker.initialise(transactional_id)  # the newest epoch is somebody else's now
    sessions.ask(session_id, "p1")
    owner.turns(30)
    assert sessions.verdicts(session_id) == [("p1", "started")], "once, and the partition does not stand still"
    sessions.ask(session_id, "p2")
    owner.turns()
    assert sessions.verdicts(session_id)[1:] == [("p2", "queued")]


def test_b32_a_waking_member_that_initialises_again_cannot_take_the_place_of_the_owner(world: World) -> None:
    topics = world.topics
    for partition in range(PARTITIONS):
        world.append(partition, b"in")
    first = world.member("s0")
    first.poll_for(PARTITIONS)
    former = first.member()
    half = first.log.begin(2)
    half.produce([output(topics.events, PARTITIONS - 1, b"half")])
    second = world.member("s1")
    settle(first, second)
    lost = max(second.owned)
    first.log.renew()  # it wakes and takes the newest epoch of its own ids
    assert first.commit([output(topics.events, lost, b"late")], {lost: 1}, former) is Outcome.ABORTED
    world.append(lost, b"more")
    wait_for(lambda: (lost, 1) in [(r.partition, r.offset) for r in second.poll()], "the next input")
    assert [r.offset for r in second.seen if r.partition == lost] == [0, 1], "nothing of the zombie's was committed"
    assert second.commit([output(topics.events, lost, b"good")], {lost: 2}) is Outcome.COMMITTED
    shown(world, topics.events, lost, [b"good"])


# -- B33: state restored too short


def restored(member: Participant, partition: int) -> tuple[list[bytes | None], int, int]:
    """(values, position, end) of the state of a partition, read until recovery would call it whole."""
    restorer = member.log.restorer
    restorer.open(partition, 0)
    values: list[bytes | None] = []

    def whole() -> bool:
        values.extend(value for _, _, value in restorer.read(100))
        survey = restorer.survey(partition)
        return survey is not None and restorer.position(partition) >= survey.state_end

    wait_for(whole, "the end of the state")
    survey = restorer.survey(partition)
    assert survey is not None
    position = restorer.position(partition)
    restorer.close(partition)
    return values, position, survey.state_end


def test_b33_an_empty_state_and_one_that_ends_in_a_control_record_are_read_to_their_end(world: World) -> None:
    topics = world.topics
    world.append(0, b"in")
    member = world.member("s0")
    member.poll_for(1)
    assert restored(member, 1) == ([], 0, 0), "nothing is waited for where nothing is"
    assert member.commit([output(topics.state, 0, b"one", track=True)], {0: 1}) is Outcome.COMMITTED
    aborted = member.log.begin(1)
    aborted.produce([output(topics.state, 0, b"never")])
    assert aborted.abort() is Outcome.ABORTED
    values, position, end = restored(member, 0)
    assert values == [b"one"]
    assert position >= end > 1, "the end is a position behind the markers, not a record"


def test_b33_a_successor_ends_what_the_dead_left_open_and_knows_the_newest_state(
    memory: MemoryWorld, sessions: Sessions
) -> None:
    session_id = named(0)
    dead, partition = Node(memory, "s0"), 0
    sessions.ask(session_id, "p1")
    dead.turns()
    open_one = dead.log.begin(1)
    open_one.produce([output(memory.topics.state, partition, b"\x00 half of a batch")])
    memory.broker.leave(dead.log.group, "s0", PARTITIONS)
    second = Node(memory, "s1")
    # Newer than the open record, and hidden behind it until somebody ends that transaction.
    memory.mono_s += 1
    second.turns(100)
    sessions.ask(session_id, "p2")
    second.turns(100)
    assert sessions.verdicts(session_id) == [("p1", "started"), ("p2", "queued")], "the run of the dead is known"


def test_b33_newer_state_behind_an_open_transaction_is_waited_for(memory: MemoryWorld, sessions: Sessions) -> None:
    session_id = named(0)
    owner, zombie = Node(memory, "s0"), memory.log("zombie")
    sessions.ask(session_id, "p1")
    owner.turns()
    zombie.renew()
    zombie.begin(1).produce([output(memory.topics.state, 0, b"half of a batch of long ago")])
    sessions.ask(session_id, "p2")
    owner.turns()  # committed, and hidden from every reader of committed records
    memory.broker.leave(owner.log.group, "s0", PARTITIONS)
    successor = Node(memory, "s1")
    sessions.ask(session_id, "p3")
    memory.mono_s += 1
    successor.turns(100)
    assert memory.broker.stable_end(memory.topics.events, 0) == memory.broker.end(memory.topics.events, 0)
    assert sessions.verdicts(session_id) == [("p1", "started"), ("p2", "queued")], "it does not begin with less"
    memory.broker.initialise(zombie.transactional_ids[1])  # the broker ends it when its time is over
    successor.turns(100)
    assert sessions.verdicts(session_id)[2:] == [("p3", "queued")]
    assert sessions.events(session_id) == ["1:run.started"]


# -- B34: a rebalance in the middle of a transaction


def test_b34_a_transaction_that_a_rebalance_overtakes_leaves_one_decision(world: World) -> None:
    topics = world.topics
    for partition in range(PARTITIONS):
        world.append(partition, b"p1")
    first = world.member("s0")
    first.poll_for(PARTITIONS)
    former = first.member()
    outputs = [output(topics.events, partition, b"started") for partition in range(PARTITIONS)]
    transaction = first.log.begin(len(outputs))
    transaction.produce(outputs)
    second = world.member("s1")
    settle(first, second)
    outcome = transaction.commit(dict.fromkeys(range(PARTITIONS), 1), former)
    assert outcome is not Outcome.COMMITTED
    if outcome is Outcome.DOUBT:  # on a slow machine the broker has ended it before
        first.log.renew()
    assert all(world.stored(topics.events, partition) == [] for partition in range(PARTITIONS))

    # The same process goes on with what it kept, read again; the rest is decided by the new owner.
    for member in (first, second):
        member.seen.clear()
        wait_for(lambda m=member: all(m.log.start(p, 0) for p in m.owned), "the start")  # type: ignore[misc]
    for member in (first, second):
        mine = sorted(member.owned)
        assert sorted(r.partition for r in member.poll_for(len(mine))) == mine
        outputs = [output(topics.events, partition, b"started") for partition in mine]
        assert member.commit(outputs, dict.fromkeys(mine, 1)) is Outcome.COMMITTED
    for partition in range(PARTITIONS):
        shown(world, topics.events, partition, [b"started"])


@pytest.mark.parametrize("cause", ["a member joins", "nothing at all"])
def test_b34_after_an_abort_the_memory_is_that_of_the_last_commit(memory: MemoryWorld, cause: str) -> None:
    log = memory.log("s0")
    engine = Engine(log, CountingCore(memory.topics), memory.settings("s0"), clock=lambda: memory.mono_s)
    log.subscribe(engine)
    for _ in range(3):
        memory.append(0, b"x", b"s")
    for _ in range(5):
        engine.turn()
    add_offsets, hit = memory.broker.add_offsets, []

    def in_between(*request: object) -> None:
        memory.broker.add_offsets = add_offsets  # type: ignore[method-assign]
        hit.append(len(memory.stored(memory.topics.events, 0, committed=False)))
        if cause == "nothing at all":
            raise Refused("a refusal that nothing explains")
        memory.broker.join(log.group, "s1", PARTITIONS)
        add_offsets(*request)  # type: ignore[arg-type]

    memory.broker.add_offsets = in_between  # type: ignore[method-assign]
    for _ in range(2):
        memory.append(0, b"x", b"s")
    for _ in range(20):
        memory.mono_s += 0.01
        engine.turn()
    assert hit == [5], "it came between outputs and commit"
    found = [record.value for record in memory.stored(memory.topics.events, 0)]
    assert found == [b"s %d %d" % (n + 1, n) for n in range(5)], "counted once each, in order"
    tried = memory.stored(memory.topics.events, 0, committed=False)
    assert len(tried) == 7, "the aborted copies are there, and no reader of committed records sees them"


# -- B37: protocol and state of a newer release


def test_b37_a_newer_protocol_stops_its_partition_and_says_so(
    memory: MemoryWorld, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    stopped, other = named(0), named(1)
    sessions.ask(stopped, "p1")
    newer = PolicyRecord(tenant_id=0, version=1, body=orjson.dumps({"protocol": 1}))
    memory.append(0, codec.encode(newer), b"policy")
    sessions.ask(stopped, "p2")
    sessions.ask(other, "p3")
    Node(memory).turns(20)
    assert sessions.verdicts(stopped) == [("p1", "started")], (
        "nothing behind it is decided by a release that is too old"
    )
    assert sessions.verdicts(other) == [("p3", "started")]
    assert "ALARM partition_stopped: partition 0" in caplog.text
    assert "protocol version 1" in caplog.text
    assert not sessions.letters(stopped), "nor thrown away"


# -- B38, B40: what does not belong here


def test_b40_poison_is_parked_and_the_next_prompt_follows_at_once(memory: MemoryWorld, sessions: Sessions) -> None:
    session_id = named(2)
    key = session_id.encode()
    sessions.ask(session_id, "good")
    good = memory.stored(memory.topics.inputs, 2)[0].value
    assert good is not None
    poison = [b"\xff\xfe", b'{"mode":"prompt"', b"[1]", b"", None, b"\x00\x00\x00\xff\xff" + good[5:], good[:-2]]
    for value in poison:
        memory.append(2, value, key)
    for wrong_key in (b"", None, b"someone-else"):
        memory.append(2, good, wrong_key)
    sessions.ask(session_id, "next")
    node = Node(memory)
    node.turns(20)
    assert sessions.verdicts(session_id) == [("good", "started"), ("next", "queued")]
    assert sessions.letters(session_id) == [
        b"no_frame", b"no_frame", b"no_frame", b"no_frame", b"null_value", b"unknown_schema", b"undecodable",
        b"wrong_key", b"wrong_key", b"wrong_key",
    ]  # fmt: skip
    letters = memory.stored(memory.topics.deadletters, 2)
    assert [record.value for record in letters[:7]] == poison, "byte for byte; null and empty differ"
    assert node.log.committed([2]) == {2: 12}
    Node(memory).turns(20)
    assert len(memory.stored(memory.topics.deadletters, 2)) == 10, "and a restart does not do it again"


def test_b38_a_session_has_one_owner_however_its_records_were_written(memory: MemoryWorld, sessions: Sessions) -> None:
    session_id = named(0)
    sessions.ask(session_id, "p1")
    value = memory.stored(memory.topics.inputs, 0)[0].value
    for elsewhere in range(1, PARTITIONS):  # another client's partition function
        memory.append(elsewhere, value, session_id.encode())
    Node(memory).turns(20)
    started = [record for partition in range(PARTITIONS) for record in memory.stored(memory.topics.events, partition)]
    assert len(started) == 1
    for elsewhere in range(1, PARTITIONS):
        (letter,) = memory.stored(memory.topics.deadletters, elsewhere)
        assert dict(letter.headers)[REASON] == b"wrong_partition"


# -- B39: where reading begins


def test_b39_what_was_sent_before_the_first_start_is_decided(memory: MemoryWorld, sessions: Sessions) -> None:
    names = [named(partition) for partition in range(PARTITIONS)]
    for name in names:
        sessions.ask(name, "early")
    Node(memory).turns(20)
    assert [sessions.verdicts(name) for name in names] == [[("early", "started")]] * PARTITIONS


def test_b39_a_whole_replay_under_another_group_changes_nothing(
    memory: MemoryWorld, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    session_id = named(0)
    sessions.ask(session_id, "p1")
    sessions.claim(session_id)
    sessions.end(session_id)
    Node(memory).turns(20)
    before = (sessions.verdicts(session_id), sessions.events(session_id))
    memory.broker._groups.clear()  # the group was renamed: no offset, but state
    caplog.set_level(logging.INFO)
    Node(memory).turns(20)
    assert (sessions.verdicts(session_id), sessions.events(session_id)) == before
    assert "next input 3" in caplog.text, "the position came with the state"
    # The same records written once more, as a replayed topic would bring them.
    for record in list(memory.stored(memory.topics.inputs, 0)):
        memory.append(0, record.value, record.key)
    Node(memory).turns(20)
    assert sessions.events(session_id) == before[1], "no second run"
    assert sessions.verdicts(session_id) == [*before[0], ("p1", "duplicate")]


# -- B54: one session and the rest of its partition


def test_b54_the_prompt_behind_a_hot_session_is_decided_and_memory_stays_bounded(
    memory: MemoryWorld, sessions: Sessions
) -> None:
    hot = named(0)
    cold = next(f"c{n}" for n in range(1_000) if partition_of(f"c{n}".encode(), PARTITIONS) == 0)
    sessions.ask(hot, "p1")
    for number in range(60):
        sessions.ask(hot, f"st{number}", "steer", content="x" * 200_000)
    sessions.ask(cold, "p2")
    node = Node(memory)
    batches: list[int] = []
    poll = node.log.poll

    def measured(**limits: int) -> object:
        batch = poll(**limits)
        batches.append(sum(len(record.value or b"") for record in batch.records))
        return batch

    node.log.poll = measured  # type: ignore[method-assign,assignment]
    node.turns(40)
    verdicts = [verdict for _, verdict in sessions.verdicts(hot)]
    assert (verdicts.count("steered"), verdicts.count("refused")) == (5, 55)
    assert sessions.verdicts(cold) == [("p2", "started")]
    assert max(batches) <= Limits().bytes + 201_000, "a batch is cut by bytes as well"


def test_b02_a_batch_that_was_decided_but_not_committed_is_decided_the_same_again(
    memory: MemoryWorld, sessions: Sessions
) -> None:
    session_id = named(0)
    sessions.ask(session_id, "p1")
    node = Node(memory)
    memory.broker.reachable = True
    write = memory.broker.write
    memory.broker.write = lambda *_: (_ for _ in ()).throw(MemoryError("dies here"))  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        node.turns()
    memory.broker.write = write  # type: ignore[method-assign]
    assert sessions.events(session_id) == []
    Node(memory).turns(20)
    sessions.ask(session_id, "p1")
    Node(memory).turns(20)
    assert sessions.events(session_id) == ["1:run.started"]
    assert sessions.verdicts(session_id) == [("p1", "started"), ("p1", "duplicate")]
