"""Workers on the real broker with the real processor: the public API from prompt to recorded end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from onepen.schemas.errors import Fatal
from onepen.streams.worker import ActionPermit, ActionVoided, RunContext
from tests.integration.running_pipeline import LEASE_MS, UNHURRIED, Pipeline, eventually, named, running, serving, types
from tests.services import fresh_topic_prefix


@pytest.fixture(scope="module")
def pipeline(kafka_bootstrap: str) -> Iterator[Pipeline]:
    with running(kafka_bootstrap, fresh_topic_prefix(), UNHURRIED) as found:
        yield found


def test_a_run_with_model_tool_message_and_action(pipeline: Pipeline) -> None:
    worker = pipeline.worker()
    performed: list[tuple[Any, ActionPermit]] = []

    def look_up(topic: str) -> dict[str, str]:
        return {"topic": topic, "answer": "42"}

    async def send_mail(args: Any, permit: ActionPermit) -> dict[str, str]:
        performed.append((args, permit))
        return {"mail": "m-1"}

    @worker.run
    async def answer(ctx: RunContext) -> dict[str, Any]:
        async with ctx.model_request(model="echo") as turn:
            turn.note(tokens=3)
        found = await ctx.tool("look_up", look_up, topic=ctx.input)
        await ctx.message(f"about {ctx.input}")
        assert await ctx.emit("x.note", {"n": 1}) == "accepted"
        mail = await ctx.action("send_mail", {"to": "a@b"}, perform=send_mail)
        return {"found": found, "mail": mail, "attempt": ctx.attempt}

    with serving(worker), pipeline.client() as client:
        sent = client.prompt("session-1", "kafka", source="ui")
        verdict = sent.verdict(timeout_ms=30_000)
        assert (verdict.verdict, verdict.accepted) == ("started", True)
        assert verdict.run_id is not None
        events = pipeline.run_of(verdict.run_id)
    assert types(events) == [
        "run.started", "run.leased", "model.request.started", "model.request.finished", "tool.started",
        "tool.finished", "message.completed", "x.note", "action.requested", "action.permitted", "action.finished",
        "run.finished",
    ]  # fmt: skip
    (finished,) = named(events, "run.finished")
    assert finished["terminalStatus"] == "completed"
    assert finished["output"] == {
        "found": {"topic": "kafka", "answer": "42"}, "mail": {"mail": "m-1"}, "attempt": 1,
    }  # fmt: skip
    ((args, permit),) = performed
    assert args == {"to": "a@b"}
    assert permit.fencing == (verdict.run_id, 1)
    assert permit.key == f"{verdict.run_id}:send_mail:1"
    assert named(events, "run.leased")[0]["workerId"] == worker.worker_id
    assert 0 < permit.valid_ms <= 1_500


def test_steers_are_applied_and_given_to_the_body(pipeline: Pipeline) -> None:
    worker = pipeline.worker()
    taken: list[str] = []
    began = threading.Event()

    @worker.run
    async def answer(ctx: RunContext) -> list[str]:
        began.set()
        while len(taken) < 2:
            for steer in await ctx.steers():
                taken.append(str(steer))
            await asyncio.sleep(0.01)
        return taken

    with serving(worker), pipeline.client() as client:
        run_id = client.prompt("session-steer", "go").verdict(30_000).run_id
        assert began.wait(30)
        first = client.steer("session-steer", "left", source="ui")
        second = client.steer("session-steer", "right", source="ui")
        assert first.verdict(30_000).verdict == "steered"
        assert second.disposition(20_000).disposition == "consumed"
        assert run_id is not None
        events = pipeline.run_of(run_id)
    assert taken == ["left", "right"]
    assert [e["content"] for e in named(events, "input.applied")] == ["left", "right"]


def test_b13a_a_cancel_reaches_model_tool_and_waiting_action(pipeline: Pipeline) -> None:
    worker = pipeline.worker(max_runs=4)
    inside = threading.Event()
    seen: list[str] = []

    async def never(args: Any, permit: ActionPermit) -> None:
        seen.append("performed")

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("tool cancelled")
            raise

    @worker.run
    async def answer(ctx: RunContext) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.action("send_mail", {"to": "x"}, perform=never, approval=True))
            group.create_task(ctx.tool("slow", slow))
            async with ctx.model_request(model="m"):
                await ctx.emit("x.inside")
                inside.set()
                await ctx.cancelled.wait()
                await asyncio.sleep(60)

    with serving(worker), pipeline.client() as client:
        run_id = client.prompt("session-cancel", "go").verdict(30_000).run_id
        assert run_id is not None
        assert inside.wait(30)
        abort = client.abort("session-cancel", run_id=run_id, reason="enough")
        assert abort.verdict(30_000).verdict == "cancelling"
        assert abort.disposition(30_000).disposition == "done"
        events = pipeline.run_of(run_id)
    (finished,) = named(events, "run.finished")
    assert finished["terminalStatus"] == "cancelled"
    assert finished["forced"] is False
    assert finished["inDoubt"] == []
    assert [v["name"] for v in finished["voided"]] == ["send_mail"]
    assert named(events, "model.request.finished")[0]["status"] == "aborted"
    assert named(events, "tool.finished")[0]["status"] == "cancelled"
    assert seen == ["tool cancelled"]


def test_an_approval_permits_and_a_denial_voids(pipeline: Pipeline) -> None:
    worker = pipeline.worker()
    outcomes: list[Any] = []

    async def perform(args: Any, permit: ActionPermit) -> str:
        return f"done {args['n']}"

    @worker.run
    async def answer(ctx: RunContext) -> None:
        for n in (1, 2):
            try:
                outcomes.append(await ctx.action("pay", {"n": n}, perform=perform, approval=True))
            except ActionVoided as error:
                outcomes.append(error.reason)

    with serving(worker), pipeline.client() as client:
        run_id = client.prompt("session-approval", "go").verdict(30_000).run_id
        assert run_id is not None
        decisions = iter(("approve", "deny"))
        for event in pipeline.subscriber().run(run_id, timeout_ms=30_000):
            if event.type == "approval.requested":
                asked = named([event], "approval.requested")[0]
                answered = client.answer(
                    "session-approval", action_key=asked["actionKey"], action_name=asked["name"],
                    args_digest=asked["argsDigest"], decision=next(decisions),  # type: ignore[arg-type]
                )  # fmt: skip
                assert answered.verdict(30_000).verdict == "answered"
    assert outcomes == ["done 1", "voided"]


def test_an_exception_is_a_failure_and_strange_output_is_kept_in_shape(pipeline: Pipeline) -> None:
    worker = pipeline.worker()

    @worker.run
    async def answer(ctx: RunContext) -> Any:
        if ctx.input == "fail":
            raise ValueError("no")
        got = await ctx.tool("odd", lambda: {"s": "\ud800", "n": float("nan"), "z": "a\x00b"})
        big = await ctx.tool("big", lambda: "x" * 600_000)
        await ctx.tool("object", lambda: object())
        return [got, len(big)]

    with serving(worker), pipeline.client() as client:
        failed = client.prompt("session-odd-1", "fail").verdict(30_000).run_id
        odd = client.prompt("session-odd-2", "go").verdict(30_000).run_id
        assert failed is not None
        assert odd is not None
        (end,) = named(pipeline.run_of(failed), "run.finished")
        events = pipeline.run_of(odd)
    assert (end["terminalStatus"], end["retryable"], end["error"]["type"]) == ("failed", False, "ValueError")
    tools = named(events, "tool.finished")
    assert tools[0]["result"] == {"s": "\ufffd", "n": "nan", "z": "a\x00b"}
    assert tools[0]["flattened"] == ["result.s", "result.n"]
    assert (tools[1]["resultOmitted"], tools[1]["resultBytes"]) == ("too_large", 600_002)
    assert tools[2]["resultOmitted"] == "not_json"
    assert named(events, "run.finished")[0]["output"] == [tools[0]["result"], 600_000]


def test_b27a_a_blocking_body_does_not_starve_the_renewals(pipeline: Pipeline) -> None:
    worker = pipeline.worker()

    @worker.run
    async def answer(ctx: RunContext) -> int:
        threading.Event().wait(1.2 * UNHURRIED.lease_ms / 1000)  # blocks the event loop for longer than a lease
        return ctx.generation

    with serving(worker), pipeline.client() as client:
        run_id = client.prompt("session-block", "go").verdict(30_000).run_id
        assert run_id is not None
        events = pipeline.run_of(run_id)
    assert named(events, "run.finished")[0]["output"] == 1
    assert types(events) == ["run.started", "run.leased", "run.finished"]


def test_b31_an_outage_of_the_processor_suspends_and_the_result_is_sent_not_computed_again(
    kafka_bootstrap: str,
) -> None:
    computed: list[int] = []
    began, outage, finish = threading.Event(), threading.Event(), threading.Event()

    with running(kafka_bootstrap, fresh_topic_prefix()) as pipeline, pipeline.client() as client:
        worker = pipeline.worker()

        @worker.run
        async def answer(ctx: RunContext) -> str:
            began.set()
            await asyncio.to_thread(outage.wait)
            computed.append(ctx.generation)
            if ctx.input == "tool":
                await ctx.tool("late", lambda: finish.set())
            return "result"

        with serving(worker):
            runs = [client.prompt(f"outage-{kind}", kind).verdict(30_000).run_id for kind in ("tool", "end")]
            assert began.wait(30)
            eventually(lambda: worker.held_count() == 2)
            pipeline.halt()
            assert not finish.wait(LEASE_MS / 1000 + 0.5)  # longer than the lease, without any answer
            outage.set()
            assert not finish.wait(1), "suspended: no new tool"
            pipeline.start()
            assert finish.wait(20), "the next answer lets it go on"
            for run_id in runs:
                assert run_id is not None
                events = pipeline.run_of(run_id)
                assert named(events, "run.finished")[0]["output"] == "result"
                assert {event.generation for event in events} == {1}, "the lease was kept by the renewals in the log"
    assert computed == [1, 1]


def test_a_stopped_worker_gives_its_run_back_and_another_goes_on(pipeline: Pipeline) -> None:
    first, second = pipeline.worker(grace_ms=200), pipeline.worker(name="second")
    began = threading.Event()
    performed: list[int] = []
    histories: list[int] = []

    async def perform(args: Any, permit: ActionPermit) -> str:
        performed.append(permit.generation)
        return "once"

    async def body(ctx: RunContext) -> Any:
        history = await ctx.history()
        histories.append(len(history))
        assert history[0].type == "run.started"
        result = await ctx.action("send", {"a": 1}, perform=perform)
        if not ctx.had_owner:
            began.set()
            await asyncio.sleep(60)
        return [result, ctx.generation, ctx.attempt]

    first.run(body)
    second.run(body)
    with pipeline.client() as client:
        with serving(first):
            run_id = client.prompt("session-release", "go").verdict(30_000).run_id
            assert run_id is not None
            assert began.wait(30)
        with serving(second):
            events = pipeline.run_of(run_id)
    assert named(events, "run.finished")[0]["output"] == ["once", 2, 1]
    assert performed == [1], "the recorded result is joined, not performed again"
    assert "run.released" in types(events)
    assert histories[1] > histories[0] >= 1


def test_a_full_worker_leaves_runs_to_others_or_takes_them_later(pipeline: Pipeline) -> None:
    workers = [pipeline.worker(name=f"small-{n}", max_runs=1) for n in range(2)]

    async def body(ctx: RunContext) -> str:
        await asyncio.sleep(0.2)
        return ctx.session_id

    for worker in workers:
        worker.run(body)
    with serving(workers[0]), serving(workers[1]), pipeline.client() as client:
        sent = [client.prompt(f"session-full-{n}", "go") for n in range(12)]
        for one in sent:
            assert one.disposition(30_000).disposition == "consumed"
        ends = [pipeline.run_of(one.verdict(1_000).run_id or "", one.session_id) for one in sent]
    owners = {named(events, "run.leased")[0]["workerId"] for events in ends}
    assert owners == {worker.worker_id for worker in workers}
    assert all(types(events) == ["run.started", "run.leased", "run.finished"] for events in ends)


def test_a_worker_whose_inbox_is_gone_stops_and_says_so(kafka_bootstrap: str) -> None:
    with running(kafka_bootstrap, fresh_topic_prefix()) as pipeline, pipeline.client() as client:
        worker = pipeline.worker(grace_ms=100)

        @worker.run
        async def answer(ctx: RunContext) -> None:
            await ctx.cancelled.wait()

        async def serve() -> str:
            serving_ = asyncio.create_task(worker.serve_async())
            assert await asyncio.to_thread(worker.wait_ready, 20_000)
            client.prompt("gone", "x")
            assert await asyncio.to_thread(eventually, lambda: worker.held_count() == 1)
            assert worker._runtime is not None
            worker._runtime._fail("the inbox cannot be read any more", RuntimeError("out of range"))
            with pytest.raises(Fatal) as caught:
                await asyncio.wait_for(serving_, 30)
            return str(caught.value)

        assert "the inbox cannot be read any more: out of range" in asyncio.run(serve())
        run_id = client.prompt("gone", "y").verdict(30_000)
        assert run_id.verdict == "queued", "the run was given back and is still there"
