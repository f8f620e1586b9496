"""Objects below a root: the session's own files go, twice is fine, and nothing else is ever touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepen.schemas.ids import object_folder
from onepen.sinks.objects import FileObjects, ObjectRefused

MINE = object_folder("s")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "objects"
    (folder / "7" / MINE).mkdir(parents=True)
    (folder / "7" / object_folder("t")).mkdir()
    (folder / "8" / MINE).mkdir(parents=True)
    return folder


def test_an_object_is_deleted_once_and_again(root: Path) -> None:
    objects = FileObjects(root)
    mine, other = root / "7" / MINE / "a b.json", root / "7" / MINE / "other"
    mine.write_text("x")
    other.write_text("y")
    objects.delete(7, "s", mine.as_uri())
    assert not mine.exists()
    assert other.exists()
    objects.delete(7, "s", mine.as_uri())
    objects.delete(7, "s", (root / "7" / MINE / "never" / "there").as_uri())


def test_the_root_may_be_named_through_a_link(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    for index, base in enumerate((root, link)):
        victim = root / "7" / MINE / f"v{index}"
        victim.write_text("x")
        FileObjects(link).delete(7, "s", f"file://{base}/7/{MINE}/v{index}")
        assert not victim.exists()


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/7/{mine}/a",
        "/7/{mine}/a",
        "file://elsewhere{root}/7/{mine}/a",
        "file://{root}/8/{mine}/a",
        "file://{root}/7/{other}/a",
        "file://{root}/7/a",
        "file://{root}/7/{mine}",
        "file://{root}/7",
        "file://{root}/a",
        "file://{root}/7/{mine}/../{other}/a",
        "file://{root}/7/{mine}/%2e%2e/{other}/a",
        "file://{root}/7/{mine}/a%00",
        "file://{root}/7/{mine}/a?x=1",
        "file:///etc/passwd",
        "file://{root}x/7/{mine}/a",
        "file://{root}/7/{mine}/folder",
        "file://{root}/7/{mine}/a/b",
        "file://{root}/7/{mine}/loop/b",
        "file://{root}/7/{mine}/{long}",
        "file://{root}/7/{mine}/{long}/b",
        "file://[",
        "",
    ],
)
def test_anything_else_is_refused(root: Path, uri: str) -> None:
    """Another session's object too: a pointer may name it."""
    files = [root / "8" / MINE / "a", root / "7" / object_folder("t") / "a", root / "7" / "a", root / "7" / MINE / "a"]
    for kept in files:
        kept.write_text("kept")
    (root / "7" / MINE / "folder").mkdir()
    (root / "7" / MINE / "loop").symlink_to(root / "7" / MINE / "loop")
    named = {"root": root, "mine": MINE, "other": object_folder("t"), "long": "x" * 300}
    with pytest.raises(ObjectRefused):
        FileObjects(root).delete(7, "s", uri.format(**named))
    assert all(kept.read_text() == "kept" for kept in files)


def test_links_below_the_root_are_not_followed(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    mine = root / "7" / MINE
    (mine / "up").symlink_to(tmp_path)
    with pytest.raises(ObjectRefused):
        FileObjects(root).delete(7, "s", f"file://{mine}/up/secret")
    (mine / "alias").symlink_to(secret)
    FileObjects(root).delete(7, "s", f"file://{mine}/alias")
    assert not (mine / "alias").is_symlink()
    assert secret.read_text() == "kept"


def test_all_objects_of_a_session_go_and_no_others(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    mine = root / "7" / MINE
    (mine / "nested").mkdir()
    for gone in (mine / "a", mine / "b", mine / "nested" / "c"):
        gone.write_text("gone")
    (mine / "up").symlink_to(tmp_path)
    others = [root / "7" / object_folder("t") / "a", root / "8" / MINE / "a"]
    for kept in others:
        kept.write_text("kept")
    FileObjects(root).delete_all(7, "s")
    assert not mine.exists()
    assert [kept.read_text() for kept in (secret, *others)] == ["kept"] * 3
    FileObjects(root).delete_all(7, "s")
    FileObjects(root).delete_all(9, "no objects of this tenant")
    mine.symlink_to(root / "7" / object_folder("t"))
    with pytest.raises(ObjectRefused):
        FileObjects(root).delete_all(7, "s")
    assert others[0].read_text() == "kept"


def test_a_root_that_is_away_is_no_deletion(tmp_path: Path) -> None:
    """Not mounted: the object may well be there. It must not count as gone."""
    away = FileObjects(tmp_path / "missing")
    with pytest.raises(OSError, match="missing"):
        away.delete(7, "s", f"file://{tmp_path}/missing/7/{MINE}/a")
    with pytest.raises(OSError, match="missing"):
        away.delete_all(7, "s")
