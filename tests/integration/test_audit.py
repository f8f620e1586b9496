"""`onepen audit` on the real services: a good history is clean on topics and tables, each damage is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onepen.streams.audit.checks import ON_TABLES, ON_TOPICS
from onepen.streams.outside_reader import read_topic
from onepen.streams.plain_producer import PlainProducer
from tests.integration.played_pipeline import Command, Played
from tests.services import execute

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def document(out: str) -> dict[str, Any]:
    found = json.loads(out)
    assert isinstance(found, dict)
    assert list(found) == ["checked", "violations"]
    return found


def test_a_good_history_is_clean(played: Played, command: Command) -> None:
    code, out, err = command("audit", "-o", "json")
    found = document(out)
    assert found["violations"] == [], err
    assert code == 0
    names = [check.name for check in (*ON_TOPICS, *ON_TABLES)]
    assert found["checked"].keys() == {*names, "subtasks", "transactions", "input_ranges"}
    for name in names:
        assert found["checked"][name] > 0, name
    assert found["checked"]["transactions"] > 20
    assert found["checked"]["subtasks"] == 1
    code, out, _ = command("audit")
    assert (code, "one_active_run" in out) == (0, True)


@pytest.mark.long
def test_beside_a_running_system(played: Played, command: Command) -> None:
    """Audited while sessions go on and the sink follows: never a false violation."""
    with played.client() as client:
        for number in range(3):
            sent = [client.prompt(f"audited-{number}-{n}", "go", on_busy="interrupt") for n in range(30)]
            sent += [client.prompt(f"audited-{number}-{n}", "again", on_busy="interrupt") for n in range(30)]
            code, out, err = command("audit", "-o", "json")
            assert document(out)["violations"] == [], err
            assert code == 0
            assert sent[-1].verdict(20_000).accepted


def test_topics_only_and_nobody_there(command: Command) -> None:
    code, out, err = command("audit", "--topics-only", "-o", "json", ONEPEN_DSN=None)
    assert code == 0, err
    assert "tables_equal_fold" not in document(out)["checked"]
    code, out, err = command("audit", ONEPEN_DSN=None)
    assert (code, out) == (2, "")
    assert command("audit", ONEPEN_BOOTSTRAP="127.0.0.1:1")[0] == 4
    assert command("audit", ONEPEN_DSN="postgresql://u:secret@127.0.0.1:1/x")[0] == 4


@pytest.mark.parametrize(
    ("statement", "undo", "check"),
    [
        (
            "update agent_runs set generation = generation + 1 where id = (select min(id) from agent_runs)",
            "update agent_runs set generation = generation - 1 where id = (select min(id) from agent_runs)",
            "tables_equal_fold",
        ),
        (
            "update agent_run_events set payload = payload || '{\"edited\": 1}' where seq = 1 and log_offset = 0",
            "update agent_run_events set payload = payload - 'edited' where seq = 1 and log_offset = 0",
            "replay_by_run",
        ),
        (
            "update agent_inputs set disposition = null where disposition = 'refused' and verdict_reason = 'stale_run'",
            "update agent_inputs set disposition = 'refused' where verdict_reason = 'stale_run'",
            "disposed_in_tables",
        ),
    ],
)
def test_a_row_that_was_edited(played: Played, command: Command, statement: str, undo: str, check: str) -> None:
    dsn = played.settings.require_dsn()
    execute(dsn, statement)
    try:
        code, out, _ = command("audit", "-o", "json")
    finally:
        execute(dsn, undo)
    assert code == 1
    assert check in {one["check"] for one in document(out)["violations"]}
    assert all(one["where"] for one in document(out)["violations"])


def test_records_that_nobody_wrote(own: Played, command_on_own: Command) -> None:
    """Somebody writes to the topics: an event, a receipt, and half a transaction."""
    code, out, _ = command_on_own("audit", "--topics-only", "-o", "json")
    assert (code, document(out)["violations"]) == (0, [])
    settings = own.settings
    producer = PlainProducer(settings.kafka_client(), client_id="forger")
    for topic in (settings.topics.events, settings.topics.receipts):
        record = next(r for r in read_topic(settings, topic) if r.key == b"1/desk")
        assert record.key is not None
        assert record.value is not None
        headers: list[tuple[str, str | bytes | None]] = [*record.headers]
        producer.send(topic, record.partition, key=record.key, value=record.value, headers=headers)
    assert producer.close(10_000) == 0
    code, out, _ = command_on_own("audit", "--topics-only", "-o", "json")
    assert code == 1
    found = {one["check"] for one in document(out)["violations"]}
    assert {"gapless", "hash_chain", "conservation", "transactions"} <= found
