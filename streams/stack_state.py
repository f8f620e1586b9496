"""What is on file about a running stack: `<data>/stack.json`.

Rule: the supervisor is the only writer; each version replaces the one before in one step, readable by its
owner only (it holds the DSN). Every pid stands beside the start time of its process, and a reader believes
neither: it looks.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from onepen.streams.process_identity import ProcessIdentity, is_running

__all__ = [
    "ACTIVE_PHASES",
    "ChildRecord",
    "ChildStatus",
    "Phase",
    "StackRecord",
    "StackStatus",
    "read_record",
    "status",
]

STATE_NAME = "stack.json"
FORMAT = 1

Phase = Literal["absent", "starting", "running", "stopping", "stopped", "failed", "died"]
ACTIVE_PHASES: tuple[Phase, ...] = ("starting", "running", "stopping")
ChildPhase = Literal["starting", "running", "waiting", "stopped", "ended"]


@dataclass
class ChildRecord:
    """One child as its supervisor wrote it down. `waiting` is between a crash and the next start."""

    name: str
    phase: ChildPhase = "starting"
    pid: int | None = None
    start_time: str | None = None
    stop_signal: int = 15
    crashes: int = 0
    exit_code: int | None = None
    log: str = ""

    @property
    def identity(self) -> ProcessIdentity | None:
        if self.pid is None or self.start_time is None:
            return None
        return ProcessIdentity(self.pid, self.start_time)


@dataclass
class StackRecord:
    """The content of the state file. Children are in the order of their start."""

    supervisor: ProcessIdentity
    phase: Phase = "starting"
    addresses: dict[str, str] = field(default_factory=dict)
    children: list[ChildRecord] = field(default_factory=list)
    failure: str | None = None

    def write(self, data_dir: Path) -> None:
        """Replace the state file in one step, mode 0600."""
        temporary = data_dir / (STATE_NAME + ".new")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "w", encoding="utf-8") as stream:
            json.dump({"format": FORMAT, **asdict(self)}, stream, indent=1)
        os.replace(temporary, data_dir / STATE_NAME)


@dataclass(frozen=True)
class ChildStatus:
    """One child as it is now."""

    name: str
    phase: str
    pid: int | None
    alive: bool
    crashes: int
    exit_code: int | None
    log_path: Path


@dataclass(frozen=True)
class StackStatus:
    """A stack as it is now. `died`: its supervisor is gone without having stopped it."""

    data_dir: Path
    phase: Phase
    supervisor_pid: int | None
    addresses: dict[str, str]
    children: tuple[ChildStatus, ...]
    failure: str | None


def read_record(data_dir: Path) -> StackRecord | None:
    """The record on file, None when there is none. A damaged file raises `ValueError`."""
    try:
        content: dict[str, Any] = json.loads((data_dir / STATE_NAME).read_text("utf-8"))
    except FileNotFoundError:
        return None
    if content.pop("format", None) != FORMAT:
        raise ValueError(f"{data_dir / STATE_NAME} is not of format {FORMAT}")
    try:
        content["supervisor"] = ProcessIdentity(**content["supervisor"])
        content["children"] = [ChildRecord(**child) for child in content["children"]]
        return StackRecord(**content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{data_dir / STATE_NAME} is damaged: {error}") from error


def status(data_dir: Path) -> StackStatus:
    """Look at the stack of a directory: what is on file, and which of the processes are really there."""
    record = read_record(data_dir)
    if record is None:
        return StackStatus(data_dir, "absent", None, {}, (), None)
    phase = record.phase
    supervised = phase in ACTIVE_PHASES and is_running(record.supervisor)
    if phase in ACTIVE_PHASES and not supervised:
        phase = "died"
    children = tuple(
        ChildStatus(
            name=child.name,
            phase=child.phase,
            pid=child.pid,
            alive=child.identity is not None and is_running(child.identity),
            crashes=child.crashes,
            exit_code=child.exit_code,
            log_path=data_dir / child.log,
        )
        for child in record.children
    )
    pid = record.supervisor.pid if supervised else None
    return StackStatus(data_dir, phase, pid, record.addresses, children, record.failure)
