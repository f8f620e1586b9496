"""What the runtime makes of an offer: the log alone knows whether the run is still there to be begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from onepen.streams.settings import Settings
from onepen.streams.worker.context import RunContext
from onepen.streams.worker.runtime import STALE_SLACK_MS, Runtime
from onepen.streams.worker.session import HeldRun
from tests.unit.worker.bench import Bench, Running, played, until

HOUR_MS = 3_600_000


def runtime_of(bench: Bench, begin: Callable[[HeldRun], None]) -> Runtime:
    """One whose records are decided by the bench."""
    runtime = Runtime(
        Settings(),
        worker_id="w",
        group="g",
        tenant_id=1,
        max_runs=2,
        loop=asyncio.get_running_loop(),
        begin=begin,
        failed=lambda sentence: None,
    )
    runtime.send = bench.send  # type: ignore[method-assign]
    return runtime


def test_a_worker_that_does_not_know_the_time_begins_nothing_that_is_over() -> None:
    """The offers of a new group begin with old ones, and nothing of the worker's own was stamped yet."""
    began: list[str] = []

    async def scene(bench: Bench) -> None:
        running: list[Running] = []

        async def body(ctx: RunContext) -> None:
            began.append(ctx.run_id)

        bench.ask(content="go", timeout_ms=5_000)
        bench.fire("run", 5_001)
        bench.hold = True
        runtime = runtime_of(bench, lambda held: running.append(bench.execute(held, body)))
        runtime._consider(bench.offers[-1], 0)
        await until(lambda: running)
        for _ in range(20):  # what could begin has begun
            await asyncio.sleep(0)
        assert [type(record).__name__ for record in bench.sent] == ["Claim"], "asked at once, whatever the time"
        bench.let_go()
        await running[0].over()
        assert running[0].held.ended == "run_ended"

    played(scene)
    assert began == []


def test_a_worker_that_knows_the_time_begins_before_the_answer_and_skips_what_is_over() -> None:
    held: list[HeldRun] = []

    async def scene(bench: Bench) -> None:
        bench.ask(content="go")
        offer = bench.offers[-1]
        bench.hold = True
        runtime = runtime_of(bench, held.append)
        runtime._clock.observe(offer.at_ms)
        over_ms = offer.at_ms - HOUR_MS
        runtime._consider(msgspec.structs.replace(offer, expires_at_ms=over_ms - STALE_SLACK_MS), 0)
        runtime._consider(offer, 0)
        await until(lambda: held)
        assert runtime.held_count() == 1

    played(scene)
    assert [one.machine.optimistic for one in held] == [True]
