"""`onepen up` and what goes with it: a whole stack of its own, as a user has it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onepen.streams.process_identity import ProcessIdentity, identify, is_running
from onepen.streams.stack_state import read_record

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

UP_S = 120


class Stack:
    """The command line on one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ONEPEN_")}
        self.environment = kept | {"ONEPEN_DATA_DIR": str(data_dir)}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "onepen", *arguments]
        done = subprocess.run(
            argv,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=UP_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def left_behind(self, started: list[ProcessIdentity]) -> list[ProcessIdentity]:
        """What still runs of these, and of what is on file now: a child that was ended is not."""
        return [one for one in {*started, *self.identities()} if is_running(one)]

    def identities(self) -> list[ProcessIdentity]:
        record = read_record(self.data_dir)
        assert record is not None
        return [record.supervisor, *(child.identity for child in record.children if child.identity)]


@pytest.fixture
def stack() -> Iterator[Stack]:
    # Not below pytest's own directory: every pytest that starts takes the rights of other users away there, and
    # PostgreSQL runs as another user where the tests run as root.
    with tempfile.TemporaryDirectory(prefix="onepen-stack-") as directory:
        stack = Stack(Path(directory) / "data")
        yield stack
        stack.run("reset", "--yes")


def test_up_detached_then_down_keeps_the_data_and_leaves_no_process(stack: Stack) -> None:
    began_s = time.monotonic()
    up = stack.run("up", "--detach")
    assert up.returncode == 0, up.stderr
    cold_s = time.monotonic() - began_s
    assert "onepen prompt session-42" in up.stdout
    assert "password" not in up.stdout
    children = json.loads(stack.run("status", "-o", "json").stdout)["children"]
    assert {child["name"] for child in children} == {"kafka", "postgres", "processor", "sink", "views", "worker"}
    assert all(child["alive"] for child in children)

    second = stack.run("up")
    assert second.returncode == 5
    assert "a stack is already up" in second.stderr

    asked = stack.run("prompt", "session-42", "What is new?", "--follow", "-o", "jsonl")
    assert asked.returncode == 0, asked.stderr
    run_id = json.loads(asked.stdout.splitlines()[0])["runId"]
    assert "processor" in stack.run("logs").stdout

    started = stack.identities()
    kafka_port = int(json.loads((stack.data_dir / "stack.json").read_text())["addresses"]["bootstrap"].split(":")[1])
    assert stack.run("down").returncode == 0
    assert stack.left_behind(started) == []
    assert stack.run("status").returncode == 1

    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", kafka_port))
        squatter.listen()
        began_s = time.monotonic()
        again = stack.run("up", "--detach")
        warm_s = time.monotonic() - began_s
        assert again.returncode == 0, again.stderr
        assert f"Port {kafka_port} is taken" in again.stderr
        replay = stack.run("run", "replay", run_id, "-o", "jsonl")
        assert replay.returncode == 0, replay.stderr
        assert replay.stdout.splitlines() == asked.stdout.splitlines()[1:]
        started = stack.identities()
    print(f"cold {cold_s:.1f} s, warm {warm_s:.1f} s")
    reset = stack.run("reset", "--yes")
    assert reset.returncode == 0, reset.stderr
    assert [one for one in started if is_running(one)] == []
    assert not stack.data_dir.exists()


@contextmanager
def up_until(condition: Callable[[], bool], stack: Stack, errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`onepen up` in the foreground, which writes `errors`; once the condition holds."""
    with errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "onepen", "up"],
            env=stack.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err.fileno(),
        )
    try:
        end_s = time.monotonic() + UP_S
        while not condition():
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < end_s, errors.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_ctrl_c_ends_everything_in_order(stack: Stack, tmp_path: Path) -> None:
    errors = tmp_path / "err"
    with up_until(lambda: "ready after" in errors.read_text(), stack, errors) as process:
        own = identify(process.pid)
        assert own is not None
        started = stack.identities()
        assert own in started
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 0
    assert stack.left_behind(started) == []
    assert "Traceback" not in errors.read_text()
    assert json.loads((stack.data_dir / "stack.json").read_text())["phase"] == "stopped"


def test_ctrl_c_during_the_start_leaves_nothing_behind(stack: Stack, tmp_path: Path) -> None:
    errors = tmp_path / "err"
    with up_until((stack.data_dir / "logs" / "kafka.log").exists, stack, errors) as process:
        started = stack.identities()
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130, errors.read_text()
    assert "Traceback" not in errors.read_text()
    assert stack.left_behind(started) == []
    assert json.loads((stack.data_dir / "stack.json").read_text())["phase"] == "stopped"
