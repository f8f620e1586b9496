"""The codec on bytes from anywhere: what is decoded is exactly what was encoded, everything else is `Poison`."""

import json
import struct
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onepen.schemas
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Poison
from onepen.schemas.events import Cause, Event, EventDraft, chain_hash
from onepen.schemas.inputs import Content, Input, digest
from onepen.schemas.limits import EVENT_BYTES_MAX
from onepen.schemas.offers import Offer
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.receipts import Receipt
from onepen.schemas.timers import Timer
from onepen.schemas.views import ActionView, PendingSteer, RefusedEvent, View
from onepen.schemas.worker_records import Claim, Release, Renew, Report, ReportEvent, report_digest

WORKER: dict[str, Any] = {
    "tenant_id": 7, "session_id": "s", "run_id": "run-1", "generation": 2, "token": "k1.x", "worker_id": "w",
    "inbox": 3,
}  # fmt: skip
INPUT = Input(
    input_id="i", issued_at_ms=1, tenant_id=7, user_id=-1, session_id="s", mode="prompt", source="ui",
    content=Content(media_type="application/octet-stream", data=b"\0\xff"), on_busy="queue", ttl_ms=5,
)  # fmt: skip
RECORDS = (
    INPUT,
    msgspec.structs.replace(INPUT, content=None, target_kind="run", target_id="r", scope="run", reason="ja\0"),
    msgspec.structs.replace(INPUT, content=Content(uri="s3://b/o", digest="d", size_bytes=2**40)),
    Claim(**WORKER),
    Renew(**WORKER, no=4, suspended=True, want_contents=True),
    Report(**WORKER, no=1, events=(ReportEvent(type="x.a", payload=b"{}"), ReportEvent(type="", payload=b""))),
    Report(**WORKER, no=1, events=()),
    Release(**WORKER, reason="shutdown"),
    Timer(tenant_id=7, session_id="s", kind="lease", run_id="r", generation=1, subject="", deadline_ms=2**62),
    PolicyRecord(tenant_id=0, version=2, body=b"{}"),
    Receipt(kind="input", tenant_id=7, session_id="s", partition=1, offset=2, at_ms=3, verdict="started", detail=b"{}"),
    Offer(
        tenant_id=7, session_id="s", run_id="r", run_no=1, generation=1, token="t", input_id="i", user_id=1,
        source="ui", mode="prompt", content=Content(data=b"x"), last_seq=1, last_hash=bytes(32), had_owner=False,
        attempt=1, ordinal=1, hops=0, at_ms=1, expires_at_ms=2, lease_ms=3, renew_ms=1, permit_ms=1,
        recovery="resume", lineage="r",
    ),
    View(
        tenant_id=7, session_id="s", run_id="r", generation=1, no=2, status="running", worker_id="w", inbox=3,
        pending=(PendingSteer(input_id="i", user_id=1, source="ui", with_content=True, content=Content(data=b"")),),
        actions=(ActionView(action_key="k", name="n", args_digest="d", state="ok", result=b"1"),),
        refused=(RefusedEvent(no=1, index=-1, reason="invalid"),),
    ),
)  # fmt: skip
INPUTS = tuple(record for record in RECORDS if type(record).__name__ in codec._INPUTS_NAMES)
DRAFT = EventDraft(
    tenant_id=7, session_id="s", run_id="r", run_no=1, seq=1, type="run.started", generation=1, at_ms=5,
    cause=Cause(1, 2, 3), payload=b'{"a":1}',
)  # fmt: skip


def reason_of(data: bytes | None) -> str:
    with pytest.raises(Poison) as caught:
        codec.decode(data)
    return caught.value.reason


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_what_is_encoded_is_decoded(record: Any) -> None:
    data = codec.encode(record)
    assert data[:1] == b"\0"
    assert int.from_bytes(data[1:5], "big") == codec.IDS[type(record).__name__]
    assert codec.decode(data) == record


def test_an_event_carries_its_hash_in_its_last_32_bytes() -> None:
    event, data = codec.seal(DRAFT, bytes(32))
    assert codec.decode(data) == event
    assert event.hash == data[-32:] == chain_hash(bytes(32), codec.event_body(data))
    assert event.prev_hash == bytes(32)
    other, _ = codec.seal(DRAFT, event.hash)
    assert other.hash != event.hash


def test_null_empty_and_unframed_values() -> None:
    assert reason_of(None) == "null_value"
    assert reason_of(b"") == "no_frame"
    assert reason_of(b"\0\0\0\0") == "no_frame"
    assert reason_of(b'{"input_id": "i"}') == "no_frame"
    assert reason_of(b"\x01" + codec.encode(INPUT)[1:]) == "no_frame"


def test_unknown_schemas() -> None:
    assert reason_of(b"\0\xff\xff\xff\xff") == "unknown_schema"
    assert reason_of(b"\0\0\0\0\0") == "unknown_schema"
    state = codec.encode_state(1, 1, b"x")
    assert reason_of(state) == "unknown_schema", "a state value is no record"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_trailing_bytes_and_cut_records(record: Any) -> None:
    data = codec.encode(record)
    assert reason_of(data + b"\0") == "trailing_bytes"
    for length in range(5, len(data)):
        assert reason_of(data[:length]) == "undecodable", length


def test_records_of_other_topics_are_not_inputs() -> None:
    for record in RECORDS:
        data = codec.encode(record)
        if record in INPUTS:
            assert codec.decode_inputs(data) == record
        else:
            with pytest.raises(Poison, match="unexpected_record"):
                codec.decode_inputs(data)
    with pytest.raises(Poison, match="unexpected_record"):
        codec.decode_as(Event, codec.encode(INPUT))


def frame(name: str, body: bytes) -> bytes:
    return codec._FRAMES[name] + body


def varint(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


@pytest.mark.parametrize("length", [2**20, 2**31, 2**40, 2**62, -1, -(2**40)])
def test_lengths_that_lie(length: int) -> None:
    assert reason_of(frame("Input", varint(length) + b"i")) == "undecodable"
    claim = varint(7) + varint(length) + b"s"
    assert reason_of(frame("Claim", claim)) == "undecodable"
    policy = varint(1) + varint(1) + varint(length)
    assert reason_of(frame("PolicyRecord", policy)) in ("undecodable", "not_canonical")


@pytest.mark.parametrize("count", [2**20, 2**40, 2**62, -(2**40), -1])
def test_counts_that_lie(count: int) -> None:
    data = codec.encode(Report(**WORKER, no=1, events=()))
    assert data[-1:] == b"\0", "an empty array is its last byte"
    assert reason_of(data[:-1] + varint(count)) == "undecodable"


def test_texts_that_are_not_utf8() -> None:
    data = codec.encode(msgspec.structs.replace(INPUT, source="XX"))
    for bad in (b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80"[:2]):
        assert reason_of(data.replace(b"XX", bad)) == "undecodable"


def test_branches_of_a_union_that_do_not_exist() -> None:
    data = codec.encode(msgspec.structs.replace(INPUT, content=None, on_busy=None, ttl_ms=None))
    absent = data[-1:]
    assert absent == b"\0"
    for index in (2, -1, -2, 77, 2**40):
        with pytest.raises(Poison):
            codec.decode_inputs(data[:-1] + varint(index))


def test_numbers_longer_than_64_bit() -> None:
    body = b"\xff" * 10 + b"\x01" + varint(1) + varint(0)
    with pytest.raises(Poison):
        codec.decode_inputs(frame("PolicyRecord", body))
    overlong = b"\x8e\x80\x80\x00"  # 7, written in four bytes instead of one
    with pytest.raises(Poison, match="not_canonical"):
        codec.decode_inputs(frame("PolicyRecord", overlong + varint(1) + varint(0)))


def test_a_value_too_large_is_not_looked_into() -> None:
    assert reason_of(frame("PolicyRecord", bytes(EVENT_BYTES_MAX))) == "too_large"


@settings(max_examples=300)
@given(data=st.binary(max_size=80), name=st.sampled_from(sorted(codec._FRAMES)))
def test_any_bytes_are_a_record_or_poison(data: bytes, name: str) -> None:
    framed = frame(name, data)
    try:
        record = codec.decode_inputs(framed)
    except Poison:
        return
    assert codec.encode(record) == framed, "what is accepted is written in one way only"


@settings(max_examples=300)
@given(data=st.data())
def test_one_changed_byte_is_another_record_or_poison(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(INPUTS))
    good = bytearray(codec.encode(record))
    good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = codec.decode_inputs(bytes(good))
    except Poison:
        return
    assert codec.encode(found) == bytes(good)
    assert found != record


def test_state_values() -> None:
    assert codec.decode_state(codec.encode_state(0, 1, b"")) == (0, 1, b"")
    assert codec.decode_state(codec.encode_state(2**62, 7, b"\0x")) == (2**62, 7, b"\0x")
    for bad in (codec.encode_state(0, 1, b"") + b"\0", codec.encode(INPUT), b"", b"\0\0\0\0\xff"):
        with pytest.raises(Fatal):
            codec.decode_state(bad)


def avro_files() -> dict[str, Any]:
    folder = files(onepen.schemas) / "avro"
    return {
        e["name"]: json.loads((folder / e["file"]).read_text())
        for e in json.loads((folder / "ids.lock.json").read_text())
    }


def nodes(schema: Any, inside: tuple[str, ...] = ()) -> Any:
    yield schema, inside
    match schema:
        case list():
            for branch in schema:
                yield from nodes(branch, inside)
        case {"type": "record"}:
            for field in schema["fields"]:
                yield from nodes(field["type"], (*inside, schema["name"]))
        case {"type": "array", "items": items}:
            yield from nodes(items, inside)
        case {"type": "map", "values": values}:
            yield from nodes(values, inside)
        case {"type": inner} if not isinstance(inner, str):
            yield from nodes(inner, inside)


def test_no_schema_can_be_made_a_bomb() -> None:
    """No recursion, and no array or map over items that take no bytes: five bytes could ask for 2^31 of them."""
    for name, schema in avro_files().items():
        for node, inside in nodes(schema):
            if isinstance(node, str):
                assert node.removeprefix("onepen.") not in inside, f"{name} is recursive"
            if isinstance(node, dict) and node.get("type") in ("array", "map"):
                items = node.get("items", node.get("values"))
                assert items != "null", name
                assert not isinstance(items, dict) or items.get("fields", [1]), f"{name}: items without bytes"


def test_ids_of_schemas_are_unique_and_locked() -> None:
    assert len(set(codec.IDS.values())) == len(codec.IDS)
    assert all(0 < number < 2**31 for number in codec.IDS.values())
    assert struct.calcsize(">bI") == codec.FRAME_BYTES


# -- digests --------------------------------------------------------------------------------------------------------


def test_the_digest_covers_every_field_a_client_sets() -> None:
    first = digest(INPUT)
    changes: dict[str, Any] = {
        "input_id": "j", "issued_at_ms": 2, "tenant_id": 8, "user_id": 2, "session_id": "t", "mode": "steer",
        "source": "remote", "content": Content(data=b"y"), "expected_run_id": "r", "on_busy": "reject",
        "if_missed": "reject", "ttl_ms": 6, "retry_of": "r", "recovery": "fail", "timeout_ms": 1, "max_attempts": 1,
        "parent": b"p", "target_kind": "run", "target_id": "r", "scope": "run", "reason": "x", "action_key": "k",
        "action_name": "n", "args_digest": "d", "decision": "deny",
    }  # fmt: skip
    assert changes.keys() == set(Input.__struct_fields__)
    digests = {digest(msgspec.structs.replace(INPUT, **{name: value})) for name, value in changes.items()}
    assert len(digests | {first}) == len(changes) + 1
    assert digest(msgspec.structs.replace(INPUT)) == first


def test_the_digest_of_a_report_tells_events_apart_however_they_are_cut() -> None:
    def of(*events: tuple[str, bytes]) -> bytes:
        return report_digest(
            Report(**WORKER, no=1, events=tuple(ReportEvent(type=kind, payload=payload) for kind, payload in events))
        )

    assert len({of(("a", b"bc")), of(("ab", b"c")), of(("a", b"b"), ("c", b"")), of(("a", b"")), of()}) == 5
    assert of(("a", b"bc")) == of(("a", b"bc"))
