"""Where output goes: data to stdout in the format asked for, messages to stderr; nothing is printed past this module.

Rule: text is made `printable` here, whatever it is; JSON is escaped. Colours only on a terminal and never with
NO_COLOR. A reader that goes away (`| head`) ends the command quietly.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TextIO

from onepen.cli.terminal_text import json_text, printable

_WORD_STARTS = re.compile(r"(?<=[a-z])(?=[A-Z])")
_COLOURS = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}


class Format(StrEnum):
    """`text` for people, `json` one document, `jsonl` one JSON value a line."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


class OutputClosed(Exception):
    """The reader of stdout went away."""


def write_data(text: str) -> None:
    """Write one or more lines to stdout, at once. The text must have passed `printable` or `json_text`."""
    _write(sys.stdout, text)


def note(text: str) -> None:
    """One message on stderr."""
    _write(sys.stderr, printable(text, lines=True))


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(_encodable(text, stream) + "\n")
        stream.flush()
    except BrokenPipeError:
        raise OutputClosed from None


def _encodable(text: str, stream: TextIO) -> str:
    """A terminal whose encoding lacks a character (LANG=C) gets an escape instead of an exception."""
    encoding = stream.encoding or "utf-8"
    if encoding.lower().replace("-", "") == "utf8":
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)


def colours_wanted(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that may be coloured."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """`text`, already printable, in a colour where colours are wanted."""
    if not colours_wanted(stream or sys.stdout):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def show_record(record: Mapping[str, Any], form: Format) -> None:
    """One record: aligned `name  value` lines, or a JSON object."""
    if form is not Format.TEXT:
        write_data(json_text(record, indent=form is Format.JSON))
        return
    width = max((len(name) for name in record), default=0)
    for name, value in record.items():
        if value is not None:
            write_data(f"{coloured(printable(name).ljust(width), 'dim')}  {cell(value)}")


def show_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], form: Format, *, empty: str) -> None:
    """Many records: a table of `columns`, a JSON array, or one JSON object a line. `empty` is said on stderr."""
    if form is Format.JSONL:
        for row in rows:
            write_data(json_text(row))
        return
    every = list(rows)
    if form is Format.JSON:
        write_data(json_text(every, indent=True))
    elif not every:
        note(empty)
    else:
        _show_table([[cell(row.get(name)) for name in columns] for row in every], columns)


def _show_table(cells: Sequence[Sequence[str]], columns: Sequence[str]) -> None:
    from rich.cells import cell_len

    heads = [_WORD_STARTS.sub(" ", name).replace("_", " ").upper() for name in columns]
    widths = [max(cell_len(line[i]) for line in [heads, *cells]) for i in range(len(columns))]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join(text + " " * (widths[i] - cell_len(text)) for i, text in enumerate(line)).rstrip()

    write_data(coloured(aligned(heads), "bold"))
    for line in cells:
        write_data(aligned(line))


def cell(value: Any) -> str:
    """One value on one line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict | list | tuple):
        return json_text(value)
    return printable(str(value))
