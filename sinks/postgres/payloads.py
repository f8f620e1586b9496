"""JSON text of the log in two forms: `jsonb` text for queries, and the received bytes where those must be kept.

Rule: `received(*stored(raw)) == raw` for every JSON text, always. `raw` is left out only when canonical rendering
of the parsed value gives the same bytes *and* jsonb cannot change the value: no U+0000 (jsonb has none), no number
with an exponent and no negative zero (jsonb rewrites them). The look for these is a scan of the bytes that may see
one where there is none (then the bytes are kept, which is never wrong) but never misses one.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from onepen.schemas.errors import Poison
from onepen.schemas.strict_json import canonical, too_deep

__all__ = ["check_writable", "parsed", "received", "stored"]

NUL: Final = "\x00"
NUL_SHOWN: Final = "�"

# In compact JSON a number follows '[', ',' or ':'; the same bytes inside of a text only cost the space of `raw`.
_JSONB_REWRITES: Final = re.compile(rb"\\u0000|[\[,:]-0(?:[.,\]}]|$)|[\[,:]-0\.0|[\[,:]-?[0-9.]+[eE]")


def parsed(raw: bytes) -> Any:
    """The value of JSON text of the log. Raises `Poison("payload_not_json")`."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Poison("payload_not_json", str(error)) from None


def stored(raw: bytes, value: Any) -> tuple[str, bytes | None]:
    """What goes into (`payload`, `raw`): jsonb text, and the bytes or None. `value` is `parsed(raw)`.

    Raises `Poison("payload_too_deep")`: JSON may be read that is nested deeper than what can be written.
    """
    text = _rendered(value)
    if text == raw and _JSONB_REWRITES.search(raw) is None:
        return text.decode(), None
    if b"\\u0000" in raw:
        text = _rendered(_without_nul(value))
    return text.decode(), raw


def check_writable(raw: bytes, value: Any) -> None:
    """Raise what `stored` would. Only nesting can be refused, and little of it never is."""
    if too_deep(raw):
        stored(raw, value)


def received(payload: str, raw: bytes | None) -> bytes:
    """The bytes that the log had: `payload` is the text of the jsonb column."""
    return canonical(orjson.loads(payload)) if raw is None else raw


def _rendered(value: Any) -> bytes:
    try:
        return canonical(value)
    except TypeError as error:  # a parsed value has no foreign types: only its depth can be refused
        raise Poison("payload_too_deep", str(error)) from None


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(NUL, NUL_SHOWN)
    if isinstance(value, dict):
        return {name.replace(NUL, NUL_SHOWN): _without_nul(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_without_nul(member) for member in value]
    return value
