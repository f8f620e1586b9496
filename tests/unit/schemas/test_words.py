"""Ids, partitions and strict JSON: what fits, what is refused, and values that others have computed."""

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepen.schemas import ids
from onepen.schemas.errors import Invalid
from onepen.schemas.limits import JSON_DEPTH_MAX
from onepen.schemas.partitioning import murmur2, partition_of
from onepen.schemas.strict_json import (
    canonical,
    check,
    embed,
    flatten,
    members_unchanged,
    parse,
    parse_object,
    too_deep,
    well_formed,
)

# -- ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", "x" * 128, "!", "~", "a/b", "%2F", "session-42", "run\\1", '"'])
def test_ids_that_fit(text: str) -> None:
    assert ids.id_ok(text)
    assert ids.check_id(text, "session_id") is text


@pytest.mark.parametrize(
    "text",
    ["", " ", "a b", "a\n", "\na", "a\0", "x" * 129, "é", "\u2028", "\x7f", "\x1f", "a\u0301", "\ud800", "\u0660"],
)
def test_ids_that_do_not_fit(text: str) -> None:
    assert not ids.id_ok(text)
    with pytest.raises(Invalid) as caught:
        ids.check_id(text, "session_id")
    assert caught.value.field == "session_id"
    assert "session_id" in str(caught.value)


@pytest.mark.parametrize("value", [None, 1, b"a", ["a"], 1.0, True])
def test_an_id_is_text_and_is_never_converted(value: object) -> None:
    assert not ids.id_ok(value)
    with pytest.raises(Invalid):
        ids.check_id(value, "x")


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, True, 1.0, "1", None])
def test_integers_are_64_bit_and_no_truth_values(value: object) -> None:
    with pytest.raises(Invalid):
        ids.check_int64(value, "tenant_id")


def test_integers_at_the_bounds() -> None:
    assert [ids.check_int64(n, "n") for n in (2**63 - 1, -(2**63), 0)] == [2**63 - 1, -(2**63), 0]


def test_run_ids_are_derived_and_differ() -> None:
    assert re.fullmatch(r"run-[0-9a-f]{32}", ids.run_id(7, "session-42", 1))
    assert ids.run_id(7, "session-42", 1) == ids.run_id(7, "session-42", 1)
    found = {
        ids.run_id(tenant, session, no) for tenant in (1, 11) for session in ("1", "1/1", "1/11") for no in (1, 11)
    }
    assert len(found) == 12
    assert ids.run_id(7, "session-42", 1) == "run-e2f6ca7e6e3f3c9cca111a56f1a4784c", "pinned: a replay derives it again"


def test_output_keys_are_unambiguous() -> None:
    assert ids.output_key(1, "2/3") == b"1/2/3"
    assert ids.output_key(12, "3") != ids.output_key(1, "2/3")


# -- partitions -----------------------------------------------------------------------------------------------------

# Values of org.apache.kafka.common.utils.Utils.murmur2, as signed 32-bit numbers (Kafka's own UtilsTest).
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", JAVA)
def test_b38_murmur2_as_java_computes_it(key: bytes) -> None:
    assert murmur2(key) == JAVA[key] & 0xFFFFFFFF


def test_a_partition_is_the_positive_part_of_the_hash() -> None:
    assert partition_of(b"21", 12) == (-973932308 & 0x7FFFFFFF) % 12
    assert {partition_of(f"session-{n}".encode(), 12) for n in range(500)} == set(range(12))
    assert partition_of(b"", 5) == (murmur2(b"") & 0x7FFFFFFF) % 5


# -- strict JSON ----------------------------------------------------------------------------------------------------

DEEP = "[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX
TOO_DEEP = "[" + DEEP + "]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("NaN", "NaN"), ("Infinity", "Infinity"), ("-Infinity", "Infinity"), ("[1e999]", "Infinity"),
        ('"\\ud800"', "surrogate"), ('"\\udc00\\ud800"', "surrogate"), ('{"\\ud800": 1}', "surrogate"),
        ("9223372036854775808", "64 bits"), ("-9223372036854775809", "64 bits"),
        (TOO_DEEP, "deeper"), ("[" * 100_000, "deeper"), ('{"a": 1, "a": 2}', "twice"),
        ("", "not JSON"), ("{", "not JSON"), ("{'a': 1}", "not JSON"), ("[1,]", "not JSON"), ("1 2", "not JSON"),
        (b"\xff", "UTF-8"), ("\ufeff{}", "not JSON"),
    ],
)  # fmt: skip
def test_what_strict_json_refuses(text: str | bytes, told: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse(text, "content")
    assert told in str(caught.value)
    assert (caught.value.field or "").startswith("content")


@pytest.mark.parametrize(
    "text",
    ["null", "9223372036854775807", "-9223372036854775808", '"\\u0000"', '"\\ud83d\\ude00"', DEEP, '{"a": {"a": 1}}'],
)
def test_what_strict_json_accepts(text: str) -> None:
    assert parse(text) == json.loads(text)
    assert well_formed(text.encode())


def test_a_refusal_names_the_member() -> None:
    with pytest.raises(Invalid) as caught:
        check({"a": [{"b": 2**64}]}, "content")
    assert caught.value.field == "content.a[0].b"


@pytest.mark.parametrize("value", [b"x", {1}, object(), {1: 2}, float("nan"), "\ud800", 2**64])
def test_values_that_are_no_json(value: object) -> None:
    with pytest.raises(Invalid):
        check(value, "v")


def test_nesting_is_judged_outside_of_strings() -> None:
    assert not too_deep(DEEP.encode())
    assert too_deep(TOO_DEEP.encode())
    assert too_deep(b'{"a":' * 65 + b"1" + b"}" * 65)
    assert not too_deep(orjson.dumps("[" * 1000))
    assert not too_deep(orjson.dumps({"\\": '"' + "[{" * 200 + "\\"}))
    assert not too_deep(b"[" + b"[]," * 5000 + b"[]]"), "wide is not deep"


@settings(max_examples=200)
@given(
    value=st.recursive(
        st.text(alphabet='[]{}"\\a', max_size=6) | st.integers(0, 9),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner, max_size=3)
        ),
        max_leaves=40,
    ),
    around=st.integers(0, 70),
)  # fmt: skip
def test_nesting_is_judged_as_by_counting(value: Any, around: int) -> None:
    def depth(v: Any) -> int:
        inner = list(v.values()) if isinstance(v, dict) else v if isinstance(v, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    for _ in range(around):
        value = [value]
    assert too_deep(orjson.dumps(value)) == (depth(value) > JSON_DEPTH_MAX)


def test_a_text_that_never_ends_is_refused_at_once() -> None:
    """Quotes that nothing closes behind many brackets: a search for texts would begin anew at each of them."""
    hostile = b"[" * 65 + b'"' + b'\\"' * 120_000
    assert not well_formed(hostile)
    assert parse_object(hostile) is None


def test_objects_of_workers() -> None:
    assert parse_object(b'{"a": 1}') == {"a": 1}
    for bad in (b"", b"[]", b"1", b"null", b"{", b'{"a": NaN}', b"\xff", b'{"a":"\\ud800"}', TOO_DEEP.encode()):
        assert parse_object(bad) is None


def test_members_keep_their_text() -> None:
    raw = b'{"b": 123456789012345678901234567890, "a": [1e15, "\\u0041"]}'
    assert canonical(members_unchanged(raw)) == b'{"a":[1e15, "\\u0041"],"b":123456789012345678901234567890}'


def test_canonical_bytes_do_not_depend_on_the_order_of_members() -> None:
    assert canonical({"b": 1, "a": [{"d": 1, "c": 2}]}) == canonical({"a": [{"c": 2, "d": 1}], "b": 1})


def test_embedded_content() -> None:
    assert canonical({"c": embed("application/json", b'{"a":  1}')}) == b'{"c":{"a":  1}}'
    assert canonical({"c": embed("text/plain", b"a\0")}) == b'{"c":"a\\u0000"}'
    assert canonical({"c": embed("image/png", b"\xff")}) == b'{"c":{"base64":"/w=="}}'


def test_b42_tool_output_is_made_strict_and_the_places_are_named() -> None:
    value, flagged = flatten({"a": ["ok\ud800", float("nan")], "b": 2**64, "c": float("-inf"), "\udc00": 1})
    assert value["a"] == ["ok\ufffd", "nan"]
    assert value["b"] == "18446744073709551616"
    assert value["c"] == "-inf"
    assert "\ufffd" in value
    assert set(flagged) >= {"result.a[0]", "result.a[1]", "result.b", "result.c"}
    check(value, "result")


def test_tool_output_that_is_strict_is_untouched() -> None:
    value = {"a": [1, 1.5, None, True, "\0 😀"], "b": {}}
    assert flatten(value) == (value, [])


def test_names_that_are_not_text_become_text_and_are_named() -> None:
    assert flatten({1: "a"}) == ({"1": "a"}, ["result.1"])


@pytest.mark.parametrize("value", [dict.fromkeys(("\ud800", "\ud801")), {1: "a", "1": "b"}])
def test_no_member_is_lost_because_two_names_become_one(value: Any) -> None:
    with pytest.raises(Invalid, match="twice"):
        flatten(value)


@pytest.mark.parametrize("value", [b"x", {1}, object()])
def test_tool_output_of_other_types_is_refused(value: object) -> None:
    with pytest.raises(Invalid):
        flatten({"a": value})


def test_tool_output_too_deep_is_refused() -> None:
    value: Any = 1
    for _ in range(JSON_DEPTH_MAX + 1):
        value = [value]
    with pytest.raises(Invalid):
        flatten(value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters(codec=None), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200)
@given(value=_JSON)
def test_whatever_a_tool_returns_becomes_json_that_everybody_reads(value: Any) -> None:
    flat, _ = flatten(value)
    check(flat, "result")
    data = canonical(flat)
    assert well_formed(data)
    assert parse(data) == orjson.loads(data)
