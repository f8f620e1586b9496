"""Avro with Confluent framing: magic byte 0, four bytes of schema id, one datum, nothing behind it.

The `.avsc` files are the contract; ids come from the checked-in lock file, so no registry is needed at run time and
any Confluent client can read the topics. Only ids of the lock are decoded. This is the only module that knows fastavro,
which reads what is not written as we write it, and says what is wrong with it; the common case is `avro_code`.
"""

from __future__ import annotations

import io
import json
from importlib.resources import files
from typing import Any, Final, TypeVar

import msgspec
from fastavro import parse_schema, schemaless_reader
from fastavro.schema import SchemaParseException, fingerprint, to_parsing_canonical_form

from onepen.schemas.avro_code import LONG, Code, Odd, Reader, Writer, long_at
from onepen.schemas.errors import Fatal, Poison
from onepen.schemas.events import Cause, Event, EventDraft, chain_hash
from onepen.schemas.inputs import Content, Input, Parent
from onepen.schemas.limits import EVENT_BYTES_MAX
from onepen.schemas.notices import Notice
from onepen.schemas.offers import Offer
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.receipts import Receipt
from onepen.schemas.timers import Timer
from onepen.schemas.views import ActionView, Checkpoint, PendingSteer, RefusedEvent, SubtaskView, View
from onepen.schemas.worker_records import Claim, Release, Renew, Report, ReportEvent

T = TypeVar("T")
InputsRecord = Input | Claim | Renew | Report | Release | Timer | Notice | PolicyRecord
"""Everything that may stand on the inputs topic."""

HASH_BYTES: Final = 32
FRAME_BYTES: Final = 5
_KEEP = (bytes,)


def _load() -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The schemas as they are checked in and as fastavro wants them, and their ids."""
    folder = files(__package__) / "avro"
    lock = json.loads((folder / "ids.lock.json").read_text())
    plain: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    ids: dict[str, int] = {}
    for entry in lock:
        raw = json.loads((folder / entry["file"]).read_text())
        found = fingerprint(to_parsing_canonical_form(raw), "SHA-256")
        if found != entry["fingerprint"]:
            raise Fatal(f"schema {entry['file']} differs from its fingerprint in ids.lock.json")
        try:
            schemas[entry["name"]] = parse_schema(raw)
            plain[entry["name"]] = raw
        except SchemaParseException as error:
            raise Fatal(f"schema {entry['file']}: {error}") from None
        ids[entry["name"]] = entry["id"]
    return plain, schemas, ids


_PLAIN, _SCHEMAS, IDS = _load()
_NAMES = {number: name for name, number in IDS.items()}
_FRAMES = {name: b"\x00" + number.to_bytes(4, "big") for name, number in IDS.items()}
_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Input, Claim, Renew, Report, Release, Timer, Notice, PolicyRecord, Event, Receipt, Offer, View)
}
_INPUTS_NAMES = frozenset(("Input", "Claim", "Renew", "Report", "Release", "Timer", "Notice", "PolicyRecord"))


_PARTS = (Content, Parent, ReportEvent, Cause, PendingSteer, ActionView, RefusedEvent, SubtaskView, Checkpoint)


def _coders() -> tuple[dict[type[Any], tuple[bytes, Writer]], dict[bytes, Reader], Writer]:
    """Frame and writer by class, reader by frame, and the writer of an event up to `payload`."""
    code = Code(_TYPES | {kind.__name__: kind for kind in _PARTS})
    writers = {kind: (_FRAMES[name], code.writer(_PLAIN[name])) for name, kind in _TYPES.items()}
    readers = {_FRAMES[name]: code.reader(_PLAIN[name]) for name in _TYPES}
    fields = _PLAIN["Event"]["fields"]
    assert [field["name"] for field in fields[-3:]] == ["payload", "prev_hash", "hash"]
    return writers, readers, code.writer(_PLAIN["Event"] | {"name": "EventDraft", "fields": fields[:-2]})


_WRITERS, _READERS, _write_draft = _coders()
_EVENT_FRAME, _STATE_FRAME = _FRAMES["Event"], _FRAMES["StateValue"]


def encode(record: InputsRecord | Receipt | Offer | View) -> bytes:
    """Framed Avro bytes of a record. The record's values must fit its schema (they do when built by this package)."""
    frame, write = _WRITERS[type(record)]
    return frame + write(record)


def seal(draft: EventDraft, prev_hash: bytes) -> tuple[Event, bytes]:
    """Chain a draft to `prev_hash`: the event with its hash, and its framed bytes (`hash` is their last 32)."""
    body = _write_draft(draft) + prev_hash
    digest = chain_hash(prev_hash, body)
    event = Event(
        tenant_id=draft.tenant_id,
        session_id=draft.session_id,
        run_id=draft.run_id,
        run_no=draft.run_no,
        seq=draft.seq,
        type=draft.type,
        generation=draft.generation,
        at_ms=draft.at_ms,
        cause=draft.cause,
        payload=draft.payload,
        prev_hash=prev_hash,
        hash=digest,
    )
    return event, _EVENT_FRAME + body + digest


def event_body(data: bytes) -> bytes:
    """The hashed part of a framed event: its Avro bytes without the frame and without `hash`."""
    return data[FRAME_BYTES:-HASH_BYTES]


def decode(data: bytes | None) -> Any:
    """The record in framed bytes. Raises `Poison` (null, frame, unknown schema, trailing bytes, wrong form)."""
    framed = _framed(data)
    record = _canonical(framed)
    return _decode_any(framed) if record is None else record


def _framed(data: bytes | None) -> bytes:
    if data is None:
        raise Poison("null_value")
    if len(data) < FRAME_BYTES or data[0] != 0:
        raise Poison("no_frame", "not Confluent-framed Avro")
    if len(data) > EVENT_BYTES_MAX:
        raise Poison("too_large", f"{len(data)} bytes")
    return data


def _canonical(data: bytes) -> Any:
    """The record in framed bytes that are exactly what `encode` writes; None for all others."""
    read = _READERS.get(data[:FRAME_BYTES])
    if read is None:
        return None
    try:
        record, end = read(data, FRAME_BYTES)
    except (Odd, IndexError, UnicodeDecodeError):
        return None
    return record if end == len(data) else None


def _decode_any(data: bytes) -> Any:
    """The record in any framed Avro, or what is wrong with it."""
    name = _NAMES.get(int.from_bytes(data[1:5], "big"))
    if name is None or name not in _TYPES:
        raise Poison("unknown_schema", data[1:5].hex())
    stream = io.BytesIO(data)
    stream.seek(FRAME_BYTES)
    try:
        value = schemaless_reader(stream, _SCHEMAS[name], None)
    except Exception as error:  # fastavro raises many kinds on foreign bytes; each means the same here
        raise Poison("undecodable", f"{name}: {type(error).__name__}") from None
    if stream.tell() != len(data):
        raise Poison("trailing_bytes", name)
    try:
        return msgspec.convert(value, _TYPES[name], builtin_types=_KEEP)
    except msgspec.ValidationError as error:
        raise Poison("undecodable", f"{name}: {error}") from None


def decode_inputs(data: bytes | None) -> InputsRecord:
    """Like `decode`, for the inputs topic: other records are `Poison("unexpected_record")`.

    Bytes that another reader would refuse or read otherwise are `Poison("not_canonical")`: the general Avro reader
    takes overlong numbers and negative union branches without a word, so what it has read is written and compared.
    """
    framed = _framed(data)
    known = _canonical(framed)
    record = _decode_any(framed) if known is None else known
    if type(record).__name__ not in _INPUTS_NAMES:
        raise Poison("unexpected_record", type(record).__name__)
    if known is None:
        _check_canonical(record, framed)
    return record  # type: ignore[no-any-return]


def _check_canonical(record: InputsRecord, data: bytes) -> None:
    try:
        canonical = encode(record)
    except (ValueError, TypeError, OverflowError) as error:
        raise Poison("not_canonical", f"{type(record).__name__}: {type(error).__name__}") from None
    if canonical != data:
        raise Poison("not_canonical", type(record).__name__)


def decode_as(kind: type[T], data: bytes | None) -> T:
    """Like `decode`; any other kind of record is `Poison("unexpected_record")`."""
    record = decode(data)
    if type(record) is not kind:
        raise Poison("unexpected_record", type(record).__name__)
    return record


def encode_state(next_deadline_ms: int, version: int, body: bytes) -> bytes:
    """A value of the state topic; 0 = no deadline. Readable from its first varint without decoding the body."""
    return b"".join((_STATE_FRAME, LONG[next_deadline_ms], LONG[version], LONG[len(body)], body))


def decode_state(data: bytes) -> tuple[int, int, bytes]:
    """(next_deadline_ms, version, body) of a value of the state topic. Raises `Fatal`: state is never guessed at."""
    if data[:FRAME_BYTES] != _STATE_FRAME:
        raise Fatal("a record of the state topic has an unknown frame; a newer version wrote it? Stop and upgrade")
    try:
        next_deadline_ms, at = long_at(data, FRAME_BYTES)
        version, at = long_at(data, at)
        size, at = long_at(data, at)
    except (Odd, IndexError):
        raise Fatal("a record of the state topic is damaged") from None
    if at + size != len(data):
        raise Fatal("a record of the state topic is cut, or has trailing bytes")
    return next_deadline_ms, version, data[at:]
