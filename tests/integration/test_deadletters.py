"""Dead letters on real Kafka: found, shown, put back once, and never half."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from onepen.cli import main
from onepen.schemas.errors import Fenced, OnepenError
from onepen.schemas.partitioning import partition_of
from onepen.streams.dead_letters_reading import LetterId, get
from onepen.streams.dead_letters_redrive import redrive
from tests.conformance.worlds import wait_for
from tests.integration.engine_world import PARTITIONS, EngineWorld
from tests.integration.in_process import only, run_main

pytestmark = pytest.mark.integration

Run = Callable[..., tuple[int, str, str]]
HERE = partition_of(b"s", PARTITIONS)
ELSEWHERE = (HERE + 1) % PARTITIONS


@pytest.fixture
def run(world: EngineWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    only(monkeypatch, world.environment())

    def call(*arguments: str) -> tuple[int, str, str]:
        return run_main(capsys, "deadletters", *arguments)

    return call


def letters_on(world: EngineWorld) -> list[tuple[int, int]]:
    """Places of the dead letters, notes left out."""
    found = world.stored(world.topics.deadletters)
    return [(p, r.offset) for p, r in found if "onepen-reason" in dict(r.headers)]


def test_list_show_and_redrive(world: EngineWorld, run: Run) -> None:
    world.prompt("s", "stray")
    world.flush()
    value = next(r.value for _, r in world.stored(world.topics.inputs) if r.value and b"stray" in r.value)
    stray = value.replace(b"stray", b"lost!")
    world.send(stray, b"s", ELSEWHERE)
    world.send(b"garbage", b"s")
    world.flush()
    sink = Producer({"bootstrap.servers": world.bootstrap})
    headers = [("onepen-reason", b"no_frame"), ("onepen-topic", world.topics.events.encode()),
               ("onepen-partition", b"0"), ("onepen-offset", b"4")]  # fmt: skip
    sink.produce(world.topics.deadletters, b"of the sink", b"k", 0, headers=headers)
    assert sink.flush(10) == 0
    with world.thread("s0"):
        wait_for(lambda: len(letters_on(world)) == 3, "three dead letters")

        code, out, _ = run("list", "-o", "json")
        rows = {row["reason"] + row["topic"]: row for row in json.loads(out)}
        assert code == 0
        lost = rows["wrong_partition" + world.topics.inputs]
        assert (lost["partition"], lost["sizeBytes"], lost["redriven"]) == (ELSEWHERE, len(stray), 0)
        assert [row["reason"] for row in json.loads(run("list", "--reason", "wrong_partition", "-o", "json")[1])] == [
            "wrong_partition"
        ]
        assert json.loads(run("list", "--since", "2100-01-01", "-o", "json")[1]) == []
        code, out, err = run("list", "--limit", "1")
        assert (len(out.splitlines()), "the newest 1 of 3" in err) == (2, True)

        code, out, _ = run("show", lost["id"], "-o", "json")
        shown = json.loads(out)
        assert (code, shown["value"]["kind"], shown["value"]["input_id"]) == (0, "Input", "lost!")
        assert shown["topic"] == world.topics.inputs

        code, out, _ = run("redrive", lost["id"], "--dry-run", "-o", "json")
        assert json.loads(out)[0] | {"reason": None} == {
            "id": lost["id"], "reason": None, "action": "redrive", "partition": HERE, "offset": None, "why": None
        }  # fmt: skip
        assert run("redrive", lost["id"])[0] == 2, "nobody to ask, and no --yes"
        assert "lost!" not in world.verdicts()

        code, out, _ = run("redrive", lost["id"], "--yes", "-o", "json")
        done = json.loads(out)[0]
        assert (code, done["action"], done["partition"]) == (0, "redriven", HERE)
        wait_for(lambda: world.verdicts().get("lost!") == ["queued"], "its verdict")
        written = {(p, r.offset): r for p, r in world.stored(world.topics.inputs)}[HERE, done["offset"]]
        assert (written.key, written.value) == (b"s", stray)
        assert dict(written.headers) == {
            "onepen-redriven": lost["id"].encode(),
            "onepen-origin": f"{world.topics.inputs}/{ELSEWHERE}/{lost['offset']}".encode(),
        }

        again = json.loads(run("redrive", lost["id"], "--yes", "-o", "json")[1])[0]
        assert (again["action"], "--again" in again["why"]) == ("skipped", True)
        assert json.loads(run("show", lost["id"], "-o", "json")[1])["redriven"] == 1
        every = json.loads(run("redrive", "--all", "--dry-run", "-o", "json")[1])
        assert [row["reason"] for row in every] == ["no_frame"], "neither what was redriven nor what is the sink's"
        foreign = rows["no_frame" + world.topics.events]["id"]
        refused = json.loads(run("redrive", foreign, "--yes", "-o", "json")[1])[0]
        assert (refused["action"], world.topics.events in refused["why"]) == ("skipped", True)
        repeated = json.loads(run("redrive", lost["id"], "--again", "--yes", "-o", "json")[1])[0]
        assert repeated["action"] == "redriven"
        wait_for(lambda: len(world.verdicts()["lost!"]) == 2, "the verdict of the repeat")
    assert len(letters_on(world)) == 3, "notes are no letters, and nothing was set aside anew"
    for command in (["verify", "--all", "-o", "json"], ["audit", "--topics-only", "-o", "json"]):
        assert main(command) == 0, "a redriven input is an input like any other"


def test_unknown_ids_say_so(world: EngineWorld, run: Run) -> None:
    for arguments in (["show", "0-5"], ["show", "77-0"], ["redrive", "0-5", "--yes"]):
        code, out, err = run(*arguments)
        assert (code, out) == (6, "")
        assert f"there is no dead letter {arguments[1]}" in err
    code, _, err = run("show", "five")
    assert (code, "PARTITION-OFFSET" in err) == (2, True)


def test_two_at_once_put_a_letter_back_once(world: EngineWorld) -> None:
    world.send(b"garbage", b"s")
    world.flush()
    with world.thread("s0"):
        wait_for(lambda: len(letters_on(world)) == 1, "the dead letter")
    settings = world.settings("s0")
    wanted = [LetterId(*letters_on(world)[0])]
    reading, go = threading.Event(), threading.Event()
    outcome: list[object] = []

    def slow() -> list[object]:
        found = get(settings, wanted)
        reading.set()
        assert go.wait(30)
        return found  # type: ignore[return-value]

    def first() -> None:
        try:
            outcome.append(redrive(settings, slow))  # type: ignore[arg-type]
        except OnepenError as error:
            outcome.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert reading.wait(30)
        done, _ = redrive(settings, lambda: get(settings, wanted))
        assert [one.action for one in done] == ["redriven"]
    finally:
        go.set()
        thread.join(40)
    assert isinstance(outcome[0], Fenced), outcome
    assert sum(r.value == b"garbage" for _, r in world.stored(world.topics.inputs)) == 2
