"""The content argument: what it may name, and one line naming the field for everything else."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onepen.cli.content import read_bytes, read_content, read_document
from onepen.schemas.errors import Invalid
from onepen.schemas.limits import RECORD_BYTES_MAX


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes, *, terminal: bool = False) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_text_stays_as_it_is() -> None:
    assert read_content("Grüße\n, - and @ inside") == "Grüße\n, - and @ inside"


def test_a_dash_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "zwölf\n".encode())
    assert read_content("-") == "zwölf\n"


def test_a_terminal_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"", terminal=True)
    with pytest.raises(Invalid, match="content: '-' reads stdin, and stdin is a terminal"):
        read_content("-")


def test_a_file_and_text_that_begins_with_at(tmp_path: Path) -> None:
    file = tmp_path / "question.txt"
    file.write_text("from a file", "utf-8")
    assert read_content(f"@{file}") == "from a file"
    assert read_content("@@here") == "@here"
    assert read_document(str(file), "policy") == b"from a file"


def test_json_is_read_strictly() -> None:
    assert read_content('{"a": [1, 2.5, null]}', as_json=True) == {"a": [1, 2.5, None]}
    for bad in ("{", "NaN", '{"a": 1, "a": 2}', str(2**64), "[" * 65 + "]" * 65):
        with pytest.raises(Invalid, match=r"^content") as caught:
            read_content(bad, as_json=True)
        assert str(caught.value.field).startswith("content")


def test_bytes_that_are_no_text_are_refused_with_their_place() -> None:
    # argv with a byte that is no UTF-8, as Python hands it over.
    with pytest.raises(Invalid, match=r"^content: not UTF-8 text \(byte 2\)$"):
        read_content(b"ab\xff".decode("utf-8", "surrogateescape"))
    assert read_bytes(b"ab\xff".decode("utf-8", "surrogateescape")) == b"ab\xff"


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"x" * (RECORD_BYTES_MAX + 10_000))
    with pytest.raises(Invalid, match=r"^content: more than 256 KiB; larger content needs an object store"):
        read_content("-")


@pytest.mark.parametrize("name", ["missing.txt", ".", "a\x00b"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Invalid, match=r"^content: cannot read "):
        read_content(f"@{name}")
