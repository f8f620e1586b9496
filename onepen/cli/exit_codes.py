"""The exit codes of every command: one table, used by the code and shown by `onepen --help`."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a script may rely on."""

    OK = 0
    FINDING = 1
    USAGE = 2
    REFUSED = 3
    NO_ANSWER = 4
    CONFLICT = 5
    NOT_FOUND = 6
    INTERNAL = 70
    INTERRUPTED = 130
    PIPE_CLOSED = 141


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "done; the input was accepted",
    ExitCode.FINDING: "looked, and something is wrong (a difference, a red check, a run that did not complete)",
    ExitCode.USAGE: "bad input or usage; nothing was sent",
    ExitCode.REFUSED: "the protocol refused it; nothing changed",
    ExitCode.NO_ANSWER: "no answer: unreachable, or the time is over and the outcome unknown",
    ExitCode.CONFLICT: "something else is in the way (a stack already runs here, a newer policy is in force)",
    ExitCode.NOT_FOUND: "no such session, run, input or process",
    ExitCode.INTERNAL: "a defect of onepen (ONEPEN_TRACEBACK=1 shows where)",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
    ExitCode.PIPE_CLOSED: "the reader of the output went away",
}

assert MEANING.keys() == set(ExitCode), "every code has its meaning"


def table() -> str:
    """The table as text, one code a line."""
    return "\n".join(f"{code.value:>5}  {meaning}" for code, meaning in MEANING.items())
