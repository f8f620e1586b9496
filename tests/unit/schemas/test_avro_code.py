"""The compiled readers and writers against fastavro: the same bytes, the same records, and nothing odd is taken."""

import io
from typing import Any

import msgspec
import pytest
from fastavro import schemaless_reader, schemaless_writer
from hypothesis import given, settings
from hypothesis import strategies as st

from onepen.schemas import codec
from onepen.schemas.avro_code import LONG, Odd, long_at
from tests.unit.schemas.test_codec import DRAFT, RECORDS

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    "long": st.one_of(st.integers(-100, 3000), INT64), "int": st.integers(-(2**31), 2**31 - 1),
    "boolean": st.booleans(), "string": TEXTS, "bytes": st.binary(max_size=200), "null": st.none(),
    "onepen.Sha256": st.binary(min_size=32, max_size=32),
}  # fmt: skip


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Any value of a schema, as plain data."""
    if isinstance(schema, str):
        return SIMPLE[schema]
    if isinstance(schema, list):
        return st.one_of([values(branch) for branch in schema])
    if schema["type"] == "array":
        return st.lists(values(schema["items"]), max_size=3)
    if schema["type"] == "fixed":
        return st.binary(min_size=schema["size"], max_size=schema["size"])
    SIMPLE.setdefault(f"onepen.{schema['name']}", st.deferred(lambda: values(schema)))
    return st.fixed_dictionaries({field["name"]: values(field["type"]) for field in schema["fields"]})


RECORD_VALUES = {name: values(codec._PLAIN[name]) for name in codec._TYPES}
ANY_RECORD = st.one_of([st.tuples(st.just(name), found) for name, found in RECORD_VALUES.items()])


def framed(name: str, value: dict[str, Any]) -> bytes:
    """What fastavro writes."""
    out = io.BytesIO()
    schemaless_writer(out, codec._SCHEMAS[name], value)
    return codec._FRAMES[name] + out.getvalue()


def read_by_fastavro(data: bytes) -> Any:
    """The record, or None where fastavro takes the bytes not, or not all of them."""
    name = codec._NAMES[int.from_bytes(data[1:5], "big")]
    stream = io.BytesIO(data[5:])
    try:
        value = schemaless_reader(stream, codec._SCHEMAS[name], None)
    except Exception:
        return None
    if stream.read():
        return None
    return msgspec.convert(value, codec._TYPES[name], builtin_types=(bytes,))


@settings(max_examples=300, deadline=None)
@given(ANY_RECORD)
def test_the_same_bytes_and_the_same_record(given_record: tuple[str, dict[str, Any]]) -> None:
    name, value = given_record
    data = framed(name, value)
    record = msgspec.convert(value, codec._TYPES[name], builtin_types=(bytes,))
    assert codec.encode(record) == data
    assert codec._canonical(data) == record


@settings(max_examples=800, deadline=None)
@given(
    st.sampled_from([codec.encode(record) for record in RECORDS] + [codec.seal(DRAFT, bytes(32))[1]]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255), st.sampled_from("sid")), min_size=1, max_size=3),
)
def test_what_is_taken_from_damaged_bytes_is_what_they_say(data: bytes, damages: list[tuple[int, int, str]]) -> None:
    for place, byte, how in damages:
        at = 5 + place % (len(data) - 5)
        data = data[:at] + (b"" if how == "d" else bytes((byte,))) + data[at + (how != "i") :]
    found = codec._canonical(data)
    if found is not None:
        assert found == read_by_fastavro(data)
        assert codec.encode(found) == data


@given(INT64)
def test_numbers_are_read_as_they_were_written(number: int) -> None:
    data = LONG[number]
    assert long_at(b"x" + data, 1) == (number, 1 + len(data))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_a_number_that_does_not_fit_is_not_written(number: int) -> None:
    with pytest.raises(OverflowError):
        LONG[number]


@pytest.mark.parametrize("data", [b"\x80\x00", b"\x82\x80\x00", b"\xff" * 9 + b"\x02", b"\xff" * 10 + b"\x01"])
def test_overlong_and_too_large_numbers_are_odd(data: bytes) -> None:
    with pytest.raises(Odd):
        long_at(data, 0)


def test_what_is_remembered_of_numbers_is_bounded_and_right() -> None:
    for number in range(10**6, 10**6 + 2 * LONG.KEPT):
        assert long_at(LONG[number], 0)[0] == number
    assert len(LONG) <= LONG.KEPT
    assert LONG[1] == b"\x02"


def test_other_blocks_of_an_array_are_odd_and_read_all_the_same() -> None:
    report = next(record for record in RECORDS if type(record).__name__ == "Report" and record.events)
    data = codec.encode(report)
    cut = len(data) - 1  # the end of the only block
    first = framed("Report", msgspec.to_builtins(msgspec.structs.replace(report, events=report.events[:1]),
                                                 builtin_types=(bytes,)))  # fmt: skip
    second = data[len(first) - 1 : cut]
    two_blocks = first[:-1] + b"\x02" + second + b"\0"
    assert codec._canonical(two_blocks) is None
    assert codec.decode(two_blocks) == report
