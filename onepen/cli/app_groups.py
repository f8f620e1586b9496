"""Groups of commands in the house style: plain help (examples stay as written), no completion, no tracebacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def new_group(name: str | None, help_text: str, *, epilog: str | None = None) -> typer.Typer:
    """An empty group; called without a command it shows its help."""
    return typer.Typer(
        name=name,
        help=help_text,
        epilog=epilog,
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=dict(CONTEXT),
    )


def add_command(app: typer.Typer, command: Callable[..., Any], short_help: str, *, name: str | None = None) -> None:
    """Hang a command into a group; `short_help` is its line in the list of commands."""
    app.command(name, short_help=short_help, context_settings=dict(CONTEXT))(command)
