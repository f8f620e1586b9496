"""jsonb text and received bytes: nothing is lost, whatever JSON the log holds."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepen.schemas.errors import Poison
from onepen.schemas.strict_json import canonical
from onepen.sinks.postgres.payloads import parsed, received, stored

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES)


def as_jsonb(text: str) -> str:
    """A model of what jsonb does to numbers, member order and blanks. (The real one: test_sink_writer.)"""

    def number(literal: str) -> object:
        value = float(literal)
        if value == 0:
            return 0.0 if "." in literal else 0
        return int(value) if "e" in literal.lower() and value.is_integer() else value

    value = json.loads(text, parse_float=number, parse_int=int)
    return json.dumps(value, ensure_ascii=False)


@given(OBJECTS, st.sampled_from(["canonical", "as_given", "spaced"]))
def test_the_received_bytes_come_back(value: object, style: str) -> None:
    raw = {
        "canonical": lambda: canonical(value),
        "as_given": lambda: orjson.dumps(value),
        "spaced": lambda: json.dumps(value).encode(),
    }[style]()
    payload, kept = stored(raw, parsed(raw))
    assert "\\u0000" not in payload.replace("\\\\", "")
    assert received(as_jsonb(payload), kept) == raw


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (b'{"a":1,"b":[true,null,"x"]}', False),
        (b'{"b":0.25,"digest":"5e77e1"}', False),
        (b'{"b":1,"a":2}', True),
        (b'{"a": 1}', True),
        (b'{"a":1e16}', True),
        (b'{"a":-0.0}', True),
        (b'{"a":1.0}', False),
        (b'{"a":"\\u0000"}', True),
        (b'{"a":"\\\\u0000"}', True),
        (b'{"a":1,"a":2}', True),
    ],
)
def test_bytes_are_kept_only_when_needed(raw: bytes, kept: bool) -> None:
    payload, extra = stored(raw, parsed(raw))
    assert (extra is not None) is kept
    assert extra in (None, raw)
    assert received(payload, extra) == raw


def test_b41_nul_is_shown_in_names_and_values() -> None:
    raw = b'{"a\\u0000":["\\u0000",{"b":"\\u0000\\\\u0000"}]}'
    payload, kept = stored(raw, parsed(raw))
    assert json.loads(payload) == {"a�": ["�", {"b": "�\\u0000"}]}
    assert kept == raw


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"a":1e999}', b'{"a":NaN}'])
def test_what_is_not_json_is_poison(raw: bytes) -> None:
    with pytest.raises(Poison):
        parsed(raw)
