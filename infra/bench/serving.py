"""The processes that a benchmark measures: each a child of it, ended with it."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from typing import Any, Final

from infra.bench.core import KEYS
from infra.bench.raw import echo
from onepen.streams.engine_settings import STATISTICS_MS, EngineSettings
from onepen.streams.engine_watch import watching
from onepen.streams.processor import run_engine
from onepen.streams.settings import Settings
from onepen.streams.worker import RunContext, Worker

END_S: Final = 10.0


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[SpawnProcess]:
    """`target` in a process of its own, until the block is left."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join(END_S)


def _told() -> threading.Event:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def processor(bootstrap: str, prefix: str, partitions: int) -> None:
    stop = _told()
    run_engine(EngineSettings(bootstrap, prefix, partitions, "s0"), KEYS, stop, stop)


def watched_processor(bootstrap: str, prefix: str, partitions: int, metrics_port: int) -> None:
    """The same, with its metrics on a port."""
    stop = _told()
    settings = Settings(bootstrap=bootstrap, prefix=prefix, partitions=partitions, metrics_port=metrics_port)
    engine_settings = EngineSettings(bootstrap, prefix, partitions, "s0", statistics_ms=STATISTICS_MS)
    run_engine(engine_settings, KEYS, stop, stop, lambda engine, log: watching(settings, engine, log))


def plain(bootstrap: str, inputs: str, outputs: str) -> None:
    echo(bootstrap, inputs, outputs, _told())


def worker(bootstrap: str, prefix: str, partitions: int, max_runs: int) -> None:
    """Three steps, then an answer; the steps themselves take no time."""
    settings = Settings(bootstrap=bootstrap, prefix=prefix, partitions=partitions, tenant_id=1)
    serving = Worker("bench", max_runs=max_runs, settings=settings)

    async def step(**given: Any) -> dict[str, Any]:
        return given

    @serving.run
    async def steps(ctx: RunContext) -> dict[str, Any]:
        for number in range(3):
            await ctx.tool_call(f"step-{number}", step, {"number": number})
        return {"text": "done"}

    serving.serve(_told())
