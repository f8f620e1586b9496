"""`onepen why` and `onepen simulate-policy` on the real broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.played_pipeline import Command, Played

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("desk:first", ["no active run", "it started run 1", "ended completed"]),
        ("desk:queued", ["list of waiting inputs", "It began run 2"]),
        ("desk:busy", ["refused (busy)", "changes nothing"]),
        ("desk:stale", ["refused (stale_run)", "never touches another run"]),
        ("desk:steer", ["handed to run 1", "applied it as its event"]),
        ("stopped:stop", ["told to stop", "was done when run 1", "ended cancelled (enough)"]),
        ("stopped:waiting", ["discarded (aborted)"]),
        ("stopped:withdrawn", ["withdrawn by input"]),
        ("stopped:late", ["refused (no_active_run)", "last run was run 1", "which ended cancelled"]),
        ("lost:first", ["it started run 1"]),
        ("parent:first", ["it started run 1", "ended completed"]),
        ("erased:second", ["It interrupts: run 1", "stands in front", "It began run 2"]),
        ("erased:erase", ["takes no input", "It was done when run 2"]),
        ("erased:late", ["refused (erased)"]),
    ],
)
def test_it_tells_why(played: Played, command: Command, name: str, phrases: list[str]) -> None:
    sent = played.sent[name]
    code, out, err = command("why", sent.input_id, "--session", sent.session_id)
    assert code == 0, err
    assert not [phrase for phrase in phrases if phrase not in out], out


def test_the_session_need_not_be_named_and_json_has_the_positions(played: Played, command: Command) -> None:
    sent = played.sent["desk:first"]
    code, out, err = command("why", sent.input_id, "-o", "json")
    assert code == 0, err
    accounts: list[dict[str, Any]] = json.loads(out)
    assert [account["verdict"] for account in accounts] == ["started", "duplicate"], "it was sent twice"
    partition, offset = sent.position
    assert {"partition": partition, "offset": offset} in [account["position"] for account in accounts]
    assert accounts[0]["events"][0]["type"] == "run.started"
    code, out, _ = command("why", sent.input_id, "-o", "jsonl")
    assert [json.loads(line) for line in out.splitlines()] == accounts


def test_what_is_not_there(played: Played, command: Command) -> None:
    sent = played.sent["desk:first"]
    assert command("why", "in-nobody")[0] == 6
    assert command("why", sent.input_id, "--session", "lost")[0] == 6
    assert command("why", sent.input_id, "--tenant", "2")[0] == 6
    assert command("why", "no id")[0] == 2
    assert command("why", sent.input_id, ONEPEN_BOOTSTRAP="127.0.0.1:1")[0] == 4


def test_another_policy(played: Played, command: Command, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"onBusy": "queue", "ifMissed": "queue"}')
    code, out, err = command("simulate-policy", str(file), "-o", "json")
    assert code == 0, err
    same = json.loads(out)
    assert (same["differing"], same["differences"]) == (0, [])
    assert same["inputs"] >= 10
    file.write_text('{"pendingMax": 0}')
    code, out, err = command("simulate-policy", str(file), "-o", "json")
    assert code == 0, err
    found = json.loads(out)
    queued = played.sent["desk:queued"]
    by_id = {one["inputId"]: one for one in found["differences"]}
    assert by_id[queued.input_id]["before"] == {"verdict": "queued", "reason": None}
    assert by_id[queued.input_id]["after"] == {"verdict": "refused", "reason": "queue_full"}
    assert found["differing"] == len(found["differences"])
    assert found["changes"]["queued -> refused queue_full"] >= 2
    code, out, _ = command("simulate-policy", str(file), "--since", "2999-01-01", "-o", "json")
    assert json.loads(out)["inputs"] == 0
    code, out, _ = command("simulate-policy", str(file))
    assert "queued -> refused queue_full" in out


def test_policies_that_cannot_be(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"permitMs": 60000, "cancelMs": 1000}')
    assert command("simulate-policy", str(file))[0] == 2
    assert command("simulate-policy", str(tmp_path / "nowhere"))[0] == 2
    file.write_text("{}")
    assert command("simulate-policy", str(file), "--since", "yesterday")[0] == 2
    assert command("simulate-policy", str(file), "--partition", "99")[0] == 2
    assert command("simulate-policy", str(file), ONEPEN_TOKEN_KEY="y" * 64)[0] == 2
