"""Objects: stored once under what they hold, loaded only when they are what the log names. Inputs made ready."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from onepen.schemas.edge import parse_request
from onepen.schemas.errors import Invalid
from onepen.schemas.inputs import Input, digest
from onepen.schemas.limits import RECORD_BYTES_MAX
from onepen.sinks.objects import FileObjects
from onepen.streams import objects
from onepen.streams.objects import FileStore, ObjectRefused, load, sha256_hex
from onepen.streams.sealing import seal


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    (tmp_path / "objects").mkdir()
    return FileStore(tmp_path / "objects")


def files(store: FileStore) -> list[Path]:
    return sorted(path for path in store._root.rglob("*") if path.is_file())


def test_an_object_is_stored_once_and_loaded_by_its_digest(store: FileStore) -> None:
    uri = store.put(7, "a/../b", b"text")
    assert store.put(7, "a/../b", b"text") == uri == store.uri_of(7, "a/../b", sha256_hex(b"text"))
    assert len(files(store)) == 1, "no draft is left"
    assert load(store, 7, uri, sha256_hex(b"text")) == b"text"
    assert load(store, 7, uri, f"sha256:{sha256_hex(b'text')}") == b"text"
    with pytest.raises(ObjectRefused, match="has the digest"):
        load(store, 7, uri, sha256_hex(b"other"))


def test_a_stored_object_and_all_folders_above_it_are_on_the_disk(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power the record that points to it may be there, so the object must be."""
    synced: list[tuple[int, list[str]]] = []

    def fsync(opened: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(opened).st_mode)
        synced.append((os.fstat(opened).st_ino, sorted(os.listdir(opened)) if is_folder else []))

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):  # again, by one who cannot know whether the other one has come so far
        path = Path(unquote(urlsplit(store.put(7, "s", b"text")).path))
        above = [path.parent, path.parent.parent, store._root]
        assert synced[-3:] == [(folder.stat().st_ino, [name]) for folder, name in zip(
            above, (path.name, path.parent.name, "7"), strict=True)]  # fmt: skip
    assert synced[0] == (path.stat().st_ino, []), "the bytes first"
    assert len(synced) == 7


def test_the_sink_deletes_what_was_stored(store: FileStore) -> None:
    uri, other = store.put(7, "s", b"text"), store.put(7, "t", b"text")
    FileObjects(store._root).delete(7, "s", uri)
    with pytest.raises(ObjectRefused, match="is not there"):
        store.get(7, uri)
    assert store.get(7, other) == b"text", "the same content of another session is another object"
    FileObjects(store._root).delete_all(7, "t")
    assert files(store) == []


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/7/a", "/7/a", "file://elsewhere{root}/7/a", "file://{root}/8/a", "file://{root}/7",
        "file://{root}/7/../8/a", "file://{root}/7/%2e%2e/8/a", "file://{root}/7/a%00", "file://{root}/7/a?x=1",
        "file:///etc/passwd", "file://{root}x/7/a", "file://{root}/7/folder", "file://{root}/7/up/secret",
        "file://{root}/7/alias", "file://{root}/7/loop/x", "file://{root}/7/{long}", "file://{root}/7/{long}/x",
        "file://[", "",
    ],
)  # fmt: skip
def test_nothing_else_is_read(store: FileStore, tmp_path: Path, uri: str) -> None:
    root = store._root
    for tenant in ("7", "8"):
        (root / tenant).mkdir()
    (root / "8" / "a").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    (root / "7" / "folder").mkdir()
    (root / "7" / "up").symlink_to(tmp_path)
    (root / "7" / "alias").symlink_to(tmp_path / "secret")
    (root / "7" / "loop").symlink_to(root / "7" / "loop")
    with pytest.raises(ObjectRefused):
        store.get(7, uri.format(root=root, long="x" * 300))


def test_a_root_that_is_away_is_an_outage_and_no_empty_store(tmp_path: Path) -> None:
    away = FileStore(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        away.put(7, "s", b"x")
    with pytest.raises(FileNotFoundError):
        away.get(7, away.uri_of(7, "s", sha256_hex(b"x")))
    assert not (tmp_path / "away").exists()


def test_what_is_too_large_is_refused(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = store.put(7, "s", b"12345")
    monkeypatch.setattr(objects, "OBJECT_BYTES_MAX", 4)
    with pytest.raises(Invalid, match="at most 4"):
        store.put(7, "s", b"123456")
    with pytest.raises(ObjectRefused, match="larger than 4"):
        store.get(7, uri)


def made(content: Any) -> Input:
    fields = {"mode": "prompt", "session_id": "s", "input_id": "i", "issued_at_ms": 1, "content": content}
    return parse_request(fields).to_input(tenant_id=7, user_id=1)


@pytest.mark.parametrize(("content", "media_type"), [("x" * RECORD_BYTES_MAX, "text/plain"), ([1] * 200_000, None)])
def test_large_content_becomes_a_pointer_to_where_it_will_lie(store: FileStore, content: Any, media_type: Any) -> None:
    sealed = seal(made(content), store, erasable=False)
    pointer = sealed.record.content
    assert sealed.content is not None
    assert pointer is not None
    assert files(store) == [], "sealing does no I/O"
    assert (pointer.data, pointer.size_bytes) == (None, len(sealed.content))
    assert pointer.media_type == (media_type or "application/json")
    assert len(sealed.data) < 1_000
    assert store.put(7, "s", sealed.content) == pointer.uri
    assert load(store, 7, pointer.uri or "", pointer.digest or "") == sealed.content
    assert digest(sealed.record) == digest(seal(made(content), store, erasable=False).record), "a repeat is the same"


def test_small_content_travels_by_value_unless_it_has_to_be_erasable(store: FileStore) -> None:
    assert seal(made("x"), store, erasable=False).record == made("x")
    sealed = seal(made("x"), store, erasable=True)
    assert sealed.content == b"x"
    assert b"x" * 2 not in sealed.data
    assert sealed.record.content is not None
    assert sealed.record.content.data is None


def test_without_a_store_it_is_said(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid, match=r"bytes encoded.*ONEPEN_OBJECTS_ROOT.*pointer"):
        seal(made("x" * RECORD_BYTES_MAX), None, erasable=False)
    with pytest.raises(Invalid, match=r"^erasable: .*ONEPEN_OBJECTS_ROOT"):
        seal(made("x"), None, erasable=True)
    monkeypatch.setattr("onepen.streams.sealing.OBJECT_BYTES_MAX", 4)
    with pytest.raises(Invalid, match="at most 4"):
        seal(made("12345"), store, erasable=True)
