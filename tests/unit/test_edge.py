"""What users may hand in: strict, one sentence per error naming the field, sizes as encoded."""

from __future__ import annotations

import time
from typing import Any

import pytest

from onepen.processors.input_rules import broken_rule
from onepen.schemas import codec
from onepen.schemas.edge import content_value, encode_input, parse_request, request_from_json, to_content
from onepen.schemas.errors import Invalid
from onepen.schemas.inputs import JSON, OPAQUE, TEXT, Input
from onepen.schemas.limits import RECORD_BYTES_MAX
from onepen.schemas.policies import DEFAULT_POLICY

DIGEST = "a" * 64


def made(**fields: Any) -> Input:
    return parse_request({"mode": "prompt", "session_id": "s", **fields}).to_input(tenant_id=1, user_id=2)


@pytest.mark.parametrize(
    ("fields", "field", "sentence"),
    [
        ({"mode": "promt"}, "mode", "must be 'prompt', 'steer'"),
        ({"session_id": ""}, "session_id", "must not be empty"),
        ({"session_id": "a b"}, "session_id", "only printable ASCII"),
        ({"session_id": "é"}, "session_id", "only printable ASCII"),
        ({"session_id": "x" * 129}, "session_id", "longer than 128"),
        ({"session_id": 5}, "session_id", "must be a valid string"),
        ({"session_id": None}, "session_id", "must be a valid string"),
        ({"content": "a\ud800"}, "content", "lone surrogate"),
        ({"content": {"a": [float("nan")]}}, "content.a[0]", "NaN"),
        ({"content": {"n": 2**63}}, "content.n", "64 bits"),
        ({"content": {1: 2}}, "content", "member names must be text"),
        ({"content": object()}, "content", "is not JSON"),
        ({"content": None}, "content", "needs content or a pointer"),
        ({"content": "x", "source": ""}, "source", "at least 1"),
        ({"content": "x", "ttl_ms": "5"}, "ttl_ms", "must be a valid integer"),
        ({"content": "x", "ttl_ms": True}, "ttl_ms", "must be a valid integer"),
        ({"content": "x", "ttl_ms": 0}, "ttl_ms", "greater than or equal to 1"),
        ({"content": "x", "tenant_id": 2**63}, "tenant_id", "less than or equal"),
        ({"content": "x", "tenant_id": 0}, "tenant_id", "greater than or equal"),
        ({"content": "x", "on_busy": "wait"}, "on_busy", "must be 'queue'"),
        ({"content": "x", "colour": "red"}, "colour", "is no member"),
        ({"content": "x", "target_kind": "active"}, "target_kind", "has no meaning in mode prompt"),
        ({"content": "x", "pointer": {"uri": "u", "digest": DIGEST, "size_bytes": 1}}, "pointer", "one of them"),
        ({"pointer": {"uri": "u", "digest": "zz", "size_bytes": 1}}, "pointer.digest", "64 hex digits"),
        ({"content": "x", "media_type": "application/pdf"}, "media_type", "bytes only"),
        ({"mode": "abort", "content": None}, "target_kind", "an abort names its target"),
        ({"mode": "abort", "target_kind": "run"}, "target_id", "names it"),
        ({"mode": "abort", "target_kind": "active", "target_id": "r"}, "target_id", "no meaning"),
        ({"mode": "abort", "target_kind": "active", "content": "x"}, "content", "has no meaning in mode abort"),
        ({"mode": "answer", "action_key": "k", "decision": "approve"}, "args_digest", "an answer needs it"),
        ({"mode": "answer", "action_key": "k", "args_digest": "d", "decision": "yes"}, "decision", "'approve', 'deny'"),
        ({"content": "x", "expected_run_id": "r"}, "expected_run_id", "on_busy steer only"),
        ({"content": "x", "on_busy": "queue", "expected_run_id": "r"}, "expected_run_id", "on_busy steer only"),
        ({"mode": "follow_up", "content": "x", "expected_run_id": "r"}, "expected_run_id", "on_busy steer only"),
        ({"mode": "steer", "content": "x", "expected_run_id": "a b"}, "expected_run_id", "printable ASCII"),
        ({"mode": "auto"}, "content", "an auto needs content"),
        ({"content": "x", "retry_of": "r"}, "retry_of", "takes over the content"),
        ({"pointer": {"uri": "u", "digest": DIGEST, "size_bytes": 1}, "retry_of": "r"}, "retry_of", "takes over"),
        ({"mode": "auto", "retry_of": "r"}, "retry_of", "only a prompt"),
        ({"retry_of": "r", "erasable": True}, "erasable", "no content of its own"),
        ({"content": "x", "recovery": "again"}, "recovery", "must be 'resume'"),
        ({"content": "x", "erasable": "yes"}, "erasable", "must be a valid boolean"),
        ({"content": "x", "parent": {"session_id": "p"}}, "parent", "is no member"),
        ({"mode": "erase", "content": "x"}, "content", "has no meaning in mode erase"),
        ({"mode": "erase", "target_kind": "active"}, "target_kind", "has no meaning in mode erase"),
        ({"mode": "erase", "erasable": True}, "erasable", "has no meaning in mode erase"),
    ],
)
def test_one_sentence_naming_the_field(fields: dict[str, Any], field: str, sentence: str) -> None:
    with pytest.raises(Invalid) as caught:
        made(**fields)
    text = str(caught.value)
    assert caught.value.field == field
    assert text.startswith(f"{field}: ")
    assert sentence in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "auto", "content": "x", "expected_run_id": "r", "if_missed": "reject"},
        {"mode": "steer", "content": "x", "expected_run_id": "r", "on_busy": "interrupt"},
        {"content": "x", "on_busy": "steer", "expected_run_id": "r"},
        {"content": "x", "on_busy": "interrupt", "recovery": "rerun"},
        {"retry_of": "r", "recovery": "fail", "timeout_ms": 5, "max_attempts": 2},
        {"mode": "erase", "reason": "asked for"},
        {"mode": "answer", "action_key": "k", "args_digest": "d", "decision": "ok"},
        {"mode": "answer", "action_key": "k", "args_digest": "d", "decision": "error"},
        {"mode": "answer", "action_key": "k", "args_digest": "d", "decision": "not_performed"},
    ],
    ids=str,
)
def test_what_the_edge_lets_through_is_no_broken_rule_of_the_core(fields: dict[str, Any]) -> None:
    record = made(**fields)
    assert broken_rule(record, DEFAULT_POLICY) is None
    given = {name: value for name, value in fields.items() if name not in ("content", "mode")}
    assert {name: getattr(record, name) for name in given} == given
    assert record.parent is None


def test_what_asks_for_erasable_content_is_said_to_the_client_only() -> None:
    assert made(content="x", input_id="i", issued_at_ms=1, erasable=True) == made(
        content="x", input_id="i", issued_at_ms=1
    )


@pytest.mark.parametrize(
    ("value", "media_type", "data"),
    [
        ("né\x00", TEXT, b"n\xc3\xa9\x00"),
        ("", TEXT, b""),
        ({"b": 1, "a": [True, None]}, JSON, b'{"a":[true,null],"b":1}'),
        (7, JSON, b"7"),
        (b"\xff\x00", OPAQUE, b"\xff\x00"),
    ],
)
def test_content_keeps_its_kind_and_comes_back(value: Any, media_type: str, data: bytes) -> None:
    content = to_content(value)
    assert (content.media_type, content.data) == (media_type, data)
    record = codec.decode(codec.encode(made(content=value)))
    assert content_value(record.content) == value


def test_b36_the_size_that_counts_is_the_encoded_one() -> None:
    empty = len(encode_input(made(content="", input_id="i", issued_at_ms=1)))
    # the length of the content is itself a varint: 1 byte for nothing, 3 bytes from 8 KiB on
    room = RECORD_BYTES_MAX - empty - 2
    assert len(encode_input(made(content="x" * room, input_id="i", issued_at_ms=1))) == RECORD_BYTES_MAX
    sentence = rf"{RECORD_BYTES_MAX + 1} bytes encoded, {RECORD_BYTES_MAX} are allowed.*pointer"
    with pytest.raises(Invalid, match=sentence):
        encode_input(made(content="x" * (room + 1), input_id="i", issued_at_ms=1))


def test_ids_are_minted_once_and_kept_when_given() -> None:
    before = time.time_ns() // 1_000_000
    one, two = made(content="x"), made(content="x")
    assert one.input_id != two.input_id
    assert before <= one.issued_at_ms <= time.time_ns() // 1_000_000
    again = made(content="x", input_id=one.input_id, issued_at_ms=one.issued_at_ms)
    assert again == one
    assert (one.tenant_id, one.user_id, one.source) == (1, 2, "sdk")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"\xff", "not UTF-8 text"),
        (b"[1]", "must be a JSON object"),
        (b'{"mode":"prompt","mode":"steer"}', "a member name stands twice"),
        (b'{"mode":"prompt","session_id":"s","content":NaN}', "NaN is not JSON"),
        (b"{", "not JSON"),
        (b'{"session_id":"s","content":"x"}', "mode: is missing"),
    ],
)
def test_json_lines_are_read_strictly(line: bytes, sentence: str) -> None:
    with pytest.raises(Invalid, match=sentence):
        request_from_json(line)
