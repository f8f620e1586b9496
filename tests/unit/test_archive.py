"""The archive file: written whole, read back the same, and refused in one clear sentence at the least doubt."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import msgspec
import pytest

from onepen.processors import state_keys
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Invalid
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.streams.archive import FORMAT, MAGIC, ArchiveHeader, archives_in, read_archive, write_archive
from onepen.streams.archiving import StateRead
from onepen.streams.store import MARK_FORMAT, Mark

HEADER = ArchiveHeader(
    format=FORMAT, prefix="t", partition=3, partitions=12, protocol=0, next_input_offset=77,
    events_from=5, receipts_from=6, receipts_until=9,
)  # fmt: skip
RECORDS = {f"s/1/session-{n}".encode(): bytes([n % 256]) * n for n in range(300)} | {b"p/1/1": b"policy"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "new", HEADER, RECORDS)
    found = read_archive(path, prefix="t", partition=3)
    assert (found.header, found.records) == (HEADER, RECORDS)
    assert list(path.parent.iterdir()) == [path]
    assert archives_in(path, prefix="t") == {3: path}


def test_the_same_state_is_the_same_file(tmp_path: Path) -> None:
    first = write_archive(tmp_path / "a", HEADER, RECORDS).read_bytes()
    second = write_archive(tmp_path / "b", HEADER, dict(reversed(RECORDS.items()))).read_bytes()
    assert first == second


def test_an_empty_state(tmp_path: Path) -> None:
    assert read_archive(write_archive(tmp_path, HEADER, {}), prefix="t").records == {}


@pytest.mark.parametrize("kept", [0, 1, len(MAGIC), len(MAGIC) + 5, 200, -33, -1])
def test_a_torn_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = write_archive(tmp_path, HEADER, RECORDS)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(Invalid, match=r"torn or was changed|is no archive"):
        read_archive(path, prefix="t")


def test_every_changed_byte_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path, HEADER, {b"s/1/a": b"value"})
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(Invalid):
            read_archive(path, prefix="t")
    path.write_bytes(whole + b"\0")
    with pytest.raises(Invalid):
        read_archive(path, prefix="t")


def resealed(path: Path, packed: bytes) -> None:
    """Another content under a checksum that fits: an archive that a program made, but not this one."""
    data = MAGIC + packed
    path.write_bytes(data + hashlib.sha256(data).digest())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot be read"),
        (b"\0\0\0\2\0\0\0\0{}", "has format None"),
        (b"\0\0\0\x0c\0\0\0\0" + b'{"format":2}', "has format 2; this release reads 1"),
        (b"\0\0\0\x0c\0\0\0\0" + b'{"format":1}', "header that cannot be read"),
        (b"\xff\0\0\0\0\0\0\0", "no release of onepen writes"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "x.archive"
    resealed(path, gzip.compress(content))
    with pytest.raises(Invalid, match=sentence):
        read_archive(path, prefix="t")


def test_a_wrong_count_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path, HEADER, {b"s/1/a": b"v"})
    content = gzip.decompress(path.read_bytes()[len(MAGIC) : -32])
    resealed(path, gzip.compress(content[:-1] + b"\7"))
    with pytest.raises(Invalid, match="another number of records"):
        read_archive(path, prefix="t")


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path, HEADER, RECORDS)
    with pytest.raises(Invalid, match=r"of the topics t\.\*, not of u\.\*"):
        read_archive(path, prefix="u")
    with pytest.raises(Invalid, match="of partition 3, not of partition 4"):
        read_archive(path, prefix="t", partition=4)
    with pytest.raises(Invalid, match="cannot be read"):
        read_archive(tmp_path / "nowhere", prefix="t")


def test_the_newest_of_each_partition_in_a_folder(tmp_path: Path) -> None:
    for partition, offset in ((0, 5), (0, 40), (1, 7)):
        header = msgspec.structs.replace(HEADER, partition=partition, next_input_offset=offset)
        write_archive(tmp_path, header, {})
    (tmp_path / "t-broken.archive").write_bytes(b"x")
    found = archives_in(tmp_path, prefix="t")
    assert {
        partition: read_archive(path, prefix="t").header.next_input_offset for partition, path in found.items()
    } == {
        0: 40,
        1: 7,
    }
    with pytest.raises(Invalid, match="no archive of the topics"):
        archives_in(tmp_path, prefix="other")


def mark(offset: int, protocol: int = PROTOCOL_VERSION) -> bytes:
    return Mark(MARK_FORMAT, offset, protocol, 12, "slot", ("a", "b")).encode()


def test_only_what_a_partition_record_closes_is_taken() -> None:
    """Half a transaction behind the last partition record is not in the state."""
    head = state_keys.head_key(1, "a")
    other = state_keys.head_key(1, "b")
    read = StateRead(0)
    read.take(head, codec.encode_state(0, 1, b"1"))
    assert (read.records, read.mark) == ({}, None)
    read.take(b"partition", mark(5))
    read.take(head, codec.encode_state(0, 1, b"2"))
    read.take(other, codec.encode_state(0, 1, b"3"))
    assert read.mark is not None
    assert (read.records, read.mark.next_input_offset) == ({head: codec.encode_state(0, 1, b"1")}, 5)
    read.take(other, None)
    read.take(b"partition", mark(9))
    assert (read.records, read.mark.next_input_offset) == ({head: codec.encode_state(0, 1, b"2")}, 9)


def test_a_newer_state_is_refused() -> None:
    with pytest.raises(Fatal):
        StateRead(0).take(b"z/unknown", b"x")
    with pytest.raises(Fatal, match="Upgrade"):
        StateRead(0).take(b"partition", mark(5, PROTOCOL_VERSION + 1))
