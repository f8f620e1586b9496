"""The state of one partition in a file that is read fast: what a local archive is made of.

Form: MAGIC, then frames of a kind, a length, a digest and a body. The digest of a frame covers the digest of the frame
before it, so a frame that is missing, moved or of another file is noticed like a changed one. The first frame is the
header (JSON), then come policies, sessions in maps (msgpack) of some thousands each, and which of them are active; the
last one says how many there are, and nothing stands behind it. Written beside its place, made durable, then renamed: no
half of one is ever under its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec

from onepen.schemas.errors import Fatal
from onepen.streams.store import Mark, PartitionStore

__all__ = ["FORMAT", "SUFFIX", "StateFile", "StateHeader", "Unusable", "write_state"]

MAGIC: Final = b"onepen local archive\n\x00"
FORMAT: Final = 1
SUFFIX: Final = ".state"
SESSIONS_PER_FRAME: Final = 4_000
GROUPED_PER_FRAME: Final = 1_000
PIECE_BYTES: Final = 16 * 1024 * 1024
"""Sessions of a frame are cut by it as well: one of them may be large."""
FRAME_BYTES_MAX: Final = 1 << 31
_FRAME: Final = struct.Struct(">cI32s")
_HEADER, _SINGLE, _MANY, _POLICIES, _ACTIVE, _END = b"H", b"S", b"M", b"P", b"A", b"E"

T = TypeVar("T")
_single_of = msgspec.msgpack.Decoder(dict[bytes, bytes])
_active_of = msgspec.msgpack.Decoder(set[tuple[int, str]])
_many_of = msgspec.msgpack.Decoder(dict[bytes, dict[bytes, bytes]])


class Unusable(Exception):
    """The archive is not what is needed. The message continues the sentence "the local archive ..."."""


class StateHeader(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the state is of.

    `position`: the place in the state topic up to which it is right; `current_ms`: when nothing stood behind it there
    yet, by the clock of the machine that wrote it.
    """

    format: int
    prefix: str
    topic_id: str
    partition: int
    partitions: int
    protocol: int
    position: int
    next_input_offset: int
    current_ms: int


class _End(msgspec.Struct, frozen=True):
    sessions: int


def _digest(before: bytes, kind: bytes, body: bytes) -> bytes:
    digest = hashlib.sha256(before + kind)
    digest.update(body)
    return digest.digest()


def write_state(place: Path, header: StateHeader, store: PartitionStore[Any]) -> int:
    """Write the store to `place`; it is whole and on disk when this returns its length in bytes. Raises `OSError`."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = place.parent / f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC)
            digest = b""
            for kind, body in _frames(header, store):
                digest = _digest(digest, kind, body)
                file.write(_FRAME.pack(kind, len(body), digest))
                file.write(body)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return size


def _frames(header: StateHeader, store: PartitionStore[Any]) -> Iterator[tuple[bytes, bytes]]:
    encode = msgspec.msgpack.encode
    yield _HEADER, msgspec.json.encode(header)
    mark = b"" if store.mark is None else store.mark.encode()
    yield _POLICIES, encode({b"": mark, **store.policies})
    for single in store.single_records(SESSIONS_PER_FRAME, PIECE_BYTES):
        yield _SINGLE, encode(single)
    for many in store.grouped_records(GROUPED_PER_FRAME, PIECE_BYTES):
        yield _MANY, encode(many)
    yield _ACTIVE, encode(sorted(store.active))
    yield _END, msgspec.json.encode(_End(store.sessions))


class StateFile:
    """A file that is being read. What it gave to a store counts only when `load` has come to its end."""

    def __init__(self, place: Path) -> None:
        """Reads the header. Raises `Unusable`."""
        try:
            self._file: IO[bytes] = place.open("rb")
        except OSError as error:
            raise Unusable(f"cannot be opened ({error.strerror})") from None
        self._digest = b""
        try:
            if self._read(len(MAGIC)) != MAGIC:
                raise Unusable("is no local archive of a release that this one knows")
            kind, body = self._frame()
            if kind != _HEADER:
                raise Unusable("has no header")
            form = _decoded(body, dict[str, Any]).get("format")
            if form != FORMAT:
                raise Unusable(f"has format {form}; this release reads {FORMAT}")
            self.header = _decoded(body, StateHeader)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def load(self, store: PartitionStore[Any]) -> Iterator[None]:
        """Fill an empty store, a frame at a time. Raises `Unusable`; the store is not to be used then."""
        while True:
            kind, body = self._frame()
            try:
                if kind == _SINGLE:
                    store.take_single(_single_of.decode(body))
                elif kind == _MANY:
                    store.take_grouped(_many_of.decode(body))
                elif kind == _POLICIES:
                    policies = _single_of.decode(body)
                    mark = policies.pop(b"", b"")
                    store.mark = Mark.decode(mark) if mark else None
                    store.policies |= policies
                elif kind == _ACTIVE:
                    store.active |= _active_of.decode(body)
                elif kind == _END:
                    return self._finish(store, _decoded(body, _End))
                else:
                    raise Unusable(f"has a part of the unknown kind {kind!r}")
            except (msgspec.MsgspecError, Fatal, ValueError) as error:
                raise Unusable(f"has a part that cannot be read ({error})") from None
            yield

    def _finish(self, store: PartitionStore[Any], end: _End) -> None:
        if self._read_some(1):
            raise Unusable("goes on behind its end")
        if store.sessions != end.sessions:
            raise Unusable(f"names another number of sessions than the {store.sessions} it has")
        mark = store.mark
        if mark is None or (mark.next_input_offset, mark.partitions) != (
            self.header.next_input_offset,
            self.header.partitions,
        ):
            raise Unusable("has a partition record that its header does not name")
        store.position = self.header.position

    def _frame(self) -> tuple[bytes, bytes]:
        kind, length, digest = _FRAME.unpack(self._read(_FRAME.size))
        if length > FRAME_BYTES_MAX:
            raise Unusable("has a part of an impossible length")
        body = self._read(length)
        if _digest(self._digest, kind, body) != digest:
            raise Unusable("was changed: a checksum does not fit")
        self._digest = digest
        return kind, body

    def _read(self, length: int) -> bytes:
        data = self._read_some(length)
        if len(data) != length:
            raise Unusable("is torn: it ends too early")
        return data

    def _read_some(self, length: int) -> bytes:
        try:
            return self._file.read(length)
        except (OSError, MemoryError) as error:
            raise Unusable(f"cannot be read ({error})") from None


def _decoded(body: bytes, form: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.MsgspecError as error:
        raise Unusable(f"has a header that cannot be read ({error})") from None
