"""One process in the foreground: signals become a wish to stop, and what others may know of it stands in a file.

Rule: the entry points install no signal handlers; here SIGTERM, SIGINT and SIGHUP ask them to end in order, a second
Ctrl-C does not wait. A process that others address (`processor drain`) writes pid and start time beside each other, so
that nobody ever signals a stranger.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.log_lines import LogFormat, log_to_stderr

if TYPE_CHECKING:
    from onepen.streams.process_identity import ProcessIdentity

RUN_DIR = "run"
"""In the data directory: who serves, and the ready files of a local stack."""

Serve = Callable[[threading.Event], None]
log = logging.getLogger("onepen")


def serve(
    name: str,
    run: Serve,
    *,
    wishes: dict[int, threading.Event] | None = None,
    log_format: LogFormat | None = None,
) -> None:
    """Run until a signal, then let it end in order. `wishes`: further signals that end it, with what they also set."""
    log_to_stderr(log_format)
    stop = threading.Event()
    with _stop_on_signals(stop, wishes or {}):
        run(stop)
    if not stop.is_set():
        raise Failure(f"the {name} ended by itself", ExitCode.FINDING)
    log.info("%s ended in order", name)


@contextmanager
def _stop_on_signals(stop: threading.Event, wishes: dict[int, threading.Event]) -> Iterator[None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number in wishes:
            wishes[number].set()
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *wishes)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ReadyWhenRecovered(logging.Handler):
    """Tells ready once the processor has read the state of every partition it was assigned.

    The engine says both in its log; this listens there.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._missing: set[int] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple) or not record.args:
            return
        first = record.args[0]
        if record.msg.startswith("assigned: ") and isinstance(first, list):
            self._missing = (self._missing or set()) | set(first)
        elif record.msg.startswith("partition %d: %d sessions") and self._missing is not None:
            self._missing.discard(int(str(first)))
        else:
            return
        if not self._missing:
            from onepen.streams.readiness import say_ready

            say_ready()


def _identity_path(data_dir: Path, name: str) -> Path:
    return data_dir / RUN_DIR / f"{name}.json"


def claim_if_ours(data_dir: Path) -> None:
    """Mark a new or empty directory as a data directory; one with other content is used as it is."""
    from onepen.cli.local_stack import OWN_NAMES
    from onepen.streams.data_dir import DataDirError, claim

    with suppress(DataDirError):
        claim(data_dir, *OWN_NAMES)


@contextmanager
def on_file(data_dir: Path, name: str) -> Iterator[None]:
    """Have this process on file under `name` while it runs. Where that cannot be written, it runs without."""
    from onepen.streams.process_identity import identify

    own = identify(os.getpid())
    path = _identity_path(data_dir, name)
    claim_if_ours(data_dir)
    try:
        if own is None:
            raise OSError("this process has no start time: /proc (or ps) does not work here")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"pid": own.pid, "start_time": own.start_time}) + "\n", "utf-8")
    except OSError as error:
        log.warning("%s is not on file, so `drain` will not find it: %s", name, error)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def process_on_file(data_dir: Path, name: str) -> ProcessIdentity | None:
    """The running process that is on file under `name`."""
    from onepen.streams.process_identity import ProcessIdentity, is_running

    try:
        stored = json.loads(_identity_path(data_dir, name).read_text("utf-8"))
        found = ProcessIdentity(int(stored["pid"]), str(stored["start_time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if is_running(found) else None
