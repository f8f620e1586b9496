"""`onepen demo --recording`: the re-enactment with a progress bar, its figures, and what the outside checks say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onepen.demo.answers import print_answers
from onepen.demo.checks import exit_code
from onepen.demo.recording import SHIPPED, Summary, re_enact, verify
from onepen.streams.settings import Settings

__all__ = ["show_recording"]

STEPS_SAID = 10
"""How often progress is said where there is no terminal to draw a bar in."""


def show_recording(
    settings: Settings, console: Console, path: Path | None = None, sessions: int | None = None, speed: float = 1.0
) -> int:
    """Re-enact `path` (None: the shipped recording), print runs/s, inputs/s, events/s, then judge it from outside.

    0 only when every turn became one completed run and every check holds. Raises like `re_enact`.
    """
    summary = _played(settings, console, path or SHIPPED, sessions, speed)
    console.print(str(summary), soft_wrap=True)
    console.print("Checking topics and tables from outside ...")
    _, answers = verify(settings, summary)
    print_answers(console, answers)
    complete = summary.ends == {"completed": summary.turns}
    if not complete:
        console.print(f"{summary.turns} turns, but the runs ended: {summary.ends}", style="bold red")
    return max(exit_code(answers), int(not complete))


def _played(settings: Settings, console: Console, path: Path, sessions: int | None, speed: float) -> Summary:
    if not console.is_terminal:
        return re_enact(settings, path, sessions, speed, progress=_said(console))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("turns", total=None)
        return re_enact(
            settings, path, sessions, speed, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _said(console: Console) -> Callable[[int, int], None]:
    """Says every tenth of the way in a line of its own."""
    said = 0

    def say(done: int, total: int) -> None:
        nonlocal said
        step = done * STEPS_SAID // max(total, 1)
        if step > said:
            said = step
            console.print(f"{done} of {total} turns")

    return say
