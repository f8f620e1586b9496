"""Recorded topics as a file: inputs, dead letters, events and receipts of a running pipeline, byte for byte.

    python -m tests.compat.history_file NAME    writes histories/NAME.jsonl.gz from the stack that the settings name

The token key is written beside them, so a history is recorded from a stack made for it, never from a real one.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onepen.streams.outside_reader import RawRecord, read_topic
from onepen.streams.settings import Settings, load_settings
from onepen.streams.verifying import dead_offset

HISTORIES = Path(__file__).parent / "histories"


class History(NamedTuple):
    """Everything that re-execution needs, and what it must come to."""

    partitions: int
    key_name: str
    key: bytes
    inputs: list[RawRecord]
    dead: set[tuple[int, int]]
    events: list[RawRecord]
    receipts: list[RawRecord]


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _line(kind: str, record: RawRecord) -> dict[str, Any]:
    headers = [[name, _text(value)] for name, value in record.headers if name != "onepen-tx"]
    key, value = _text(record.key), _text(record.value)
    return {"kind": kind, "at": [record.partition, record.offset, record.at_ms], "data": [key, value, headers]}


def _record(line: dict[str, Any]) -> RawRecord:
    key, value, headers = line["data"]
    shown = tuple((name, _bytes(text)) for name, text in headers)
    return RawRecord(*line["at"], _bytes(key), _bytes(value), shown)


def record(settings: Settings, path: Path) -> int:
    """Write the history of the settings' topics; answers the number of input records."""
    topics = settings.topics
    inputs = read_topic(settings, topics.inputs)
    lines: list[dict[str, Any]] = [
        {
            "kind": "head",
            "partitions": settings.partitions,
            "keyName": settings.token_key_name,
            "key": _text(settings.require_token_key()),
        }
    ]
    lines += [_line("input", found) for found in inputs]
    for letter in read_topic(settings, topics.deadletters):
        offset = dead_offset(letter, topics.inputs, letter.partition)
        if offset is not None:
            lines.append({"kind": "dead", "at": [letter.partition, offset, 0]})
    lines += [_line("event", found) for found in read_topic(settings, topics.events)]
    lines += [_line("receipt", found) for found in read_topic(settings, topics.receipts)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return len(inputs)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        yield json.loads(line)


def load(path: Path) -> History:
    """Read a history back."""
    head, *lines = _lines(path)
    kinds: dict[str, list[RawRecord]] = {"input": [], "event": [], "receipt": []}
    dead: set[tuple[int, int]] = set()
    for line in lines:
        if line["kind"] == "dead":
            dead.add((line["at"][0], line["at"][1]))
        else:
            kinds[line["kind"]].append(_record(line))
    key = _bytes(head["key"])
    assert key is not None
    return History(head["partitions"], head["keyName"], key, kinds["input"], dead, kinds["event"], kinds["receipt"])


if __name__ == "__main__":
    written = HISTORIES / f"{sys.argv[1]}.jsonl.gz"
    print(f"{record(load_settings(), written)} inputs in {written.name}")
