"""Services that are not there: every command that needs one says so in one line that names it, and ends with 4."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from onepen.cli import main, send_command, submission
from onepen.cli.app import build
from onepen.cli.exit_codes import ExitCode
from onepen.streams import partition_mending
from onepen.streams.deadline import Deadline

NOWHERE = "127.0.0.1:9"
WAIT_MS = 100
WAIT = ("--timeout-ms", str(WAIT_MS))
LINE = b'{"mode": "prompt", "session_id": "s", "content": "x"}\n'

# Leaf command -> its arguments, one list for each way to the broker. Every command of the tree stands in one of these.
ASKS_KAFKA: dict[str, list[tuple[str, ...]]] = {
    "topics apply": [()],
    "topics check": [()],
    "prompt": [("s", "x", *WAIT), ("s", "x", *WAIT, "--no-wait"), ("s", "x", *WAIT, "--follow")],
    "steer": [("s", "x", *WAIT)],
    "follow-up": [("s", "x", *WAIT)],
    "auto": [("s", "x", *WAIT)],
    "retry": [("run-1", *WAIT)],
    "abort": [("s", "--active", *WAIT)],
    "answer": [("s", "approve", "--key", "k", "--name", "n", "--digest", "0" * 64, *WAIT)],
    "erase": [("s", "--yes", *WAIT)],
    "send": [WAIT],
    "tail": [("s",), ("--run", "run-1"), ("--all",)],
    "run replay": [("run-1",), ("run-1", "--session", "s")],
    "why": [("in-1",), ("in-1", "--session", "s")],
    "policy put": [("-", *WAIT)],
    "policy show": [WAIT],
    "simulate-policy": [("-",)],
    "verify": [("--all",), ("--session", "s"), ("--run", "run-1")],
    "archive": [(), ("--partition", "0")],
    "audit": [("--topics-only",)],
    "deadletters list": [()],
    "deadletters show": [("0-1",)],
    "deadletters redrive": [("0-1", "--yes"), ("--all", "--dry-run")],
    "partition list": [()],
    "partition mend": [("0",), ("0", "--yes")],
    "demo": [()],
}
ASKS_POSTGRES: dict[str, tuple[str, ...]] = {
    "session list": (),
    "session show": ("s",),
    "run list": (),
    "run show": ("run-1",),
    "input show": ("in-1",),
    "migrate": (),
    "audit": (),
}
ASKS_NEITHER = {"down", "reset", "status", "logs", "topics plan", "processor drain"}
WAITS_FOR_THEM = {"up", "processor", "sink", "views", "worker"}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, one in getattr(command, "commands", {}).items():
        yield from leaves(one, (*path, name))
    if not hasattr(command, "commands") or (path and command.invoke_without_command):
        yield " ".join(path)


def test_every_command_is_told_apart() -> None:
    known = ASKS_KAFKA.keys() | ASKS_POSTGRES.keys() | ASKS_NEITHER | WAITS_FOR_THEM
    assert set(leaves(typer.main.get_command(build()))) == known


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("ONEPEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ONEPEN_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("ONEPEN_BOOTSTRAP", NOWHERE)
    monkeypatch.setenv("ONEPEN_TOKEN_KEY", "k" * 64)
    # Nobody answers, however long it is waited for.
    whole = Deadline.__init__
    monkeypatch.setattr(Deadline, "__init__", lambda self, timeout_ms: whole(self, min(timeout_ms, WAIT_MS)))
    for module, name, value in (
        (partition_mending, "ANSWER_S", WAIT_MS / 1000),
        (submission, "CLOSE_MS", WAIT_MS),
        (send_command, "CLOSE_MS", WAIT_MS),
    ):
        monkeypatch.setattr(module, name, value)


def ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr (that of the process: librdkafka writes past Python)."""
    stdin = b"{}" if "-" in arguments else LINE
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False))
    code = main(arguments)
    said = capfd.readouterr()
    assert (code, said.out) == (ExitCode.NO_ANSWER, ""), said.err
    assert said.err.startswith("onepen: "), said.err
    assert said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    "arguments", [[*name.split(), *more] for name, ways in ASKS_KAFKA.items() for more in ways], ids=" ".join
)
def test_a_broker_that_is_not_there(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if arguments == ["demo"]:
        monkeypatch.setenv("ONEPEN_DSN", f"postgresql://u:hush@{NOWHERE}/db")
    line = ended(arguments, monkeypatch, capfd)
    # An input of which nothing is known is told by its id, and how to send it again.
    assert f"Kafka at {NOWHERE}" in line or "--input-id" in line or "sending it again is safe" in line


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("name", ASKS_POSTGRES)
def test_a_database_that_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEPEN_DSN", f"postgresql://u:hush@{NOWHERE}/db")
    line = ended([*name.split(), *ASKS_POSTGRES[name]], monkeypatch, capfd)
    assert f"PostgreSQL at {NOWHERE} does not answer: Connection refused" in line
    assert "hush" not in line
