"""The directory of one stack, and what in it is ours to remove.

Rule: a directory is ours only if it has our marker file, and the marker is put into new or empty directories
only. `remove_data` removes the names that the marker lists, nothing else. One process at a time holds the
directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

from onepen.streams.engine_settings import LOCAL_ARCHIVE_FOLDER

__all__ = ["DataDirError", "DataDirLock", "claim", "is_claimed", "remove_data"]

MARKER_NAME = ".onepen-data.json"
LOCK_NAME = "stack.lock"
# What the embedded stack itself makes; others name theirs in `claim`.
OWN_NAMES = ("kafka", "postgres", "logs", "views", "stack.json", LOCK_NAME)
# What a processor may have left there that ran without a stack.
EARLIER_NAMES = frozenset({LOCAL_ARCHIVE_FOLDER})


class DataDirError(RuntimeError):
    """The directory cannot be used or must not be touched; the message is a sentence for the terminal."""


def is_claimed(data_dir: Path) -> bool:
    """Whether the directory has our marker."""
    return (data_dir / MARKER_NAME).is_file()


def claim(data_dir: Path, *names: str) -> None:
    """Make the directory ours; `names` are further entries in it that `remove_data` may remove.

    Raises `DataDirError` for a directory that has content but no marker.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_claimed(data_dir) and {entry.name for entry in data_dir.iterdir()} - EARLIER_NAMES:
            raise DataDirError(f"{data_dir} has content that onepen did not make. Name a new or empty directory.")
        known = _marked_names(data_dir) if is_claimed(data_dir) else ()
        wanted = sorted({*OWN_NAMES, *EARLIER_NAMES, *known, *names})
        if tuple(wanted) != known:
            text = json.dumps({"what": "data of one onepen stack", "names": wanted}, indent=1)
            temporary = data_dir / (MARKER_NAME + ".new")
            temporary.write_text(text + "\n", "utf-8")
            os.replace(temporary, data_dir / MARKER_NAME)
    except OSError as error:
        raise DataDirError(f"{data_dir} cannot be used for data: {error.strerror or error}") from error


def remove_data(data_dir: Path) -> list[str]:
    """Remove what onepen made there, and the directory if nothing else is left; answers what else is left.

    Raises `DataDirError` for a directory without our marker. A directory that does not exist is already
    removed.
    """
    if not data_dir.exists():
        return []
    if not is_claimed(data_dir):
        raise DataDirError(f"{data_dir} has no marker of onepen ({MARKER_NAME}): nothing was removed.")
    try:
        for name in _marked_names(data_dir):
            _remove(data_dir / name)
        _remove(data_dir / MARKER_NAME)
        left = sorted(entry.name for entry in data_dir.iterdir())
        if not left:
            data_dir.rmdir()
    except OSError as error:
        raise DataDirError(f"The data in {data_dir} could not be removed: {error}") from error
    return left


def _marked_names(data_dir: Path) -> tuple[str, ...]:
    try:
        names = json.loads((data_dir / MARKER_NAME).read_text("utf-8"))["names"]
        if not all(isinstance(name, str) and _stays_inside(name) for name in names):
            raise ValueError("a name is not a plain name")
    except (ValueError, KeyError, TypeError) as error:
        raise DataDirError(f"The marker {data_dir / MARKER_NAME} is damaged ({error}).") from error
    return tuple(names)


def _stays_inside(name: str) -> bool:
    """Whether it names one entry of the directory, whatever somebody wrote into the marker. (`Path("..").name` is "..",
    so that a comparison with it would let the directory above pass.)"""
    return name not in ("", os.curdir, os.pardir) and not set(name) & {"/", "\\", "\0"}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class DataDirLock:
    """The right to run the stack of a directory.

    The kernel gives it back when the process ends, however it ends.
    """

    def __init__(self, data_dir: Path) -> None:
        """Take the right; raises `DataDirError` when another process has it."""
        self._fd = os.open(data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise DataDirError(f"A stack already runs on {data_dir}. `onepen down` ends it.") from error

    def release(self) -> None:
        """Give the right back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
