"""Worlds kept as recorded topics, in the form of `tests/compat`: inputs, dead letters, events and receipts.

A world that was red is saved by `python -m tests.simulation.whole SEED --save NAME`; what is in `histories/` is decided
again by `test_whole.py` from then on, whatever the simulator draws from that seed by then.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation.whole_checks import dead, raw

if TYPE_CHECKING:
    from onepen.streams.outside_reader import RawRecord
    from tests.simulation.whole_world import World

HISTORIES = Path(__file__).parent / "histories"


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _lines(world: World) -> Iterator[dict[str, Any]]:
    yield {"kind": "head", "partitions": world.partitions, "keyName": world.keys.name, "key": _text(world.keys.secret)}
    topics = world.topics
    for partition in range(world.partitions):
        decided = world.broker._group(world.group).offsets.get(partition, 0)
        inputs = [record for record in raw(world, topics.inputs, partition) if record.offset < decided]
        yield from (_line("input", record) for record in inputs)
        yield from ({"kind": "dead", "at": [partition, offset, 0]} for offset in sorted(dead(world, partition)))
        if world.green:
            yield from _outputs(world, partition)


def _outputs(world: World, partition: int) -> Iterator[dict[str, Any]]:
    topics = world.topics
    yield from (_line("event", record) for record in raw(world, topics.events, partition))
    yield from (_line("receipt", record) for record in raw(world, topics.receipts, partition))


def _line(kind: str, record: RawRecord) -> dict[str, Any]:
    headers = [[name, _text(value)] for name, value in record.headers if name != "onepen-tx"]
    data = [_text(record.key), _text(record.value), headers]
    return {"kind": kind, "at": [record.partition, record.offset, record.at_ms], "data": data}


def save(world: World, name: str) -> Path:
    """The topics of a world as a file. Of a red one only the inputs that were decided: its outputs prove nothing."""
    HISTORIES.mkdir(exist_ok=True)
    path = HISTORIES / f"{name}.jsonl.gz"
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in _lines(world))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path
