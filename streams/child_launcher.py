"""The few lines that run in a new process before it becomes the wanted program.

Rule: standard library only and no import of onepen, because it runs as `python -I -S child_launcher.py`. It
drops root for a given user, ties the life of the program to that of its parent, and then becomes the program:
the pid stays the same.

On Linux the kernel sends the death signal. The order matters: the kernel forgets the wish when the user
changes, so the user changes first; and the parent may be gone before the wish is known, so its pid is
compared afterwards. Elsewhere a small watcher holds the reading end of a pipe whose writing end only the
parent has: at its end it sends the death signal, and SIGKILL if that is not enough.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

PR_SET_PDEATHSIG = 1
GRACE_S = 3.0
CANNOT_RUN = 127


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--death-signal", type=int, default=int(signal.SIGKILL))
    parser.add_argument("--user")
    parser.add_argument("--watch-fd", type=int)
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(argv)
    program: list[str] = options.program

    if options.watch_fd is not None:
        _start_watcher(options.watch_fd, options.death_signal)
    # All imports happen before the change of user, who may not be able to read this Python's library.
    libc = _libc() if options.watch_fd is None else None
    if options.user:
        _become(options.user)
    if libc is not None:
        _die_with_parent(libc, options.death_signal)
    if os.getppid() != options.parent:
        return CANNOT_RUN
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Ignored signals survive exec, and Python ignores SIGPIPE.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"cannot run {program[0]}: {error.strerror}\n")
        sys.stderr.flush()
    return CANNOT_RUN


def _become(user: str) -> None:
    import pwd

    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    os.environ.update(HOME=entry.pw_dir, USER=user, LOGNAME=user)


def _libc() -> ctypes.CDLL:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _die_with_parent(libc: ctypes.CDLL, death_signal: int) -> None:
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")


def _start_watcher(watch_fd: int, death_signal: int) -> None:
    """Fork twice, so that the watcher is nobody's child and the program meets no child it did not make."""
    target = os.getpid()
    first = os.fork()
    if first == 0:
        try:
            if os.fork() == 0:
                _watch(watch_fd, target, death_signal)
        finally:
            os._exit(0)
    os.waitpid(first, 0)
    os.close(watch_fd)


def _watch(watch_fd: int, target: int, death_signal: int) -> None:
    import select

    os.setsid()
    start_time_of = _start_time_reader()
    born = start_time_of(target)
    while True:
        ready, _, _ = select.select([watch_fd], [], [], 1.0)
        if start_time_of(target) != born:
            os._exit(0)
        if ready and os.read(watch_fd, 1) == b"":
            break
    for number in (death_signal, int(signal.SIGKILL)):
        end_s = time.monotonic() + GRACE_S
        if start_time_of(target) != born:
            os._exit(0)
        os.kill(target, number)
        while start_time_of(target) == born and time.monotonic() < end_s:
            time.sleep(0.05)
    os._exit(0)


def _start_time_reader() -> Callable[[int], str | None]:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "process_identity.py")
    reader: Callable[[int], str | None] = runpy.run_path(path)["start_time_of"]
    return reader


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
