"""Whose a data directory is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onepen.streams.data_dir import MARKER_NAME, DataDirError, claim, remove_data


def test_what_a_processor_without_a_stack_has_left_is_ours(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "local-archive").mkdir(parents=True)
    (folder / "local-archive" / "onepen-00000.state").write_bytes(b"state")
    claim(folder)
    assert remove_data(folder) == []
    assert not folder.exists()


def test_anything_else_is_not(tmp_path: Path) -> None:
    (tmp_path / "local-archive").mkdir()
    (tmp_path / "letters").mkdir()
    with pytest.raises(DataDirError, match="content that onepen did not make"):
        claim(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "/", "../letters", "kafka/..", "/etc", "..\\letters", "a\0b", 7])
def test_a_marker_that_names_anything_outside_removes_nothing(tmp_path: Path, name: object) -> None:
    (tmp_path / "letters").mkdir()
    folder = tmp_path / "data"
    claim(folder)
    (folder / "kafka").mkdir()
    (folder / MARKER_NAME).write_text(json.dumps({"names": ["kafka", name]}))
    with pytest.raises(DataDirError, match="is damaged"):
        remove_data(folder)
    assert (folder / "kafka").is_dir()
    assert (tmp_path / "letters").is_dir()
