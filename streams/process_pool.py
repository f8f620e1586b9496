"""Several processes of one kind under one parent, each with a slot of its own: started, restarted, ended together.

Rule: the parent decides nothing and reads nothing of Kafka. A member that ends without being asked to is started again
(`restarts`); one end too many ends the pool, so that whoever runs the pool sees it. A member that ended in order was
asked to by somebody and stays away. The kernel ends the members when the parent dies (`child_process`); what they print
goes where the parent's output goes.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from onepen.schemas.errors import Fatal
from onepen.streams.child_process import ChildProcess, launch
from onepen.streams.deadline import Deadline
from onepen.streams.readiness import READY_FILE_VARIABLE, say_ready
from onepen.streams.restarts import Restarts

__all__ = ["Member", "ProcessPool", "slots"]

log = logging.getLogger("onepen.pool")

TURN_S: Final = 0.05
STOP_TIMEOUT_MS: Final = 15_000
USAGE: Final = 2
"""The exit code of settings that cannot work: starting again would not help."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process: what to run, with what laid over this process's environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


def slots(slot: str, count: int) -> list[str]:
    """The slots of `count` processes: `<host>-0` … `<host>-<count - 1>`. Stable, so that a restart finds its own."""
    stem = slot.removesuffix("-0")
    return [f"{stem}-{number}" for number in range(count)]


class _Slot:
    def __init__(self, member: Member, ready_path: Path) -> None:
        self.member = member
        self.ready_path = ready_path
        self.process: ChildProcess | None = None
        self.start_at_s: float | None = 0.0
        """When to start it; None: it runs, or stays away."""
        self.restarts = Restarts()


class ProcessPool:
    """Used by one thread, which must live as long as the members are wanted."""

    def __init__(self, members: Sequence[Member], *, ready: Callable[[], None] = say_ready) -> None:
        """`ready` is called once every member has said that it is ready."""
        self._ready: Callable[[], None] | None = ready
        self._folder = tempfile.TemporaryDirectory(prefix="onepen-pool-")
        paths = [Path(self._folder.name) / f"{number}.ready" for number in range(len(members))]
        self._slots = [_Slot(member, path) for member, path in zip(members, paths, strict=True)]

    def run(self, stop: threading.Event, *, stop_signal: Callable[[], int] = lambda: signal.SIGTERM) -> None:
        """Keep the members running until `stop`, or until each has ended in order; then end them with `stop_signal`.

        Raises `Fatal` when one of them cannot be kept running; the others are ended by then.
        """
        try:
            while not stop.is_set() and self._turn():
                stop.wait(TURN_S)
        finally:
            self._end(int(stop_signal()))
            self._folder.cleanup()

    def pids(self) -> dict[str, int]:
        """Name -> pid of the members that run now. May be called on any thread."""
        return {slot.member.name: process.pid for slot in self._slots if (process := slot.process) is not None}

    def _turn(self) -> bool:
        """False when no member runs or is to be started."""
        now_s = time.monotonic()
        for slot in self._slots:
            if slot.process is not None:
                code = slot.process.poll()
                if code is not None:
                    slot.process = None
                    self._note_end(slot, code, now_s)
            elif slot.start_at_s is not None and now_s >= slot.start_at_s:
                self._start(slot)
        if self._ready is not None and all(slot.ready_path.exists() for slot in self._slots):
            ready, self._ready = self._ready, None
            ready()
        return any(slot.process is not None or slot.start_at_s is not None for slot in self._slots)

    def _start(self, slot: _Slot) -> None:
        slot.start_at_s = None
        env = {**slot.member.env, READY_FILE_VARIABLE: str(slot.ready_path)}
        slot.process = launch(slot.member.argv, log_path=None, env=env)
        log.info("%s runs as pid %d", slot.member.name, slot.process.pid)

    def _note_end(self, slot: _Slot, code: int, now_s: float) -> None:
        name = slot.member.name
        if code == 0:
            log.info("%s ended in order and stays away", name)
            return
        if code == USAGE:
            raise Fatal(f"{name} cannot work with these settings; its own message stands above")
        delay_s = slot.restarts.ended(now_s)
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        if delay_s is None:
            times = len(slot.restarts)
            raise Fatal(f"{name} ended {times} times within a minute, the last time {how}; its log stands above")
        slot.start_at_s = now_s + delay_s
        log.warning("%s ended %s; starting it again in %.1f s", name, how, delay_s)

    def _end(self, stop_signal: int) -> None:
        """All at once under one deadline; who does not end by then is killed with its group."""
        deadline = Deadline(STOP_TIMEOUT_MS)
        running = [slot for slot in self._slots if slot.process is not None]
        for slot in running:
            if slot.process is not None:
                slot.process.signal(stop_signal)
                slot.process.signal(signal.SIGCONT)  # a stopped process would not see the request
        for slot in running:
            if slot.process is not None and slot.process.end(stop_signal, deadline.remaining_ms()) is None:
                log.error("%s (pid %d) does not end, not even by SIGKILL", slot.member.name, slot.process.pid)
            slot.process = None
