"""Objects below a root: the tenant's own files go, twice is fine, and nothing else is ever touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepen.sinks.objects import FileObjects, ObjectRefused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "objects"
    (folder / "7" / "session 1").mkdir(parents=True)
    (folder / "8").mkdir()
    return folder


def test_an_object_is_deleted_once_and_again(root: Path) -> None:
    objects = FileObjects(root)
    mine, other = root / "7" / "session 1" / "a b.json", root / "7" / "other"
    mine.write_text("x")
    other.write_text("y")
    objects.delete(7, mine.as_uri())
    assert not mine.exists()
    assert other.exists()
    objects.delete(7, mine.as_uri())
    objects.delete(7, (root / "7" / "never" / "there").as_uri())


def test_the_root_may_be_named_through_a_link(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    for index, base in enumerate((root, link)):
        victim = root / "7" / f"v{index}"
        victim.write_text("x")
        FileObjects(link).delete(7, f"file://{base}/7/v{index}")
        assert not victim.exists()


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/7/a",
        "/7/a",
        "file://elsewhere{root}/7/a",
        "file://{root}/8/a",
        "file://{root}/7",
        "file://{root}/a",
        "file://{root}/7/../8/a",
        "file://{root}/7/%2e%2e/8/a",
        "file://{root}/7/a%00",
        "file://{root}/7/a?x=1",
        "file:///etc/passwd",
        "file://{root}x/7/a",
        "file://{root}/7/folder",
        "file://[",
        "",
    ],
)
def test_anything_else_is_refused(root: Path, uri: str) -> None:
    outside = root / "8" / "a"
    for kept in (outside, root / "a", root / "7" / "a"):
        kept.write_text("kept")
    (root / "7" / "folder").mkdir()
    with pytest.raises(ObjectRefused):
        FileObjects(root).delete(7, uri.replace("{root}", str(root)))
    assert all(kept.read_text() == "kept" for kept in (outside, root / "a", root / "7" / "a"))


def test_links_below_the_root_are_not_followed(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    (root / "7" / "up").symlink_to(tmp_path)
    with pytest.raises(ObjectRefused):
        FileObjects(root).delete(7, f"file://{root}/7/up/secret")
    (root / "7" / "alias").symlink_to(secret)
    FileObjects(root).delete(7, f"file://{root}/7/alias")
    assert not (root / "7" / "alias").is_symlink()
    assert secret.read_text() == "kept"


def test_a_root_that_is_away_is_no_deletion(tmp_path: Path) -> None:
    """Not mounted: the object may well be there. It must not count as gone."""
    with pytest.raises(OSError, match="missing"):
        FileObjects(tmp_path / "missing").delete(7, f"file://{tmp_path}/missing/7/a")
