"""`onepen processor --workers N` on real Kafka: slots, restarts, one metrics port each, an end in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from onepen.streams.ports import free_port, port_is_free
from onepen.streams.process_identity import ProcessIdentity, is_running
from tests.conformance.worlds import wait_for
from tests.integration.engine_world import PARTITIONS, TOKEN_KEY, EngineWorld
from tests.integration.test_watch import get

pytestmark = pytest.mark.integration


def neighbours() -> int:
    """A free port whose successor is free as well."""
    while True:
        port = free_port()
        if port_is_free(port + 1):
            return port


def on_file(world: EngineWorld, name: str) -> ProcessIdentity:
    stored = json.loads((world.data_dir / "run" / f"{name}.json").read_text())
    return ProcessIdentity(stored["pid"], stored["start_time"])


def test_two_workers_share_the_partitions_and_survive_a_kill(world: EngineWorld, tmp_path: Path) -> None:
    port = neighbours()
    ready = tmp_path / "ready"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONEPEN_")} | {
        "ONEPEN_BOOTSTRAP": world.bootstrap, "ONEPEN_PREFIX": world.prefix, "ONEPEN_PARTITIONS": str(PARTITIONS),
        "ONEPEN_SLOT": "s-0", "ONEPEN_TOKEN_KEY": TOKEN_KEY, "ONEPEN_DATA_DIR": str(world.data_dir),
        "ONEPEN_READY_FILE": str(ready),
    }  # fmt: skip
    argv = [sys.executable, "-m", "onepen", "processor", "--workers", "2", "--metrics-port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*argv, "--log-format", "json"], env=environment, stderr=log)
    children: list[ProcessIdentity] = []
    try:
        wait_for(ready.exists, "all workers ready", 60)

        def shares() -> list[tuple[int, int]]:
            return [(code, text.count(",") + 1) for code, text in (get(port, "/readyz"), get(port + 1, "/readyz"))]

        wait_for(lambda: shares() == [(200, 2), (200, 2)], "two partitions each", 60)
        children = [on_file(world, "processor.s-0"), on_file(world, "processor.s-1")]
        admin = AdminClient({"bootstrap.servers": world.bootstrap})  # its answers die with it
        group = admin.describe_consumer_groups([f"{world.prefix}.processor"])
        members = next(iter(group.values())).result(10).members
        assert {member.group_instance_id for member in members} == {"s-0", "s-1"}

        for n in range(20):
            world.prompt(f"a-{n}", f"a-{n}")
        world.flush()
        wait_for(lambda: len(world.verdicts()) == 20, "verdicts")
        os.kill(children[1].pid, signal.SIGKILL)
        for n in range(20):
            world.prompt(f"b-{n}", f"b-{n}")
        world.flush()
        wait_for(lambda: len(world.verdicts()) == 40, "verdicts of all partitions after the restart", 60)
        assert all(len(found) == 1 for found in world.verdicts().values())
        wait_for(lambda: shares() == [(200, 2), (200, 2)], "the restarted one has its partitions again", 60)
        children.append(on_file(world, "processor.s-1"))
        assert children[2] != children[1]
        drained = subprocess.run(
            [sys.executable, "-m", "onepen", "processor", "drain"],
            env=environment, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert drained.returncode == 0, drained.stderr
        assert process.wait(20) == 0
        group = admin.describe_consumer_groups([f"{world.prefix}.processor"])
        assert not next(iter(group.values())).result(10).members, "the partitions were given away at once"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
    assert not [one for one in children if is_running(one)]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {line.get("process") for line in lines} == {None, "s-0", "s-1"}
    assert any("ended by signal 9; starting it again" in line["msg"] for line in lines)
