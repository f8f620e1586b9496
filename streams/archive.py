"""The state of a partition at an offset, as one file: written whole or not at all, refused at the least doubt.

Form: MAGIC; a gzip stream with the header (JSON behind its length), then every state record (lengths, key, value) in
the order of keys, then a mark and their count; last the SHA-256 of everything before it. The same state at the same
offset gives the same bytes. A file is written beside its place and renamed, so no reader ever sees half of one.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from onepen.schemas.errors import Invalid

__all__ = ["FORMAT", "Archive", "ArchiveHeader", "ArchiveRefused", "archives_in", "read_archive", "write_archive"]

MAGIC: Final = b"onepen archive\n\x00"
FORMAT: Final = 1
SUFFIX: Final = ".archive"
_DIGEST_BYTES: Final = 32
_CHUNK_BYTES: Final = 1024 * 1024
_LENGTHS: Final = struct.Struct(">II")
_COUNT: Final = struct.Struct(">Q")
_END: Final = 0xFFFFFFFF
_HEADER_BYTES_MAX: Final = 64 * 1024
_KEY_BYTES_MAX: Final = 4 * 1024
_VALUE_BYTES_MAX: Final = 4 * 1024 * 1024


class ArchiveRefused(Invalid):
    """The file is no whole, unchanged archive of what was asked for. The message says what it is."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"archive {path}: {what}", field="archive")


class ArchiveHeader(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an archive is of. Inputs from `next_input_offset` on are not in it.

    Events and receipts that follow from those stand at `events_from` and `receipts_from` or behind; what stands at
    `receipts_until` or behind follows from them surely.
    """

    format: int
    prefix: str
    partition: int
    partitions: int
    protocol: int
    next_input_offset: int
    events_from: int
    receipts_from: int
    receipts_until: int

    @property
    def file_name(self) -> str:
        return f"{self.prefix}-{self.partition:05d}-{self.next_input_offset:020d}{SUFFIX}"


@dataclass(frozen=True)
class Archive:
    """A state that was read from a file."""

    header: ArchiveHeader
    records: dict[bytes, bytes]


class _Hashing(io.RawIOBase):
    """Writes through to a file and keeps the digest of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = bytes(data)  # type: ignore[call-overload]
        self.digest.update(view)
        return self._file.write(view)


def write_archive(folder: Path, header: ArchiveHeader, records: Mapping[bytes, bytes]) -> Path:
    """Write the state into `folder`; the path of the file, which is on disk and whole when this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / header.file_name
    draft = folder / f".{header.file_name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with draft.open("xb") as file:
            out = _Hashing(file)
            out.write(MAGIC)
            with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6, mtime=0, filename="") as packed:
                _write_content(packed, header, records)
            file.write(out.digest.digest())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
    _sync_folder(folder)
    return place


def _write_content(packed: gzip.GzipFile, header: ArchiveHeader, records: Mapping[bytes, bytes]) -> None:
    shown = msgspec.json.encode(header)
    packed.write(_LENGTHS.pack(len(shown), 0) + shown)
    for key in sorted(records):
        value = records[key]
        packed.write(_LENGTHS.pack(len(key), len(value)) + key + value)
    packed.write(_LENGTHS.pack(_END, 0) + _COUNT.pack(len(records)))


def _sync_folder(folder: Path) -> None:
    """Make the new name durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_archive(path: Path, *, prefix: str, partition: int | None = None) -> Archive:
    """The state in a file. Raises `ArchiveRefused` unless it is whole, unchanged and of these topics."""
    try:
        with path.open("rb") as file:
            _check_whole(path, file)
            with gzip.GzipFile(fileobj=file, mode="rb") as packed:
                header = _read_header(path, packed)
                _check_meant(path, header, prefix, partition)
                return Archive(header, dict(_read_records(path, packed)))
    except (OSError, EOFError, zlib.error, struct.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ArchiveRefused(path, f"cannot be read ({reason})") from None


def _check_whole(path: Path, file: IO[bytes]) -> None:
    """The checksum over the whole file, before a byte of it is believed."""
    size = os.fstat(file.fileno()).st_size
    if file.read(len(MAGIC)) != MAGIC:
        raise ArchiveRefused(path, "is no archive of onepen")
    left = size - len(MAGIC) - _DIGEST_BYTES
    digest = hashlib.sha256(MAGIC)
    while left > 0:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            break
        digest.update(chunk)
        left -= len(chunk)
    if left != 0 or file.read(_DIGEST_BYTES) != digest.digest():
        raise ArchiveRefused(path, "is torn or was changed: its checksum does not fit. Write it again")
    file.seek(len(MAGIC))


def _exactly(packed: gzip.GzipFile, length: int) -> bytes:
    data = packed.read(length)
    if len(data) != length:
        raise EOFError("it ends in the middle of a record")
    return data


def _read_header(path: Path, packed: gzip.GzipFile) -> ArchiveHeader:
    length, _ = _LENGTHS.unpack(_exactly(packed, _LENGTHS.size))
    if length > _HEADER_BYTES_MAX:
        raise ArchiveRefused(path, "has a header that no release of onepen writes")
    shown = _exactly(packed, length)
    try:
        form = msgspec.json.decode(shown, type=dict[str, object]).get("format")
        if form != FORMAT:
            raise ArchiveRefused(path, f"has format {form}; this release reads {FORMAT}")
        return msgspec.json.decode(shown, type=ArchiveHeader)
    except msgspec.MsgspecError as error:
        raise ArchiveRefused(path, f"has a header that cannot be read ({error})") from None


def _check_meant(path: Path, header: ArchiveHeader, prefix: str, partition: int | None) -> None:
    if header.prefix != prefix:
        raise ArchiveRefused(path, f"is of the topics {header.prefix}.*, not of {prefix}.*")
    if partition is not None and header.partition != partition:
        raise ArchiveRefused(path, f"is of partition {header.partition}, not of partition {partition}")


def _read_records(path: Path, packed: gzip.GzipFile) -> Iterator[tuple[bytes, bytes]]:
    count = 0
    while True:
        key_bytes, value_bytes = _LENGTHS.unpack(_exactly(packed, _LENGTHS.size))
        if key_bytes == _END:
            break
        if key_bytes > _KEY_BYTES_MAX or value_bytes > _VALUE_BYTES_MAX:
            raise ArchiveRefused(path, "has a record that no release of onepen writes")
        yield _exactly(packed, key_bytes), _exactly(packed, value_bytes)
        count += 1
    if _COUNT.unpack(_exactly(packed, _COUNT.size))[0] != count:
        raise ArchiveRefused(path, f"names another number of records than the {count} it has")


def archives_in(place: Path, *, prefix: str) -> dict[int, Path]:
    """Partition -> archive: of the one file, or the newest of each partition in a folder, by their names.

    Raises `ArchiveRefused` when there is none. What a file really is, is known only by `read_archive`.
    """
    if not place.is_dir():
        return {read_header(place, prefix=prefix).partition: place}
    found: dict[int, tuple[int, Path]] = {}
    for path in place.glob(f"{prefix}-*{SUFFIX}"):
        parts = path.name.removeprefix(f"{prefix}-").removesuffix(SUFFIX).split("-")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts):
            continue
        partition, offset = int(parts[0]), int(parts[1])
        if partition not in found or found[partition][0] < offset:
            found[partition] = offset, path
    if not found:
        raise ArchiveRefused(place, f"there is no archive of the topics {prefix}.* in this folder")
    return {partition: path for partition, (_, path) in found.items()}


def read_header(path: Path, *, prefix: str) -> ArchiveHeader:
    """The header of an archive, checked like the whole file."""
    return read_archive(path, prefix=prefix).header
