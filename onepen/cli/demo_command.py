"""`onepen demo`: recorded agent sessions, played through the real pipeline; and the door to the founding story.

Rule: the demonstrations themselves live in `onepen.demo`; here are only their arguments and their exit codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.options import BootstrapOption, DataDirOption, settings_of

if TYPE_CHECKING:
    from rich.console import Console

    from onepen.streams.settings import Settings


def register(app: typer.Typer) -> None:
    """Hang the command into the command tree."""
    add_command(app, demo, "Re-enact recorded agent sessions.")


def demo(
    recording: Annotated[
        Path | None,
        typer.Option("--recording", metavar="FILE", help="JSON lines: session, messages [the one shipped]."),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option("--sessions", min=1, metavar="N", help="Only the first N sessions of the file.")
    ] = None,
    speed: Annotated[
        float,
        typer.Option(
            "--speed", min=0.0, metavar="X", help="Pace: 1 is readable, 10 ten times as fast, 0 without pauses."
        ),
    ] = 1.0,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
) -> int:
    """Re-enact recorded agent sessions: each user message a prompt, each tool that changes the world an action.

    Needs a running stack (`onepen up`) and brings its own worker. Sessions get new ids at each start. Exit 0 when every
    turn became one completed run and every check of topics and tables holds.

    \b
    Examples:
      onepen demo
      onepen demo --recording sessions.jsonl --sessions 3 --speed 10
    """
    from onepen.demo.showing import show_recording

    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap)
    settings.require_dsn()
    return show_recording(settings, console(), recording, sessions, speed)


def play_story(settings: Settings, *, once: bool) -> int:
    """Play the founding story against a running stack; its exit code."""
    from onepen.demo.story import play

    return play(settings, console(), once=once)


def console() -> Console:
    """A console for the demonstrations: colours as everywhere, no markup in other people's text."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
