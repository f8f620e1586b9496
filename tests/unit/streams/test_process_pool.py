"""Members are restarted after a crash, stay away after an end in order, and end with their parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onepen.schemas.errors import Fatal
from onepen.streams.process_pool import Member, ProcessPool, slots

# Appends its pid, says that it is ready, and then does what it is told.
CHILD = """
import os, pathlib, signal, sys, time
folder, name, code = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with open(folder / name, "a") as file:
    file.write(f"{os.getpid()}\\n")
def end(number, frame):
    (folder / f"{name}.end").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end)
pathlib.Path(os.environ["ONEPEN_READY_FILE"]).touch()
if code >= 0:
    sys.exit(code)
while True:
    time.sleep(60)
"""
RUN = -1


class Crew:
    def __init__(self, folder: Path, codes: dict[str, int]) -> None:
        self.folder = folder
        self.ready = threading.Event()
        self.stop = threading.Event()
        self.failed: list[BaseException] = []
        self.stop_signal = int(signal.SIGTERM)
        argv = [sys.executable, "-c", CHILD, str(folder)]
        members = [Member(name, [*argv, name, str(code)]) for name, code in codes.items()]
        self.pool = ProcessPool(members, ready=self.ready.set)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.pool.run(self.stop, stop_signal=lambda: self.stop_signal)
        except BaseException as error:
            self.failed.append(error)

    def starts(self, name: str) -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@contextmanager
def crew(folder: Path, **codes: int) -> Iterator[Crew]:
    made = Crew(folder, codes)
    made.thread.start()
    try:
        yield made
    finally:
        made.stop.set()
        made.thread.join(30)
        assert not made.thread.is_alive()
        assert not made.pool.pids()
        for name in codes:
            assert not any(alive(pid) for pid in made.starts(name))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def test_slots_are_numbered_behind_the_host() -> None:
    assert slots("host-0", 3) == ["host-0", "host-1", "host-2"]
    assert slots("rack7", 2) == ["rack7-0", "rack7-1"]


def test_a_killed_member_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    with crew(tmp_path, a=RUN, b=RUN) as made:
        assert made.ready.wait(30)
        os.kill(made.starts("a")[0], signal.SIGKILL)
        wait_for(lambda: len(made.starts("a")) == 2, "the second start")
        assert len(made.starts("b")) == 1
    assert not made.failed
    assert (tmp_path / "b.end").read_text() == str(int(signal.SIGTERM))


def test_all_are_ended_with_the_signal_that_was_wished_for(tmp_path: Path) -> None:
    with crew(tmp_path, a=RUN, b=RUN) as made:
        assert made.ready.wait(30)
        made.stop_signal = int(signal.SIGUSR1)
    assert [(tmp_path / f"{name}.end").read_text() for name in "ab"] == [str(int(signal.SIGUSR1))] * 2


def test_a_member_that_ended_in_order_stays_away(tmp_path: Path) -> None:
    with crew(tmp_path, a=0, b=0) as made:
        made.thread.join(30)
        assert not made.thread.is_alive(), "nothing is left to be kept running"
    assert not made.failed
    assert [len(made.starts(name)) for name in "ab"] == [1, 1]


@pytest.mark.parametrize(("code", "starts", "said"), [(1, 5, "ended 5 times within a minute"), (2, 1, "settings")])
def test_a_member_that_cannot_be_kept_running_ends_the_pool(tmp_path: Path, code: int, starts: int, said: str) -> None:
    with crew(tmp_path, a=code, b=RUN) as made:
        made.thread.join(40)
        assert not made.thread.is_alive()
    assert isinstance(made.failed[0], Fatal)
    assert said in str(made.failed[0])
    assert len(made.starts("a")) == starts
