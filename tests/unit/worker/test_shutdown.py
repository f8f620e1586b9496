"""A worker that is stopped ends, whatever the threads of its tools do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from onepen.schemas.worker_records import Release
from onepen.streams.settings import Settings
from onepen.streams.worker import ActionPermit, RunContext, Worker
from onepen.streams.worker import worker as worker_module
from onepen.streams.worker.machine import Machine
from onepen.streams.worker.session import HeldRun
from tests.unit.worker.bench import Bench

LONG_S = 30.0


class Stuck:
    """Work in a thread that takes no notice of anything until the test is over."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()

    def work(self) -> None:
        self.begun.set()
        self.over.wait()

    def perform(self, _: Any, __: ActionPermit) -> None:
        self.work()


class OneRun:
    """In place of the runtime: one run on a bench, granted at once."""

    bench: Bench

    def __init__(self, *_: Any, loop: asyncio.AbstractEventLoop, begin: Callable[[HeldRun], None], **__: Any) -> None:
        self._loop, self._begin = loop, begin
        OneRun.bench = Bench()

    def start(self, _: threading.Event) -> bool:
        self._loop.call_soon_threadsafe(self._take)
        return True

    def _take(self) -> None:
        bench = self.bench
        bench.ask(content="go")
        held = HeldRun(Machine(bench.offers[-1], "w", 0), bench.send, self._loop, bench.clocks)
        bench.helds.append(held)
        held.claim()
        self._begin(held)

    def stop_offers(self) -> None:
        """None come anyway."""

    def close(self, _: int) -> None:
        """There is nothing to close."""

    def done(self, _: HeldRun) -> None:
        """Its place is not needed."""


async def in_a_tool(ctx: RunContext, stuck: Stuck) -> None:
    await ctx.tool("t", stuck.work)


async def in_an_action(ctx: RunContext, stuck: Stuck) -> None:
    await ctx.action("send", {"a": 1}, perform=stuck.perform)


async def in_a_task_left_behind(ctx: RunContext, stuck: Stuck) -> None:
    tool = asyncio.ensure_future(ctx.tool("t", stuck.work))
    while not stuck.begun.is_set():  # noqa: ASYNC110 - a threading.Event cannot be awaited
        await asyncio.sleep(0.001)
    assert not tool.done()


@pytest.mark.parametrize("where", [in_a_tool, in_an_action, in_a_task_left_behind])
def test_a_thread_that_never_returns_does_not_keep_the_worker(
    where: Callable[[RunContext, Stuck], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "Runtime", OneRun)
    monkeypatch.setattr(worker_module, "STOP_MS", 20)
    stuck, stop = Stuck(), threading.Event()
    worker = Worker("w", grace_ms=0, settings=Settings())

    @worker.run
    async def body(ctx: RunContext) -> None:
        await where(ctx, stuck)

    serving = threading.Thread(target=worker.serve, args=(stop,), daemon=True)
    serving.start()
    try:
        assert stuck.begun.wait(LONG_S)
        stop.set()
        serving.join(LONG_S)
        assert not serving.is_alive()
    finally:
        stuck.over.set()
        serving.join(LONG_S)
    last = OneRun.bench.sent[-1]
    assert isinstance(last, Release), "nothing is told of an end that nobody knows"
    assert last.reason == "shutdown"
