"""Which process a pid means: the pid together with the time at which that process began.

Rule: a pid from a file is never signalled alone. Pids are reused; a pid and a start time are not. On Linux
the start time is the kernel's own count of ticks with the id of the boot, elsewhere what `ps` prints. A
zombie counts as gone: it runs nothing and holds nothing. (Standard library only: the child launcher runs this
file by its path.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

__all__ = ["ProcessIdentity", "end_exactly", "identify", "is_running", "signal_exactly", "start_time_of"]

POLL_S = 0.02


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, for ever: no later process equals it."""

    pid: int
    start_time: str


def start_time_of(pid: int) -> str | None:
    """When the running process `pid` began, as an opaque word; None when there is none (or only a zombie)."""
    if pid <= 0:
        return None
    return _start_time_linux(pid) if sys.platform == "linux" else _start_time_ps(pid)


def _start_time_linux(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            stat = stream.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may hold spaces and parentheses itself.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X", b"x"):
        return None
    return f"{_boot_id()}:{fields[19].decode()}"


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read(8)
    except OSError:
        return "boot"


def _start_time_ps(pid: int) -> str | None:
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    answer = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    state, _, began = answer.stdout.strip().partition(" ")
    if answer.returncode != 0 or not began or state.startswith("Z"):
        return None
    return " ".join(began.split())


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the process that runs as `pid` now."""
    start_time = start_time_of(pid)
    return None if start_time is None else ProcessIdentity(pid, start_time)


def is_running(process: ProcessIdentity) -> bool:
    """Whether exactly this process still runs."""
    return start_time_of(process.pid) == process.start_time


def signal_exactly(process: ProcessIdentity, number: int) -> bool:
    """Send the signal to exactly this process;

    False when it is gone (a stranger with its pid gets nothing).
    """
    opener = getattr(os, "pidfd_open", None)
    sender = getattr(signal, "pidfd_send_signal", None)
    try:
        if opener is None or sender is None:
            if not is_running(process):
                return False
            os.kill(process.pid, number)
            return True
        # The handle is taken before the check, so the process that was checked is the one that is signalled.
        handle: int = opener(process.pid)
        try:
            if not is_running(process):
                return False
            sender(handle, number)
        finally:
            os.close(handle)
    except ProcessLookupError:
        return False
    return True


def end_exactly(process: ProcessIdentity, stop_signal: int, *, timeout_ms: int, kill_wait_ms: int = 2_000) -> str:
    """End exactly this process: `stop_signal`, then SIGKILL after `timeout_ms`.

    Answers `"gone"` (it did not run any more), `"stopped"`, `"killed"` or `"running"` (SIGKILL did not help
    within `kill_wait_ms`, as with a process that waits for a broken disk).
    """
    if not signal_exactly(process, stop_signal):
        return "gone"
    if _wait_gone(process, timeout_ms):
        return "stopped"
    signal_exactly(process, signal.SIGKILL)
    return "killed" if _wait_gone(process, kill_wait_ms) else "running"


def _wait_gone(process: ProcessIdentity, timeout_ms: int) -> bool:
    end_s = time.monotonic() + timeout_ms / 1000
    while is_running(process):
        if time.monotonic() >= end_s:
            return False
        time.sleep(POLL_S)
    return True
