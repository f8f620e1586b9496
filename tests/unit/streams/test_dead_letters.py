"""What of a dead letter is shown, which ids are ids, and what a redrive would do, without any broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepen.processors.rules import Keys
from onepen.schemas import codec
from onepen.schemas.errors import Invalid
from onepen.schemas.inputs import Content, Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.worker_records import Claim, Report, ReportEvent
from onepen.streams.dead_letters_reading import Letter, LetterId, preview
from onepen.streams.dead_letters_redrive import BYTES_MAX, plan_redrive
from onepen.streams.settings import Settings, load_settings

TOKEN = Keys("k1", b"secret" * 8).token(1, "s", "run-1", 1)
HEAD = {"tenant_id": 1, "session_id": "s", "run_id": "run-1", "generation": 1, "token": TOKEN, "worker_id": "w",
        "inbox": 0}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(prefix="p", partitions=4, data_dir=tmp_path)


def letter(offset: int, **changes: object) -> Letter:
    fields: dict[str, object] = {"at_ms": 1, "reason": "no_frame", "topic": "p.inputs", "partition": 1, "offset": 7,
                                 "key": b"s", "value": b"x", "size_bytes": 1} | changes  # fmt: skip
    return Letter(LetterId(1, offset), **fields)  # type: ignore[arg-type]


def test_a_token_is_never_shown() -> None:
    claim = codec.encode(Claim(**HEAD))  # type: ignore[arg-type]
    payload = b'{"secret": "' + TOKEN.encode() + b'"}'
    report = codec.encode(Report(**HEAD, no=1, events=(ReportEvent(type="x", payload=payload),)))  # type: ignore[arg-type]
    for value in (claim, report, claim + b"tail", claim[3:], payload):
        shown = str(preview(value))
        assert TOKEN not in shown
        assert TOKEN.partition(".")[2][:24] not in shown
    assert preview(claim)["kind"] == "Claim"
    assert preview(claim)["run_id"] == "run-1"
    assert preview(claim + b"tail")["why"].startswith("trailing_bytes")


def test_a_preview_names_the_record_and_is_short() -> None:
    prompt = Input(input_id="in-1", issued_at_ms=5, tenant_id=1, user_id=1, session_id="s", mode="prompt", source="ui",
                   content=Content(data=b"word " * 10_000))  # fmt: skip
    shown = preview(codec.encode(prompt))
    assert (shown["kind"], shown["input_id"], shown["content"]["sizeBytes"]) == ("Input", "in-1", 50_000)
    assert len(str(shown)) < 1_000
    assert shown["content"]["preview"].endswith("…")
    assert preview(None) == {"kind": "null"}


def test_ids_are_places() -> None:
    assert LetterId.parse("3-17") == LetterId(3, 17)
    assert str(LetterId(3, 17)) == "3-17"
    for text in ("", "3", "3-", "-3", "3-17x", "a-b", "3-1-7", "9" * 20 + "-1"):
        with pytest.raises(Invalid):
            LetterId.parse(text)


def test_what_a_redrive_would_do(settings: Settings) -> None:
    letters = [
        letter(0),
        letter(1, redriven_ms=(5,)),
        letter(2, topic="p.events"),
        letter(3, partition=9),
        letter(4, reason="wrong_partition"),
        letter(5, size_bytes=BYTES_MAX),
    ]
    planned = plan_redrive(settings, letters, 4, again=False)
    assert [one.action for one in planned] == ["redrive", "skipped", "skipped", "skipped", "redrive", "left"]
    assert [one.partition for one in planned] == [1, -1, -1, -1, partition_of(b"s", 4), -1]
    assert plan_redrive(settings, letters, 4, again=True)[1].action == "redrive"
    alone = plan_redrive(settings, letters[5:], 4, again=False)
    assert alone[0].action == "redrive", "one that is large is still taken alone"
