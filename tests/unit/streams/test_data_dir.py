"""Whose a data directory is."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepen.streams.data_dir import DataDirError, claim, remove_data


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
