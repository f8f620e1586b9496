"""Log files as lines for a terminal: the last ones, and those that come.

Rule: a log holds what programs and their inputs wrote: every line is made printable. A file that was rotated (it is
shorter than what was read of it) is read from its beginning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from onepen.cli.terminal_text import printable

TURN_S = 0.2
BLOCK_BYTES = 256 * 1024


class LogFile:
    """One log; `label` stands before each line when several are shown."""

    def __init__(self, path: Path, label: str = "") -> None:
        self._path = path
        self._label = label
        self._position = 0
        self._rest = b""

    def last(self, count: int) -> list[str]:
        """The last `count` lines that are there now; `more` goes on behind them."""
        try:
            with self._path.open("rb") as stream:
                end = stream.seek(0, os.SEEK_END)
                data = b""
                start = end
                while start > 0 and data.count(b"\n") <= count:
                    start = max(0, start - BLOCK_BYTES)
                    stream.seek(start)
                    data = stream.read(end - start)
        except FileNotFoundError:
            return []
        whole, newline, self._rest = data.rpartition(b"\n")
        self._position = end
        lines = whole.split(b"\n") if newline else []
        return [self._shown(line) for line in (lines[-count:] if count else [])]

    def more(self) -> list[str]:
        """The lines that were written since."""
        try:
            if self._path.stat().st_size < self._position:
                self._position, self._rest = 0, b""
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                data = stream.read(BLOCK_BYTES)
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._shown(line) for line in lines]

    def _shown(self, line: bytes) -> str:
        text = printable(line.rstrip(b"\r").decode("utf-8", "replace"))
        return f"{self._label:<10} {text}" if self._label else text


def follow_logs(files: Sequence[LogFile], show: Callable[[str], None]) -> None:
    """Show new lines as they come; ends by KeyboardInterrupt."""
    while True:
        shown = 0
        for file in files:
            for line in file.more():
                show(line)
                shown += 1
        if not shown:
            time.sleep(TURN_S)
