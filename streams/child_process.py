"""Starting a program that lives no longer than the process that started it.

Rule: every process that onepen starts goes through `launch`: in a session and process group of its own
(Ctrl-C in the terminal reaches the supervisor only), tied to the life of this process (`child_launcher`), its
output appended to a log file. The thread that calls `launch` must live as long as the process is wanted: on
Linux the kernel counts the end of that thread as the end of the parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onepen.streams.process_identity import ProcessIdentity, identify

__all__ = ["ChildProcess", "launch", "tail_lines"]

LAUNCHER_PATH = Path(__file__).with_name("child_launcher.py")
POLL_S = 0.01
TAIL_BYTES = 64 * 1024


@dataclass
class ChildProcess:
    """A child of this process; only the process that launched it may use this object."""

    popen: subprocess.Popen[bytes]
    identity: ProcessIdentity
    watch_fd: int | None = None

    @property
    def pid(self) -> int:
        return self.identity.pid

    def poll(self) -> int | None:
        """The exit code once the child has ended (negative:

        The signal), else None. Ends its whole group then.
        """
        if self.popen.returncode is not None:
            return int(self.popen.returncode)
        if self._waits_to_be_reaped():
            # Before the child is reaped its pid, and so the id of its group, cannot belong to anybody else.
            self.signal_group(signal.SIGKILL)
            self.popen.wait()
            self._close_watch()
        return self.popen.returncode

    def _waits_to_be_reaped(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13; the group is signalled right after the reaping
            return self.popen.poll() is not None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.popen.pid, flags) is not None
        except ChildProcessError:
            return True

    def signal(self, number: int) -> None:
        """Send a signal to the child itself; nothing happens when it has ended."""
        if self.poll() is None:
            self.popen.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the child's process group."""
        # Gone, or (macOS) nothing but a zombie.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def wait(self, timeout_ms: int) -> int | None:
        """Wait for the end; the exit code, or None when the time ran out first."""
        end_s = time.monotonic() + timeout_ms / 1000
        while (code := self.poll()) is None and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return code

    def end(self, stop_signal: int, timeout_ms: int) -> int | None:
        """Ask with `stop_signal`, wait, then SIGKILL to the whole group;

        The exit code (None: not even that).
        """
        self.signal(stop_signal)
        self.signal(signal.SIGCONT)  # a stopped process would not see the request
        code = self.wait(timeout_ms)
        if code is None:
            self.signal_group(signal.SIGKILL)
            code = self.wait(2_000)
        return code

    def _close_watch(self) -> None:
        if self.watch_fd is not None:
            os.close(self.watch_fd)
            self.watch_fd = None


def launch(
    argv: Sequence[str],
    *,
    log_path: Path | None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: str | None = None,
    death_signal: int = signal.SIGKILL,
    watch_by_pipe: bool = sys.platform != "linux",
) -> ChildProcess:
    """Start `argv` as said at the top of the module.

    `env` is laid over this process's environment. `user` is a system user to become (root only). Without
    `log_path` the output goes where that of this process goes. `death_signal` is what the child gets when
    this process dies. Raises `OSError` when the process cannot be made; a program that cannot be run ends with
    code 127 and a line in its log.
    """
    command = [sys.executable, "-I", "-S", str(LAUNCHER_PATH)]
    command += ["--parent", str(os.getpid()), "--death-signal", str(int(death_signal))]
    if user:
        command += ["--user", user]
    reading_fd, writing_fd = os.pipe() if watch_by_pipe else (None, None)
    if reading_fd is not None:
        command += ["--watch-fd", str(reading_fd)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log_fd = None if log_path is None else os.open(log_path, flags, 0o600)
    try:
        popen = subprocess.Popen(
            [*command, "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
            pass_fds=() if reading_fd is None else (reading_fd,),
        )
    except OSError:
        if writing_fd is not None:
            os.close(writing_fd)
        raise
    finally:
        if log_fd is not None:
            os.close(log_fd)
        if reading_fd is not None:
            os.close(reading_fd)
    return ChildProcess(popen, _identity_of(popen.pid), writing_fd)


def _identity_of(pid: int) -> ProcessIdentity:
    """The identity of a child of ours. One that has already ended gets a start time that matches nothing."""
    return identify(pid) or ProcessIdentity(pid, "ended at once")


def tail_lines(log_path: Path, count: int) -> list[str]:
    """The last lines of a log, fit for a terminal: control characters are replaced."""
    try:
        with log_path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    lines = text.splitlines()[-count:]
    return ["".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line) for line in lines]
