"""The `onepen` command: arguments in, data on stdout, messages on stderr, one documented exit code.

Rule: this package parses, prints and wires; it decides nothing about sessions. What a command needs is imported when
the command runs, so that `onepen --help` is quick and works without the extras.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Never raises for an expected error, never prints a traceback for one."""
    from onepen.cli.app import run

    return run(argv)
