"""Whole runs: prompt -> claimed -> three steps -> completed, one processor and one worker process.

Runs per second with so many prompts outstanding all the time, and the milliseconds from submit to `run.finished` at a
fixed rate. Beside it, for scale: what a durable-execution engine written in Rust does with three such steps.

    python -m infra.bench.runs [--runs N] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from infra.bench.engine import broker, prepared
from infra.bench.latency import part_of
from infra.bench.measures import Measures
from infra.bench.serving import child, processor, worker
from onepen.schemas import codec
from onepen.schemas.events import RUN_FINISHED, Event
from onepen.streams.async_client import AsyncClient
from onepen.streams.outside_reader import Follower, end_offsets
from onepen.streams.settings import Settings

PARTITIONS: Final = 4
OUTSTANDING: Final = (16, 64, 256)
RATE_PER_S: Final = 20
OTHERS_RUNS_PER_S: Final = 615.0
OTHERS_P50_MS: Final = 15.0
READY_S: Final = 60.0
LIMIT_S: Final = 120.0


class Runs:
    """Prompts, and the ends of their runs as the log tells them."""

    def __init__(self, settings: Settings, client: AsyncClient) -> None:
        self._settings, self._client = settings, client
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._number = 0
        self._mark = f"{time.time_ns() // 1_000_000:x}"

    async def one(self) -> float:
        """One run from its prompt to its end, in ms."""
        self._number += 1
        session = f"run-{self._mark}-{self._number}"
        ended = self._ends[session] = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self._client.prompt(session, "go")
        async with asyncio.timeout(LIMIT_S):
            await ended
        return (time.perf_counter() - began) * 1000

    def follow(self, stop: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        topic = self._settings.topics.events
        follower = Follower(self._settings, {topic: end_offsets(self._settings, topic)})
        try:
            while not stop.is_set():
                events = [codec.decode_as(Event, raw.value) for _, raw in follower.poll(0.05)]
                ended = [event.session_id for event in events if event.type == RUN_FINISHED]
                if ended:
                    loop.call_soon_threadsafe(self._take, ended)
        finally:
            follower.close()

    def _take(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            ended = self._ends.pop(session, None)
            if ended is not None and not ended.done():
                ended.set_result(None)

    async def at_once(self, outstanding: int, total: int) -> float:
        """Runs per second with so many outstanding all the time."""
        left = iter(range(total))

        async def user() -> None:
            for _ in left:
                await self.one()

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(outstanding, total)):
                group.create_task(user())
        return total / (time.perf_counter() - began)

    async def at_rate(self, rate: int, total: int) -> list[float]:
        """Their times in ms, in order of size."""
        began, tasks = time.perf_counter(), []
        for number in range(total):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self.one()))
        return sorted(await asyncio.gather(*tasks))


async def measure(settings: Settings, runs: int, measures: Measures) -> None:
    stop = threading.Event()
    async with AsyncClient(settings=settings) as client:
        ours = Runs(settings, client)
        following = asyncio.create_task(asyncio.to_thread(ours.follow, stop, asyncio.get_running_loop()))
        try:
            async with asyncio.timeout(READY_S):
                await ours.at_once(4, 20)
            times = await ours.at_rate(RATE_PER_S, min(runs, 200))
            measures.calibrate()
            for share, label in ((0.5, "p50"), (0.99, "p99")):
                measures.say(
                    f"run.end_to_end_ms.{RATE_PER_S}.{label}", part_of(times, share), "ms", baseline=OTHERS_P50_MS
                )
            for outstanding in OUTSTANDING:
                per_s = await ours.at_once(outstanding, runs)
                measures.calibrate()
                measures.say(f"run.end_to_end_per_s.{outstanding}", per_s, "runs/s", baseline=OTHERS_RUNS_PER_S)
        finally:
            stop.set()
            with contextlib.suppress(asyncio.CancelledError):
                await following


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole runs per second, and how long one takes.")
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    options = parser.parse_args()
    measures = Measures(options.out)
    with broker() as bootstrap:
        prepared(bootstrap, "bench", PARTITIONS)
        settings = Settings(
            bootstrap=bootstrap,
            prefix="bench",
            partitions=PARTITIONS,
            tenant_id=1,
        )
        with (
            child(processor, bootstrap, "bench", PARTITIONS),
            child(worker, bootstrap, "bench", PARTITIONS, max(OUTSTANDING)),
        ):
            asyncio.run(measure(settings, options.runs, measures))


if __name__ == "__main__":
    main()
