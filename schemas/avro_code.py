"""Readers and writers of Avro, made from the schemas: each record gets one function of straight-line Python.

A general writer asks the schema anew at every field of every record, which costs several times what the bytes cost.
Here the schema is asked once, at import: its fields become the source of a function, which is then compiled, as
`dataclasses` does it. Nothing but the checked-in schemas and their field names enters the source.

Rule: a reader takes canonical bytes only (shortest numbers, arrays in one block, branches 0 and 1) and raises `Odd` for
everything else, so what it takes is what the writer would write. Who meets `Odd` has a slower, general reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

Schema = str | list[Any] | dict[str, Any]
Writer = Callable[[Any], bytes]
Reader = Callable[[bytes, int], tuple[Any, int]]


class Odd(ValueError):
    """Not bytes that these writers write; perhaps Avro all the same."""


class _Longs(dict[int, bytes]):
    """Number -> its bytes (zigzag, seven bits a byte, the lowest first). Small ones and recent ones are at hand: the
    same few times and offsets stand in all records that follow from one input."""

    KEPT: Final = 8192

    def __missing__(self, number: int) -> bytes:
        found = _long(number)
        if len(self) >= self.KEPT:
            self.clear()
            self.update(_SMALL)
        self[number] = found
        return found


def _long(number: int) -> bytes:
    if not -(2**63) <= number < 2**63:
        raise OverflowError(f"{number} does not fit 64 bits")
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


_SMALL: Final = {number: _long(number) for number in range(-64, 2048)}
LONG: Final = _Longs(_SMALL)


def long_at(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises `Odd` (overlong, too large), `IndexError` (it is cut)."""
    byte = data[at]
    at += 1
    number = byte & 0x7F
    shift = 7
    while byte > 0x7F:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
    if (byte == 0 and shift > 7) or number >= 2**64:
        raise Odd
    return (number >> 1) ^ -(number & 1), at


def _sized(data: bytes) -> bytes:
    return LONG[len(data)] + data


def _array(items: Any, write: Writer) -> bytes:
    return LONG[len(items)] + b"".join([write(item) for item in items]) + b"\0"


_WRITTEN = {
    "long": "LONG[{0}]",
    "int": "LONG[{0}]",
    "boolean": '(b"\\1" if {0} else b"\\0")',
    "string": "sized({0}.encode())",
    "bytes": "sized({0})",
}
_READ = {
    "long": ("{0}, at = long_at(data, at)",),
    "int": ("{0}, at = long_at(data, at)",),
    "boolean": ("{0} = data[at]", "if {0} > 1: raise Odd", "{0} = {0} == 1", "at += 1"),
    "bytes": (
        "size, at = long_at(data, at)",
        "if not 0 <= size <= len(data) - at: raise Odd",
        "{0} = data[at : (at := at + size)]",
    ),
}
_READ["string"] = (*_READ["bytes"][:2], "{0} = data[at : (at := at + size)].decode()")


class Code:
    """The readers and writers of some schemas. Definitions of a name agree wherever it stands (Avro's own rule)."""

    def __init__(self, kinds: Mapping[str, type[Any]]) -> None:
        """`kinds`: the class of each record that is read, by its Avro name; its fields are named as in the schema."""
        self._kinds = kinds
        self._named: dict[str, dict[str, Any]] = {}
        self._scope: dict[str, Any] = {"LONG": LONG, "long_at": long_at, "sized": _sized, "array": _array, "Odd": Odd}

    def writer(self, schema: dict[str, Any]) -> Writer:
        """record -> bytes; the record's attributes are named as the fields. Values must fit."""
        found: Writer = self._scope[self._writer(schema)]
        return found

    def reader(self, schema: dict[str, Any]) -> Reader:
        """(bytes, place) -> (record, place behind it). Raises `Odd`, `IndexError` or `UnicodeDecodeError`."""
        found: Reader = self._scope[self._reader(schema)]
        return found

    def _resolved(self, schema: Schema) -> Schema:
        if isinstance(schema, str):
            return self._named.get(schema.rpartition(".")[2], schema)
        if isinstance(schema, dict) and "name" in schema:
            self._named[schema["name"]] = schema
        return schema

    def _compiled(self, name: str, lines: list[str]) -> str:
        exec("\n    ".join(lines), self._scope)
        return name

    # -- writing ---------------------------------------------------------------------------------------------------

    def _writer(self, schema: dict[str, Any]) -> str:
        name = f"write_{schema['name']}"
        fields = [self._written(field["type"], f"record.{field['name']}") for field in schema["fields"]]
        return self._compiled(name, [f"def {name}(record):", f'return b"".join(({", ".join(fields)},))'])

    def _written(self, schema: Schema, value: str) -> str:
        """The expression that gives the bytes of `value`."""
        schema = self._resolved(schema)
        if isinstance(schema, str):
            return _WRITTEN[schema].format(value)
        if isinstance(schema, list):
            return f'(b"\\0" if {value} is None else b"\\2" + {self._written(_other(schema), value)})'
        if schema["type"] == "fixed":
            return value
        if schema["type"] == "array":
            item = self._written(schema["items"], "item")
            return f'(array({value}, lambda item: {item}) if {value} else b"\\0")'
        return f"{self._writer(schema)}({value})"

    # -- reading ---------------------------------------------------------------------------------------------------

    def _reader(self, schema: dict[str, Any]) -> str:
        name, kind = f"read_{schema['name']}", schema["name"]
        self._scope[kind] = self._kinds[kind]
        lines = [f"def {name}(data, at):"]
        for field in schema["fields"]:
            lines += self._read(field["type"], f"f_{field['name']}")
        members = ", ".join(f"{field['name']}=f_{field['name']}" for field in schema["fields"])
        return self._compiled(name, [*lines, f"return {kind}({members}), at"])

    def _read(self, schema: Schema, into: str) -> list[str]:
        """The statements that read a value at `at` into a variable."""
        schema = self._resolved(schema)
        if isinstance(schema, str):
            return [line.format(into) for line in _READ[schema]]
        if isinstance(schema, list):
            there = self._read(_other(schema), into)
            lines = [f"{into} = None", "branch = data[at]", "at += 1", "if branch:", "    if branch != 2: raise Odd"]
            return lines + [f"    {line}" for line in there]
        if schema["type"] == "fixed":
            size = schema["size"]
            return [f"if len(data) - at < {size}: raise Odd", f"{into} = data[at : (at := at + {size})]"]
        if schema["type"] == "array":
            items = self._read(schema["items"], "item")
            return [
                f"{into} = ()",
                "count, at = long_at(data, at)",
                # No item is empty: a count beyond the bytes that are left is not worth a try.
                "if not 0 <= count <= len(data) - at: raise Odd",
                "if count:",
                f"    {into} = []",
                "    for _ in range(count):",
                *(f"        {line}" for line in items),
                f"        {into}.append(item)",
                "    if data[at]: raise Odd",
                "    at += 1",
                f"    {into} = tuple({into})",
            ]
        return [f"{into}, at = {self._reader(schema)}(data, at)"]


def _other(union: list[Any]) -> Schema:
    """The second branch of ["null", ...]: the only unions there are."""
    first, second = union
    assert first == "null"
    found: Schema = second
    return found
