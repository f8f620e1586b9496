"""Formats, tables, log files, and what each kind of error means for the exit code."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from onepen.cli import failures, output
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.log_files import LogFile
from onepen.cli.output import Format, OutputClosed
from onepen.cli.rendering import run_exit_code, show_event, terminal_status
from onepen.schemas.codec import seal
from onepen.schemas.errors import Fatal, Fenced, Invalid, Poison, Retryable, UnknownOutcome
from onepen.schemas.events import Cause, Event, EventDraft

ROWS: list[dict[str, Any]] = [{"name": "a\x1b[31m", "count": 1}, {"name": "東京", "count": None}]


def test_a_table_is_aligned_and_tame(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_rows(ROWS, ("name", "count"), Format.TEXT, empty="nothing")
    assert capsys.readouterr().out.splitlines() == ["NAME       COUNT", "a\\x1b[31m  1", "東京       -"]


def test_json_formats(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_rows(iter(ROWS), ("name",), Format.JSONL, empty="")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS
    output.show_rows(ROWS, ("name",), Format.JSON, empty="")
    assert json.loads(capsys.readouterr().out) == ROWS
    output.show_rows([], ("name",), Format.JSON, empty="nothing")
    assert json.loads(capsys.readouterr().out) == []
    output.show_rows([], ("name",), Format.TEXT, empty="nothing")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "nothing\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_for_terminals_that_want_them(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.coloured("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"
    assert output.coloured("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv(variable, value)
    assert output.coloured("x", "red", Terminal()) == "x"


def test_a_terminal_that_lacks_a_character_gets_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.write_data("Grüße")
    assert raw.getvalue() == b"Gr\\xfc\\xdfe\n"


def test_a_closed_pipe_is_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(OutputClosed):
        output.write_data("x")


ERRORS: list[tuple[Exception, ExitCode]] = [
    (Failure("not there", ExitCode.NOT_FOUND), ExitCode.NOT_FOUND),
    (Invalid("field: wrong", field="field"), ExitCode.USAGE),
    (UnknownOutcome("who knows"), ExitCode.NO_ANSWER),
    (Retryable("later"), ExitCode.NO_ANSWER),
    (Fenced("another owner"), ExitCode.CONFLICT),
    (Fatal("look at it"), ExitCode.FINDING),
    (Poison("garbage"), ExitCode.FINDING),
    (TimeoutError(), ExitCode.NO_ANSWER),
    (ConnectionRefusedError(111, "Connection refused"), ExitCode.NO_ANSWER),
    (PermissionError(13, "Permission denied"), ExitCode.FINDING),
    (ZeroDivisionError("a defect"), ExitCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda one: type(one).__name__)
def test_errors_are_one_line_and_a_code(error: Exception, code: ExitCode, capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.report(error) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("onepen: ")
    assert said.err.count("\n") == 1


def event(payload: bytes, kind: str = "run.finished") -> Event:
    draft = EventDraft(
        tenant_id=1,
        session_id="s",
        run_id="run-1",
        run_no=1,
        seq=3,
        type=kind,
        generation=1,
        at_ms=1_700_000_000_123,
        cause=Cause(0, 7, 0),
        payload=payload,
    )
    return seal(draft, bytes(32))[0]


def test_events_in_text_and_in_the_shape_of_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    finished = event(b'{"terminalStatus":"completed","output":"\\u001b]0;x\\u0007\\u202e"}')
    show_event(finished, Format.TEXT)
    line = capsys.readouterr().out
    assert "run 1 #3" in line
    assert not set(line) & set("\x1b\x07\u202e")
    show_event(finished, Format.JSONL)
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["sessionId", "runId", "seq", "type", "payload"]
    assert shown["payload"]["output"] == "\x1b]0;x\x07\u202e"
    assert run_exit_code(terminal_status(finished)) == ExitCode.OK
    assert run_exit_code(terminal_status(event(b'{"terminalStatus":"failed"}'))) == ExitCode.FINDING


def test_log_files_are_read_from_their_end_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "processor.log"
    log = LogFile(path, "processor")
    assert log.last(3) == []
    path.write_bytes(b"one\ntwo\n\x1b[31mthree\nhalf")
    assert log.last(2) == ["processor  two", "processor  \\x1b[31mthree"]
    assert log.more() == []
    with path.open("ab") as stream:
        stream.write(b" done\r\nnext\n")
    assert log.more() == ["processor  half done", "processor  next"]
    path.write_bytes(b"fresh\n")
    assert log.more() == ["processor  fresh"]
