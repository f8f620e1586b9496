"""`onepen verify` on the real broker: a run with steer, cancel and takeover; a live system; damage on the topics."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from onepen.schemas import codec, ids
from onepen.schemas.events import Event
from onepen.streams.outside_reader import read_topic
from onepen.streams.plain_producer import PlainProducer
from tests.integration.played_pipeline import TENANT, Command, Played

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def document(out: str) -> dict[str, Any]:
    found = json.loads(out)
    assert isinstance(found, dict)
    assert list(found) == ["inputs", "events", "receipts", "mismatches", "chain_errors"]
    return found


def test_everything_is_as_the_inputs_say(played: Played, command: Command) -> None:
    code, out, err = command("verify", "--all", "-o", "json")
    assert code == 0, out + err
    found = document(out)
    assert found["mismatches"] == found["chain_errors"] == []
    assert found["events"] == len(read_topic(played.settings, played.settings.topics.events))
    assert found["receipts"] == len(read_topic(played.settings, played.settings.topics.receipts))
    assert found["inputs"] > 30
    code, out, _ = command("verify", "--all")
    assert (code, "mismatches    0" in out) == (0, True)


def test_one_session_and_one_run(played: Played, command: Command) -> None:
    events = [codec.decode_as(Event, r.value) for r in read_topic(played.settings, played.settings.topics.events)]
    code, out, err = command("verify", "--session", "lost", "-o", "json")
    assert code == 0, err
    assert document(out)["events"] == sum(event.session_id == "lost" for event in events)
    first = ids.run_id(TENANT, "desk", 1)
    code, out, err = command("verify", "--run", first, "-o", "json")
    assert code == 0, err
    # The last event of the first run is followed by the first of the next one in the same decision.
    mine = sum(event.run_id == first for event in events)
    assert mine < document(out)["events"] < sum(event.session_id == "desk" for event in events)


def test_what_is_not_there_is_not_verified(command: Command) -> None:
    assert command("verify", "--session", "nobody")[0] == 6
    assert command("verify", "--run", "run-" + "0" * 32)[0] == 6
    assert command("verify", "--session", "desk", "--tenant", "2")[0] == 6
    assert command("verify")[0] == 2
    assert command("verify", "--all", "--session", "desk")[0] == 2


def test_without_the_key_or_with_another_one(command: Command) -> None:
    code, out, err = command("verify", "--all", "-o", "json", ONEPEN_TOKEN_KEY=None)
    assert (code, out) == (2, "")
    assert "token key" in err
    code, out, err = command("verify", "--all", "-o", "json", ONEPEN_TOKEN_KEY="x" * 64)
    assert code == 1
    assert document(out)["mismatches"]
    assert "token key" in err


def test_nobody_there(command: Command) -> None:
    code, out, err = command("verify", "--all", "-o", "json", ONEPEN_BOOTSTRAP="127.0.0.1:1")
    assert (code, out) == (4, "")
    assert err.count("\n") == 1


@pytest.mark.long
def test_beside_a_running_system(played: Played, command: Command) -> None:
    """Verified again and again while sessions go on: never a false finding."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def go_on() -> None:
        try:
            with played.client() as client:
                number = 0
                while not stop.is_set():
                    sent = [client.prompt(f"busy-{number}-{n}", "go") for n in range(20)]
                    client.abort(f"busy-{number}-0", active=True)
                    assert sent[-1].verdict(20_000).accepted
                    number += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        counts = []
        for _ in range(4):
            code, out, err = command("verify", "--all", "-o", "json")
            assert code == 0, out + err
            counts.append(document(out)["inputs"])
    finally:
        stop.set()
        thread.join(30)
    assert not failed
    assert counts[-1] > counts[0]


def test_a_forged_event_is_found(own: Played, command_on_own: Command) -> None:
    """Somebody writes an event that stands in the log already."""
    command = command_on_own
    assert command("verify", "--all", "-o", "json")[0] == 0
    topic = own.settings.topics.events
    record = next(r for r in read_topic(own.settings, topic) if r.key == b"1/desk")
    assert record.value is not None
    assert record.key is not None
    producer = PlainProducer(own.settings.kafka_client(), client_id="forger")
    producer.send(topic, record.partition, key=record.key, value=record.value)
    assert producer.close(10_000) == 0
    code, out, _ = command("verify", "--all", "-o", "json")
    found = document(out)
    assert code == 1
    (mismatch,) = found["mismatches"]
    assert len(found["chain_errors"]) == 1
    assert (mismatch["topic"], mismatch["partition"], mismatch["inputOffset"]) == (topic, record.partition, None)
    code, out, _ = command("verify", "--session", "desk")
    assert (code, "follows from no input" in out) == (1, True)
