"""Local archives on a real broker: a processor that was stopped reads its own state back, and drops it at any doubt."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from onepen.processors.rules import Keys
from onepen.schemas.partitioning import partition_of
from onepen.streams import topic_admin
from onepen.streams.core import SessionCore
from onepen.streams.state_file import StateFile, write_state
from onepen.streams.store import PartitionStore
from tests.conformance.worlds import delete_topics, wait_for
from tests.integration.engine_world import PARTITIONS, TOKEN_KEY, EngineWorld

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

HERE = partition_of(b"s", PARTITIONS)
FROM_ARCHIVE = "the local archive has"


def place(world: EngineWorld, partition: int = HERE) -> Path:
    return world.data_dir / "local-archive" / f"{world.prefix}-{partition:05d}.state"


def decide(world: EngineWorld, *inputs: str, drain: bool = False) -> None:
    """A processor that decides these and is stopped; archives are left behind unless it drains."""
    for one in inputs:
        world.prompt("s", one)
    world.flush()
    with world.thread("s0", drain=drain):
        wait_for(lambda: all(one in world.verdicts() for one in inputs), "verdicts")


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said since it was asked last."""
    caplog.set_level(logging.INFO, logger="onepen.processor")

    told = 0

    def said() -> list[str]:
        nonlocal told
        found = caplog.records[told:]
        told += len(found)
        return [record.getMessage() for record in found]

    return said


def read_of_here(messages: list[str]) -> int:
    """How many records of the state were read from the brokers."""
    line = next(line for line in messages if line.startswith(f"partition {HERE}:") and "records read in" in line)
    return int(line.split(" records read")[0].rsplit(" ", 1)[1])


def test_the_next_start_reads_it_and_it_is_used_once(world: EngineWorld, messages: Callable[[], list[str]]) -> None:
    with world.process("s0") as process:
        for number in range(40):
            world.prompt(f"s-{number}", f"in-{number}")
        world.prompt("s", "first")
        world.flush()
        wait_for(lambda: len(world.verdicts()) == 41, "verdicts", 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert [place(world, partition).exists() for partition in range(PARTITIONS)] == [True] * PARTITIONS
    assert not list(world.data_dir.joinpath("local-archive").glob(".*")), "no draft is left"
    decide(world, "second", "third", drain=True)
    said = messages()
    assert sum(FROM_ARCHIVE in line for line in said) == PARTITIONS, said
    assert read_of_here(said) <= 1, "the record at the position of the archive"
    assert world.verdicts()["second"] == ["queued"], "the run of the first one is known"
    assert not place(world).exists(), "used once; whoever drains leaves none"
    decide(world, "fourth")
    said = messages()
    assert not any(FROM_ARCHIVE in line for line in said)
    assert read_of_here(said) > 1
    assert place(world).exists()


def test_a_torn_a_foreign_and_a_stale_one_are_dropped(world: EngineWorld, messages: Callable[[], list[str]]) -> None:
    decide(world, "in-1")
    content = place(world).read_bytes()
    place(world).write_bytes(content[: len(content) // 2])
    decide(world, "in-2")
    check_dropped(messages(), "is torn")

    rewrite(world, position=1_000_000)
    decide(world, "in-3")
    check_dropped(messages(), "the state topic ends at")

    alter(world, "delete.retention.ms", "1")
    decide(world, "in-4")
    check_dropped(messages(), "delete.retention.ms")
    alter(world, "delete.retention.ms", "86400000")
    assert all(verdicts == ["started" if one == "in-1" else "queued"] for one, verdicts in world.verdicts().items())

    # The same names, other topics.
    delete_topics(world.bootstrap, world.topics)
    wait_for(lambda: applied(world), "new topics of the same names", 60)
    world.verdicts().clear()
    decide(world, "in-1")
    check_dropped(messages(), "another cluster, or of a topic of the same name")


def applied(world: EngineWorld) -> bool:
    """Deleting topics goes on for a while behind the answer."""
    try:
        topic_admin.apply(world.settings("s0"))
    except Exception:
        return False
    return True


def test_offsets_that_do_not_agree_drop_it_and_a_torn_transaction_is_refused(
    world: EngineWorld, messages: Callable[[], list[str]]
) -> None:
    decide(world, "in-1", "in-2")
    messages()
    source = StateFile(place(world))
    source.close()
    commit(world, 1)
    said: list[str] = []

    def heard(part: str) -> bool:
        said.extend(messages())
        return any(part in line for line in said)

    with world.thread("s0"):
        wait_for(lambda: heard(f"to mend: onepen partition mend {HERE}"), "the refusal names the command")
        wait_for(lambda: heard("ALARM partition_stopped"), "and the partition stands still")
    assert any(FROM_ARCHIVE in line for line in said)
    check_dropped(said, "does not agree")
    commit(world, source.header.next_input_offset)
    decide(world, "in-3")
    assert world.verdicts() == {"in-1": ["started"], "in-2": ["queued"], "in-3": ["queued"]}


def check_dropped(said: list[str], why: str) -> None:
    """In a sentence; and the state came from the brokers."""
    lines = [line for line in said if line.startswith(f"partition {HERE}: the local archive") and "is dropped" in line]
    assert len(lines) == 1, said
    assert why in lines[0]


def rewrite(world: EngineWorld, **changes: Any) -> None:
    """The archive with another header."""
    core = SessionCore(Keys("k1", TOKEN_KEY.encode()), world.topics, PARTITIONS)
    store, source = PartitionStore(HERE, core), StateFile(place(world))
    for _ in source.load(store):
        pass
    source.close()
    write_state(place(world), msgspec.structs.replace(source.header, **changes), store)


def alter(world: EngineWorld, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, world.topics.state, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": world.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(20)


def commit(world: EngineWorld, offset: int) -> None:
    """What a broken operator's script, or half a transaction, leaves."""
    admin = AdminClient({"bootstrap.servers": world.bootstrap})
    group = f"{world.prefix}.processor"
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(world.topics.inputs, HERE, offset)])

    def done() -> bool:
        answer = admin.alter_consumer_group_offsets([wanted])[group].result(20)
        return all(one.error is None for one in answer.topic_partitions)

    wait_for(done, "the group is empty")
