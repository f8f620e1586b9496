"""Log lines as JSON: one object a line, whatever is in it."""

import json
import logging
import sys
from pathlib import Path

import pytest

from onepen.cli.local_stack import process_child
from onepen.cli.log_lines import JsonLines, LogFormat, format_of_environment
from onepen.streams.settings import load_settings


def line(message: str, *arguments: object, level: int = logging.INFO, failed: bool = False) -> dict[str, object]:
    error = None
    if failed:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            error = sys.exc_info()
    record = logging.LogRecord("onepen.processor", level, __file__, 1, message, arguments, error)
    record.created = 1_700_000_000.25
    text = JsonLines().format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_the_members_of_a_line() -> None:
    assert line("plain %s", "words") == {
        "ts": "2023-11-14T22:13:20.250Z", "level": "INFO", "logger": "onepen.processor", "msg": "plain words"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "arguments", "places"),
    [
        ("partition %d: %d sessions", (3, 9), {"partition": 3}),
        ("input %d-%d: dead letter: %s", (3, 17, "x"), {"partition": 3, "offset": 17}),
        ("ALARM partition_stopped: partition %d stands still: %s", (3, "x"),
         {"alarm": "partition_stopped", "partition": 3}),
        ("ALARM: %s/%d is parked: %s", ("t", 3, "x"), {"alarm": "alarm"}),
        ("assigned: %s", ([1, 2],), {}),
        ("%d things", (3,), {}),
    ],
)  # fmt: skip
def test_places_are_members_of_their_own(message: str, arguments: tuple[object, ...], places: object) -> None:
    found = line(message, *arguments)
    assert {name: found[name] for name in ("partition", "offset", "alarm") if name in found} == places


def test_an_exception_stays_on_its_line() -> None:
    found = line("it failed", failed=True, level=logging.ERROR)
    assert "ValueError: two\nlines" in str(found["exception"])
    assert found["level"] == "ERROR"


def test_where_several_write_to_one_place_a_line_names_the_process() -> None:
    record = logging.LogRecord("onepen", logging.INFO, __file__, 1, "partition %d: read", (3,), None)
    found = json.loads(JsonLines("host-1").format(record))
    assert (found["process"], found["partition"]) == ("host-1", 3)


def test_commands_without_the_option_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, form in (("json", LogFormat.JSON), ("text", LogFormat.TEXT), ("", LogFormat.TEXT)):
        monkeypatch.setenv("ONEPEN_LOG_FORMAT", word)
        assert format_of_environment() is form


@pytest.mark.parametrize(("processors", "port"), [(None, "9465"), ("2", "9466"), ("4", "9468"), ("many", "9465")])
def test_processors_and_sink_of_a_local_stack_do_not_share_a_metrics_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processors: str | None, port: str
) -> None:
    monkeypatch.delenv("ONEPEN_PROCESSOR_WORKERS", raising=False)
    if processors is not None:
        monkeypatch.setenv("ONEPEN_PROCESSOR_WORKERS", processors)
    settings = load_settings(data_dir=tmp_path, dsn="postgresql://u@h/d", metrics_port=9_464)
    assert process_child("sink", settings).env["ONEPEN_METRICS_PORT"] == port
    assert "ONEPEN_METRICS_PORT" not in process_child("processor", settings).env, "it has it from its parent"
    plain = load_settings(data_dir=tmp_path, dsn="postgresql://u@h/d")
    assert "ONEPEN_METRICS_PORT" not in process_child("sink", plain).env
