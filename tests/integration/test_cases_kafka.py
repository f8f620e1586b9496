"""Cases that others have met in public whose fault lies with real brokers and real processes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource  # type: ignore[attr-defined]  # type: ignore[attr-defined]

from onepen.cli import main
from onepen.schemas import codec
from onepen.schemas.edge import parse_request
from onepen.schemas.errors import Fatal
from onepen.schemas.partitioning import partition_of
from onepen.streams import topic_admin
from onepen.streams.dead_letters import REASON
from onepen.streams.processor import run_processor
from onepen.streams.worker import RunContext
from tests.conformance.worlds import wait_for
from tests.integration.engine_world import PARTITIONS, EngineWorld
from tests.integration.in_process import only
from tests.integration.running_pipeline import Pipeline, running, serving
from tests.services import fresh_topic_prefix

pytestmark = pytest.mark.integration


def named(partition: int) -> str:
    return next(f"s{n}" for n in range(1_000) if partition_of(f"s{n}".encode(), PARTITIONS) == partition)


# -- B32: a processor that is frozen for longer than its membership lasts


@pytest.mark.long
def test_b32_a_frozen_processor_wakes_and_decides_nothing_twice(
    world: EngineWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="onepen.processor")
    sent: list[str] = []

    def send(count: int) -> None:
        for _ in range(count):
            sent.append(f"in-{len(sent)}")
            world.prompt(named(len(sent) % PARTITIONS), sent[-1])
        world.flush()

    def decided() -> bool:
        verdicts = world.verdicts()
        twice = {i: v for i, v in verdicts.items() if len(v) > 1}
        assert not twice, f"decided twice: {twice}"
        return verdicts.keys() >= set(sent)

    send(8)
    with world.process("s0") as frozen:
        wait_for(decided, "the first verdicts")
        send(400)
        wait_for(lambda: decided() or len(world.verdicts()) > 8, "that it is in the middle of its work")
        os.kill(frozen.pid, signal.SIGSTOP)
        send(20)
        with world.thread("s1"):
            wait_for(decided, "every verdict, from the successor")
            os.kill(frozen.pid, signal.SIGCONT)
            send(20)
            wait_for(decided, "verdicts beside the one that woke")
            # It learns that it was removed: it joins again, which moves partitions back, or leaves its process.
            caplog.clear()

            def came_to_itself() -> bool:
                send(4)
                wait_for(decided, "verdicts meanwhile")
                return "revoked: " in caplog.text or frozen.poll() is not None

            wait_for(came_to_itself, "that it comes to itself")
            send(20)
            wait_for(decided, "the rest of the verdicts")
    started = [verdict for verdicts in world.verdicts().values() for verdict in verdicts if verdict == "started"]
    assert len(started) == PARTITIONS, "one run per session, whoever decided"


# -- B33: the state topic must be what recovery relies on


@pytest.mark.parametrize(
    ("topic", "name", "wrong", "right"),
    [("state", "cleanup.policy", "delete", "compact"), ("events", "retention.ms", "60000", "-1")],
)
def test_b33_a_topic_that_would_lose_history_stops_the_start(
    world: EngineWorld, topic: str, name: str, wrong: str, right: str
) -> None:
    full_name = getattr(world.topics, topic)
    entry = ConfigEntry(name, wrong, incremental_operation=AlterConfigOpType.SET)
    admin = AdminClient({"bootstrap.servers": world.bootstrap})
    resource = ConfigResource("topic", full_name, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)
    with pytest.raises(Fatal, match=f"{name} is {wrong}, the plan says {right}"):
        topic_admin.require_topics(world.settings("s0"))
    with pytest.raises(Fatal, match="differ from the plan"):
        run_processor(world.settings("s0"), threading.Event())


# -- B38: one partition function for all clients


def test_b38_clients_that_hash_as_java_does_agree_and_others_are_parked(world: EngineWorld) -> None:
    names = [f"session-{n}" for n in range(40)] + ["\u00e9".encode().hex(), "a", "x" * 128]

    def produced(partitioner: str) -> dict[str, int]:
        """Where a client of librdkafka puts a prompt of each session when it is left to itself."""
        found: dict[str, int] = {}
        producer = Producer({"bootstrap.servers": world.bootstrap, "partitioner": partitioner})
        for name in names:
            fields = {"mode": "prompt", "session_id": name, "content": "x", "input_id": f"{partitioner}-{name}"[:128]}
            record = parse_request(fields).to_input(tenant_id=1, user_id=1)

            def landed(error: object, message: object, name: str = name) -> None:
                assert error is None
                found[name] = message.partition()  # type: ignore[attr-defined]

            producer.produce(world.topics.inputs, codec.encode(record), name.encode(), on_delivery=landed)
        assert producer.flush(20) == 0
        return found

    assert produced("murmur2_random") == {name: partition_of(name.encode(), PARTITIONS) for name in names}
    elsewhere = [n for n, p in produced("consistent_random").items() if p != partition_of(n.encode(), PARTITIONS)]
    assert elsewhere, "the default of librdkafka is another function"
    with world.thread("s0"):
        wait_for(lambda: len(world.verdicts()) == 2 * len(names) - len(elsewhere), "the verdicts")
        wait_for(lambda: len(world.stored(world.topics.deadletters)) == len(elsewhere), "the dead letters")
    letters = [dict(record.headers)[REASON] for _, record in world.stored(world.topics.deadletters)]
    assert letters == [b"wrong_partition"] * len(elsewhere)
    owners: dict[bytes | None, set[int]] = {}
    for partition, record in world.stored(world.topics.events):
        owners.setdefault(record.key, set()).add(partition)
    assert {len(partitions) for partitions in owners.values()} == {1}, "no session has two owners"


# -- B53: looking on and stopping


@pytest.fixture
def pipeline(kafka_bootstrap: str) -> Iterator[Pipeline]:
    with running(kafka_bootstrap, fresh_topic_prefix()) as found:
        worker = found.worker()

        @worker.run
        async def wait(ctx: RunContext) -> None:
            await ctx.cancelled.wait()

        with serving(worker):
            yield found


def command_line(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
    """`main` reaches the pipeline from here on."""
    settings = pipeline.settings
    only(
        monkeypatch,
        {
            "ONEPEN_BOOTSTRAP": settings.bootstrap,
            "ONEPEN_PREFIX": settings.prefix,
            "ONEPEN_PARTITIONS": str(settings.partitions),
            "ONEPEN_DATA_DIR": str(data_dir),
        },
    )


def test_b53_a_closed_tab_stops_nothing_and_the_command_line_stops_what_another_tab_shows(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pipeline.client() as client:
        run_id = client.prompt("tabs", "go").verdict(30_000).run_id
    assert run_id is not None
    first_tab = pipeline.subscriber().run(run_id, timeout_ms=30_000)
    first_tab.close()
    seen: list[str] = []

    def look_on() -> None:
        seen.extend(event.type for event in pipeline.subscriber().run(run_id, timeout_ms=30_000))

    second_tab = threading.Thread(target=look_on)
    second_tab.start()
    command_line(pipeline, monkeypatch, tmp_path)
    assert main(["abort", "tabs", "--run", run_id, "--reason", "enough", "-o", "json"]) == 0
    assert orjson.loads(capsys.readouterr().out)["verdict"] == "cancelling"
    second_tab.join(30)
    assert not second_tab.is_alive(), "the resumed view ends with the run"
    assert seen[-1] == "run.finished"
    assert seen.count("run.cancel_requested") == 1, "the closed tab asked for nothing"


# -- B01: prompts through every entry at the same moment


def test_b01_prompts_through_every_entry_at_once_are_one_run(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command_line(pipeline, monkeypatch, tmp_path)
    with pipeline.client() as client:
        sent = [
            client.prompt("race", "from the button"),
            client.prompt("race", "from the clock", source="scheduler"),
            client.auto("race", "from the queue", source="queue"),
            client.prompt("race", "from afar", source="remote", on_busy="reject"),
        ]
        assert main(["prompt", "race", "from the command line", "-o", "json"]) == 0
        first = orjson.loads(capsys.readouterr().out)
        verdicts = [handle.verdict(30_000) for handle in sent]
        told = [*((found.verdict, found.run_id) for found in verdicts), (first["verdict"], first["runId"])]
        assert [verdict for verdict, _ in told].count("started") == 1
        assert {verdict for verdict, _ in told} == {"started", "queued", "refused"}
        assert len({run_id for _, run_id in told}) == 1, "each names the run that is active"
        client.abort("race", active=True, scope="run_and_queue").disposition(30_000)
    started = list(pipeline.subscriber().session("race", follow=False, timeout_ms=30_000))
    assert [event.run_no for event in started if event.type == "run.started"] == [1]
