"""The log of one slot, whose processes follow each other: lines with their times, and what they say of partitions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_LINE = re.compile(r"^(\d+\.\d+) (\S+) (.*)$", re.M)


class SlotLog:
    """Of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def text(self) -> str:
        return self.path.read_text("utf-8", "replace")

    def lines(self, since_s: float = 0.0) -> Iterator[tuple[float, str]]:
        """(time, text) of its lines."""
        for match in _LINE.finditer(self.text()):
            if float(match[1]) >= since_s:
                yield float(match[1]), match[3]

    def said(self, start: str, since_s: float = 0.0) -> float | None:
        """When a line began so for the first time."""
        return next((at for at, text in self.lines(since_s) if text.startswith(start)), None)

    def owns(self, since_s: float = 0.0) -> set[int]:
        """What its last process was assigned and not revoked since."""
        owned: set[int] = set()
        for _, text in self.lines(since_s):
            if text.startswith("processor of slot"):
                owned.clear()
            elif match := re.match(r"(assigned|revoked): \[(.*)\]", text):
                partitions = {int(p) for p in match[2].split(",") if p}
                owned = owned | partitions if match[1] == "assigned" else owned - partitions
        return owned

    def tail(self, lines: int) -> str:
        return "\n".join(self.text().splitlines()[-lines:])
