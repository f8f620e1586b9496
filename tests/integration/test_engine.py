"""The processor on real Kafka: dead letters, timers, refusal of what it does not know."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from confluent_kafka import Producer

from onepen.processors.state_keys import head_key
from onepen.schemas import codec
from onepen.schemas.errors import Invalid
from onepen.schemas.offers import Offer
from onepen.schemas.partitioning import partition_of
from onepen.schemas.policies import Policy, PolicyRecord, policy_body
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka import KafkaLog
from onepen.streams.processor import warn_of_long_session
from tests.conformance.worlds import wait_for
from tests.integration.engine_world import PARTITIONS, EngineWorld

pytestmark = pytest.mark.integration


def test_b40_bad_records_are_dead_lettered_and_the_next_one_is_processed(world: EngineWorld) -> None:
    where = partition_of(b"s", PARTITIONS)
    elsewhere = (where + 1) % PARTITIONS
    world.prompt("s", "good-1")
    world.send(b"garbage", b"s")
    world.send(None, b"s")
    world.send(b"\x00\x00\x00\x00\x07" + b"\xff" * 20, b"s")
    world.prompt("s", "good-2")
    world.flush()
    stray = world.stored(world.topics.inputs)
    value = next(r.value for p, r in stray if p == where and r.value and b"good-1" in r.value)
    world.send(value, b"other", where)
    world.send(value, b"s", elsewhere)
    world.prompt("s", "good-3")
    world.flush()
    with world.thread("s0"):
        wait_for(lambda: len(world.verdicts()) == 3, "three verdicts")
        wait_for(lambda: len(world.stored(world.topics.deadletters)) == 5, "five dead letters")
    letters = [(p, r, dict(r.headers)) for p, r in world.stored(world.topics.deadletters)]
    assert {headers["onepen-reason"] for _, _, headers in letters} == {
        b"no_frame", b"null_value", b"undecodable", b"wrong_key", b"wrong_partition"
    }  # fmt: skip
    inputs = {(p, r.offset): r for p, r in world.stored(world.topics.inputs)}
    for partition, letter, headers in letters:
        source = inputs[int(headers["onepen-partition"] or b""), int(headers["onepen-offset"] or b"")]
        assert partition == int(headers["onepen-partition"] or b"")
        assert (letter.key, letter.value) == (source.key, source.value)
        assert headers["onepen-topic"] == world.topics.inputs.encode()
        assert ("onepen-null" in headers) == (source.value is None)


def test_b36_the_largest_record_that_the_inputs_take_fits_the_dead_letters(world: EngineWorld) -> None:
    value = b"x" * (1024 * 1024 - 200)
    world.send_large(value, b"s")
    world.prompt("s", "good")
    world.flush()
    with world.thread("s0"):
        wait_for(lambda: "good" in world.verdicts(), "the verdict behind it")
    assert [r.value for _, r in world.stored(world.topics.deadletters)] == [value]


def test_an_unclaimed_offer_is_followed_by_the_next_one(world: EngineWorld) -> None:
    policy = Policy(version=1, offer_ms=300, offer_max_ms=600)
    record = PolicyRecord(tenant_id=7, version=1, body=policy_body(policy))
    for partition in range(PARTITIONS):
        world.send(codec.encode(record), b"policy", partition)
    world.prompt("s", "in", tenant_id=7)
    world.flush()

    def offers() -> list[Offer]:
        found = [codec.decode_as(Offer, r.value) for _, r in world.stored(world.topics.offers)]
        return sorted(found, key=lambda offer: offer.generation)

    with world.thread("s0"):
        wait_for(lambda: len(offers()) >= 3, "three offers")
    made = offers()[:3]
    assert [o.generation for o in made] == [1, 2, 3]
    for former, later in pairwise(made):
        assert later.at_ms >= former.expires_at_ms, "a timer may be late, never early"
    assert not world.stored(world.topics.deadletters)


def test_b37_state_of_an_unknown_form_stops_its_partition_only(
    world: EngineWorld, caplog: pytest.LogCaptureFixture
) -> None:
    where = partition_of(b"s", PARTITIONS)
    other = next(f"t{n}" for n in range(100) if partition_of(f"t{n}".encode(), PARTITIONS) != where)
    producer = Producer({"bootstrap.servers": world.bootstrap})
    producer.produce(world.topics.state, b"\x00\x00\x00\x03\xe7 from the future", head_key(1, "s"), where)
    assert producer.flush(10) == 0
    world.prompt("s", "stands-still")
    world.prompt(other, "goes-on")
    world.flush()
    with world.thread("s0"):
        wait_for(lambda: "goes-on" in world.verdicts(), "the verdict of the other partition")
        wait_for(lambda: "ALARM partition_stopped" in caplog.text, "the alarm")
    assert "stands-still" not in world.verdicts()


def test_a_property_that_breaks_the_promise_is_refused_with_its_reason(world: EngineWorld) -> None:
    settings = EngineSettings(
        world.bootstrap, world.prefix, PARTITIONS, "s0", kafka={"isolation.level": "read_uncommitted"}
    )
    with pytest.raises(Invalid, match=r"isolation\.level cannot be set: what is not committed"):
        KafkaLog(settings)


def test_a_group_session_too_long_for_the_lease_is_said(world: EngineWorld, caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings.from_settings(world.settings("s0"))
    assert not warn_of_long_session(settings, lease_ms=600_000)
    with caplog.at_level(logging.WARNING):
        assert warn_of_long_session(settings, lease_ms=3_000)
    assert "more than a third of a lease" in caplog.text
