"""The processes of the story: workers, the scheduler, live views. Each is started and ended by its pid.

Rule: nothing outlives the story. A frozen process is woken before it is asked to end.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

import orjson

from onepen.demo import story_worker
from onepen.schemas.errors import Fatal
from onepen.streams.child_process import ChildProcess, launch, tail_lines
from onepen.streams.deadline import Deadline
from onepen.streams.settings import Settings
from onepen.streams.views import VIEWS_FILE, read_views

__all__ = ["Cast"]

START_TIMEOUT_MS = 20_000
STOP_TIMEOUT_MS = 5_000
FRESH_MS = 5_000
"""A views file older than this belongs to nobody who is alive."""
AHEAD_MS = 150
"""So far ahead lies the moment at which operator and scheduler send."""
POLL_S = 0.02


class Cast:
    """Starts processes with the addresses of `settings` and the story's tenant; ends all of them on leaving."""

    def __init__(self, settings: Settings, tenant_id: int) -> None:
        self._settings = settings
        self._directory = Path(tempfile.mkdtemp(prefix="onepen-story-"))
        self._children: dict[str, ChildProcess] = {}
        self._environment = {
            "ONEPEN_BOOTSTRAP": settings.bootstrap,
            "ONEPEN_PREFIX": settings.prefix,
            "ONEPEN_PARTITIONS": str(settings.partitions),
            "ONEPEN_DATA_DIR": str(self._directory),
            "ONEPEN_KAFKA": orjson.dumps(settings.kafka).decode(),
            story_worker.TENANT_VARIABLE: str(tenant_id),
        }

    def __enter__(self) -> Cast:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGTERM)
        for child in self._children.values():
            child.end(signal.SIGTERM, STOP_TIMEOUT_MS)
        if error is None:
            shutil.rmtree(self._directory)
        else:
            error.add_note(f"The logs of the story's processes are in {self._directory}")

    def _start(self, name: str, *argv: str, **env: str) -> ChildProcess:
        command = [sys.executable, "-P", "-m", *argv]
        log_path = self._directory / f"{name}.log"
        child = launch(command, log_path=log_path, env=self._environment | env, cwd=self._directory)
        self._children[name] = child
        return child

    # -- workers -----------------------------------------------------------------------------------------------

    def start_workers(self, count: int, mail_address: str, nonce: str) -> list[int]:
        """Start worker processes for sessions that end with `nonce`; their pids. Ready once their files are there."""
        pids = []
        for number in range(1, count + 1):
            ready = str(self._ready_path(number))
            env = {
                story_worker.MAIL_VARIABLE: mail_address,
                story_worker.NONCE_VARIABLE: nonce,
                story_worker.READY_VARIABLE: ready,
            }
            pids.append(self._start(f"worker-{number}", "onepen.demo.story_worker", **env).pid)
        return pids

    def await_workers(self, count: int) -> None:
        """Wait until all of them read offers. Raises `Fatal` with the last lines of one that ended."""
        for number in range(1, count + 1):
            self._await_file(self._ready_path(number), f"worker-{number}")

    def _ready_path(self, number: int) -> Path:
        return self._directory / f"worker-{number}.ready"

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process of the story; any other pid is refused."""
        for child in self._children.values():
            if child.pid == pid:
                child.signal(number)
                return
        raise Fatal(f"pid {pid} is no process of this story")

    def pids(self) -> dict[int, str]:
        """Processes of the story by pid."""
        return {child.pid: name for name, child in self._children.items()}

    # -- the scheduler -----------------------------------------------------------------------------------------

    def start_scheduler(self, session: str, content: object) -> None:
        """Start the scheduler; it is ready soon and sends when `set_off` names the moment."""
        argv = ("onepen.demo.story_scheduler", session, str(self._moment), orjson.dumps(content).decode())
        self._start("scheduler", *argv)

    def await_scheduler(self) -> None:
        """Wait until it only waits for the moment."""
        self._await_file(self._moment.with_suffix(".ready"), "scheduler")

    def set_off(self) -> None:
        """Name the moment, and return at it: whoever calls this sends at the same time as the scheduler."""
        at_ms = time.time_ns() // 1_000_000 + AHEAD_MS
        draft = self._moment.with_suffix(".draft")
        draft.write_text(str(at_ms))
        draft.rename(self._moment)
        pause = threading.Event()
        while time.time_ns() // 1_000_000 < at_ms:
            pause.wait(0.001)

    @property
    def _moment(self) -> Path:
        return self._directory / "moment"

    # -- live views --------------------------------------------------------------------------------------------

    def views_path(self) -> Path:
        """The file of live views over this log: of the running stack, else of a process of our own."""
        path = self._settings.data_dir / VIEWS_FILE
        views = read_views(path)
        fresh = views is not None and views.written_at_ms > time.time_ns() // 1_000_000 - FRESH_MS
        if views is not None and fresh and views.events_topic == self._settings.topics.events:
            return path
        self._start("views", "onepen", "views")
        return self._directory / VIEWS_FILE

    def _await_file(self, path: Path, name: str) -> None:
        deadline = Deadline(START_TIMEOUT_MS)
        pause = threading.Event()
        while not path.exists():
            if self._children[name].poll() is not None or deadline.expired:
                lines = "\n".join(tail_lines(self._directory / f"{name}.log", 10))
                raise Fatal(f"{name} of the story did not start:\n{lines}")
            pause.wait(POLL_S)
