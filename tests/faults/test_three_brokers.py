"""Three brokers, three replicas, two in sync: the one that has an office is killed, or suspended longer than the others
wait for it, while two processors of each group protocol work.

Afterwards every partition goes on, and everything that was acknowledged is decided once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from onepen.streams import topic_admin
from onepen.streams.plain_producer import PlainProducer
from onepen.streams.settings import Settings
from tests.conformance.worlds import delete_topics
from tests.faults.team import Team
from tests.faults.three_brokers import ThreeBrokers
from tests.services import fresh_topic_prefix

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PROTOCOLS = ("classic", "consumer")
PER_S = 60
SUSPENDED_S = 12.0
"""The others wait 9 s for a broker."""
CLIENT_WAITS_MS = 27_000
"""Less than the 30 s after which a client gives a record up."""
TRANSACTIONS, GROUP, CONTROLLER = "transaction coordinator", "group coordinator", "controller"
OFFICES = {TRANSACTIONS, GROUP, CONTROLLER}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeBrokers]:
    cluster = ThreeBrokers(tmp_path_factory.mktemp("three"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def teams(cluster: ThreeBrokers, tmp_path: Path) -> Iterator[list[Team]]:
    """One of each protocol, both at work."""
    with ExitStack() as stack:
        teams: list[Team] = []
        for protocol in PROTOCOLS:
            team = Team(cluster.bootstrap, protocol, tmp_path / protocol, ("s0", "s1"), PER_S, replication=3)
            stack.callback(team.close)
            teams.append(team)
            for slot in team.slots:
                team.join(slot)
        for team in teams:
            team.watch(team.shared, "both slots own partitions")
            team.watch(team.goes_on(), "work in every partition")
        cluster.wait_in_sync()
        yield teams


def offices(cluster: ThreeBrokers, teams: list[Team]) -> dict[int, set[str]]:
    """What each broker is: coordinator of one of the transactional ids or of one of the groups, controller."""
    held: dict[int, set[str]] = {number: set() for number in cluster.nodes}
    for team in teams:
        held[cluster.group_coordinator(team.settings.group)].add(GROUP)
        for slot in team.slots:
            for tid in dataclasses.replace(team.settings, slot=slot).transactional_ids:
                held[cluster.transaction_coordinator(tid)].add(TRANSACTIONS)
    held[cluster.controller()].add(CONTROLLER)
    return held


def next_to_strike(held: dict[int, set[str]], struck: set[str]) -> int | None:
    """The broker with the most offices that were not struck yet; None when there is no such office."""
    number = max(held, key=lambda n: len(held[n] - struck))
    return number if held[number] - struck else None


def go_on(teams: list[Team], since_s: float) -> str:
    """Every partition of every team goes on; after how many seconds, for the reader of the output."""
    conditions = [(team, team.goes_on()) for team in teams]
    took: list[str] = []
    for team, condition in conditions:
        team.watch(condition, "work in every partition")
        took.append(f"{team.protocol} {time.monotonic() - since_s:.1f} s")
    return ", ".join(took)


def test_a_client_is_acknowledged_while_the_leader_it_spoke_to_is_suspended(cluster: ThreeBrokers) -> None:
    settings = Settings(bootstrap=cluster.bootstrap, prefix=fresh_topic_prefix(), partitions=1, replication=3)
    topic_admin.apply(settings)
    cluster.wait_in_sync()
    topic, outcomes = settings.topics.inputs, list[KafkaError | None]()
    leader = cluster.nodes[cluster.leaders(topic)[0]]
    producer = PlainProducer(settings.kafka_client(), client_id="client")

    def send(value: bytes) -> None:
        producer.send(topic, 0, key=b"s", value=value, on_delivery=lambda error, _: outcomes.append(error))

    try:
        send(b"it is connected")
        assert producer.flush(30_000) == 0
        leader.suspend()
        send(b"it is not answered")
        assert producer.flush(CLIENT_WAITS_MS) == 0, "it waits for a broker that will not answer"
        assert outcomes == [None, None]
    finally:
        leader.resume()
        producer.close(1_000)
        delete_topics(cluster.bootstrap, settings.topics)
        cluster.wait_in_sync()


def sleep_until(mono_s: float) -> None:
    time.sleep(max(0.0, mono_s - time.monotonic()))


@pytest.mark.parametrize("action", ["kill", "suspend"])
def test_everything_is_decided_once(cluster: ThreeBrokers, teams: list[Team], action: str) -> None:
    struck: set[str] = set()
    while (number := next_to_strike(held := offices(cluster, teams), struck)) is not None:
        struck |= held[number]
        node, struck_s = cluster.nodes[number], time.monotonic()
        if action == "kill":
            node.kill()
        else:
            node.suspend()
        went_on = go_on(teams, struck_s)
        if action == "kill":
            node.run()
        else:
            sleep_until(struck_s + SUSPENDED_S)
            node.resume()
        again = go_on(teams, time.monotonic())
        cluster.wait_in_sync()
        print(f"{action} {number}, {sorted(held[number])}: went on after {went_on}; with all {again}", flush=True)
    assert struck == OFFICES
    for team in teams:
        team.judge()
        print(f"{team.protocol}: {team.feed.sent} decided once; pauses over 5 s {team.pauses_ms(5_000)}", flush=True)
        print(f"{team.protocol}: started again {team.restarted}", flush=True)
