"""A record held across a revoke, on real Kafka with two members: red without the rule, green with it.

Brokers check the member and the generation of a commit, not whether the member owns the partition. So a member that
polled a record, lost its partition and commits it with a LATER membership is believed: outputs are doubled and the
committed offset goes backwards. The rule (ownership numbers, and the membership of the batch itself) is switched off
by a subclass here, to show that this test would notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from onepen.streams.kafka import KafkaLog
from onepen.streams.log import Outcome, Record
from tests.conformance.worlds import PARTITIONS, KafkaWorld, Participant, output, shown, wait_for

pytestmark = pytest.mark.integration

RECORDS = 6


class CarelessLog(KafkaLog):
    """Hands out what it holds, whoever owns the partition by now."""

    def _owned(self, record: Record) -> bool:
        return True


@pytest.fixture(params=["classic", "consumer"])
def world(request: pytest.FixtureRequest, kafka_bootstrap: str, topic_prefix: str) -> Iterator[KafkaWorld]:
    kafka = KafkaWorld(kafka_bootstrap, topic_prefix, request.param)
    for partition in range(PARTITIONS):
        for n in range(RECORDS):
            kafka.append(partition, b"%d" % n)
    try:
        yield kafka
    finally:
        kafka.close()


def serve(member: Participant) -> None:
    """Serve the membership, take nothing, start what was assigned."""
    member.log.poll(records_max=0, bytes_max=0, wait_ms=20)


def decide_all(world: KafkaWorld, member: Participant, records: list[Record]) -> Outcome:
    """One output for each record, named after it, and the offsets behind them."""
    outputs = [output(world.topics.events, r.partition, b"%d-%d" % (r.partition, r.offset)) for r in records]
    offsets = dict.fromkeys({r.partition for r in records}, 0)
    for record in records:
        offsets[record.partition] = max(offsets[record.partition], record.offset + 1)
    return member.commit(outputs, offsets)


def surely_decide_all(world: KafkaWorld, member: Participant, records: list[Record]) -> None:
    """Once: a commit that takes longer than its limit is doubted, and then the offsets say what became of it."""
    behind = {r.partition: r.offset + 1 for r in records}

    def done() -> bool:
        outcome = decide_all(world, member, records)
        if outcome is Outcome.COMMITTED:
            return True
        assert outcome is Outcome.DOUBT
        member.log.renew()
        return member.log.committed(sorted(behind)) == behind

    wait_for(done, "a commit")


def play(world: KafkaWorld, log: KafkaLog) -> tuple[list[int], Participant]:
    """The first member holds everything, the second one takes its share over and decides it. Answers that share."""
    world.logs.append(log)
    first = Participant(log)
    held = first.poll_for(PARTITIONS * RECORDS)
    first.log.put_back(held)
    second = world.member("s1")

    def moved() -> bool:
        serve(first)
        second.poll()
        return len(second.owned) == PARTITIONS // 2 and len(second.seen) == RECORDS * len(second.owned)

    wait_for(moved, "the takeover")
    lost = sorted(second.owned)
    surely_decide_all(world, second, second.seen)
    assert second.log.committed(lost) == dict.fromkeys(lost, RECORDS)
    return lost, first


def doubled(world: KafkaWorld, partitions: list[int]) -> list[bytes | None]:
    values = [r.value for partition in partitions for r in world.stored(world.topics.events, partition)]
    return [value for value, count in Counter(values).items() if count > 1]


def test_without_the_rule_outputs_are_doubled_and_the_offset_goes_backwards(world: KafkaWorld) -> None:
    lost, first = play(world, CarelessLog(world.settings("s0")))

    def stolen() -> bool:
        records = first.poll(records_max=1)
        return bool(records) and records[0].partition in lost and decide_all(world, first, records) is Outcome.COMMITTED

    wait_for(stolen, "a commit of a record of a lost partition")
    wait_for(lambda: doubled(world, lost), "the same record decided twice")
    assert min(o or 0 for o in first.log.committed(lost).values()) < RECORDS, "and the committed offset fell"


def test_b32_with_the_rule_nothing_held_across_the_revoke_is_decided(world: KafkaWorld) -> None:
    lost, first = play(world, KafkaLog(world.settings("s0")))
    first.next.clear()
    decided: list[Record] = []

    def rest() -> bool:
        records = first.poll(records_max=1)
        if records:
            assert records[0].partition not in lost
            surely_decide_all(world, first, records)
            decided.extend(records)
        return len(decided) >= RECORDS * (PARTITIONS - len(lost))

    wait_for(rest, "the rest of the records")
    everywhere = list(range(PARTITIONS))
    for partition in everywhere:
        shown(world, world.topics.events, partition, [b"%d-%d" % (partition, n) for n in range(RECORDS)])
    assert first.log.committed(everywhere) == dict.fromkeys(everywhere, RECORDS)
