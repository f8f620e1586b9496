"""The worker as users see it: a name, a body, `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Final, TypeVar

from onepen.schemas.errors import Fatal, Invalid
from onepen.schemas.ids import check_id
from onepen.streams.objects import object_store
from onepen.streams.settings import Settings, load_settings
from onepen.streams.worker.cancel_token import CancelToken
from onepen.streams.worker.contents import Contents
from onepen.streams.worker.context import RunContext
from onepen.streams.worker.execution import Body, Execution
from onepen.streams.worker.history import LogHistory
from onepen.streams.worker.runtime import Runtime
from onepen.streams.worker.session import HeldRun

__all__ = ["Worker"]

log = logging.getLogger("onepen.worker")

B = TypeVar("B", bound=Body)

NAME_CHARS_MAX: Final = 40
HOST_CHARS_MAX: Final = 50
GRACE_MS: Final = 5_000
STOP_MS: Final = 5_000
CLOSE_MS: Final = 5_000
STEP_S: Final = 0.05


class Worker:
    """Executes runs. `worker = Worker("hello", max_runs=8)`, one body by `@worker.run`, then `worker.serve()`.

    `max_runs` counts runs that work: one that only waits for an approval or a subtask takes no place. It serves one
    tenant (by default that of the settings), or `all_tenants`. Workers of one `group` share the
    offers; by default all workers of the same tenant do. Each process start has an id of its own (`worker_id`:
    name, host, pid and a random part). On SIGTERM, or when `stop` is set, the worker takes no more runs, gives
    bodies `grace_ms` to finish, stops the rest and gives their runs back. Tools in threads that do not stop either are
    left behind.
    """

    def __init__(
        self,
        name: str,
        *,
        bootstrap: str | None = None,
        prefix: str | None = None,
        tenant_id: int | None = None,
        all_tenants: bool = False,
        max_runs: int = 8,
        group: str | None = None,
        grace_ms: int = GRACE_MS,
        settings: Settings | None = None,
    ) -> None:
        self.name = check_id(name, "name")
        if len(name) > NAME_CHARS_MAX:
            raise Invalid(f"name: longer than {NAME_CHARS_MAX} characters", field="name")
        if max_runs < 1:
            raise Invalid("max_runs: must be 1 or more", field="max_runs")
        self._settings = settings or load_settings(bootstrap=bootstrap, prefix=prefix)
        self._store = object_store(self._settings)
        self._tenant_id = None if all_tenants else tenant_id or self._settings.tenant_id
        self._group = group or f"{self._settings.prefix}.workers.{self._tenant_id or 'all'}"
        self._max_runs = max_runs
        self._grace_ms = grace_ms
        self._body: Body | None = None
        self._runtime: Runtime | None = None
        self._ready = threading.Event()
        self._executions: dict[HeldRun, Execution] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        host = re.sub(r"[^A-Za-z0-9._]", "-", socket.gethostname())[:HOST_CHARS_MAX]
        self.worker_id = f"{name}-{host}-{os.getpid()}-{secrets.token_hex(4)}"

    def run(self, body: B) -> B:
        """Decorator: `async def answer(ctx: RunContext)` is the body of every run. What it returns becomes the
        output of `run.finished {completed}`; an exception becomes `{failed, error, retryable: false}`, an
        `errors.Retryable` `{failed, error, retryable: true}`."""
        if self._body is not None:
            raise Invalid("run: this worker has a body already", field="run")
        self._body = body
        return body

    def wait_ready(self, timeout_ms: int) -> bool:
        """Wait (in another thread than `serve`) until the worker has its share of the offers."""
        return self._ready.wait(timeout_ms / 1000)

    def held_count(self) -> int:
        """How many runs this worker holds at the moment."""
        return self._runtime.held_count() if self._runtime is not None else 0

    def serve(self, stop: threading.Event | None = None) -> None:
        """Work until `stop` is set; without one, until SIGTERM or SIGINT. Blocks."""
        asyncio.run(self._serve_until(stop))

    async def _serve_until(self, stop: threading.Event | None) -> None:
        stopped = asyncio.Event()
        with _signals(stopped, stop):
            await self.serve_async(stopped)

    async def serve_async(self, stop: asyncio.Event | None = None) -> None:
        """Work in this event loop until `stop` is set (or this task is cancelled). Installs no signal handlers.

        Raises `Fatal` after an orderly stop when offers or views cannot be read any more, and `Invalid` for settings
        that cannot work.
        """
        if self._body is None:
            raise Invalid("run: the worker has no body; decorate one with @worker.run", field="run")
        stop = stop or asyncio.Event()
        halt = threading.Event()
        failures: list[str] = []

        def failed(sentence: str) -> None:
            failures.append(sentence)
            stop.set()

        runtime = self._runtime = Runtime(
            self._settings,
            worker_id=self.worker_id,
            group=self._group,
            tenant_id=self._tenant_id,
            max_runs=self._max_runs,
            loop=asyncio.get_running_loop(),
            begin=self._begin,
            failed=failed,
        )
        runtime.ready = self._ready
        starting = asyncio.ensure_future(asyncio.to_thread(runtime.start, halt))
        try:
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # what cannot start says why, instead of waiting for its stop
            await stopping
        finally:
            halt.set()
            await asyncio.shield(self._shut_down(runtime, starting))
        if failures:
            raise Fatal(f"worker {self.worker_id} stopped: {failures[0]}; start it again")

    def _begin(self, held: HeldRun) -> None:
        assert self._body is not None
        cancelled = CancelToken()
        contents = Contents(held.offer.tenant_id, self._store, erasable=self._settings.erasable_content)
        context = RunContext(held, cancelled, LogHistory(self._settings), contents)
        execution = Execution(held, self._body, context, cancelled)
        self._executions[held] = execution
        task = asyncio.ensure_future(self._execute(execution))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, execution: Execution) -> None:
        held = execution.held
        log.debug("run %s generation %d begins", held.offer.run_id, held.offer.generation)
        try:
            await execution.run()
        finally:
            del self._executions[held]
            assert self._runtime is not None
            self._runtime.done(held)
            log.debug("run %s is over for this worker: %s", held.offer.run_id, held.ended)

    async def _shut_down(self, runtime: Runtime, starting: asyncio.Future[bool]) -> None:
        try:
            if not await starting:
                return
            runtime.stop_offers()
            await self._drained(self._grace_ms)
            for execution in list(self._executions.values()):
                execution.stop()
            await self._drained(STOP_MS)
            for held, execution in list(self._executions.items()):
                log.warning("run %s did not stop in time; it is given back", held.offer.run_id)
                execution.abandon()
        finally:
            await asyncio.to_thread(runtime.close, CLOSE_MS)
            for task in list(self._tasks):
                task.cancel()

    async def _drained(self, timeout_ms: int) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_ms / 1000)


@contextlib.contextmanager
def _signals(stopped: asyncio.Event, stop: threading.Event | None) -> Iterator[None]:
    """Set `stopped` when `stop` is set, or by SIGTERM and SIGINT when there is none and this is the main thread."""
    loop = asyncio.get_running_loop()
    if stop is not None:

        async def watch() -> None:
            while not stop.is_set():  # noqa: ASYNC110 - a threading.Event cannot be awaited
                await asyncio.sleep(STEP_S)
            stopped.set()

        watcher = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watcher.cancel()
        return
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
