"""Subtasks of bodies against the pure core: waited for, joined after a takeover, stopped with their parent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from onepen.schemas.errors import Invalid, Retryable
from onepen.schemas.ids import run_id
from onepen.schemas.limits import OPEN_CHILDREN_MAX
from onepen.streams.objects import FileStore
from onepen.streams.worker import (
    RunContext,
    SubtaskCancelled,
    SubtaskCycle,
    SubtaskEnded,
    SubtaskFailed,
    SubtaskNotStarted,
    SubtaskRefused,
    SubtaskTimedOut,
)
from tests.unit.worker.bench import Bench, played, until

RUN = run_id(1, "s", 1)
CHILD = run_id(1, "child", 1)

Body = Callable[[RunContext], Awaitable[Any]]


async def parent(ctx: RunContext) -> Any:
    return await ctx.subtask("child", {"ask": ctx.input})


async def quick(ctx: RunContext) -> str:
    return "done"


async def begun(bench: Bench, session_id: str = "child") -> None:
    await until(lambda: "run.started" in bench.types(session_id))


async def serve(bench: Bench, child: Body, session_id: str = "child") -> None:
    """Let a worker run the child that was asked for to its end."""
    await begun(bench, session_id)
    await bench.take(child, session_id=session_id, worker_id="c").over()


async def through(bench: Bench, body: Body, child: Body) -> None:
    """A run whose body waits for one child, and that child, to their ends."""
    bench.ask(content="go")
    running = bench.take(body)
    await serve(bench, child)
    await running.over()


def test_the_result_of_a_child_comes_back() -> None:
    async def scene(bench: Bench) -> None:
        async def child(ctx: RunContext) -> Any:
            return {"said": ctx.input, "source": ctx.source}

        await through(bench, parent, child)

    bench = played(scene)
    assert bench.end()["output"] == {"said": {"ask": "go"}, "source": "subtask"}
    assert bench.types() == ["run.started", "run.leased", "subtask.started", "subtask.finished", "run.finished"]
    (started,) = bench.named("subtask.started")
    assert (started["callId"], started["sessionId"], started["name"]) == (f"{RUN}:child:1", "child", "child")
    (finished,) = bench.named("subtask.finished")
    assert (finished["status"], finished["runId"]) == ("completed", CHILD)


@pytest.mark.parametrize(("size", "shown"), [(20_000, False), (10, True)])
def test_a_result_too_large_for_a_view_comes_from_the_childs_last_event(size: int, shown: bool) -> None:
    async def scene(bench: Bench) -> None:
        async def child(ctx: RunContext) -> str:
            return "x" * size

        async def body(ctx: RunContext) -> int:
            return len(await ctx.subtask("child", "go"))

        await through(bench, body, child)

    bench = played(scene)
    assert bench.end()["output"] == size
    assert ("result" in bench.named("subtask.finished")[0]) is shown


async def _fails(ctx: RunContext) -> None:
    raise ValueError("no invoice")


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("failed", SubtaskFailed, {"type": "ValueError", "message": "no invoice"}),
        ("cancelled", SubtaskCancelled, None),
        ("withdrawn", SubtaskNotStarted, None),
        ("timed_out", SubtaskTimedOut, None),
        ("erased", SubtaskRefused, None),
    ],
)
def test_other_ends_are_told_apart(how: str, kind: type[SubtaskEnded], said: Any) -> None:
    caught: list[SubtaskEnded] = []

    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            with pytest.raises(kind) as error:
                await ctx.subtask("look", "x", session_id="child", timeout_ms=5_000)
            caught.append(error.value)
            return "went on"

        if how == "withdrawn":
            bench.ask(content="first", session_id="child")
        if how == "erased":
            bench.ask("erase", session_id="child")
        bench.ask(content="go")
        running = bench.take(body, session_id="s")
        await until(lambda: "subtask.started" in bench.types())
        if how == "failed":
            await bench.take(_fails, session_id="child", worker_id="c").over()
        elif how == "cancelled":
            bench.ask("abort", session_id="child", target_kind="active")
        elif how == "withdrawn":
            input_id = bench.named("subtask.started")[0]["inputId"]
            bench.ask("abort", session_id="child", target_kind="input", target_id=input_id)
        elif how == "timed_out":
            bench.fire("run", 5_001, "child")
        await running.over()

    assert played(scene).ends()[0]["output"] == "went on"
    assert (caught[0].result, caught[0].session_id, caught[0].name) == (said, "child", "look")
    if how == "erased":
        assert caught[0].reason == "erased"


def test_a_session_that_would_wait_for_itself_is_a_cycle() -> None:
    async def scene(bench: Bench) -> None:
        async def back(ctx: RunContext) -> str:
            with pytest.raises(SubtaskCycle):
                await ctx.subtask("s", "and you?")
            return "no"

        await through(bench, parent, back)

    bench = played(scene)
    assert bench.end()["output"] == "no"
    assert "subtask.started" not in bench.types("child")


def test_b22d_a_takeover_joins_the_open_child_and_no_second_one_is_asked_for() -> None:
    async def scene(bench: Bench) -> None:
        bench.ask(content="go")
        dead = bench.take(parent)
        await begun(bench)
        bench.helds.clear()
        bench.fire("lease", 4_000)
        other = bench.take(parent, worker_id="other", session_id="s")
        await until(lambda: other.held.machine.subtasks)
        await bench.take(quick, session_id="child", worker_id="c").over()
        await other.over()
        dead.task.cancel()

    bench = played(scene)
    assert bench.end()["output"] == "done"
    assert bench.types("child").count("run.started") == 1
    assert len(bench.named("subtask.started")) == 1


def test_a_takeover_gets_the_recorded_end() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> Any:
            found = await ctx.subtask("child", "x")
            if ctx.generation == 1:
                await asyncio.sleep(60)
            return found

        bench.ask(content="go")
        dead = bench.take(body)
        await serve(bench, quick)
        await until(lambda: "subtask.finished" in bench.types())
        bench.helds.clear()
        bench.fire("lease", 4_000)
        await bench.take(body, worker_id="other", session_id="s").over()
        dead.task.cancel()

    bench = played(scene)
    assert bench.end()["output"] == "done"
    assert bench.types("child").count("run.started") == 1


def test_a_retry_keeps_what_ended_and_asks_anew_for_what_went_down_with_the_run() -> None:
    async def scene(bench: Bench) -> None:
        async def child(ctx: RunContext) -> str:
            return f"{ctx.session_id} did {ctx.input}"

        async def body(ctx: RunContext) -> Any:
            first = await ctx.subtask("one", "1")
            second = asyncio.ensure_future(ctx.subtask("two", "2"))
            await asyncio.wait([second], timeout=0.05 if ctx.run_id == RUN else None)
            if not second.done():
                raise Retryable("come again")
            return [first, second.result(), ctx.run_id != ctx.lineage]

        bench.ask(content="go")
        running = bench.take(body)
        await serve(bench, child, "one")
        await running.over()
        assert bench.ends()[0]["retryable"] is True
        assert bench.ends("two")[0]["terminalStatus"] == "cancelled", "it went down with the run that had asked"
        bench.ask(retry_of=RUN)
        again = bench.take(body, session_id="s")
        await until(lambda: bench.types("two").count("run.started") == 2)
        await bench.take(child, session_id="two", worker_id="c").over()
        await again.over()

    bench = played(scene)
    assert bench.ends()[1]["output"] == ["one did 1", "two did 2", True]
    assert bench.types("one").count("run.started") == 1
    calls = [started["callId"] for started in bench.named("subtask.started")]
    assert calls == [f"{RUN}:one:1", f"{RUN}:two:1", f"{RUN}:two:1:r2"]


def test_a_run_that_only_waits_takes_no_place() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> list[Any]:
            held = ctx._held
            seen = [held.only_waits]
            waiting = asyncio.ensure_future(ctx.subtask("child", "x"))
            await until(lambda: held.only_waits)
            async with ctx.model_request(model="m"):
                seen.append(held.only_waits)
            seen.append(held.only_waits)
            await waiting
            seen.append(held.only_waits)
            asked = asyncio.ensure_future(
                ctx.action("pay", 1, perform=lambda args, permit: held.only_waits, approval=True)
            )
            await until(lambda: held.only_waits)
            (approval,) = bench.named("approval.requested")
            bench.ask(
                "answer", action_key=approval["actionKey"], args_digest=approval["argsDigest"], decision="approve"
            )
            return [*seen, await asked, held.only_waits]

        bench.ask(content="go")
        running = bench.take(body)
        await begun(bench)
        await until(lambda: len(bench.named("model.request.finished")) == 1)
        await bench.take(quick, session_id="child", worker_id="c").over()
        await running.over()

    assert played(scene).end()["output"] == [False, False, True, False, False, False]


def test_b22a_a_cancel_of_the_parent_stops_the_waiting_body_and_the_child() -> None:
    stopped: list[str] = []

    async def scene(bench: Bench) -> None:
        inside = asyncio.Event()

        async def child(ctx: RunContext) -> None:
            inside.set()
            try:
                await asyncio.sleep(60)
            finally:
                stopped.append(ctx.session_id)

        bench.ask(content="go")
        running = bench.take(parent)
        await begun(bench)
        below = bench.take(child, session_id="child", worker_id="c")
        await inside.wait()
        await until(lambda: below.held.machine.granted)
        bench.ask("abort", target_kind="active", reason="enough")
        await running.over()
        assert running.held.ended == "recorded", "the worker is done with it, though the run still waits"
        await below.over()

    bench = played(scene)
    assert stopped == ["child"]
    end = bench.end()
    assert (end["terminalStatus"], end["forced"]) == ("cancelled", False)
    assert [(s["branch"], s["status"]) for s in end["stopped"]] == [("subtask", "cancelled")]
    assert bench.end("child")["reason"] == "parent cancelled"


def test_a_body_that_completes_without_waiting_leaves_the_child_running() -> None:
    async def scene(bench: Bench) -> None:
        left: list[asyncio.Future[Any]] = []

        async def body(ctx: RunContext) -> str:
            left.append(asyncio.ensure_future(ctx.subtask("child", "x")))
            await begun(bench)
            return "out"

        bench.ask(content="go")
        await bench.take(body).over()
        assert left[0].cancelled()
        assert bench.session_named("child").head.run is not None

    bench = played(scene)
    assert [e["status"] for e in bench.named("subtask.finished")] == ["detached"]
    assert bench.end()["terminalStatus"] == "completed"


def test_concurrent_calls_have_ids_of_their_own_and_one_id_two_contents_is_a_conflict() -> None:
    async def scene(bench: Bench) -> None:
        async def child(ctx: RunContext) -> Any:
            return ctx.input

        async def body(ctx: RunContext) -> Any:
            calls = [ctx.subtask("child", n, session_id=f"c{n}", call_id=f"call-{n}") for n in range(3)]
            found = await asyncio.gather(*calls)
            with pytest.raises(SubtaskRefused, match="key_conflict"):
                await ctx.subtask("child", "other", session_id="c1", call_id="call-1")
            return found

        bench.ask(content="go")
        running = bench.take(body)
        for n in (2, 0, 1):
            await serve(bench, child, f"c{n}")
        await running.over()

    assert played(scene).end()["output"] == [0, 1, 2]


def test_more_children_than_allowed_are_refused() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            calls = [asyncio.ensure_future(ctx.subtask(f"c{n}", "x")) for n in range(OPEN_CHILDREN_MAX)]
            await until(lambda: len(bench.named("subtask.started")) == OPEN_CHILDREN_MAX)
            with pytest.raises(SubtaskRefused, match="too_many_branches"):
                await ctx.subtask("one-more", "x")
            for call in calls:
                call.cancel()
            return "enough"

        bench.ask(content="go")
        await bench.take(body).over()

    assert played(scene).end()["output"] == "enough"


@pytest.mark.parametrize("erasable", [False, True])
def test_large_or_erasable_content_lies_with_the_childs_session(erasable: bool, tmp_path: Path) -> None:
    content = "short" if erasable else "x" * 300_000

    async def scene(bench: Bench) -> None:
        bench.store, bench.erasable = FileStore(tmp_path), erasable

        async def child(ctx: RunContext) -> bool:
            return bool(ctx.input == content)

        async def body(ctx: RunContext) -> Any:
            return await ctx.subtask("child", content)

        await through(bench, body, child)

    bench = played(scene)
    assert bench.end()["output"] is True
    (started,) = bench.named("run.started", "child")
    assert "content" not in started
    assert FileStore(tmp_path).uri_of(1, "child", started["pointer"]["digest"]) == started["pointer"]["uri"]


def test_misuse_is_named() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> None:
            for arguments, said in (
                (("a b", "x"), "name: "),
                (("child", None), "content: a subtask needs content"),
                (("child", {"a": float("nan")}), "content.a: NaN"),
                (("child", b"bytes"), "no object store"),
                (("child", "x" * 300_000), "no object store"),
            ):
                with pytest.raises(Invalid, match=said):
                    await ctx.subtask(*arguments)
            with pytest.raises(Invalid, match="timeout_ms"):
                await ctx.subtask("child", "x", timeout_ms=0)

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert bench.end()["terminalStatus"] == "completed"
    assert "subtask.started" not in bench.types()
