"""The processor killed, restarted and moved, on real Kafka: no input is decided twice, none is lost."""

from __future__ import annotations

import logging
import random
import signal
import time

import pytest
from confluent_kafka.admin import AdminClient

from tests.conformance.worlds import OutsideReader, wait_for
from tests.freezing import freeze_when
from tests.integration.engine_world import PARTITIONS, EngineWorld
from tests.seeds import drawn_seed

pytestmark = pytest.mark.integration


def once_each(world: EngineWorld, input_ids: list[str]) -> bool:
    """Every one of these inputs has exactly one verdict; one that has two fails at once."""
    verdicts = world.verdicts()
    twice = {i: v for i, v in verdicts.items() if len(v) > 1}
    assert not twice, f"decided twice: {dict(list(twice.items())[:5])}"
    return verdicts.keys() >= set(input_ids)


def kill_in_the_middle(world: EngineWorld, rng: random.Random) -> None:
    """Start a processor, and kill it shortly after it has begun to write."""
    reader = OutsideReader(world.bootstrap, [world.topics.receipts], PARTITIONS, committed=False)
    reader.read(to_the_end=True)
    with world.process("s0") as process:
        wait_for(lambda: reader.read() or process.poll() is not None, "a first record")
        freeze_when(world.transaction_is_open, process.send_signal, 20, 0.03, rng)
        assert process.poll() is None, "it ended by itself"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    reader.close()


@pytest.mark.parametrize("world", ["classic", pytest.param("consumer", marks=pytest.mark.long)], indirect=True)
def test_b02_killed_in_the_middle_of_transactions(world: EngineWorld) -> None:
    rng = random.Random(drawn_seed())
    sent: list[str] = []
    kills = 0
    while kills < 2 or (kills < 8 and not world.aborted_records()):
        for _ in range(500):
            sent.append(f"in-{len(sent)}")
            world.prompt(f"s-{len(sent) % 150}", sent[-1])
        world.flush()
        kill_in_the_middle(world, rng)
        kills += 1
    with world.thread("s0"):
        wait_for(lambda: once_each(world, sent), f"a verdict for each of {len(sent)} inputs", 60)
    assert world.aborted_records() > 0, f"no transaction was hit in {kills} kills"


def test_a_restart_knows_what_was_decided(world: EngineWorld) -> None:
    issued_at_ms = time.time_ns() // 1_000_000
    ids = [f"a-{n}" for n in range(40)]
    for count in (1, 2, 3):
        for n, input_id in enumerate(ids):
            world.prompt(f"s-{n}", input_id, issued_at_ms=issued_at_ms)
        world.flush()
        with world.thread("s0", drain=count == 3):
            wait_for(
                lambda count=count: all(len(world.verdicts().get(i, [])) == count for i in ids),  # type: ignore[misc]
                "a verdict for each",
            )
    assert {tuple(v) for v in world.verdicts().values()} == {("started", "duplicate", "duplicate")}


def test_b04b_partitions_move_and_come_back_with_their_parked_state(
    world: EngineWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="onepen.processor")
    sent: list[str] = []

    def send_and_wait() -> None:
        for n in range(40):
            sent.append(f"in-{len(sent)}")
            world.prompt(f"s-{n}", sent[-1])
        world.flush()
        wait_for(lambda: once_each(world, sent), f"{len(sent)} verdicts")

    with world.thread("s0"):
        send_and_wait()
        with world.thread("s1"):
            wait_for(lambda: "revoked: " in caplog.text, "a rebalance")
            send_and_wait()
        caplog.clear()
        wait_for(lambda: caplog.text.count(" sessions, ") >= 4, "all partitions back at the first one")
        send_and_wait()
    verdicts = [v[0] for v in world.verdicts().values()]
    assert verdicts.count("started") == 40, "one run per session: each owner knew the former one's runs"
    assert verdicts.count("queued") == 80


def test_b39_an_expired_group_offset_is_no_loss(world: EngineWorld) -> None:
    world.prompt("s", "first")
    world.flush()
    with world.thread("s0"):
        wait_for(lambda: once_each(world, ["first"]), "the verdict")
    admin = AdminClient({"bootstrap.servers": world.bootstrap})
    group = f"{world.prefix}.processor"
    admin.delete_consumer_groups([group])[group].result(20)
    world.prompt("s", "second")
    world.flush()
    with world.thread("s0"):
        wait_for(lambda: once_each(world, ["first", "second"]), "the verdict")
