"""The command tree and its one entry point `run`.

Rule: every command is a function that returns None or an exit code; whatever goes wrong is turned into one line and a
code here, in one place. Commands are grouped in the help by what people come for.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from onepen.cli import failures
from onepen.cli.app_groups import new_group
from onepen.cli.exit_codes import ExitCode, table
from onepen.cli.output import OutputClosed, note, write_data

# The base of everything Typer says about arguments, whether it carries its own click or uses the installed one.
_ARGUMENT_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

EPILOG = f"""\b
Exit codes:
{table()}

\b
Data goes to stdout, messages to stderr. Addresses come from ONEPEN_BOOTSTRAP and ONEPEN_DSN, else from the
local stack in the data directory. Secrets are never arguments: ONEPEN_DSN or ONEPEN_DSN_FILE, ONEPEN_TOKEN_KEY or
ONEPEN_TOKEN_KEY_FILE."""


def build() -> typer.Typer:
    """The whole command tree."""
    from onepen.cli import (
        control_commands,
        deadletter_commands,
        demo_command,
        partition_commands,
        policy_commands,
        reading_commands,
        send_command,
        service_commands,
        simulate_command,
        stack_commands,
        submit_commands,
        tail_command,
        topics_commands,
        verify_commands,
        why_command,
    )

    app = new_group(
        None,
        """One active run per session, everything in the log, tables in PostgreSQL.

        \b
        Start here:
          onepen up --demo                     start everything and see the founding story
          onepen prompt session-42 "Hello"     submit a prompt and print its verdict
          onepen tail session-42               follow what happens
        """,
        epilog=EPILOG,
    )
    app.callback()(_global_options)
    for module in (
        stack_commands,
        submit_commands,
        control_commands,
        send_command,
        tail_command,
        reading_commands,
        why_command,
        policy_commands,
        simulate_command,
        topics_commands,
        verify_commands,
        deadletter_commands,
        partition_commands,
        service_commands,
        demo_command,
    ):
        module.register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from onepen import __version__

        write_data(f"onepen {__version__}")
        raise typer.Exit(0)


def _global_options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Replaced by the group's own help."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    # What clients log is not for the terminal, unless the command is a process that logs (`serving`).
    logging.getLogger("onepen").addHandler(logging.NullHandler())
    code = _guarded(list(sys.argv[1:] if argv is None else argv))
    if code == ExitCode.PIPE_CLOSED:
        # What is still buffered has no reader: keep the interpreter's last flush from complaining.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
    return int(code)


def _guarded(arguments: list[str]) -> int:
    try:
        answer: Any = build()(args=arguments, prog_name="onepen", standalone_mode=False)
        return answer if isinstance(answer, int) else ExitCode.OK
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except (OutputClosed, BrokenPipeError):
        return ExitCode.PIPE_CLOSED
    except SystemExit as error:
        # Typer ends by itself in one case only: the reader of its help went away.
        return ExitCode.PIPE_CLOSED if error.code == 1 else int(error.code or 0)
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except _ARGUMENT_ERROR as error:
        return _usage(error)
    except Exception as error:  # the last resort: one line, never a traceback
        return _reported(error)


def _reported(error: Exception) -> int:
    try:
        return failures.report(error)
    except OutputClosed:
        return ExitCode.PIPE_CLOSED


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "onepen"
    message: str = error.format_message()  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        note(message.rstrip())
        return ExitCode.USAGE
    text = " ".join(message.split())
    note(f"onepen: {text} (see {path} --help)")
    return ExitCode.USAGE
