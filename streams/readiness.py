"""Tell whoever started this process that it serves: the file named by `ONEPEN_READY_FILE` appears."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["READY_FILE_VARIABLE", "say_ready"]

READY_FILE_VARIABLE: Final = "ONEPEN_READY_FILE"


def say_ready() -> None:
    """Make the file, if one is named. May be called again."""
    if path := os.environ.get(READY_FILE_VARIABLE):
        Path(path).touch()
