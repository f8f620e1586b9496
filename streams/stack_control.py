"""Ending and removing a stack from another process: `onepen down`, `onepen reset`, and `onepen up --detach`.

Rule: only processes that are on file, and only while pid and start time are those on file. The supervisor is
asked first, since it ends its children in order; what it leaves is ended here, in the reverse order of the
start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from onepen.streams.child_process import tail_lines
from onepen.streams.data_dir import DataDirError, is_claimed, remove_data
from onepen.streams.deadline import Deadline
from onepen.streams.process_identity import end_exactly, is_running, signal_exactly
from onepen.streams.stack_state import ACTIVE_PHASES, StackRecord, StackStatus, read_record, status

__all__ = ["DownReport", "StopSignals", "down", "end_leftovers", "reset", "start_detached"]

DOWN_TIMEOUT_MS = 30_000
POLL_S = 0.05
# Time that stays for the children when the supervisor does not answer.
CHILDREN_RESERVE_MS = 8_000


@dataclass(frozen=True)
class DownReport:
    """What `down` did: `forced` are those that only SIGKILL ended, `left` those that even that did not."""

    was_running: bool
    ended: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def down(data_dir: Path, timeout_ms: int = DOWN_TIMEOUT_MS) -> DownReport:
    """End the stack of a directory, whether or not its supervisor still runs.

    Processes with a recorded pid but another start time are strangers and are left alone. Raises
    `DataDirError` when the state file is damaged or the processes belong to another user.
    """
    record = _read(data_dir)
    if record is None:
        return DownReport(was_running=False)
    alive = [c for c in record.children if c.identity is not None and is_running(c.identity)]
    # A process that has stopped its stack may have other things to do.
    supervised = record.phase in ACTIVE_PHASES and is_running(record.supervisor)
    if supervised and record.supervisor.pid == os.getpid():
        raise DataDirError(f"The stack of {data_dir} runs in this very process: stop its supervisor instead.")
    if not supervised and not alive:
        return DownReport(was_running=False)
    deadline = Deadline(timeout_ms)
    names = [child.name for child in alive]
    try:
        forced: list[str] = []
        if supervised:
            wait_ms = max(1_000, deadline.remaining_ms() - CHILDREN_RESERVE_MS)
            if end_exactly(record.supervisor, signal.SIGTERM, timeout_ms=wait_ms) == "killed":
                forced.append("supervisor")
        left_over = end_leftovers(data_dir, deadline)
    except PermissionError as error:
        raise DataDirError(f"The stack of {data_dir} belongs to another user: {error}") from error
    return DownReport(True, tuple(names), (*forced, *left_over.forced), left_over.left)


def end_leftovers(data_dir: Path, deadline: Deadline, progress: Callable[[str], None] = lambda _: None) -> DownReport:
    """End the children that a supervisor which is gone left behind; usually there are none."""
    record = _read(data_dir)
    ended: list[str] = []
    forced: list[str] = []
    left: list[str] = []
    children = [] if record is None else [c for c in record.children if c.identity is not None]
    while children:
        child = children.pop()
        identity = child.identity
        if identity is None or not is_running(identity):
            continue
        progress(f"Ending {child.name} (pid {identity.pid}), left by an earlier supervisor")
        share_ms = deadline.remaining_ms() // (len(children) + 1)
        signal_exactly(identity, signal.SIGCONT)
        outcome = end_exactly(identity, child.stop_signal, timeout_ms=share_ms)
        {"killed": forced, "running": left}.get(outcome, ended).append(child.name)
    return DownReport(bool(ended or forced or left), tuple(ended), tuple(forced), tuple(left))


def reset(data_dir: Path, timeout_ms: int = DOWN_TIMEOUT_MS) -> tuple[DownReport, list[str]]:
    """`down`, then remove the data that onepen made; answers also the names of what else is in the directory.

    Raises `DataDirError` for a directory without our marker, before anything is ended or removed, and when a
    process of the stack could not be ended.
    """
    if data_dir.exists() and not is_claimed(data_dir):
        raise DataDirError(f"{data_dir} is not a data directory of onepen: nothing was removed.")
    report = down(data_dir, timeout_ms)
    if report.left:
        raise DataDirError(f"{', '.join(report.left)} could not be ended: the data in {data_dir} was left alone.")
    return report, remove_data(data_dir)


def _read(data_dir: Path) -> StackRecord | None:
    try:
        return read_record(data_dir)
    except ValueError as error:
        raise DataDirError(f"{error}. End its processes by hand and remove the file.") from error


def start_detached(
    argv: Sequence[str],
    data_dir: Path,
    log_path: Path,
    deadline: Deadline,
    *,
    env: Mapping[str, str] | None = None,
) -> StackStatus:
    """Run a supervising command in the background, in a session of its own; wait until its stack is up.

    The command must make a `Supervisor` on `data_dir` and call `set_running`. Raises `DataDirError` with the
    end of its log when it ends first or does not come up in time; in the latter case it is ended.
    """
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    finally:
        os.close(log_fd)
    while process.poll() is None and not deadline.expired:
        now = status(data_dir)
        if now.supervisor_pid == process.pid and now.phase == "running":
            # It outlives this process, so nobody here will wait for it: without this, Popen warns.
            process.returncode = 0
            return now
        time.sleep(POLL_S)
    reason = "did not come up in time" if process.poll() is None else f"ended with code {process.returncode}"
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
    lines = "\n".join(f"  {line}" for line in tail_lines(log_path, 20))
    raise DataDirError(f"The stack {reason}. The end of {log_path}:\n{lines}")


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as a wish to stop, for the main thread of a supervising command.

    The first one only sets `requested`, so that the stack is ended in order; a second SIGINT raises
    `KeyboardInterrupt` for the impatient.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def wait(self, timeout_ms: int) -> bool:
        """Wait until a stop is requested; False when the time ran out first."""
        end_s = time.monotonic() + timeout_ms / 1000
        while not self.requested and time.monotonic() < end_s:
            time.sleep(min(POLL_S, max(0.0, end_s - time.monotonic())))
        return self.requested
