"""What may reach a terminal: one function for text, one for JSON, used by everything that prints.

Rule: content of sessions, titles, ids, file names and error messages are other people's text. Control characters
(C0, C1, ESC and so every escape sequence, CR), bidirectional and other invisible format characters, line and paragraph
separators and lone surrogates are shown as escapes (`\\x1b`, `\\u202e`) and never sent. Nothing is dropped silently.
Zero-width joiners stay: scripts and emoji need them, and they move nothing.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import orjson

_KEPT = frozenset("\u200c\u200d")
_UNSAFE_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
# Everything ASCII that is printable, and the common letters, without a look at each character.
_QUICK = re.compile(r"[\x20-\x7e\u00a1-\u00ac\u00ae-\u02ff]*")


def printable(text: str, *, lines: bool = False) -> str:
    """`text` fit for a terminal, on one line; with `lines`, line feeds and tabs stay as they are."""
    if _QUICK.fullmatch(text):
        return text
    kept = _KEPT | {"\n", "\t"} if lines else _KEPT
    return "".join(c if c in kept or _is_safe(c) else _escape(c) for c in text)


def _is_safe(character: str) -> bool:
    return character in _KEPT or unicodedata.category(character) not in _UNSAFE_CATEGORIES


def _escape(character: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character)
    if named is not None:
        return named
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def json_text(value: Any, *, indent: bool = False) -> str:
    """JSON that a parser reads back unchanged and a terminal can show: what `printable` escapes is escaped as JSON."""
    option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    text = orjson.dumps(value, option=option, default=str).decode()
    if _QUICK.fullmatch(text):
        return text
    # Such characters can stand inside of strings only, where \uXXXX means the same; the line feeds are ours.
    return "".join(c if c == "\n" or _is_safe(c) else _json_escape(c) for c in text)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))
