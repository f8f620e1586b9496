"""A partition whose offset and record disagree is refused with the command that mends it, and mended."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from onepen.cli.exit_codes import ExitCode
from onepen.processors.state_keys import PARTITION_KEY
from onepen.schemas.partitioning import partition_of
from onepen.streams import topic_scan
from onepen.streams.partition_mark import read_mark
from onepen.streams.topic_scan import TopicScan
from tests.conformance.worlds import wait_for
from tests.integration.engine_world import PARTITIONS, EngineWorld
from tests.integration.in_process import only, run_main

pytestmark = pytest.mark.integration

Run = Callable[..., tuple[int, dict[str, object], str]]
HERE = partition_of(b"s", PARTITIONS)


@pytest.fixture
def run(world: EngineWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    only(monkeypatch, world.environment())

    def call(*arguments: str) -> tuple[int, dict[str, object], str]:
        code, out, said = run_main(capsys, "partition", *arguments, "-o", "json")
        return code, json.loads(out) if out else {}, said

    return call


def commit(world: EngineWorld, offset: int) -> None:
    """What a broken operator's script, or half a transaction, leaves."""
    admin = AdminClient({"bootstrap.servers": world.bootstrap})
    group = f"{world.prefix}.processor"
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(world.topics.inputs, HERE, offset)])
    done = admin.alter_consumer_group_offsets([wanted])[group].result(20)
    assert all(one.error is None for one in done.topic_partitions)


def decide(world: EngineWorld, *inputs: str) -> None:
    for one in inputs:
        world.prompt("s", one)
    world.flush()
    with world.thread("s0"):
        wait_for(lambda: all(one in world.verdicts() for one in inputs), "verdicts")


def test_a_commit_whose_markers_are_under_way_is_not_taken_for_a_torn_one(
    world: EngineWorld, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's offset may be stable while the marker of the same transaction is still to come in the state."""
    decide(world, "in-1")
    settings = world.settings("s0")
    with TopicScan(settings, world.topics.state) as state:
        mark = read_mark(state, HERE)
    assert mark is not None
    world.prompt("s", "in-2")
    world.flush()
    commit(world, mark.next_input_offset + 1)
    later = msgspec.structs.replace(mark, next_input_offset=mark.next_input_offset + 1)
    own = {"transactional.id": f"{world.prefix}.other", "transaction.timeout.ms": 15_000}
    writer = Producer(settings.kafka_client(own))
    writer.init_transactions(20)
    writer.begin_transaction()
    writer.produce(world.topics.state, later.encode(), key=PARTITION_KEY, partition=HERE)
    writer.flush(20)
    monkeypatch.setattr(topic_scan, "STANDS_STILL_S", 0.5)
    code, found, err = run("mend", str(HERE))
    assert (code, found, "transaction open" in err) == (ExitCode.NO_ANSWER, {}, True)
    writer.commit_transaction(20)
    monkeypatch.setattr(topic_scan, "STANDS_STILL_S", 60.0)
    code, found, _ = run("mend", str(HERE))
    assert (code, found["verdict"]) == (0, "agree")


def test_a_torn_partition_is_refused_and_mended_by_its_record(
    world: EngineWorld, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    decide(world, "in-1", "in-2")
    code, found, err = run("mend", str(HERE))
    assert (code, found["verdict"], "nothing to mend" in err) == (0, "agree", True)
    right = found["recordOffset"]
    assert isinstance(right, int)
    command = f"to mend: onepen partition mend {HERE}"
    for wrong in (right - 1, right + 2):
        commit(world, wrong)
        caplog.clear()
        with world.thread("s0"):
            wait_for(lambda: command in caplog.text, "the refusal names the command")
            code, _, err = run("mend", str(HERE), "--yes")
            assert (code, "s0" in err, "onepen processor drain" in err) == (5, True, True)
        code, rows, err = run("list")
        assert (code, f"partition {HERE}: torn transaction" in err) == (1, True)
        assert isinstance(rows, list)
        code, found, err = run("mend", str(HERE))
        assert (code, found["verdict"], found["committedOffset"]) == (1, "torn", wrong)
        assert f"the committed offset is to be {right}" in err
        assert run("mend", str(HERE))[1]["committedOffset"] == wrong, "a look changes nothing"
        code, _, err = run("mend", str(HERE), "--yes")
        assert (code, f"the committed offset is {right}" in err) == (0, True)
        decide(world, f"in-after-{wrong}")
        right += 1
    assert run("list")[0] == 0
    assert all(len(verdicts) == 1 for verdicts in world.verdicts().values()), "nothing was decided twice"


def test_what_offsets_do_not_mend_is_left_alone(world: EngineWorld, run: Run) -> None:
    commit(world, 1)
    code, _, err = run("mend", str(HERE), "--yes")
    assert (code, "the state topic was emptied" in err) == (1, True)
    assert run("mend", str(HERE))[1]["committedOffset"] == 1
    code, _, err = run("mend", "77")
    assert (code, f"it has {PARTITIONS}" in err) == (1, True)


def test_inputs_that_are_gone_are_skipped_only_when_that_is_said(
    world: EngineWorld, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    decide(world, "in-1")
    for n in range(3):
        world.prompt("s", f"lost-{n}")
    world.flush()
    admin = AdminClient({"bootstrap.servers": world.bootstrap})
    end = max(record.offset for partition, record in world.stored(world.topics.inputs) if partition == HERE) + 1
    place = TopicPartition(world.topics.inputs, HERE, end)
    next(iter(admin.delete_records([place]).values())).result(20)
    command = f"to mend: onepen partition mend {HERE} --skip-lost"
    with world.thread("s0"):
        wait_for(lambda: command in caplog.text, "the refusal names the command")
    code, found, err = run("mend", str(HERE), "--yes")
    assert (code, found, "3 are gone" in err or "are gone" in err) == (1, {}, True)
    code, _, err = run("mend", str(HERE), "--skip-lost", "--yes")
    assert (code, f"the committed offset is {end}" in err) == (0, True)
    decide(world, "in-2")
    assert not any(name.startswith("lost") for name in world.verdicts())
