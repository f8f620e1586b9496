"""The content argument: text itself, `-` for stdin, `@file` for a file, `@@text` for text that begins with @.

Rule: content is bytes that must be UTF-8 text (or strict JSON with --json); it is judged before anything is sent. A
terminal is never waited for: `-` without a pipe is refused. What fits no record is read only where there is an object
store for it (`bytes_max`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from onepen.schemas.errors import Invalid
from onepen.schemas.limits import RECORD_BYTES_MAX
from onepen.schemas.strict_json import parse


def read_content(
    argument: str, *, as_json: bool = False, field: str = "content", bytes_max: int = RECORD_BYTES_MAX
) -> Any:
    """The content that `argument` names: text, or with `as_json` the JSON value. Raises `Invalid` naming `field`."""
    data = read_bytes(argument, field=field, bytes_max=bytes_max)
    if as_json:
        return parse(data, field)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"{field}: not UTF-8 text (byte {error.start})", field=field) from None


def read_bytes(argument: str, *, field: str = "content", bytes_max: int = RECORD_BYTES_MAX) -> bytes:
    """The content that `argument` names, as bytes. Raises `Invalid` naming `field`."""
    # One byte more than may be sent is enough to know that it is too much.
    data = _bytes_of(argument, field, bytes_max + 1)
    if len(data) > bytes_max:
        store = "" if bytes_max > RECORD_BYTES_MAX else "; larger content needs an object store (ONEPEN_OBJECTS_ROOT)"
        raise Invalid(f"{field}: more than {bytes_max // 1024} KiB{store}", field=field)
    return data


def read_document(argument: str, field: str) -> bytes:
    """The bytes of a file or, for `-`, of stdin: for commands whose argument is a file."""
    read_max = RECORD_BYTES_MAX + 1
    return _stdin(field, read_max) if argument == "-" else _file(argument, field, read_max)


def _bytes_of(argument: str, field: str, read_max: int) -> bytes:
    if argument == "-":
        return _stdin(field, read_max)
    if argument.startswith("@@"):
        return _argument_bytes(argument[1:])
    if argument.startswith("@"):
        return _file(argument[1:], field, read_max)
    return _argument_bytes(argument)


def _argument_bytes(argument: str) -> bytes:
    # Python keeps bytes of argv that are no UTF-8 as surrogates: give them back as they came.
    return argument.encode("utf-8", "surrogateescape")


def _stdin(field: str, read_max: int) -> bytes:
    if sys.stdin is None or sys.stdin.isatty():
        raise Invalid(f"{field}: '-' reads stdin, and stdin is a terminal: pipe something into it", field=field)
    return sys.stdin.buffer.read(read_max)


def _file(name: str, field: str, read_max: int) -> bytes:
    try:
        with Path(name).open("rb") as stream:
            return stream.read(read_max)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Invalid(f"{field}: cannot read {name!r}: {reason}", field=field) from None
