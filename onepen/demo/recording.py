"""Re-enacts recorded agent sessions through the real pipeline: prompts by the public client, runs by the public worker.

Each user message is a prompt; what the agent did until the next one becomes the run's events: each assistant message a
model request with its `message.completed`, each tool call a tool, state-changing ones an action behind the gate. A
session's next prompt is sent when its run has finished, as read from the committed log. Session ids are new each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from onepen.demo.checks import Answer, Effect, Evidence, Expectations, answer_all
from onepen.demo.gather import Starts, gather, starts_now
from onepen.demo.recorded import Recording, ToolCall, Turn, read_recordings
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, UnknownOutcome
from onepen.schemas.events import RUN_FINISHED, Event
from onepen.streams.async_client import AsyncClient
from onepen.streams.outside_reader import Follower
from onepen.streams.settings import Settings
from onepen.streams.worker import ActionPermit, RunContext, Worker

__all__ = ["SHIPPED", "TENANT_ID", "Summary", "re_enact", "verify"]

TENANT_ID: Final = 4343
SHIPPED: Final = Path(__file__).with_name("recordings") / "small.jsonl"
PAUSE_MS: Final = 600
"""What a model request takes at speed 1; a tool takes half of it."""
CONCURRENCY: Final = 32
VERDICT_MS: Final = 60_000
RUN_MS: Final = 300_000
READY_MS: Final = 60_000
POLL_S: Final = 0.1
VERIFY_MS: Final = 120_000

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Summary:
    """What was played, how long it took, and what is needed to judge it (`verify`)."""

    sessions: tuple[str, ...]
    turns: int
    ends: dict[str, int]
    inputs: int
    events: int
    seconds: float
    starts: Starts
    effects: tuple[Effect, ...]

    @property
    def runs(self) -> int:
        """Runs that have ended, in whatever way."""
        return sum(self.ends.values())

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {status}" for status, count in sorted(self.ends.items())) or "none"
        rates = ((self.runs, "runs"), (self.inputs, "inputs"), (self.events, "events"))
        shown = ", ".join(f"{count / max(self.seconds, 0.001):.1f} {what}/s" for count, what in rates)
        return (
            f"{len(self.sessions)} sessions, {self.turns} turns: {ends}; {self.inputs} input records, "
            f"{self.events} events in {self.seconds:.1f} s ({shown})"
        )


def re_enact(
    settings: Settings,
    path: Path = SHIPPED,
    sessions: int | None = None,
    speed: float = 1.0,
    *,
    concurrency: int = CONCURRENCY,
    progress: Progress = lambda done, total: None,
) -> Summary:
    """Play the first `sessions` recordings of `path`, `concurrency` of them at a time; `speed` 0 is without pauses.

    `progress(done, total)` is called in this thread's event loop as turns end. Raises `Invalid` naming the line for a
    malformed file, `UnknownOutcome` or `Fatal` when the pipeline does not answer.
    """
    recordings = read_recordings(path, sessions=sessions)
    return asyncio.run(_Enactment(settings, recordings, speed, progress).run(concurrency))


def verify(settings: Settings, summary: Summary) -> tuple[Evidence, list[Answer]]:
    """The outside checks over everything the re-enactment left in topics and tables."""
    evidence = gather(
        settings, TENANT_ID, summary.sessions, summary.starts, effects=summary.effects, timeout_ms=VERIFY_MS
    )
    watched = frozenset(effect.name for effect in summary.effects)
    return evidence, answer_all(evidence, Expectations(runs_completed=summary.turns, watched_actions=watched))


@dataclass
class _World:
    """The outside world of the recordings: it remembers which effects took place."""

    effects: list[Effect] = field(default_factory=list)
    known: set[tuple[str, str, str]] = field(default_factory=set)

    def book(self, session_id: str, permit: ActionPermit) -> None:
        key = session_id, permit.name, permit.key
        effective = key not in self.known
        self.known.add(key)
        number = len(self.effects) + 1
        self.effects.append(
            Effect(
                number,
                session_id,
                permit.run_id,
                permit.generation,
                permit.name,
                permit.key,
                permit.args_digest,
                effective,
            )
        )


class _Enactment:
    """One performance: worker, client and a reader of the log in one event loop (the reader in a thread)."""

    def __init__(self, settings: Settings, recordings: Sequence[Recording], speed: float, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._pause_s = 0.0 if speed <= 0 else PAUSE_MS / 1000 / speed
        nonce = f"{time.time_ns() // 1_000_000:x}"
        self._recordings = {f"rec-{nonce}-{number}": one for number, one in enumerate(recordings, 1)}
        self._world = _World()
        self._ended: dict[tuple[str, int], asyncio.Future[str]] = {}
        self._turns = sum(len(one.turns) for one in recordings)
        self._done = 0
        self._events = 0
        self._ends: Counter[str] = Counter()

    async def run(self, concurrency: int) -> Summary:
        starts = await asyncio.to_thread(starts_now, self._settings)
        worker = self._worker(concurrency)
        stop, halt = asyncio.Event(), threading.Event()
        serving = asyncio.create_task(worker.serve_async(stop))
        follower = asyncio.create_task(asyncio.to_thread(self._follow, starts, halt, asyncio.get_running_loop()))
        try:
            if not await asyncio.to_thread(worker.wait_ready, READY_MS):
                raise Fatal(f"the worker got no share of the offers within {READY_MS} ms; is the broker reachable?")
            began_s = time.monotonic()
            await self._guarded(self._play_all(concurrency), serving, follower)
            seconds = time.monotonic() - began_s
        finally:
            stop.set()
            halt.set()
            await asyncio.gather(serving, follower, return_exceptions=True)
        ends_now = await asyncio.to_thread(starts_now, self._settings)
        return Summary(
            sessions=tuple(self._recordings),
            turns=self._turns,
            ends=dict(self._ends),
            inputs=sum(end - starts.inputs[p] for p, end in ends_now.inputs.items()),
            events=self._events,
            seconds=seconds,
            starts=starts,
            effects=tuple(self._world.effects),
        )

    async def _guarded(self, work: Any, *vital: asyncio.Task[None]) -> None:
        """Run `work`; when one of the vital tasks ends before it, raise what ended it."""
        task = asyncio.create_task(work)
        done, _ = await asyncio.wait({task, *vital}, return_when=asyncio.FIRST_COMPLETED)
        if task not in done:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            for one in done:
                await one
            raise Fatal("the worker or the reader of the log ended by itself")
        await task

    # -- the prompting side ------------------------------------------------------------------------------------

    async def _play_all(self, concurrency: int) -> None:
        waiting = iter(list(self._recordings.items()))
        self._progress(0, self._turns)
        async with AsyncClient(settings=self._settings.model_copy(update={"tenant_id": TENANT_ID})) as client:

            async def player() -> None:
                for session_id, recording in waiting:
                    await self._play(client, session_id, recording)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(player())
            except ExceptionGroup as errors:
                # The first one made the group cancel the others.
                raise errors.exceptions[0] from None

    async def _play(self, client: AsyncClient, session_id: str, recording: Recording) -> None:
        for run_no, turn in enumerate(recording.turns, 1):
            ended = self._ended[session_id, run_no] = asyncio.get_running_loop().create_future()
            sent = client.prompt(session_id, turn.prompt, source="recording")
            verdict = await sent.verdict(VERDICT_MS)
            if not verdict.accepted:
                raise Fatal(f"{session_id}, turn {run_no}: {verdict.verdict} ({verdict.reason})")
            try:
                async with asyncio.timeout(RUN_MS / 1000):
                    status = await ended
            except TimeoutError:
                sentence = f"{session_id}, turn {run_no}: its run has not ended within {RUN_MS} ms"
                raise UnknownOutcome(sentence) from None
            self._ends[status] += 1
            self._done += 1
            self._progress(self._done, self._turns)

    # -- the log -----------------------------------------------------------------------------------------------

    def _follow(self, starts: Starts, halt: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        follower = Follower(self._settings, {self._settings.topics.events: starts.events})
        try:
            while not halt.is_set():
                ends = []
                for _, raw in follower.poll(POLL_S):
                    event = codec.decode_as(Event, raw.value)
                    if event.tenant_id == TENANT_ID and event.session_id in self._recordings:
                        self._events += 1
                        if event.type == RUN_FINISHED:
                            ends.append(event)
                if ends:
                    loop.call_soon_threadsafe(self._take_ends, ends)
        finally:
            follower.close()

    def _take_ends(self, ends: Sequence[Event]) -> None:
        for event in ends:
            ended = self._ended.pop((event.session_id, event.run_no), None)
            if ended is not None and not ended.done():
                ended.set_result(_status(event))

    # -- the working side --------------------------------------------------------------------------------------

    def _worker(self, concurrency: int) -> Worker:
        worker = Worker("recording", tenant_id=TENANT_ID, max_runs=concurrency, settings=self._settings)

        @worker.run
        async def replay(ctx: RunContext) -> dict[str, Any]:
            recording = self._recordings[ctx.session_id]
            turn = recording.turns[ctx.run_no - 1]
            await self._replay(ctx, turn)
            texts = [reply.content for reply in turn.replies if reply.content]
            return {"text": texts[-1] if texts else None}

        return worker

    async def _replay(self, ctx: RunContext, turn: Turn) -> None:
        for reply in turn.replies:
            called: dict[str, Any] = {}
            if reply.calls:
                called["toolCalls"] = [{"id": c.call_id, "name": c.name, "arguments": c.arguments} for c in reply.calls]
            async with ctx.model_request(model="recorded"):
                await asyncio.sleep(self._pause_s)
                await ctx.message(reply.content, **called)
            for call in reply.calls:
                await self._call(ctx, call)

    async def _call(self, ctx: RunContext, call: ToolCall) -> None:
        async def recorded(**_: Any) -> str | None:
            await asyncio.sleep(self._pause_s / 2)
            return call.result

        async def perform(_: Any, permit: ActionPermit) -> str | None:
            self._world.book(ctx.session_id, permit)
            return await recorded()

        if call.changes_state:
            await ctx.action(call.name, call.arguments, perform=perform, honours_keys=True)
        else:
            arguments = call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
            await ctx.tool_call(call.name, recorded, arguments, call_id=call.call_id)


def _status(event: Event) -> str:
    return str(orjson.loads(event.payload).get("terminalStatus"))
