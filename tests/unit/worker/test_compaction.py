"""Compaction, checkpoints, rerun and content from objects: bodies against the pure core."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from onepen.schemas.errors import Invalid
from onepen.schemas.ids import run_id
from onepen.streams.objects import FileStore, sha256_hex
from onepen.streams.worker import Compaction, CompactionFailed, ObjectRefused, Pointer, RunContext
from tests.unit.worker.bench import Bench, played, until

RUN = run_id(1, "s", 1)


def path_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


def test_b08_a_compaction_holds_steers_back_and_the_next_run_loads_its_checkpoint(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def scene(bench: Bench) -> None:
        bench.store = FileStore(tmp_path)

        async def body(ctx: RunContext) -> Any:
            assert await ctx.checkpoint() is None
            assert await ctx.load_checkpoint() is None
            await ctx.message("before")

            async def shrink(compaction: Compaction) -> dict[str, Any]:
                assert ctx._held.machine.status == "compacting"
                bench.ask("steer", content="left")
                bench.ask("steer", content="right")
                await until(lambda: len(ctx._held.machine.pending) == 2)
                seen.append([str(steer) for steer in await ctx.steers()])
                return {"through": compaction.through_seq}

            found = await ctx.compact(shrink, why="too long")
            seen.append([str(steer) for steer in await ctx.steers()])
            return found.through_seq

        async def next_body(ctx: RunContext) -> str:
            data = await ctx.load_checkpoint()
            assert data is not None
            return data.decode()

        bench.ask(content="go")
        await bench.take(body).over()
        bench.ask(content="and on")
        await bench.take(next_body).over()

    bench = played(scene)
    assert seen == [[], ["left", "right"]]
    types = bench.types()
    assert types.index("run.compaction_finished") < types.index("input.applied")
    (started,) = bench.named("run.compaction_started")
    (finished,) = bench.named("run.compaction_finished")
    assert started["why"] == "too long"
    assert started["compactionId"] == finished["compactionId"] == "compaction-1-1"
    checkpoint = finished["checkpoint"]
    through = checkpoint["throughSeq"]
    assert bench.events[through - 1].type == "run.compaction_started"
    assert bench.ends()[0]["output"] == through
    assert bench.ends()[1]["output"] == f'{{"through":{through}}}'
    assert path_of(checkpoint["uri"]).read_bytes() == f'{{"through":{through}}}'.encode()


def test_a_checkpoint_that_is_not_what_the_log_names_is_refused(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.store = FileStore(tmp_path)

        async def body(ctx: RunContext) -> str:
            found = await ctx.compact(lambda _: "the whole story")
            path_of(found.uri).write_bytes(b"another story!!")
            with pytest.raises(ObjectRefused, match="has the digest"):
                await ctx.load_checkpoint()
            path_of(found.uri).unlink()
            with pytest.raises(ObjectRefused, match="is not there"):
                await ctx.load_checkpoint()
            return "refused"

        bench.ask(content="go")
        await bench.take(body).over()

    assert played(scene).end()["output"] == "refused"


@pytest.mark.parametrize("how", ["error", "no_checkpoint", "cancelled"])
def test_what_was_started_is_ended(how: str) -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            async def shrink() -> None:
                async with ctx.compaction():
                    if how == "error":
                        raise ValueError("no room")
                    if how == "cancelled":
                        await asyncio.sleep(60)

            if how == "no_checkpoint":
                await shrink()
            else:
                with pytest.raises(ValueError if how == "error" else TimeoutError):
                    await asyncio.wait_for(shrink(), 0.05)
            steer = bench.ask("steer", content="go on")
            await until(lambda: ctx._held.machine.pending)
            return str([s.input_id for s in await ctx.steers()] == [steer.input_id])

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    (failed,) = bench.named("run.compaction_failed")
    assert failed["reason"] == how
    assert bench.end()["output"] == "True"


def test_b14_a_cancel_ends_an_open_compaction() -> None:
    async def scene(bench: Bench) -> None:
        inside = asyncio.Event()

        async def body(ctx: RunContext) -> None:
            async with ctx.compaction():
                inside.set()
                await asyncio.sleep(60)

        bench.ask(content="go")
        running = bench.take(body)
        await inside.wait()
        bench.ask("abort", target_kind="active")
        await running.over()

    bench = played(scene)
    assert bench.named("run.compaction_failed")[0]["reason"] == "cancelled"
    assert (bench.end()["terminalStatus"], bench.end()["forced"]) == ("cancelled", False)


def test_a_late_end_and_a_second_compaction_are_refused() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            async def second() -> None:
                async with ctx.compaction():
                    raise AssertionError("two at once")

            async def first() -> None:
                async with ctx.compaction() as compaction:
                    with pytest.raises(CompactionFailed, match="already_open"):
                        await second()
                    with pytest.raises(Invalid, match="through_seq"):
                        compaction.finish("file:///x", "a" * 64, 1, through_seq=compaction.through_seq + 1)
                    compaction.finish("file:///x", "a" * 64, 1)
                    bench.fire("compaction", 301_000)

            with pytest.raises(CompactionFailed, match="not_open"):
                await first()
            return "went on"

        bench.ask(content="go", timeout_ms=3_000_000)
        await bench.take(body).over()

    bench = played(scene)
    assert bench.end()["output"] == "went on"
    assert bench.named("run.compaction_failed") == [{"compactionId": "compaction-1-1", "reason": "deadline"}]
    assert "run.compaction_finished" not in bench.types()


def test_without_a_store_a_checkpoint_made_of_bytes_is_an_error_and_a_pointer_is_not() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            with pytest.raises(Invalid, match="ONEPEN_OBJECTS_ROOT"):
                await ctx.compact(lambda _: b"context")
            elsewhere = Pointer(uri="s3://bucket/a", digest=sha256_hex(b"context"), size_bytes=7)
            return (await ctx.compact(lambda _: elsewhere)).uri

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert bench.end()["output"] == "s3://bucket/a"
    assert [f["reason"] for f in bench.named("run.compaction_failed")] == ["error"]


@pytest.mark.parametrize("recovery", ["rerun", "resume"])
def test_a_rerun_gets_the_steers_applied_before_first(recovery: str) -> None:
    taken: list[tuple[int, list[Any]]] = []

    async def scene(bench: Bench) -> None:
        inside = asyncio.Event()

        async def body(ctx: RunContext) -> str:
            assert ctx.recovery == recovery
            while len(taken) < ctx.generation:
                steers = await ctx.steers()
                if steers or ctx.generation > 1:
                    taken.append((ctx.generation, [steer.content for steer in steers]))
                await asyncio.sleep(0.001)
            if ctx.generation == 1:
                inside.set()
                await asyncio.sleep(60)
            assert await ctx.steers() == []
            return "out"

        bench.ask(content="go", recovery=recovery)
        dead = bench.take(body)
        await until(lambda: dead.held.machine.granted)
        bench.ask("steer", content={"hint": 1})
        await inside.wait()
        bench.helds.clear()
        bench.fire("lease", 4_000)
        bench.ask("steer", content="two")
        await bench.take(body, worker_id="other").over()
        dead.task.cancel()

    bench = played(scene)
    again = [{"hint": 1}, "two"] if recovery == "rerun" else ["two"]
    assert taken == [(1, [{"hint": 1}]), (2, again)]
    assert len(bench.named("input.applied")) == 2, "what was applied before is not applied again"


def test_content_by_pointer_is_loaded_before_the_body_begins(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    texts = ["a long question", "a long hint"]
    pointers = [
        Pointer(uri=store.put(1, "s", t.encode()), digest=sha256_hex(t.encode()), size_bytes=len(t),
                media_type="text/plain")
        for t in texts
    ]  # fmt: skip
    elsewhere = Pointer(uri="s3://bucket/key", digest="a" * 64, size_bytes=1)

    async def scene(bench: Bench) -> None:
        bench.store = store

        async def body(ctx: RunContext) -> Any:
            await until(lambda: len(ctx._held.machine.pending) == 2)
            near, far = [steer.content for steer in await ctx.steers()]
            assert far == elsewhere
            with pytest.raises(ObjectRefused):
                await ctx.load(far)
            return [ctx.input, near]

        bench.ask(pointer=pointers[0])
        running = bench.take(body)
        await until(lambda: running.held.machine.granted)
        bench.ask("steer", pointer=pointers[1])
        bench.ask("steer", pointer=elsewhere)
        await running.over()

    assert played(scene).end()["output"] == texts


def test_an_input_that_is_not_what_the_log_names_fails_the_run_before_its_body(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    began: list[str] = []

    async def scene(bench: Bench) -> None:
        bench.store = store

        async def body(ctx: RunContext) -> None:
            began.append(ctx.run_id)

        bench.ask(pointer=Pointer(uri=store.put(1, "s", b"x"), digest=sha256_hex(b"y"), size_bytes=1))
        await bench.take(body).over()

    end = played(scene).end()
    assert (end["terminalStatus"], end["error"]["type"], end["retryable"]) == ("failed", "ObjectRefused", False)
    assert began == []


def test_a_tool_may_declare_its_own_limit_of_progress() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> None:
            await ctx.tool_call("slow", lambda: None, {}, progress_renewals=500)
            for wrong in (0, True, 10_001):
                with pytest.raises(Invalid, match="progress_renewals"):
                    await ctx.tool_call("slow", lambda: None, {}, progress_renewals=wrong)

        bench.ask(content="go")
        await bench.take(body).over()

    assert [e["progressRenewals"] for e in played(scene).named("tool.started")] == [500]


def test_a_retry_meets_the_action_that_was_performed() -> None:
    performed: list[int] = []

    async def scene(bench: Bench) -> None:
        async def send(args: Any, permit: Any) -> str:
            performed.append(permit.generation)
            return "sent"

        async def body(ctx: RunContext) -> Any:
            found = await ctx.action("send", {"to": "a"}, perform=send)
            if ctx.run_id == ctx.lineage:
                await asyncio.sleep(60)
            return found

        bench.ask(content="go", timeout_ms=5_000)
        running = bench.take(body)
        await until(lambda: "action.finished" in bench.types())
        bench.fire("run", 5_001)
        await running.over()
        bench.ask(retry_of=RUN)
        await bench.take(body).over()

    bench = played(scene)
    assert performed == [1]
    assert [end["terminalStatus"] for end in bench.ends()] == ["timed_out", "completed"]
    assert bench.ends()[1]["output"] == "sent"
    assert bench.named("run.started")[1]["content"] == "go"
