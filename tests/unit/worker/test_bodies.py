"""Bodies against the pure core: what begins when, what is stopped how, and that every run ends balanced."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from onepen.schemas.errors import Invalid
from onepen.schemas.ids import run_id
from onepen.schemas.worker_records import Report
from onepen.streams.worker import (
    ActionFailed,
    ActionPermit,
    ActionRefused,
    ActionVoided,
    InDoubt,
    NotPerformed,
    OutcomeUnknown,
    RunContext,
    cancellation,
)
from onepen.streams.worker.actions import PERMITS_MAX
from onepen.streams.worker.machine import UNANSWERED_MAX
from onepen.streams.worker.payloads import args_digest
from onepen.streams.worker.session import UNSETTLED_MAX
from tests.unit.worker.bench import Bench, Running, played, until

RUN = run_id(1, "s", 1)


async def done(args: Any, permit: ActionPermit) -> Any:
    return {"did": args}


async def begun_action(bench: Bench) -> tuple[Running, asyncio.Event]:
    """A run whose action has begun, and what lets that end."""
    inside, finish = asyncio.Event(), asyncio.Event()

    async def perform(args: Any, permit: ActionPermit) -> str:
        inside.set()
        await finish.wait()
        return "sent"

    async def body(ctx: RunContext) -> None:
        await ctx.action("send", {}, perform=perform)

    bench.ask(content="go")
    running = bench.take(body)
    await inside.wait()
    return running, finish


async def begun_tool(bench: Bench, *, answered: bool = True) -> tuple[Running, asyncio.Event]:
    """A run whose tool has begun, in the log as well, and ends with the event; not answered: no view reaches it."""
    finish = asyncio.Event()

    async def tool() -> str:
        await finish.wait()
        return "done"

    async def body(ctx: RunContext) -> Any:
        return await ctx.tool("t", tool)

    bench.ask(content="go")
    running = bench.take(body)
    if not answered:
        bench.helds.remove(running.held)
    await until(lambda: "tool.started" in bench.types())
    return running, finish


def test_an_optimistic_body_is_judged_behind_its_claim() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            return await ctx.tool("t", lambda: "x")  # type: ignore[no-any-return]

        bench.ask(content="go")
        bench.hold = True
        running = bench.take(body)
        await until(lambda: any(isinstance(r, Report) and r.events[-1].type == "run.finished" for r in bench.waiting))
        assert bench.types() == ["run.started"], "nothing is decided yet"
        bench.let_go()
        await running.over()

    bench = played(scene)
    assert bench.types() == ["run.started", "run.leased", "tool.started", "tool.finished", "run.finished"]
    assert bench.end()["output"] == "x"


def test_a_body_without_the_claim_does_nothing() -> None:
    began: list[str] = []

    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> None:
            began.append(ctx.run_id)

        bench.ask(content="go")
        bench.take(body, worker_id="first")
        second = bench.take(body, optimistic=False, worker_id="second")
        await second.over()
        assert second.held.ended == "already_owned"

    played(scene)
    assert began == [RUN]


def test_actions_wait_for_the_permit_even_in_an_optimistic_start() -> None:
    performed: list[int] = []

    async def scene(bench: Bench) -> None:
        async def perform(args: Any, permit: ActionPermit) -> None:
            performed.append(permit.valid_ms)

        async def body(ctx: RunContext) -> None:
            await ctx.action("send", {"a": 1}, perform=perform)

        bench.ask(content="go")
        bench.hold = True
        running = bench.take(body)
        await until(lambda: any(isinstance(r, Report) for r in bench.waiting))
        await asyncio.sleep(0.02)
        assert performed == []
        bench.let_go()
        await running.over()

    bench = played(scene)
    assert len(performed) == 1
    assert bench.named("action.requested")[0]["argsDigest"] == args_digest({"a": 1})
    assert bench.end()["terminalStatus"] == "completed"


def test_a_permit_that_comes_too_late_is_given_back_and_asked_for_again() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> Any:
            return await ctx.action("send", {}, perform=done)

        bench.ask(content="go")
        running = bench.take(body, optimistic=False)
        bench.hold = True
        await until(lambda: any(isinstance(r, Report) for r in bench.waiting))
        bench.skew_ms += 1_600  # longer than a permit, shorter than the lease
        bench.let_go()
        await running.over()

    bench = played(scene)
    assert [e["status"] for e in bench.named("action.finished")] == ["not_performed", "ok"]
    assert len(bench.named("action.permitted")) == 2


def test_a_permit_that_always_comes_too_late_is_refused_in_the_end() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            with pytest.raises(ActionRefused, match="permit_expired"):
                await ctx.action("send", {}, perform=done)
            return "gave up"

        bench.ask(content="go")
        running = bench.take(body, optimistic=False)

        def late(record: Any) -> None:
            if isinstance(record, Report) and any(e.type == "action.requested" for e in record.events):
                bench.skew_ms += 1_600  # the clock jumps while the request is on its way
                asyncio.get_running_loop().call_soon(running.held.renew_now)
            bench.send(record)

        running.held._send = late
        await running.over()

    bench = played(scene)
    assert [e["status"] for e in bench.named("action.finished")] == ["not_performed"] * PERMITS_MAX
    assert bench.end()["output"] == "gave up"


def test_b20_a_cancel_between_request_and_effect_performs_nothing_and_leaves_no_doubt() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> None:
            await ctx.action("send", {}, perform=done)

        bench.ask(content="go")
        running = bench.take(body, optimistic=False)
        bench.hold = True
        await until(lambda: any(isinstance(r, Report) for r in bench.waiting))
        request = bench.waiting.pop()
        bench.put(request)  # permitted
        bench.ask("abort", target_kind="active")  # and cancelled before the worker looked
        bench.let_go()
        await running.over()

    bench = played(scene)
    assert "action.permitted" in bench.types()
    assert bench.named("action.finished") == [
        {"actionKey": f"{RUN}:send:1", "name": "send", "reportNo": 1, "status": "not_performed"},
    ]
    end = bench.end()
    assert (end["terminalStatus"], end["forced"], end["inDoubt"]) == ("cancelled", False, [])


def test_a_begun_action_is_waited_for_and_its_end_recorded() -> None:
    async def scene(bench: Bench) -> None:
        running, finish = await begun_action(bench)
        bench.ask("abort", target_kind="active")
        await until(lambda: running.held.machine.cancelling)
        await asyncio.sleep(0.02)
        assert "run.finished" not in bench.types()
        finish.set()
        await running.over()

    bench = played(scene)
    assert [(e["status"], e["result"]) for e in bench.named("action.finished")] == [("ok", "sent")]
    assert (bench.end()["terminalStatus"], bench.end()["inDoubt"]) == ("cancelled", [])


def test_a_cancel_reaches_a_tool_in_a_thread_and_waits_for_it() -> None:
    seen: list[str] = []

    async def scene(bench: Bench) -> None:
        inside = threading.Event()

        def tool() -> str:
            inside.set()
            assert cancellation().wait_in_thread(5)
            seen.append(cancellation().reason or "")
            return "half"

        async def body(ctx: RunContext) -> None:
            await ctx.tool("slow", tool)

        bench.ask(content="go")
        running = bench.take(body)
        await until(lambda: inside.is_set() and "tool.started" in bench.types())  # the log decides, not the thread
        bench.ask("abort", target_kind="active", reason="enough")
        await running.over()

    bench = played(scene)
    assert seen == ["enough"]
    assert [(e["status"], e["result"]) for e in bench.named("tool.finished")] == [("cancelled", "half")]
    assert [(s["branch"], s["status"]) for s in bench.end()["stopped"]] == [("tool", "cancelled")]


@pytest.mark.parametrize("known", [True, False], ids=["refused", "undecided"])
def test_what_began_behind_the_cancel_is_stopped_and_named_in_the_final_report(known: bool) -> None:
    """Protocol section 7: such a start is refused. The worker knows that it was, or only that the run is cancelled."""

    async def scene(bench: Bench) -> None:
        async def tool() -> None:
            await asyncio.sleep(60)

        async def body(ctx: RunContext) -> None:
            await until(lambda: bench.hold)
            async with ctx.model_request(turn_id="t1"):
                await ctx.tool_call("deploy", tool, {}, call_id="c1")

        bench.ask(content="go")
        running = bench.take(body, optimistic=False)
        await until(lambda: running.held.machine.granted)
        bench.hold = True
        await until(
            lambda: any(b"toolCallId" in e.payload for r in bench.waiting if isinstance(r, Report) for e in r.events)
        )
        bench.ask("abort", target_kind="active")  # before the starts in the log
        if not known:
            await until(lambda: any(_is_end(r) for r in bench.waiting))
        bench.let_go()
        await running.over()

    end = played(scene).end()
    assert end["stopped"] == []
    assert end["workOutcome"]["begun"] == [
        {"branch": "model_request", "id": "t1", "name": ""},
        {"branch": "tool", "id": "c1", "name": "deploy"},
    ]


def _is_end(record: object) -> bool:
    return isinstance(record, Report) and any(event.type == "run.finished" for event in record.events)


def test_a_second_call_of_a_key_neither_begins_nor_ends_the_first() -> None:
    effects: list[str] = []

    async def scene(bench: Bench) -> None:
        finish = asyncio.Event()

        async def perform(args: Any, permit: ActionPermit) -> str:
            effects.append(permit.key)
            await finish.wait()
            return "sent"

        async def body(ctx: RunContext) -> Any:
            first = asyncio.create_task(ctx.action("send", {}, perform=perform, key="k1"))
            await until(lambda: bool(effects))
            with pytest.raises(ActionRefused, match="in_flight"):
                await ctx.action("send", {}, perform=perform, key="k1")
            finish.set()
            return await first, await ctx.action("send", {}, perform=perform, key="k1")

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert bench.end()["output"] == ["sent", "sent"], "afterwards it is the recorded result"
    assert effects == ["k1"]


def test_a_call_whose_outcome_is_unknown_is_not_ended_by_the_next_one() -> None:
    """The request of the second waits in the queue when its caller gives up: nothing of it reaches the log."""

    async def scene(bench: Bench) -> None:
        async def perform(args: Any, permit: ActionPermit) -> str:
            raise OutcomeUnknown("the line went dead")

        async def body(ctx: RunContext) -> None:
            with pytest.raises(InDoubt):
                await ctx.action("send", {}, perform=perform, key="k1")
            with pytest.raises(ActionRefused, match="in_flight"):
                await ctx.action("send", {}, perform=perform, key="k1")

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert bench.end()["inDoubt"] == [{"name": "send", "actionKey": "k1"}]


def test_a_request_that_was_not_sent_is_taken_back() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            await until(lambda: bench.hold)
            for number in range(UNANSWERED_MAX):  # each a report of its own
                await ctx.message(f"{number}")
                await until(lambda n=number: len([r for r in bench.waiting if isinstance(r, Report)]) > n)  # type: ignore[misc]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await ctx.action("send", {}, perform=done, key="k1")
            bench.let_go()
            return str(await ctx.action("send", {}, perform=done, key="k1"))

        bench.ask(content="go")
        running = bench.take(body, optimistic=False)
        await until(lambda: running.held.machine.granted)
        bench.hold = True
        await running.over()

    bench = played(scene)
    assert [e["status"] for e in bench.named("action.finished")] == ["ok"]
    assert len(bench.named("action.requested")) == 1


def test_a_repeat_that_is_denied_is_in_doubt_and_not_asked_for_again() -> None:
    async def scene(bench: Bench) -> None:
        async def first(ctx: RunContext) -> None:
            await ctx.action("send", {}, perform=forever, key="k1", honours_keys=True)

        async def forever(args: Any, permit: ActionPermit) -> None:
            await asyncio.sleep(60)

        async def second(ctx: RunContext) -> str:
            again = {"perform": done, "key": "k1", "honours_keys": True}
            with pytest.raises(InDoubt):
                await ctx.action("send", {}, **again)
            try:
                await ctx.action("send", {}, **again, resolution="repeat", approval=True)
            except InDoubt:
                return "in doubt still"
            return "performed"

        bench.ask(content="go")
        bench.take(first)
        await until(lambda: "action.permitted" in bench.types())
        bench.fire("lease", 3_000)
        running = bench.take(second, worker_id="w2")
        await until(lambda: "approval.requested" in bench.types())
        digest = bench.named("approval.requested")[0]["argsDigest"]
        bench.ask("answer", action_key="k1", action_name="send", args_digest=digest, decision="deny")
        await running.over()

    bench = played(scene)
    assert len(bench.named("approval.requested")) == 1
    assert bench.end()["output"] == "in doubt still"


def test_b15_what_the_body_left_open_is_ended_before_the_final_report() -> None:
    async def scene(bench: Bench) -> None:
        tasks = []

        async def forever() -> None:
            await asyncio.sleep(60)

        async def body(ctx: RunContext) -> str:
            tasks.append(asyncio.create_task(ctx.tool("left", forever)))
            await until(lambda: "tool.started" in bench.types())
            return "out"

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert [e["status"] for e in bench.named("tool.finished")] == ["cancelled"]
    assert bench.end()["terminalStatus"] == "completed"


def test_b28_suspended_means_nothing_new_until_an_answer() -> None:
    began: list[str] = []

    async def scene(bench: Bench) -> None:
        gate = asyncio.Event()

        async def body(ctx: RunContext) -> None:
            await gate.wait()
            await ctx.tool("t", lambda: began.append("tool"))
            await ctx.steers()
            async with ctx.model_request(model="m"):
                began.append("model")

        bench.ask(content="go")
        running = bench.take(body, optimistic=False)
        await until(lambda: running.held.machine.granted)
        bench.skew_ms += 3_000
        assert running.held.look(lambda m, now: m.suspended(now))
        gate.set()
        await asyncio.sleep(0.05)
        assert began == []
        running.held.tick()  # it keeps renewing, and the next answer lets it go on
        await running.over()

    bench = played(scene)
    assert began == ["tool", "model"]
    assert bench.end()["terminalStatus"] == "completed"


def test_b28_nothing_begins_when_the_lease_ran_out_while_reports_were_waited_for() -> None:
    """More events are undecided than may be, so the start waits for them first; that may take longer than the lease."""
    began: list[int] = []

    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> None:
            await until(lambda: bench.hold)
            for number in range(UNSETTLED_MAX + 10):
                ctx._held.report("message.completed", {"content": f"{number}"})
            await ctx.tool("t", lambda: began.append(bench.skew_ms))

        bench.ask(content="go")
        running = bench.take(body, optimistic=False)
        await until(lambda: running.held.machine.granted)
        bench.hold = True
        await until(lambda: running.held.machine.unsettled >= UNSETTLED_MAX)
        bench.skew_ms += 3_000
        bench.let_go()
        await until(lambda: running.held.machine.unsettled == 0)
        assert running.held.look(lambda m, now: m.suspended(now))
        await asyncio.sleep(0.05)
        assert began == []
        running.held.tick()
        await running.over()

    assert played(scene).end()["terminalStatus"] == "completed"
    assert began


def test_a_lost_lease_stops_the_body_and_its_late_end_is_evidence() -> None:
    async def scene(bench: Bench) -> None:
        running, finish = await begun_action(bench)
        run = bench.session.head.run
        assert run is not None
        bench.fire("lease", 4_000)
        await until(lambda: running.held.ended is not None)
        assert running.held.ended == "lease_lost"
        finish.set()
        await running.over()
        await until(lambda: bench.receipts[-1].kind == "worker")

    bench = played(scene)
    assert "action.in_doubt" in bench.types()
    assert "run.finished" not in bench.types()
    refused = bench.receipts[-1]
    assert (refused.record, refused.reason, refused.generation) == ("report", "stale_generation", 1)
    assert b'"status":"ok"' in (refused.detail or b"")


def test_a_worker_that_was_never_answered_tells_the_late_end_of_what_it_began() -> None:
    """It began before its claim was answered, and was frozen before the answer came: its tool has run all the same."""

    async def scene(bench: Bench) -> None:
        running, finish = await begun_tool(bench, answered=False)
        bench.fire("lease", 4_000)
        assert not running.held.machine.granted
        running.held.give_up("stale_generation")
        finish.set()
        await running.over()
        await until(lambda: bench.receipts[-1].kind == "worker")

    refused = played(scene).receipts[-1]
    assert (refused.record, refused.reason, refused.generation) == ("report", "stale_generation", 1)
    assert b"tool.finished" in (refused.detail or b"")


def test_an_end_that_was_reported_but_not_sent_when_the_lease_was_lost_is_told() -> None:
    """A process that wakes up learns of its loss between the report of an end and the turn of the loop that sends."""

    async def scene(bench: Bench) -> None:
        running, finish = await begun_tool(bench)
        assert running.held.machine.granted
        held, flush = running.held, running.held._flush
        bench.helds.remove(held)
        bench.fire("lease", 4_000)

        def lost_first() -> None:
            held.give_up("stale_generation")
            flush()

        held._flush = lost_first  # type: ignore[method-assign]
        finish.set()
        await running.over()
        await until(lambda: bench.receipts[-1].kind == "worker")

    told = [one for one in played(scene).receipts if b"tool.finished" in (one.detail or b"")]
    assert [(one.record, one.reason, one.generation) for one in told] == [("report", "stale_generation", 1)]


def test_takeover_joins_the_recorded_action_and_meets_the_doubtful_one() -> None:
    performed: list[str] = []

    async def scene(bench: Bench) -> None:
        inside = asyncio.Event()

        async def perform(args: Any, permit: ActionPermit) -> str:
            performed.append(f"{args}@{permit.generation}")
            if args == "second" and permit.generation == 1:
                inside.set()
                await asyncio.sleep(60)
            return f"{args} done"

        async def body(ctx: RunContext) -> list[Any]:
            results = [await ctx.action("send", "first", perform=perform)]
            try:
                results.append(await ctx.action("send", "second", perform=perform))
            except InDoubt as error:
                again = ctx.action(
                    "send", "second", perform=perform, key=error.key, resolution="reconciled_not_performed"
                )
                results.append(await again)
            return results

        bench.ask(content="go")
        dead = bench.take(body)
        await inside.wait()
        bench.helds.clear()  # its process is gone
        bench.fire("lease", 4_000)
        running = bench.take(body, worker_id="other")
        assert not running.held.machine.optimistic
        await running.over()
        dead.task.cancel()

    bench = played(scene)
    assert performed == ["first@1", "second@1", "second@2"]
    assert bench.end()["output"] == ["first done", "second done"]


@pytest.mark.parametrize(
    ("raises", "kind", "statuses", "terminal"),
    [
        (ValueError("no"), ActionFailed, ["error"], "completed"),
        (NotPerformed("refused by the target"), NotPerformed, ["not_performed"], "completed"),
        (OutcomeUnknown("timed out"), InDoubt, [], "failed"),
    ],
)
def test_what_perform_raises(raises: Exception, kind: type[Exception], statuses: list[str], terminal: str) -> None:
    async def scene(bench: Bench) -> None:
        def perform(args: Any, permit: ActionPermit) -> None:
            raise raises

        async def body(ctx: RunContext) -> None:
            with pytest.raises(kind):
                await ctx.action("send", {}, perform=perform)
            if kind is ActionFailed:  # recorded: asked again it is not performed again
                with pytest.raises(ActionFailed):
                    await ctx.action("send", {}, perform=done, key=f"{RUN}:send:1")

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert [e["status"] for e in bench.named("action.finished")] == statuses
    assert bench.end()["terminalStatus"] == terminal
    if kind is InDoubt:
        assert bench.end()["inDoubt"] == [{"name": "send", "actionKey": f"{RUN}:send:1"}]


@pytest.mark.parametrize("decision", ["approve", "deny"])
def test_approvals(decision: str) -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            try:
                return str(await ctx.action("pay", {"n": 1}, perform=done, approval=True))
            except ActionVoided as error:
                return error.reason

        bench.ask(content="go")
        running = bench.take(body)
        await until(lambda: "approval.requested" in bench.types())
        (asked,) = bench.named("approval.requested")
        bench.ask("answer", action_key=asked["actionKey"], args_digest=asked["argsDigest"], decision=decision)
        await running.over()

    bench = played(scene)
    assert bench.end()["output"] == ("{'did': {'n': 1}}" if decision == "approve" else "voided")
    assert ("action.permitted" in bench.types()) is (decision == "approve")


def test_b19_one_key_two_bodies_is_a_conflict() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> Any:
            first = await ctx.action("send", {"a": 1, "b": 2}, perform=done, key="k")
            joined = await ctx.action("send", {"b": 2, "a": 1}, perform=done, key="k")
            with pytest.raises(ActionRefused, match="key_conflict"):
                await ctx.action("send", {"a": 2}, perform=done, key="k")
            return [first, joined]

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert len(bench.named("action.permitted")) == 1
    assert bench.end()["output"] == [{"did": {"a": 1, "b": 2}}] * 2


def test_a_recorded_result_too_large_for_a_view_comes_from_its_event() -> None:
    big = "x" * 100_000

    async def scene(bench: Bench) -> None:
        async def perform(args: Any, permit: ActionPermit) -> str:
            return big

        async def body(ctx: RunContext) -> bool:
            first = await ctx.action("send", {}, perform=perform, key="k")
            return bool(first == big == await ctx.action("send", {}, perform=done, key="k"))

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert len(bench.named("action.permitted")) == 1
    assert bench.end()["output"] is True


def test_steers_come_in_order_once_and_not_when_withdrawn() -> None:
    taken: list[str] = []

    async def scene(bench: Bench) -> None:
        gate = asyncio.Event()

        async def body(ctx: RunContext) -> None:
            await gate.wait()
            taken.extend(str(steer) for steer in await ctx.steers())
            assert await ctx.steers() == []

        bench.ask(content="go")
        running = bench.take(body)
        await until(lambda: running.held.machine.granted)
        inputs = [bench.ask("steer", content=f"s{n}") for n in range(4)]
        bench.hold = True
        gate.set()
        await until(lambda: bench.waiting)
        bench.ask("abort", target_kind="input", target_id=inputs[3].input_id)  # withdrawn in front of the report
        bench.let_go()
        await running.over()

    bench = played(scene)
    assert taken == ["s0", "s1", "s2"]
    assert [e["content"] for e in bench.named("input.applied")] == taken


def test_a_shutdown_gives_the_run_back_without_losing_an_attempt() -> None:
    async def scene(bench: Bench) -> None:
        inside = asyncio.Event()

        async def body(ctx: RunContext) -> None:
            async with ctx.model_request(model="m"):
                inside.set()
                await asyncio.sleep(60)

        bench.ask(content="go")
        running = bench.take(body)
        await inside.wait()
        running.execution.stop()
        await running.over()
        assert running.held.ended == "released"

    bench = played(scene)
    assert bench.types()[-2:] == ["model.request.finished", "run.released"]
    assert (bench.offers[-1].generation, bench.offers[-1].attempt) == (2, 1)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, {}),
        ({"t": "\udfff"}, {"output": {"t": "\ufffd"}, "flattened": ["output.t"]}),
        (object(), {"outputOmitted": "not_json"}),
    ],
)
def test_output_of_a_body(result: Any, expected: dict[str, Any]) -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> Any:
            return result

        bench.ask(content="go")
        await bench.take(body).over()

    end = played(scene).end()
    assert end.pop("terminalStatus") == "completed"
    assert end == expected


def test_misuse_is_named() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> None:
            with pytest.raises(Invalid, match=r"must begin with x\."):
                ctx.emit("run.finished")
            with pytest.raises(Invalid, match="action name"):
                await ctx.action("send mail", {}, perform=done)
            with pytest.raises(Invalid, match=r"args\.a: NaN"):
                await ctx.action("send", {"a": float("nan")}, perform=done)
            with pytest.raises(Invalid, match="bytes encoded"):
                await ctx.message("x" * 300_000)
            assert ctx.input == {"task": [1]}

        bench.ask(content={"task": [1]})
        await bench.take(body).over()

    assert played(scene).end()["terminalStatus"] == "completed"
