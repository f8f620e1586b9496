"""Processes that belong to this CI run, told apart by pid and start time.

    leftovers.py list MARK             prints one line `pid start_time` per process
    leftovers.py check MARK BEFORE     fails when one is there that is not in the file BEFORE, after ending it

A process belongs to the run when its environment has MARK, or its working folder, program or arguments lie
in the run's temporary folder (PostgreSQL changes its user and overwrites its environment). What somebody else
does in the checkout meanwhile is none of the run's business.
A pid alone is not enough: it is given out again, so it always goes together with the start time.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

GRACE_S = 10.0
Process = tuple[int, int]  # pid, start time in clock ticks since boot


def start_time(pid: int) -> int:
    """Field 22 of stat; the name before it, in parentheses, may hold blanks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if fields[0] == "Z" else int(fields[19])


def own_line() -> set[int]:
    """This process and its ancestors: the run itself."""
    pids, pid = set(), os.getpid()
    while pid > 0:
        pids.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pids


def belongs(pid: int, mark: str, places: list[str]) -> bool:
    proc = Path(f"/proc/{pid}")
    if mark.encode() in (proc / "environ").read_bytes():
        return True
    words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
    for link in ("cwd", "exe"):
        with contextlib.suppress(OSError):
            words.append(str((proc / link).readlink()))
    return any(f"{place}/" in f"{word}/" for word in words for place in places)


def processes(mark: str) -> dict[Process, str]:
    """The living processes of the run with their command lines, without the run's own shells."""
    places = [os.environ["TMPDIR"]]
    found: dict[Process, str] = {}
    ours = own_line()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ours:
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            started = start_time(int(entry.name))
            if started >= 0 and belongs(int(entry.name), mark, places):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name), started] = line.strip()[:200]
    return found


def check(mark: str, before: set[Process]) -> int:
    deadline = time.monotonic() + GRACE_S
    while (left := {p: line for p, line in processes(mark).items() if p not in before}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    for (pid, started), line in left.items():
        print(f"left behind: pid {pid}, started at tick {started}: {line}")
        with contextlib.suppress(OSError):
            if start_time(pid) == started:
                os.kill(pid, signal.SIGKILL)
    if not left:
        print("no process was left behind")
    return 1 if left else 0


def main(arguments: list[str]) -> int:
    match arguments:
        case ["list", mark]:
            for pid, started in sorted(processes(mark)):
                print(pid, started)
            return 0
        case ["check", mark, file]:
            rows = [line.split() for line in Path(file).read_text().splitlines()]
            return check(mark, {(int(pid), int(started)) for pid, started in rows})
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
