"""The small supervisor behind `onepen up`: children that are restarted, and that never outlive it.

Rule: one thread launches, reaps, restarts and ends all children, and lives as long as any of them (the
kernel ties a child to the thread that made it). A child that ends without being asked to is started again
after 0.2 s, doubling up to 5 s; the fifth such end within a minute stops the whole stack. Children are ended
in the reverse order of their start under one deadline, of which each gets an equal share of what is left, so
none can use up the time of those after it.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from onepen.streams.child_process import ChildProcess, launch, tail_lines
from onepen.streams.data_dir import DataDirLock, claim
from onepen.streams.deadline import Deadline
from onepen.streams.log_rotation import MAX_LOG_BYTES, rotate_if_large
from onepen.streams.process_identity import identify
from onepen.streams.restarts import Restarts
from onepen.streams.stack_control import end_leftovers
from onepen.streams.stack_state import ChildRecord, Phase, StackRecord

__all__ = ["Child", "StackFailed", "StackFailure", "Supervisor"]

TURN_S = 0.05
LOG_CHECK_S = 1.0
STOP_TIMEOUT_MS = 20_000
TAIL_LINES = 20


@dataclass(frozen=True)
class Child:
    """What to run. `ready` is asked again and again until it answers true;

    It may take up to a second itself.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    user: str | None = None
    stop_signal: int = signal.SIGTERM
    death_signal: int = signal.SIGKILL
    restart: bool = True


@dataclass(frozen=True)
class StackFailure:
    """Why a stack gave up, with the end of the log of the child that was the reason."""

    child: str
    reason: str
    log_path: Path
    log_lines: tuple[str, ...]

    def text(self) -> str:
        """Some lines for the terminal; control characters of the log are already replaced."""
        head = f"{self.child}: {self.reason}. The end of {self.log_path}:"
        return "\n".join([head, *(f"  {line}" for line in self.log_lines or ("(nothing)",))])


class StackFailed(RuntimeError):
    """The stack stopped, or a child did not come up. `failure` says more."""

    def __init__(self, failure: StackFailure) -> None:
        super().__init__(failure.text())
        self.failure = failure


class _Stopped(RuntimeError):
    """An order came after the stack had been stopped."""


class _Running:
    """A child with what the supervising thread knows about it."""

    def __init__(self, child: Child, log_path: Path, relative_log: str) -> None:
        self.child = child
        self.log_path = log_path
        self.record = ChildRecord(child.name, stop_signal=int(child.stop_signal), log=relative_log)
        self.process: ChildProcess | None = None
        self.start_at_s = 0.0
        self.restarts = Restarts()


class Supervisor:
    """Runs the children of one data directory. Its methods may be called from any thread.

    Use it as a context manager: leaving it ends all children. `failure` is set once the stack has given up;
    the children are ended by then or soon after (`wait_ended`).
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        progress: Callable[[str], None] = lambda _: None,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        """Claim the directory, end what a dead supervisor may have left there, and begin the state file.

        Raises `DataDirError` when the directory is not ours or has a running stack.
        """
        self.data_dir = data_dir.absolute()
        self._progress = progress
        self._max_log_bytes = max_log_bytes
        claim(self.data_dir)
        self._lock = DataDirLock(self.data_dir)
        try:
            (self.data_dir / "logs").mkdir(exist_ok=True)
            end_leftovers(self.data_dir, Deadline(STOP_TIMEOUT_MS), progress)
        except BaseException:
            self._lock.release()
            raise
        own = identify(os.getpid())
        if own is None:
            raise RuntimeError("this process has no start time: /proc (or ps) does not work here")
        self._record = StackRecord(own)
        self._children: dict[str, _Running] = {}
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._failure: StackFailure | None = None
        self._ended = threading.Event()
        self._dirty = True
        self._next_log_check_s = 0.0
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def failure(self) -> StackFailure | None:
        """Why the stack gave up, None while it has not."""
        return self._failure

    def start(self, *children: Child, deadline: Deadline) -> None:
        """Start the children together and wait until each is ready.

        Raises `StackFailed` when one of them is not ready in time or the stack gave up meanwhile.
        """
        started = [self._add(child) for child in children]
        for running in started:
            self._await_ready(running, deadline)

    def stop_child(self, name: str, timeout_ms: int = 5_000) -> None:
        """End one child and do not start it again. An unknown name raises `KeyError`."""
        running = self._children[name]
        self._order(lambda: self._end(running, timeout_ms), timeout_ms + 5_000)

    def pid_of(self, name: str) -> int | None:
        """The pid of a child now, None while it does not run."""
        running = self._children[name]
        return running.record.pid if running.record.phase in ("starting", "running") else None

    def set_address(self, name: str, address: str) -> None:
        """Put an address (`bootstrap`, `dsn`, …) into the state file."""
        self._order(lambda: self._record.addresses.update({name: address}))

    def set_running(self) -> None:
        """Note in the state file that everything that belongs to the stack is up."""
        self._order(lambda: self._set_phase("running"))

    def wait_ended(self, timeout_ms: int) -> bool:
        """Wait until all children are ended, by `stop` or by failure; False when the time ran out first."""
        return self._ended.wait(timeout_ms / 1000)

    def stop(self, timeout_ms: int = STOP_TIMEOUT_MS) -> None:
        """End all children in reverse order and give the directory free. A second call does nothing."""
        # ended already, or by its failure just now
        with suppress(StackFailed, _Stopped):
            self._order(lambda: self._end_all("stopped", Deadline(timeout_ms)), timeout_ms + 10_000)
        self._thread.join(5)
        self._lock.release()

    # --- the callers' side
    # -------------------------------------------------------------------------------------

    def _add(self, child: Child) -> _Running:
        if child.name in self._children:
            raise ValueError(f"there is a child {child.name!r} already")
        relative = f"logs/{child.name}.log"
        running = _Running(child, self.data_dir / relative, relative)

        def begin() -> None:
            self._children[child.name] = running
            self._record.children.append(running.record)
            self._launch(running)

        self._order(begin)
        return running

    def _await_ready(self, running: _Running, deadline: Deadline) -> None:
        child = running.child
        while True:
            if self._failure is not None:
                raise StackFailed(self._failure)
            if running.record.phase == "ended":
                raise StackFailed(self._failure_of(running, f"ended with code {running.record.exit_code}"))
            process = running.process
            if process is not None and (child.ready is None or child.ready()):
                self._order(partial(self._note_ready, running, process))
                if running.record.phase == "running":
                    return
            elif deadline.expired:
                raise StackFailed(self._failure_of(running, f"not ready within {deadline.timeout_ms} ms"))
            time.sleep(TURN_S)

    def _order(self, action: Callable[[], None], timeout_ms: int = 10_000) -> None:
        """Have the supervising thread do something, and wait for it.

        Raises `StackFailed` if the stack gave up.
        """
        done: Future[None] = Future()
        self._orders.put((action, done))
        end_s = time.monotonic() + timeout_ms / 1000
        while not done.done():
            if not self._thread.is_alive():
                if self._failure is not None:
                    raise StackFailed(self._failure)
                raise _Stopped("the stack has been stopped")
            if time.monotonic() >= end_s:
                raise TimeoutError("the supervising thread is busy")
            time.sleep(0.005)
        done.result()

    # --- the supervising thread
    # --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._turn()
        except Exception as error:  # whatever it is, the children must not be left without a supervisor
            self._failure = StackFailure("supervisor", f"{type(error).__name__}: {error}", self.data_dir, ())
            self._end_all("failed", Deadline(STOP_TIMEOUT_MS))

    def _turn(self) -> None:
        try:
            action, done = self._orders.get(timeout=TURN_S)
        except queue.Empty:
            pass
        else:
            try:
                action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            self._dirty = True
        for running in list(self._children.values()):
            self._look_after(running)
            if self._failure is not None and not self._ended.is_set():
                self._end_all("failed", Deadline(STOP_TIMEOUT_MS))
                return
        self._write_if_dirty()

    def _look_after(self, running: _Running) -> None:
        now_s = time.monotonic()
        if running.process is not None:
            code = running.process.poll()
            if code is not None:
                self._note_end(running, code, now_s)
        elif running.record.phase == "waiting" and now_s >= running.start_at_s:
            self._launch(running)
        if now_s >= self._next_log_check_s:
            self._next_log_check_s = now_s + LOG_CHECK_S
            for other in self._children.values():
                rotate_if_large(other.log_path, max_bytes=self._max_log_bytes)

    def _launch(self, running: _Running) -> None:
        child = running.child
        running.record.exit_code = None
        try:
            running.process = launch(
                child.argv,
                log_path=running.log_path,
                env=child.env,
                cwd=self.data_dir,
                user=child.user,
                death_signal=child.death_signal,
            )
        except OSError as error:
            with running.log_path.open("a", encoding="utf-8") as log:
                log.write(f"cannot start {child.argv[0]}: {error}\n")
            self._note_end(running, -1, time.monotonic())
            return
        running.record.pid = running.process.pid
        running.record.start_time = running.process.identity.start_time
        # A child that came up once needs no proof of readiness at a restart.
        running.record.phase = "running" if running.record.crashes else "starting"
        self._dirty = True

    def _note_ready(self, running: _Running, process: ChildProcess) -> None:
        # Ready was a statement about one process; after a restart in between it has to be asked again.
        if running.process is process:
            running.record.phase = "running"

    def _note_end(self, running: _Running, code: int, now_s: float) -> None:
        record = running.record
        running.process = None
        record.pid = record.start_time = None
        record.exit_code = code
        self._dirty = True
        if not running.child.restart:
            record.phase = "ended"
            return
        record.crashes += 1
        delay_s = running.restarts.ended(now_s)
        record.phase = "waiting"
        if delay_s is None:
            reason = f"ended {len(running.restarts)} times within a minute, the last time {_ending(code)}"
            self._failure = self._failure_of(running, reason)
            return
        running.start_at_s = now_s + delay_s
        self._progress(f"{record.name} ended {_ending(code)}; starting it again in {delay_s:.1f} s")

    def _end(self, running: _Running, timeout_ms: int) -> None:
        running.record.phase = "stopped"
        process = running.process
        if process is not None:
            running.record.exit_code = process.end(running.child.stop_signal, timeout_ms)
            if running.record.exit_code is None:
                self._progress(f"{running.child.name} (pid {process.pid}) does not end, not even by SIGKILL")
                return  # its pid stays on file
            running.process = None
        running.record.pid = running.record.start_time = None

    def _end_all(self, phase: Phase, deadline: Deadline) -> None:
        self._set_phase("stopping")
        self._write_if_dirty()
        left = list(self._children.values())
        while left:
            running = left[-1]
            self._end(running, deadline.remaining_ms() // len(left))
            left.pop()
        self._record.failure = self._failure.text() if self._failure else None
        self._set_phase(phase)
        self._write_if_dirty()
        self._ended.set()

    def _set_phase(self, phase: Phase) -> None:
        self._record.phase = phase
        self._dirty = True

    def _write_if_dirty(self) -> None:
        if self._dirty:
            self._dirty = False
            self._record.write(self.data_dir)

    def _failure_of(self, running: _Running, reason: str) -> StackFailure:
        lines = tuple(tail_lines(running.log_path, TAIL_LINES))
        return StackFailure(running.child.name, reason, running.log_path, lines)


def _ending(code: int) -> str:
    if code >= 0:
        return f"with code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
