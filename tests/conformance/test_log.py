"""What every log keeps: order, isolation, ownership numbers, fencing, recovery up to the high watermark."""

from __future__ import annotations

from onepen.streams.log import TX_HEADER, Outcome, Record
from tests.conformance.worlds import PARTITIONS, Participant, World, output, settle, shown, wait_for


def test_records_come_in_order_and_with_the_time_of_the_broker(group_world: World) -> None:
    for n in range(20):
        group_world.append(n % 2, b"%d" % n)
    member = group_world.member("s0")
    records = member.poll_for(20)
    for partition in (0, 1):
        mine = [r for r in records if r.partition == partition]
        assert [r.value for r in mine] == [b"%d" % n for n in range(20) if n % 2 == partition]
        assert [r.offset for r in mine] == list(range(10))
        assert all(r.log_append_time and r.timestamp_ms > 0 for r in mine)
    assert member.member().valid


def test_a_batch_is_cut_at_records_and_bytes_and_nothing_is_lost(world: World) -> None:
    for n in range(12):
        world.append(0, b"%02d" % n * 50)
    member = world.member("s0")
    sizes: list[int] = []

    def enough() -> bool:
        sizes.append(len(member.poll(records_max=5, bytes_max=350)))
        return len(member.seen) == 12

    wait_for(enough, "12 records")
    assert max(sizes) <= 4, "four records of 101 bytes pass 350"
    assert [r.offset for r in member.seen] == list(range(12))


def six_taken(world: World) -> tuple[Participant, list[Record]]:
    """A member, and the six records of partition 0 that it was handed out and has forgotten."""
    for n in range(6):
        world.append(0, b"%d" % n)
    member = world.member("s0")
    records = member.poll_for(6)
    member.seen.clear()
    return member, records


def test_records_put_back_come_again_first_and_once(world: World) -> None:
    member, records = six_taken(world)
    member.log.put_back(records[2:])
    assert [r.offset for r in member.poll_for(4)] == [2, 3, 4, 5]
    assert member.poll_nothing() == []


def test_records_are_seen_ahead_of_their_turn_and_stay(world: World) -> None:
    member, records = six_taken(world)
    assert list(member.log.ahead(10)) == []
    member.log.put_back(records[2:])
    for record in member.log.ahead(3):
        record.command = record.offset
    assert [(r.offset, r.command) for r in member.poll_for(4)] == [(2, 2), (3, 3), (4, 4), (5, None)]


def test_a_transaction_shows_all_or_nothing(world: World) -> None:
    topics = world.topics
    world.append(0, b"in")
    member = world.member("s0")
    member.poll_for(1)
    outputs = [output(topics.events, 0, b"e"), output(topics.state, 0, b"s", track=True)]
    transaction = member.log.begin(len(outputs))
    transaction.produce(outputs)
    assert world.stored(topics.events, 0) == []
    assert transaction.commit({0: 1}, member.member()) is Outcome.COMMITTED
    shown(world, topics.events, 0, [b"e"])
    assert member.log.committed([0, 1]) == {0: 1, 1: None}
    assert transaction.positions == {(topics.state, 0): 1}


def test_an_aborted_transaction_leaves_no_trace(world: World) -> None:
    topics = world.topics
    world.append(0, b"in")
    member = world.member("s0")
    member.poll_for(1)
    transaction = member.log.begin(1)
    transaction.produce([output(topics.events, 0, b"aborted")])
    assert transaction.abort() is Outcome.ABORTED
    assert member.commit([output(topics.events, 0, b"good")], {0: 1}) is Outcome.COMMITTED
    shown(world, topics.events, 0, [b"good"])


def test_every_record_of_a_transaction_carries_its_stamp(world: World) -> None:
    topics = world.topics
    world.append(0, b"in")
    member = world.member("s0")
    member.poll_for(1)
    outputs = [output(topics.events, partition, b"e") for partition in range(PARTITIONS)]
    assert member.commit(outputs, {0: 1}) is Outcome.COMMITTED
    for partition in range(PARTITIONS):
        shown(world, topics.events, partition, [b"e"])
    stamps = [
        value
        for partition in range(PARTITIONS)
        for record in world.stored(topics.events, partition)
        for name, value in record.headers
        if name == TX_HEADER
    ]
    heads = {(stamp or b"").rpartition(b":")[0] for stamp in stamps}
    tails = sorted((stamp or b"").rpartition(b":")[2] for stamp in stamps)
    assert len(heads) == 1
    assert tails == [b"%d/%d" % (i, PARTITIONS) for i in range(PARTITIONS)]


def test_an_open_transaction_holds_everything_behind_it(world: World) -> None:
    topics = world.topics
    world.append(0, b"first")
    member, other = world.member("s0"), world.log("other")
    member.poll_for(1)
    other.renew()
    transaction = other.begin(1)
    transaction.produce([output(topics.inputs, 0, b"open")])
    wait_for(lambda: len(world.stored(topics.inputs, 0, committed=False)) == 2, "the open record")
    world.append(0, b"behind")
    assert member.poll_nothing() == []
    assert transaction.abort() is Outcome.ABORTED
    assert [r.value for r in member.poll_for(1)] == [b"behind"]


def test_a_partition_started_again_is_read_from_there(world: World) -> None:
    for n in range(5):
        world.append(0, b"%d" % n)
    member = world.member("s0")
    held = member.poll_for(5)
    member.log.put_back(held[3:])
    before = member.log.number(0)
    member.log.hold(0)
    assert member.poll_nothing(5) == []
    wait_for(lambda: member.log.start(0, 1), "the start")
    assert member.log.number(0) > before
    assert [r.offset for r in member.poll_for(4)] == [1, 2, 3, 4], "and what was put back does not come twice"
    assert member.poll_nothing() == []


def test_members_share_the_partitions_and_numbers_rise(group_world: World) -> None:
    first = group_world.member("s0")
    settle(first)
    numbers = {p: first.log.number(p) for p in range(PARTITIONS)}
    second = group_world.member("s1")
    settle(first, second)
    assert first.owned | second.owned == set(range(PARTITIONS))
    for partition in second.owned:
        assert first.log.number(partition) == 0
        assert second.log.number(partition) > 0
    first.log.close(leave=True)
    settle(second)
    assert numbers.keys() == second.owned


def test_a_record_held_across_a_revoke_is_never_handed_out(group_world: World) -> None:
    for partition in range(PARTITIONS):
        for n in range(3):
            group_world.append(partition, b"%d" % n)
    first = group_world.member("s0")
    held = first.poll_for(3 * PARTITIONS)
    first.log.put_back(held)
    first.seen.clear()
    second = group_world.member("s1")
    # Nothing is taken while the group moves: the held records stay inside the log.
    wait_for(lambda: _serve(first) + _serve(second) and second.owned and first.owned, "two owners")
    first.next.clear()
    settle(first, second)
    taken = [r.partition for r in first.seen]
    assert all(partition in first.owned for partition in taken)


def _serve(member: Participant) -> int:
    """Serve the membership and take nothing."""
    member.log.poll(records_max=0, bytes_max=0, wait_ms=20)
    return 1


def test_b32_a_commit_with_a_former_membership_is_refused(group_world: World) -> None:
    topics = group_world.topics
    for partition in range(PARTITIONS):
        group_world.append(partition, b"in")
    first = group_world.member("s0")
    first.poll_for(PARTITIONS)
    former = first.member()
    second = group_world.member("s1")
    settle(first, second)
    lost = min(second.owned)
    outcome = first.commit([output(topics.events, lost, b"late")], {lost: 1}, former)
    assert outcome is Outcome.ABORTED
    assert group_world.stored(topics.events, lost) == []


def test_b32_a_successor_under_the_same_slot_fences(world: World) -> None:
    topics = world.topics
    world.append(0, b"in")
    first = world.member("s0")
    first.poll_for(1)
    transaction = first.log.begin(1)
    transaction.produce([output(topics.events, 0, b"zombie")])
    successor = world.log("s0")
    successor.renew()
    assert transaction.commit({0: 1}, first.member()) is Outcome.DOUBT
    assert world.stored(topics.events, 0) == []
    assert first.log.committed([0]) == {0: None}


def test_renew_ends_what_was_left_open(world: World) -> None:
    topics = world.topics
    world.append(0, b"in")
    member = world.member("s0")
    member.poll_for(1)
    for _ in range(2):
        transaction = member.log.begin(1)
        transaction.produce([output(topics.events, 0, b"left open")])
        wait_for(lambda: world.stored(topics.events, 0, committed=False), "the open record")
        member.log.renew()
    assert member.commit([output(topics.events, 0, b"good")], {0: 1}) is Outcome.COMMITTED
    shown(world, topics.events, 0, [b"good"])


def test_a_hint_is_appended_to_the_tail(world: World) -> None:
    world.append(0, b"in")
    member = world.member("s0")
    member.poll_for(1)
    member.log.append(output(world.topics.inputs, 0, b"hint"))
    hint = member.poll_for(1)[0]
    assert (hint.value, hint.key, hint.offset) == (b"hint", b"k", 1)


def test_b33_restore_waits_behind_an_open_transaction_and_can_end_it(world: World) -> None:
    topics = world.topics
    world.append(0, b"in")
    member = world.member("s0")
    member.poll_for(1)
    assert member.commit([output(topics.state, 0, b"one", track=True)], {0: 1}) is Outcome.COMMITTED
    dead = world.log("dead")
    dead.renew()
    dead.begin(1).produce([output(topics.state, 0, b"never")])
    wait_for(lambda: len(world.stored(topics.state, 0, committed=False)) == 2, "the open record")

    restorer = member.log.restorer
    restorer.open(0, 0)
    found: list[bytes | None] = []

    def read() -> bool:
        found.extend(value for _, _, value in restorer.read(100))
        return restorer.survey(0) is not None and bool(found)

    wait_for(read, "the survey")
    survey = restorer.survey(0)
    assert survey is not None
    assert (survey.committed, survey.inputs_start, survey.inputs_end) == (1, 0, 1)
    assert survey.newest_ms > 0
    assert restorer.position(0) < survey.state_end, "the open record lies below the high watermark"
    restorer.end_transactions_of(dead.transactional_ids)
    wait_for(lambda: read() and restorer.position(0) >= survey.state_end, "the end")
    assert found == [b"one"]
    restorer.close(0)
