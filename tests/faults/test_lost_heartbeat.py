"""A new assignment that is lost with the answer to a heartbeat: the group goes on when the brokers give the member up.

librdkafka 2.16 repeats such a heartbeat without asking for the assignment again, so the member keeps what it has and
the others wait for it until the rebalance time-out (`CONSUMER_REBALANCE_MS`).
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from onepen.schemas.topics import Topics
from onepen.streams.kafka_config import CONSUMER_REBALANCE_MS
from tests.conformance.worlds import PARTITIONS, create_topics, delete_topics
from tests.faults.outside import watch
from tests.faults.process import Spec
from tests.faults.trial import Processor
from tests.faults.wire import CONSUMER_GROUP_HEARTBEAT, Fault, Plan, Request, Verdict, Wire

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

LOST = 4
BOUND_S = CONSUMER_REBALANCE_MS / 1000 + 30


def answers_lost_while_another_joins() -> Plan:
    """The next answers to the first member once the second one has spoken: its new assignment is in one of them."""
    joined, left = False, LOST

    def plan(request: Request) -> Verdict | None:
        nonlocal joined, left
        if request.api != CONSUMER_GROUP_HEARTBEAT:
            return None
        if ".s1." in request.client_id:
            joined = True
        elif joined and left:
            left -= 1
            return Verdict(Fault.LOSE_ANSWER)
        return None

    return plan


def test_the_group_goes_on(wired: tuple[str, Wire], topic_prefix: str, tmp_path: Path) -> None:
    bootstrap, wire = wired
    topics = Topics(topic_prefix)
    create_topics(bootstrap, topics, PARTITIONS)
    spec = Spec(wire.bootstrap, topic_prefix, PARTITIONS, "s0", "consumer")
    first = Processor(spec, tmp_path / "s0.log")
    second = Processor(msgspec.structs.replace(spec, slot="s1"), tmp_path / "s1.log")
    try:
        first.start()
        watch(lambda: len(first.log.owns()) == PARTITIONS, "the first one owns all", 60)
        wire.plan(topic_prefix, answers_lost_while_another_joins())
        second.start()
        began_s = time.monotonic()
        watch(lambda: (len(first.log.owns()), len(second.log.owns())) == (2, 2), "each owns two", BOUND_S)
        print(f"shared after {time.monotonic() - began_s:.1f} s")
    finally:
        wire.plan(topic_prefix, None)
        first.kill()
        second.kill()
        delete_topics(bootstrap, topics)
