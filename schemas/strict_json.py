"""JSON at the edges: one strict reader, one canonical writer, one documented treatment of what JSON cannot say.

Refused everywhere: NaN, Infinity, lone surrogates, integers beyond 64 bit, nesting deeper than JSON_DEPTH_MAX,
non-text member names. In tool output (`flatten`) surrogates are replaced by U+FFFD and numbers that JSON lacks become
text, and the places are named so that nothing is changed silently. NUL (U+0000) is text like any other.
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any, NoReturn

import msgspec
import orjson

from onepen.schemas.errors import Invalid
from onepen.schemas.ids import INT64_MAX, INT64_MIN
from onepen.schemas.limits import JSON_DEPTH_MAX

_OPENING = frozenset(b"[{")


def canonical(value: Any) -> bytes:
    """Canonical bytes: members sorted, no blanks, UTF-8. The value must have passed `check` (or come from `parse`)."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def embed(media_type: str, data: bytes) -> Any:
    """Content as a member of a payload: text as text, JSON text unchanged as its value, other bytes as {"base64": ...}.

    The data must fit its media type (the core has refused what does not).
    """
    if media_type == "text/plain":
        return data.decode()
    if media_type == "application/json":
        return orjson.Fragment(data)
    return {"base64": base64.b64encode(data).decode()}


def check(value: Any, field: str, depth: int = 0) -> None:
    """Raise `Invalid` naming the member when `value` is not strict JSON."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _check_text(value, field)
    elif isinstance(value, int):
        if not INT64_MIN <= value <= INT64_MAX:
            raise Invalid(f"{field}: integer does not fit 64 bits", field=field)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Invalid(f"{field}: NaN and Infinity are not JSON", field=field)
    elif isinstance(value, list | tuple | dict):
        _check_nested(value, field, depth)
    else:
        raise Invalid(f"{field}: {type(value).__name__} is not JSON", field=field)


def _check_nested(value: Any, field: str, depth: int) -> None:
    if depth >= JSON_DEPTH_MAX:
        raise Invalid(f"{field}: nested deeper than {JSON_DEPTH_MAX}", field=field)
    if isinstance(value, dict):
        for name, member in value.items():
            if not isinstance(name, str):
                raise Invalid(f"{field}: member names must be text", field=field)
            _check_text(name, field)
            check(member, f"{field}.{name}", depth + 1)
    else:
        for index, member in enumerate(value):
            check(member, f"{field}[{index}]", depth + 1)


def _check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{field}: lone surrogate; not valid Unicode text", field=field) from None


def parse(data: bytes | str, field: str = "json") -> Any:
    """Parse strictly. Raises `Invalid` for what `check` refuses, duplicate members and text that is not JSON."""
    try:
        text = data.decode() if isinstance(data, bytes) else data
    except UnicodeDecodeError:
        raise Invalid(f"{field}: not UTF-8 text", field=field) from None

    def constant(name: str) -> NoReturn:
        raise Invalid(f"{field}: {name} is not JSON", field=field)

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise Invalid(f"{field}: a member name stands twice", field=field)
        return result

    try:
        value = json.loads(text, parse_constant=constant, object_pairs_hook=members)
    except RecursionError:
        raise Invalid(f"{field}: nested deeper than {JSON_DEPTH_MAX}", field=field) from None
    except Invalid:
        raise
    except ValueError as error:
        raise Invalid(f"{field}: not JSON ({error})", field=field) from None
    check(value, field)
    return value


def parse_object(data: bytes) -> dict[str, Any] | None:
    """The inside reader: a JSON object within the depth limit, or None. Used on every report event, so it is quick."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and not too_deep(data) else None


def members_unchanged(data: bytes) -> dict[str, Any]:
    """The members of a JSON object that `parse_object` has read, each as the text it was: no number is rounded."""
    raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return {name: orjson.Fragment(bytes(value)) for name, value in raw.items()}


def well_formed(data: bytes) -> bool:
    """True when `data` is strict JSON text (UTF-8, no NaN, no lone surrogates) within the depth limit."""
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return not too_deep(data)


_TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def too_deep(data: bytes) -> bool:
    """True when the nesting of `data` exceeds the limit, judged outside of strings. It must be JSON: other bytes, with
    quotes that nothing closes, take time with the square of their length."""
    if len(data) <= 2 * JSON_DEPTH_MAX or data.count(b"[") + data.count(b"{") <= JSON_DEPTH_MAX:
        return False
    depth = 0
    for bracket in _TEXTS.sub(b"", data).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in _OPENING else -1
        if depth > JSON_DEPTH_MAX:
            return True
    return False


def flatten(value: Any, field: str = "result") -> tuple[Any, list[str]]:
    """Make a tool's output strict JSON; returns it with the paths of what had to be changed.

    Lone surrogates become U+FFFD, NaN / Infinity and integers beyond 64 bit become text. Other types raise `Invalid`.
    """
    flagged: list[str] = []
    return _flatten(value, field, flagged, 0), flagged


def _flatten(value: Any, field: str, flagged: list[str], depth: int) -> Any:
    if isinstance(value, str):
        clean = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if clean != value:
            flagged.append(field)
        return clean
    if isinstance(value, bool) or value is None:
        return value
    if (isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        flagged.append(field)
        return repr(value)
    if isinstance(value, int | float):
        return value
    if depth >= JSON_DEPTH_MAX:
        raise Invalid(f"{field}: nested deeper than {JSON_DEPTH_MAX}", field=field)
    if isinstance(value, dict):
        return _flatten_members(value, field, flagged, depth)
    if isinstance(value, list | tuple):
        return [_flatten(member, f"{field}[{i}]", flagged, depth + 1) for i, member in enumerate(value)]
    raise Invalid(f"{field}: {type(value).__name__} is not JSON", field=field)


def _flatten_members(value: dict[Any, Any], field: str, flagged: list[str], depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, member in value.items():
        clean = _flatten(str(name), field, flagged, depth)
        if not isinstance(name, str):
            flagged.append(f"{field}.{clean}")
        if clean in result:
            raise Invalid(f"{field}: the member name {clean!r} would stand twice", field=field)
        result[clean] = _flatten(member, f"{field}.{clean}", flagged, depth + 1)
    return result
