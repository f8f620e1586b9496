"""Nothing that moves a cursor, sets a title, reverses text or writes a clipboard reaches the terminal."""

import unicodedata

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepen.cli.terminal_text import json_text, printable

HOSTILE = {
    "OSC 52 clipboard": ("\x1b]52;c;ZXZpbA==\x07", "\\x1b]52;c;ZXZpbA==\\x07"),
    "title": ("\x1b]0;root\x1b\\", "\\x1b]0;root\\x1b\\"),
    "cursor": ("a\x1b[2J\x1b[1;1Hb", "a\\x1b[2J\\x1b[1;1Hb"),
    "C1 CSI": ("\x9b31m", "\\x9b31m"),
    "bidi override": ("user\u202egpj.exe", "user\\u202egpj.exe"),
    "bidi isolate": ("\u2066x\u2069", "\\u2066x\\u2069"),
    "marks": ("\u200e\u200f\u061c", "\\u200e\\u200f\\u061c"),
    "carriage return": ("paid\rfree", "paid\\rfree"),
    "backspace": ("ab\x08c", "ab\\x08c"),
    "NUL and DEL": ("\x00\x7f", "\\x00\\x7f"),
    "line separators": ("a\u2028b\u2029c\x85d", "a\\u2028b\\u2029c\\x85d"),
    "tag characters": ("\U000e0041", "\\U000e0041"),
    "zero width": ("a\u200bb\ufeffc\u00ad", "a\\u200bb\\ufeffc\\xad"),
    "lone surrogate": ("a\ud800b", "a\\ud800b"),
    "newline in a field": ("a\nonepen: all is well", "a\\nonepen: all is well"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_and_not_sent(name: str) -> None:
    text, shown = HOSTILE[name]
    assert printable(text) == shown


def test_ordinary_text_stays() -> None:
    text = "Grüße, 東京, नमस्ते, 👩‍👩‍👧, می‌خواهم, a b"
    assert printable(text) == text


def test_lines_stay_lines_where_they_may() -> None:
    assert printable("a\n\tb\rc\x1b", lines=True) == "a\n\tb\\rc\\x1b"


@given(st.text())
def test_no_text_gets_through(text: str) -> None:
    shown = printable(text)
    assert all(unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")


@given(
    st.recursive(
        st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    )
)
def test_json_is_safe_and_means_the_same(value: object) -> None:
    shown = json_text(value)
    assert orjson.loads(shown) == value
    assert printable(shown) == shown
    assert "\n" not in shown
    assert orjson.loads(json_text(value, indent=True)) == value
