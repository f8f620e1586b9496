"""Workers that are frozen, killed or told to stop: real processes, real signals, the real log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onepen.schemas import codec
from onepen.schemas.receipts import Receipt
from onepen.streams.log_tail import LogTail
from onepen.streams.worker import RunContext
from tests.integration.running_pipeline import Pipeline, eventually, named, running, serving, types
from tests.services import fresh_topic_prefix

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pipeline(kafka_bootstrap: str) -> Iterator[Pipeline]:
    with running(kafka_bootstrap, fresh_topic_prefix()) as found:
        yield found


@contextmanager
def process(pipeline: Pipeline, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ, "ONEPEN_BOOTSTRAP": pipeline.settings.bootstrap, "ONEPEN_PREFIX": pipeline.settings.prefix,
    }  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.worker_process", str(folder)], cwd=ROOT, env=environment
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(30)


def refusals(pipeline: Pipeline, worker_id: str) -> list[Receipt]:
    """Receipts of refused worker records, read to the present end."""
    tail = LogTail(pipeline.settings)
    topic = pipeline.settings.topics.receipts
    found = []
    try:
        tail.open({(topic, partition): None for partition in range(tail.count(topic))})
        while not tail.caught_up:
            message = tail.poll()
            if message is not None:
                receipt = codec.decode_as(Receipt, message.value())
                if receipt.kind == "worker" and receipt.worker_id == worker_id:
                    found.append(receipt)
    finally:
        tail.close()
    return found


def test_b26_a_frozen_worker_is_replaced_and_its_late_reports_are_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    with pipeline.client() as client, process(pipeline, tmp_path) as frozen:
        run_id = client.prompt("frozen", "hold").verdict(30_000).run_id
        assert run_id is not None
        eventually(lambda: list(tmp_path.glob("began-*")), 40)
        subscription = pipeline.subscriber().run(run_id, timeout_ms=60_000)
        events = [next(subscription)]
        while events[-1].type != "tool.started":
            events.append(next(subscription))
        held = events[-1].generation
        owner = named(events, "run.leased")[0]["workerId"]
        assert f"-{frozen.pid}-" in owner
        os.kill(frozen.pid, signal.SIGSTOP)

        second = pipeline.worker(name="second")

        @second.run
        async def finish(ctx: RunContext) -> list[int]:
            return [ctx.generation, ctx.attempt]

        with serving(second):
            events += list(subscription)
        (tmp_path / "go").write_text("")
        os.kill(frozen.pid, signal.SIGCONT)

        def late_end() -> list[Receipt]:
            refused = refusals(pipeline, owner)
            found = [r for r in refused if r.record == "report" and r.generation == held]
            return found if any(b"tool.finished" in (r.detail or b"") for r in found) else []

        late = eventually(late_end, 20, "the late report of the tool's end")
    assert types(events)[-1] == "run.finished"
    (lost,) = named(events, "run.lease_lost")
    assert lost["workerId"] == owner
    generation, attempt = named(events, "run.finished")[0]["output"]
    assert generation > held
    assert attempt == 2
    assert named(events, "tool.finished")[0]["status"] == "unknown"
    assert {r.reason for r in late} <= {"run_ended", "stale_generation"}


def test_b18_a_killed_worker_leaves_its_action_in_doubt(pipeline: Pipeline, tmp_path: Path) -> None:
    with pipeline.client() as client:
        with process(pipeline, tmp_path) as first:
            run_id = client.prompt("killed", "act").verdict(30_000).run_id
            assert run_id is not None
            eventually(lambda: list(tmp_path.glob("performed-*")), 40)
            first.kill()
            first.wait(30)
        with process(pipeline, tmp_path):
            eventually(lambda: (tmp_path / "in-doubt").exists(), 40, "takeover")
            (tmp_path / "finish").write_text("")
            events = pipeline.run_of(run_id)
    names = types(events)
    assert names.count("action.requested") == 2, "the same key again, after it was reconciled"
    assert names.index("action.in_doubt") < names.index("action.finished")
    keys = {asked["actionKey"] for asked in named(events, "action.requested")}
    assert keys == {f"{run_id}:send:1"}
    assert named(events, "run.finished")[0]["terminalStatus"] == "completed"


def test_sigterm_gives_the_run_back_and_ends_the_process(pipeline: Pipeline, tmp_path: Path) -> None:
    with pipeline.client() as client, process(pipeline, tmp_path) as child:
        run_id = client.prompt("terminated", "wait").verdict(30_000).run_id
        assert run_id is not None
        subscription = pipeline.subscriber().run(run_id, timeout_ms=60_000)
        events = [next(subscription)]
        while events[-1].type != "tool.started":
            events.append(next(subscription))
        child.terminate()
        assert child.wait(20) == 0
        while events[-1].type != "run.released":
            events.append(next(subscription))
        subscription.close()
        client.abort("terminated", run_id=run_id).disposition(30_000)
    assert named(events, "run.released")[0]["reason"] == "released"
    assert "tool.finished" in types(events)
