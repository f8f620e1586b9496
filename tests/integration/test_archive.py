"""`onepen archive` on the real broker, and `onepen verify` from what it wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from onepen.streams.archive import read_archive
from onepen.streams.topic_scan import TopicScan
from tests.integration.played_pipeline import Command, Played

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_the_state_is_that_of_the_topic_and_verify_starts_from_it(
    own: Played, command_on_own: Command, tmp_path: Path
) -> None:
    command, folder = command_on_own, tmp_path / "archive"
    code, out, err = command("archive", "--to", str(folder), "-o", "json")
    assert code == 0, err
    rows = json.loads(out)
    assert [row["partition"] for row in rows] == list(range(own.settings.partitions))
    assert sum(row["sessions"] for row in rows) >= 1
    for row in rows:
        archive = read_archive(Path(row["file"]), prefix=own.settings.prefix)
        assert archive.header.next_input_offset == row["nextInputOffset"]
        assert archive.records == _state(own, row["partition"])

    # Nothing new (no session is active): from the archive there is nothing to decide, and that is clean.
    code, out, err = command("verify", "--all", "--from", str(folder), "-o", "json")
    assert code == 0, out + err
    assert json.loads(out) == {"inputs": 0, "events": 0, "receipts": 0, "mismatches": [], "chain_errors": []}

    # Life goes on; only what came since is decided again.
    own.tell("-later")
    code, out, err = command("verify", "--all", "--from", str(folder), "-o", "json")
    assert code == 0, out + err
    since = json.loads(out)
    assert since["events"] > 15
    whole = json.loads(command("verify", "--all", "-o", "json")[1])
    assert since["inputs"] < whole["inputs"]
    assert command("verify", "--session", "desk-later", "--from", str(folder))[0] == 0

    # One file: its partition begins there, the others at the first offset.
    code, out, err = command("verify", "--all", "--from", rows[0]["file"], "-o", "json")
    assert code == 0, out + err
    assert since["inputs"] < json.loads(out)["inputs"] <= whole["inputs"]

    _refusals(command, folder, Path(rows[0]["file"]))


def _refusals(command: Command, folder: Path, file: Path) -> None:
    torn = folder / "torn.archive"
    torn.write_bytes(file.read_bytes()[:-10])
    code, _, err = command("verify", "--all", "--from", str(torn))
    assert (code, err.count("\n")) == (2, 1)
    assert "torn or was changed" in err
    edited = bytearray(file.read_bytes())
    edited[len(edited) // 2] ^= 1
    torn.write_bytes(edited)
    assert command("verify", "--all", "--from", str(torn))[0] == 2
    code, _, err = command("verify", "--all", "--from", str(file), ONEPEN_PREFIX="other")
    assert (code, "is of the topics" in err) == (2, True)
    code, _, err = command("verify", "--all", "--from", str(folder / "nowhere"))
    assert (code, "cannot be read" in err) == (2, True)


def _state(own: Played, partition: int) -> dict[bytes, bytes]:
    """The records of the state topic, the last of each key, once the log stands still."""
    end_s = time.monotonic() + 30
    found: dict[bytes, bytes] = {}
    with TopicScan(own.settings, own.settings.topics.state) as scan:
        before = -1
        while (end := scan.ends(partition)[1]) != before:
            assert time.monotonic() < end_s
            before = end
        for record in scan.read(partition, *scan.ends(partition)):
            assert record.key is not None
            if record.value is None:
                found.pop(record.key, None)
            else:
                found[record.key] = record.value
    found.pop(b"partition", None)
    return found


def test_one_partition_and_places(command: Command, tmp_path: Path, played: Played) -> None:
    code, out, err = command("archive", "--partition", "1", "-o", "jsonl")
    assert code == 0, err
    row = json.loads(out)
    assert Path(row["file"]).parent == tmp_path / "data" / "archive"
    code, _, err = command("archive", "--partition", str(played.settings.partitions))
    assert (code, "there is no partition" in err) == (2, True)
    assert command("archive", ONEPEN_BOOTSTRAP="127.0.0.1:1")[0] == 4


@pytest.mark.long
def test_archives_of_a_live_system_are_whole(played: Played, command: Command, tmp_path: Path) -> None:
    """Taken while sessions go on: from each of them the rest verifies."""
    with played.client() as client:
        for number in range(3):
            sent = [client.prompt(f"live-{number}-{n}", "go") for n in range(30)]
            folder = tmp_path / str(number)
            code, _, err = command("archive", "--to", str(folder))
            assert code == 0, err
            assert sent[-1].verdict(20_000).accepted
            code, out, err = command("verify", "--all", "--from", str(folder), "-o", "json")
            assert code == 0, out + err
