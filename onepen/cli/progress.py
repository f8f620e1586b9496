"""How far a long reading command has come, on stderr: a bar on a terminal, now and then a line elsewhere.

Rule: stdout is never touched, so `-o json` stays one document.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from onepen.cli.output import colours_wanted, note

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S: Final = 5.0


class PartitionProgress:
    """Told by `show(partition, done, total)`. A context manager."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._bar: Progress | None = None
        self._tasks: dict[int, TaskID] = {}
        self._said_s = time.monotonic()

    def __enter__(self) -> PartitionProgress:
        if colours_wanted(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, partition: int, done: int, total: int) -> None:
        """`done` of `total` inputs of the partition are passed."""
        if self._bar is not None:
            if partition not in self._tasks:
                self._tasks[partition] = self._bar.add_task(f"{self._verb} partition {partition}", total=total)
            self._bar.update(self._tasks[partition], completed=done)
        elif time.monotonic() - self._said_s >= LINE_EVERY_S:
            self._said_s = time.monotonic()
            note(f"onepen: {self._verb} partition {partition}: {done} of {total} inputs")
