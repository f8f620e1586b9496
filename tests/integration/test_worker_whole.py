"""The whole protocol through the public API, on the real broker with the real processor and real workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onepen.schemas.errors import Retryable
from onepen.streams.worker import ActionPermit, Compaction, OutcomeUnknown, RunContext, SubtaskCycle
from tests.integration.running_pipeline import Pipeline, eventually, named, running, serving, types
from tests.services import fresh_topic_prefix

PATIENCE_MS = 60_000
"""The machine may be busy with other things; a test waits for the answer, not for the time."""


@pytest.fixture(scope="module")
def pipeline(kafka_bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    root = tmp_path_factory.mktemp("objects")
    with running(kafka_bootstrap, fresh_topic_prefix(), objects_root=root) as found:
        yield found


def objects_of(pipeline: Pipeline) -> list[Path]:
    assert pipeline.settings.objects_root is not None
    return [path for path in pipeline.settings.objects_root.rglob("*") if path.is_file()]


def test_b22a_a_subtask_in_another_session_and_its_cancel(pipeline: Pipeline) -> None:
    """Depth two, results on the way back, a cycle refused, and a cancel that reaches the innermost child."""
    worker = pipeline.worker(max_runs=1)  # those who wait take no place: three runs fit
    hanging = threading.Event()
    stopped: list[str] = []

    @worker.run
    async def body(ctx: RunContext) -> Any:
        if ctx.session_id.startswith("top"):
            return await ctx.subtask("middle", ctx.input, session_id=ctx.input["middle"])
        if ctx.session_id.startswith("middle"):
            return {"from": ctx.session_id, "leaf": await ctx.subtask("leaf", ctx.input, session_id=ctx.input["leaf"])}
        if ctx.input["hang"]:
            hanging.set()
            try:
                await asyncio.sleep(600)
            finally:
                stopped.append(ctx.session_id)
        with pytest.raises(SubtaskCycle):
            await ctx.subtask("up", "you", session_id="top-1")
        return "leaf says hello"

    with serving(worker), pipeline.client() as client:
        ask = {"middle": "middle-1", "leaf": "leaf-1", "hang": False}
        run_id = client.prompt("top-1", ask).verdict(PATIENCE_MS).run_id
        assert run_id is not None
        events = pipeline.run_of(run_id, "top-1", PATIENCE_MS)
        assert named(events, "run.finished")[0]["output"] == {"from": "middle-1", "leaf": "leaf says hello"}
        assert types(events)[2:4] == ["subtask.started", "subtask.finished"]

        ask = {"middle": "middle-2", "leaf": "leaf-2", "hang": True}
        run_id = client.prompt("top-2", ask).verdict(PATIENCE_MS).run_id
        assert run_id is not None
        assert hanging.wait(60)
        stop = client.abort("top-2", active=True, reason="enough")
        assert stop.disposition(PATIENCE_MS).disposition == "done"
        (end,) = named(pipeline.run_of(run_id, "top-2", PATIENCE_MS), "run.finished")
        assert (end["terminalStatus"], end["forced"]) == ("cancelled", False)
        assert [(s["branch"], s["status"]) for s in end["stopped"]] == [("subtask", "cancelled")]
        assert stopped == ["leaf-2"]
        eventually(lambda: worker.held_count() == 0, 60, "the worker is done with all three")


def test_b08_a_compaction_holds_a_steer_back_and_the_next_run_begins_from_the_checkpoint(pipeline: Pipeline) -> None:
    worker = pipeline.worker()
    inside, go_on = threading.Event(), threading.Event()
    taken: list[str] = []

    @worker.run
    async def body(ctx: RunContext) -> Any:
        if ctx.run_no == 2:
            return (await ctx.load_checkpoint() or b"").decode()

        async def shrink(compaction: Compaction) -> str:
            inside.set()
            while not go_on.is_set():
                taken.extend(str(steer) for steer in await ctx.steers())
                await asyncio.sleep(0.01)
            return f"everything through {compaction.through_seq}"

        found = await ctx.compact(shrink)
        assert taken == []
        while not taken:
            taken.extend(str(steer) for steer in await ctx.steers())
            await asyncio.sleep(0.01)
        return found.through_seq

    with serving(worker), pipeline.client() as client:
        run_id = client.prompt("compact", "go").verdict(PATIENCE_MS).run_id
        assert inside.wait(60)
        steer = client.steer("compact", "left")
        assert steer.verdict(PATIENCE_MS).verdict == "steered"
        go_on.set()
        assert steer.disposition(PATIENCE_MS).disposition == "consumed"
        assert run_id is not None
        events = pipeline.run_of(run_id, "compact", PATIENCE_MS)
        through = named(events, "run.finished")[0]["output"]
        second = client.prompt("compact", "and on").verdict(PATIENCE_MS).run_id
        assert second is not None
        loaded = named(pipeline.run_of(second, "compact", PATIENCE_MS), "run.finished")[0]["output"]
    order = [t for t in types(events) if t.startswith(("run.compaction", "input."))]
    assert order == ["run.compaction_started", "input.steered", "run.compaction_finished", "input.applied"]
    assert loaded == f"everything through {through}"
    assert taken == ["left"]


def test_interrupt_auto_and_a_retry_that_performs_nothing_twice(pipeline: Pipeline) -> None:
    worker = pipeline.worker(max_runs=4)
    began = threading.Event()
    performed: list[str] = []

    async def send(args: Any, permit: ActionPermit) -> str:
        performed.append(args)
        return f"sent {args}"

    @worker.run
    async def body(ctx: RunContext) -> Any:
        if ctx.input == "long":
            began.set()
            while True:
                steers = await ctx.steers()
                if steers:
                    await ctx.message([str(steer) for steer in steers])
                await asyncio.sleep(0.01)
        sent = await ctx.action("send", ctx.input, perform=send)
        if ctx.run_id == ctx.lineage:
            raise Retryable("the line is busy")
        return sent

    with serving(worker), pipeline.client() as client:
        first = client.auto("busy", "long", source="scheduler").verdict(PATIENCE_MS)
        assert first.verdict == "started"
        assert began.wait(60)
        added = client.auto("busy", "more", source="ui", expected_run_id=first.run_id)
        later = client.auto("busy", "nightly", source="scheduler")
        missed = client.steer("busy", "for another", expected_run_id="run-0", if_missed="reject")
        assert added.disposition(PATIENCE_MS).disposition == "consumed"
        assert later.verdict(PATIENCE_MS).verdict == "queued"
        assert (missed.verdict(PATIENCE_MS).verdict, missed.verdict(PATIENCE_MS).reason) == ("refused", "missed")
        urgent = client.prompt("busy", "urgent", on_busy="interrupt")
        assert urgent.verdict(PATIENCE_MS).verdict == "queued"
        run_id = urgent.disposition(PATIENCE_MS).run_id
        assert run_id is not None
        (end,) = named(pipeline.run_of(run_id, "busy", PATIENCE_MS), "run.finished")
        assert (end["terminalStatus"], end["retryable"], end["error"]["type"]) == ("failed", True, "Retryable")
        nightly = later.disposition(PATIENCE_MS).run_id
        assert nightly is not None
        pipeline.run_of(nightly, "busy", PATIENCE_MS)
        stale = client.retry("busy", run_id).verdict(PATIENCE_MS)
        assert (stale.verdict, stale.reason) == ("refused", "not_retryable"), "only the session's last run"
        again = client.retry("busy", nightly).verdict(PATIENCE_MS)
        assert again.verdict == "started"
        assert again.run_id is not None
        events = pipeline.run_of(again.run_id, "busy", PATIENCE_MS)
    (started,) = named(events, "run.started")
    assert (started["content"], started["retryOf"], started["lineage"]) == ("nightly", nightly, nightly)
    assert named(events, "run.finished")[0]["output"] == "sent nightly"
    assert performed == ["urgent", "nightly"]


def test_an_action_in_doubt_is_settled_by_an_answer_after_its_run(pipeline: Pipeline) -> None:
    worker = pipeline.worker()

    async def send(args: Any, permit: ActionPermit) -> None:
        raise OutcomeUnknown("the line went dead")

    @worker.run
    async def body(ctx: RunContext) -> None:
        await ctx.action("send", "x", perform=send)

    with serving(worker), pipeline.client() as client:
        run_id = client.prompt("doubt", "go").verdict(PATIENCE_MS).run_id
        assert run_id is not None
        events = pipeline.run_of(run_id, "doubt", PATIENCE_MS)
        (end,) = named(events, "run.finished")
        assert end["inDoubtCount"] == 1
        (asked,) = named(events, "action.requested")
        key, digest = asked["actionKey"], asked["argsDigest"]
        settled = client.answer("doubt", action_key=key, args_digest=digest, decision="ok").verdict(PATIENCE_MS)
        assert (settled.verdict, settled.disposition) == ("answered", "done")
        late = client.answer("doubt", action_key=key, args_digest=digest, decision="error").verdict(PATIENCE_MS)
        assert (late.verdict, late.reason) == ("refused", "already_answered")


def test_large_content_and_an_erase(pipeline: Pipeline) -> None:
    worker = pipeline.worker()
    began = threading.Event()
    text = "x" * 400_000

    @worker.run
    async def body(ctx: RunContext) -> int:
        if ctx.input != text:
            began.set()
            await asyncio.sleep(600)
        return len(ctx.input)

    with serving(worker), pipeline.client() as client:
        run_id = client.prompt("large", text).verdict(PATIENCE_MS).run_id
        assert run_id is not None
        events = pipeline.run_of(run_id, "large", PATIENCE_MS)
        assert named(events, "run.finished")[0]["output"] == len(text)
        assert "content" not in named(events, "run.started")[0]
        small = client.prompt("large", "a secret", erasable=True)
        run_id = small.verdict(PATIENCE_MS).run_id
        assert began.wait(60)
        assert "a secret" in [p.read_text() for p in objects_of(pipeline) if p.stat().st_size < 100]
        queued = client.follow_up("large", "later")
        erase = client.erase("large", reason="asked for")
        assert erase.verdict(PATIENCE_MS).verdict == "erased"
        done = erase.disposition(PATIENCE_MS)
        assert (done.disposition, done.run_id) == ("done", run_id)
        assert queued.disposition(PATIENCE_MS).disposition == "discarded"
        after = client.prompt("large", "again").verdict(PATIENCE_MS)
        assert (after.verdict, after.reason) == ("refused", "erased")
        assert run_id is not None
        ended = pipeline.run_of(run_id, "large", PATIENCE_MS)
    assert named(ended, "run.finished")[0]["terminalStatus"] == "cancelled"
    assert not [event for event in ended if b"a secret" in event.payload]


def test_a_rerun_after_a_lost_lease_gets_its_steers_again(pipeline: Pipeline) -> None:
    """The first holder stops renewing: its lease ends, another takes over and begins again from all inputs."""
    taken: dict[int, list[str]] = {}
    frozen = threading.Event()

    def worker_of(name: str) -> Any:
        worker = pipeline.worker(name=name)

        @worker.run
        async def body(ctx: RunContext) -> str:
            mine = taken.setdefault(ctx.generation, [])
            while not mine:
                mine.extend(str(steer) for steer in await ctx.steers())
                await asyncio.sleep(0.01)
            if ctx.generation == 1:
                assert worker._runtime is not None
                worker._runtime._stop.set()  # as if the process were frozen: no renewal, no view, no offer
                frozen.set()
                await ctx.cancelled.wait()
            return f"{ctx.recovery} {ctx.input}"

        return worker

    with pipeline.client() as client, serving(worker_of("first")):
        run_id = client.prompt("rerun", "go", recovery="rerun").verdict(PATIENCE_MS).run_id
        assert client.steer("rerun", "left").disposition(PATIENCE_MS).disposition == "consumed"
        assert frozen.wait(60)
        with serving(worker_of("second")):
            assert run_id is not None
            events = pipeline.run_of(run_id, "rerun", PATIENCE_MS)
    assert "run.lease_lost" in types(events)
    assert named(events, "run.finished")[0]["output"] == "rerun go"
    generations = sorted(taken)
    assert len(generations) == 2
    assert [taken[g] for g in generations] == [["left"], ["left"]]
    assert len(named(events, "input.applied")) == 1
