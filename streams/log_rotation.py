"""Keeping the log files of running programs small.

Rule: the programs hold their log open and append to it, so a full log is copied aside and emptied in place.
A line written between the copy and the emptying is lost; these logs are for people, nothing counts them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["rotate_if_large"]

MAX_LOG_BYTES = 10 * 1024 * 1024
KEPT_LOGS = 3


def rotate_if_large(path: Path, *, max_bytes: int = MAX_LOG_BYTES, kept: int = KEPT_LOGS) -> bool:
    """Move the content to `<name>.1` (and `.1` to `.2` and so on) once it exceeds `max_bytes`."""
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    for number in range(kept, 1, -1):
        older = path.with_name(f"{path.name}.{number - 1}")
        if older.exists():
            os.replace(older, path.with_name(f"{path.name}.{number}"))
    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)
    return True
