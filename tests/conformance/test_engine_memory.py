"""The engine on the log in memory, with faults that real brokers show rarely."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

import pytest

from onepen.schemas.errors import Fatal
from onepen.schemas.topics import Topics
from onepen.streams.batch_size import Limits
from onepen.streams.dead_letters import REASON
from onepen.streams.engine import Engine
from onepen.streams.log import Batch, Output, Record, Transaction
from onepen.streams.memory import MemoryLog
from onepen.streams.memory_broker import Refused
from tests.conformance.counting import Command, Counter, CountingCore
from tests.conformance.worlds import PARTITIONS, MemoryWorld


class Node:
    """An engine under a slot; `turns` drives it."""

    def __init__(self, world: MemoryWorld, slot: str = "s0", limits: Limits | None = None) -> None:
        self.world = world
        self.log: MemoryLog = world.log(slot)
        self.core = CountingCore(world.topics)
        self.engine: Engine[Counter] = Engine(
            self.log, self.core, world.settings(slot), limits=limits, clock=lambda: world.mono_s
        )
        self.log.subscribe(self.engine)

    def turns(self, count: int = 10) -> None:
        for _ in range(count):
            self.world.mono_s += 0.01
            self.engine.turn()


def events(world: MemoryWorld, partition: int = 0) -> list[bytes]:
    return [r.value or b"" for r in world.stored(world.topics.events, partition)]


def reasons(world: MemoryWorld, partition: int = 0) -> list[bytes | None]:
    return [dict(r.headers)[REASON] for r in world.stored(world.topics.deadletters, partition)]


def send(world: MemoryWorld, count: int, key: bytes = b"s", partition: int = 0) -> None:
    for _ in range(count):
        world.append(partition, b"x", key)


@pytest.fixture
def world() -> MemoryWorld:
    return MemoryWorld()


def test_inputs_are_counted_once_and_survive_a_restart(world: MemoryWorld) -> None:
    send(world, 5)
    first = Node(world, limits=Limits(records=2))
    first.turns()
    assert events(world) == [b"s %d %d" % (n + 1, n) for n in range(5)]
    send(world, 3)
    second = Node(world)
    second.turns()
    assert events(world) == [b"s %d %d" % (n + 1, n) for n in range(8)]
    with pytest.raises(Fatal):
        first.turns()


def test_two_nodes_share_and_parked_state_reads_only_the_delta(
    world: MemoryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    for partition in range(PARTITIONS):
        send(world, 4, b"p%d" % partition, partition)
    first = Node(world, "s0")
    first.turns()
    second = Node(world, "s1")
    for _ in range(10):
        first.turns(1)
        second.turns(1)
    for partition in range(PARTITIONS):
        send(world, 1, b"p%d" % partition, partition)
    for _ in range(10):
        first.turns(1)
        second.turns(1)
    second.log.close(leave=True)
    caplog.set_level(logging.INFO)
    first.turns()
    for partition in range(PARTITIONS):
        send(world, 1, b"p%d" % partition, partition)
    first.turns()
    for partition in range(PARTITIONS):
        assert events(world, partition) == [b"p%d %d %d" % (partition, n + 1, n) for n in range(6)]
    # Of each partition of the second node only what that one wrote: two records of one transaction.
    read = [r.getMessage() for r in caplog.records if "records read" in r.getMessage()]
    assert read
    assert all(", 2 records read" in line or ", 0 records read" in line for line in read), read


def test_a_bug_is_tried_again_alone_and_dead_lettered_with_an_alarm(
    world: MemoryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    send(world, 2)
    world.append(0, b"bug", b"s")
    send(world, 2)
    Node(world).turns()
    assert events(world) == [b"s 1 0", b"s 2 1", b"s 3 3", b"s 4 4"]
    assert reasons(world) == [b"internal_error"]
    assert sum("ALARM internal_error" in r.getMessage() for r in caplog.records) == 1


class ReadingCore(CountingCore):
    """Notes what it reads, and fails to read `unreadable`."""

    def __init__(self, topics: Topics) -> None:
        super().__init__(topics)
        self.read_offsets: list[int] = []

    def read(self, record: Record) -> Command:
        self.read_offsets.append(record.offset)
        if record.value == b"unreadable":
            raise ZeroDivisionError("a bug")
        return super().read(record)


def test_what_was_read_ahead_is_decided_in_its_turn_and_faults_count_there(world: MemoryWorld) -> None:
    """The time is over after nine records of a batch, again and again; the next ones are read before their turn."""
    values = {10: b"poison", 20: b"bug", 30: b"unreadable"}
    for number in range(60):
        world.append(0, values.get(number, b"x"), b"s")
    looks = itertools.count()
    core, log = ReadingCore(world.topics), world.log("s0")
    engine: Engine[Counter] = Engine(
        log, core, world.settings("s0"), limits=Limits(work_ms=2), clock=lambda: next(looks) / 1_000
    )
    log.subscribe(engine)
    ahead = 0
    for _ in range(60):
        before = engine.decided
        engine.turn()
        if engine.decided > before:
            ahead = max(ahead, max(core.read_offsets) + 1 - engine.decided)
    assert engine.decided == 60
    assert ahead > 1, "nothing was read ahead, so nothing is shown here"
    good = [number for number in range(60) if number not in values]
    assert events(world) == [b"s %d %d" % (n + 1, number) for n, number in enumerate(good)]
    assert sorted(reasons(world)) == [b"internal_error", b"internal_error", b"poison"]
    assert all(core.read_offsets.count(number) == 1 for number in good if number < 20), "each was read once"


def test_b40_poison_is_dead_lettered_with_its_bytes_in_the_same_transaction(world: MemoryWorld) -> None:
    world.append(0, b"poison", b"s")
    world.append(0, None, None)
    send(world, 1)
    Node(world).turns()
    letters = world.stored(world.topics.deadletters, 0)
    assert [(r.key, r.value) for r in letters] == [(b"s", b"poison"), (None, None)]
    assert dict(letters[1].headers)["onepen-null"] == b"1"
    assert dict(letters[1].headers)["onepen-offset"] == b"1"
    assert events(world) == [b"s 1 2"]
    stamps = {dict(r.headers)["onepen-tx"] or b"" for r in [*letters, *world.stored(world.topics.events, 0)]}
    assert len({stamp.rpartition(b":")[0] for stamp in stamps}) == 1


def test_b36_what_cannot_be_written_condemns_only_its_own_input(world: MemoryWorld) -> None:
    send(world, 3)
    world.append(0, b"big:3000000", b"s")
    send(world, 3)
    Node(world).turns(30)
    assert reasons(world) == [b"internal_error"]
    assert [line.split()[1] for line in events(world)] == [b"%d" % n for n in range(1, 7)]


def test_b36_the_others_are_not_taken_one_at_a_time_once_it_is_found(world: MemoryWorld) -> None:
    send(world, 3)
    world.append(0, b"big:3000000", b"s")
    send(world, 500)
    Node(world).turns(12)
    assert len(events(world)) == 503


def test_what_the_brokers_did_not_commit_is_tried_again_in_smaller_batches(world: MemoryWorld) -> None:
    send(world, 64)
    node = Node(world, limits=Limits(records=64))
    sizes: list[int] = []
    poll, begin = node.log.poll, node.log.begin

    def measured(**limits: int) -> Batch:
        batch = poll(**limits)
        sizes.append(len(batch.records))
        return batch

    def refused(records: int) -> Transaction:
        transaction = begin(records)
        if len(sizes) < 5:
            transaction.commit = lambda *_: transaction.abort()  # type: ignore[method-assign]
        return transaction

    node.log.poll, node.log.begin = measured, refused  # type: ignore[method-assign,assignment]
    node.turns(30)
    tried = [size for size in sizes if size]
    assert tried[:4] == [64, 32, 16, 8]
    assert len(events(world)) == 64


def test_a_fatal_input_stops_its_partition_and_no_other(world: MemoryWorld, caplog: pytest.LogCaptureFixture) -> None:
    send(world, 2)
    world.append(0, b"fatal", b"s")
    send(world, 2)
    send(world, 2, b"t", 1)
    node = Node(world)
    node.turns()
    assert events(world) == [b"s 1 0", b"s 2 1"], "nothing behind it is decided"
    assert events(world, 1) == [b"t 1 0", b"t 2 1"]
    assert node.log.committed([0]) == {0: 2}
    alarms = [r for r in caplog.records if "ALARM partition_stopped" in r.getMessage()]
    assert alarms
    world.mono_s += 61
    node.turns(1)
    assert len([r for r in caplog.records if "ALARM partition_stopped" in r.getMessage()]) > len(alarms)


def test_another_timestamp_type_stops_the_partition(world: MemoryWorld, caplog: pytest.LogCaptureFixture) -> None:
    world.broker._append_time.clear()
    send(world, 1)
    Node(world).turns()
    assert events(world) == []
    assert any("LogAppendTime" in r.getMessage() for r in caplog.records)


def test_b39_lost_inputs_stop_the_partition(world: MemoryWorld, caplog: pytest.LogCaptureFixture) -> None:
    send(world, 2)
    node = Node(world)
    node.turns()
    send(world, 3)
    world.broker.delete_before(world.topics.inputs, 0, 4)
    node.turns()
    assert events(world) == [b"s 1 0", b"s 2 1"]
    assert any("ALARM partition_stopped" in r.getMessage() for r in caplog.records)


def test_b39_an_expired_group_offset_is_replaced_by_the_partition_record(world: MemoryWorld) -> None:
    send(world, 3)
    Node(world).turns()
    world.broker._group(f"{world.topics.prefix}.processor").offsets.clear()
    send(world, 1)
    Node(world).turns()
    assert events(world) == [b"s %d %d" % (n + 1, n) for n in range(4)]


def test_offset_and_partition_record_must_agree(world: MemoryWorld, caplog: pytest.LogCaptureFixture) -> None:
    send(world, 3)
    Node(world).turns()
    world.broker._group(f"{world.topics.prefix}.processor").offsets[0] = 2
    Node(world).turns()
    assert events(world) == [b"s %d %d" % (n + 1, n) for n in range(3)]
    assert any("torn transaction" in r.getMessage() for r in caplog.records)


def test_brokers_away_for_a_while_change_nothing(world: MemoryWorld) -> None:
    send(world, 3)
    node = Node(world, limits=Limits(records=1))
    node.turns(3)
    world.broker.reachable = False
    node.turns(3)
    world.broker.reachable = True
    node.turns(20)
    assert events(world) == [b"s %d %d" % (n + 1, n) for n in range(3)]


def refusing(node: Node) -> list[float]:
    """Nothing is committed any more; when it was tried is noted, as long as the list is not told to end by a 0."""
    begin, tried = node.log.begin, list[float]()

    def refused(records: int) -> Transaction:
        transaction = begin(records)
        if 0.0 not in tried:
            tried.append(node.world.mono_s)
            transaction.commit = lambda *_: transaction.abort()  # type: ignore[method-assign]
        return transaction

    node.log.begin = refused  # type: ignore[method-assign,assignment]
    return tried


def test_a_processor_that_commits_nothing_for_a_minute_leaves(world: MemoryWorld) -> None:
    send(world, 1)
    node = Node(world)
    tried = refusing(node)

    def minutes() -> None:
        for _ in range(40):
            world.mono_s += 5
            node.turns(2)

    with pytest.raises(Fatal, match="no transaction was committed"):
        minutes()
    assert tried[-1] - tried[0] > 60


def test_failures_with_nothing_tried_in_between_are_not_one_outage(world: MemoryWorld) -> None:
    send(world, 1)
    node = Node(world)
    tried = refusing(node)
    while len(tried) < 3:
        before = len(tried)
        while len(tried) == before:
            node.turns(1)
        world.mono_s += 120
    tried.append(0.0)
    node.turns()
    assert events(world) == [b"s 1 0"]


def test_a_dead_ones_transaction_is_ended_also_when_its_name_was_not_known_at_first(world: MemoryWorld) -> None:
    """The brokers are away for longer than a recovery may stand still, before anything of the state was read."""
    send(world, 1)
    dead = Node(world, "dead")
    dead.turns()
    dead.log.close(leave=True)
    dead.log.begin(1).produce([Output(world.topics.state, 0, b"never", b"x")])
    node = Node(world)
    node.turns(1)
    world.broker.reachable = False
    for _ in range(5):
        world.mono_s += 0.5
        node.turns(1)
    world.broker.reachable = True
    send(world, 1)
    for _ in range(10):
        world.mono_s += 0.2
        node.turns(1)
    assert events(world) == [b"s 1 0", b"s 2 1"]


def hanging(world: MemoryWorld, partitions: Iterable[int]) -> int:
    """A transaction of somebody else stays open on the state of these partitions; its epoch."""
    epoch = world.broker.initialise("foreign")
    for partition in partitions:
        world.broker.write("foreign", epoch, Output(world.topics.state, partition, b"never", b"x"))
    return epoch


def pass_seconds(world: MemoryWorld, node: Node, seconds: int) -> None:
    for _ in range(2 * seconds):
        world.mono_s += 0.5
        node.turns(1)


def test_a_hanging_transaction_stops_its_partition_and_no_other(
    world: MemoryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    epoch = hanging(world, [1])
    node = Node(world)
    for partition in (0, 1):
        send(world, 1, partition=partition)
    pass_seconds(world, node, 100)
    send(world, 1)
    node.turns()
    assert (events(world), events(world, 1)) == ([b"s 1 0", b"s 2 1"], [])
    told = [record for record in caplog.records if "ALARM recovery_stands_still" in record.getMessage()]
    assert len(told) == 3, "every half minute"
    assert "kafka-transactions.sh abort" in told[0].getMessage()
    world.broker.end_transaction("foreign", epoch, commit=False)
    node.turns(20)
    assert events(world, 1) == [b"s 1 0"]


def test_the_ids_of_a_neighbour_that_lives_are_initialised_once(world: MemoryWorld) -> None:
    """The partition's last writer serves others: each time its ids are initialised it has to begin anew."""
    send(world, 1, partition=1)
    neighbour = Node(world, "s1")
    neighbour.turns()
    neighbour.log.close(leave=True)
    hanging(world, [1])
    asked: list[str] = []
    initialise = world.broker.initialise
    world.broker.initialise = lambda name: (asked.append(name), initialise(name))[1]  # type: ignore[method-assign]
    node = Node(world)
    pass_seconds(world, node, 100)
    of_neighbour = [name for name in asked if name not in node.log.transactional_ids]
    assert of_neighbour
    assert len(of_neighbour) == len(set(of_neighbour))


def test_a_partition_that_never_moves_ends_the_process_in_the_end(world: MemoryWorld) -> None:
    hanging(world, [1])
    node = Node(world)
    with pytest.raises(Fatal, match="made no progress for 30 s"):
        pass_seconds(world, node, 600)
    assert world.mono_s > 300


def test_where_nothing_runs_the_process_is_left(world: MemoryWorld) -> None:
    hanging(world, range(PARTITIONS))
    node = Node(world)
    with pytest.raises(Fatal, match="made no progress for 30 s"):
        pass_seconds(world, node, 60)


def late_end(world: MemoryWorld, *, reads_doubt: bool) -> Node:
    """A commit is repeated silently; its first copy arrives while a later transaction, to be aborted,
    is half written."""
    send(world, 1)
    node = Node(world, limits=Limits(records=1))
    node.log.reads_doubt = reads_doubt
    node.turns()
    world.broker.copy_next_end()
    send(world, 4)
    write, add_offsets = world.broker.write, world.broker.add_offsets
    armed = True

    def half_written(transactional_id: str, epoch: int, output: object) -> int:
        nonlocal armed
        offset = write(transactional_id, epoch, output)  # type: ignore[arg-type]
        if armed and any(late[0] == transactional_id for late in world.broker._late):
            armed = False
            world.broker.deliver_late_ends()
            world.broker.add_offsets = refuse_once  # type: ignore[method-assign,assignment]
        return offset

    def refuse_once(*args: object) -> None:
        world.broker.add_offsets = add_offsets  # type: ignore[method-assign]
        raise Refused("a rebalance is under way")

    world.broker.write = half_written  # type: ignore[method-assign]
    node.turns(30)
    return node


def test_a_late_end_commits_half_of_a_transaction_when_doubt_is_not_read(world: MemoryWorld) -> None:
    late_end(world, reads_doubt=False)
    assert stamps_torn(world), "this is the failure that doubt prevents; the check must see it"


def test_a_late_end_is_harmless_when_doubt_is_read(world: MemoryWorld) -> None:
    late_end(world, reads_doubt=True)
    assert events(world) == [b"s %d %d" % (n + 1, n) for n in range(5)]
    assert not stamps_torn(world)


def stamps_torn(world: MemoryWorld) -> list[bytes]:
    """Transactions of which not every record is there."""
    seen: dict[bytes, list[bytes]] = {}
    for topic in (world.topics.events, world.topics.state):
        for partition in range(PARTITIONS):
            for record in world.stored(topic, partition):
                head, _, tail = (dict(record.headers)["onepen-tx"] or b"").rpartition(b":")
                seen.setdefault(head, []).append(tail)
    return [head for head, tails in seen.items() if len(tails) != int(tails[0].partition(b"/")[2])]
