"""From an exception to one line on stderr and an exit code.

Rule: whoever raises says what is wrong; this module only chooses the code. Errors of drivers are told by the package
of their class, so that nothing is imported to ask. What is not expected is a defect: one line, 70, and the traceback
only with ONEPEN_TRACEBACK=1.
"""

from __future__ import annotations

import os
import traceback

from onepen.cli.exit_codes import ExitCode
from onepen.cli.output import note
from onepen.schemas.errors import Fatal, Fenced, Invalid, OnepenError, Poison, Retryable, UnknownOutcome

_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (Invalid, ExitCode.USAGE),
    (UnknownOutcome, ExitCode.NO_ANSWER),
    (Retryable, ExitCode.NO_ANSWER),
    (Fenced, ExitCode.CONFLICT),
    (Poison, ExitCode.FINDING),
    (Fatal, ExitCode.FINDING),
    (OnepenError, ExitCode.FINDING),
    (TimeoutError, ExitCode.NO_ANSWER),
    (ConnectionError, ExitCode.NO_ANSWER),
    (OSError, ExitCode.FINDING),
)
_DRIVERS = {
    "asyncpg": "PostgreSQL",
    "confluent_kafka": "Kafka",
    "cimpl": "Kafka",
}


class Failure(Exception):
    """An expected end of a command: its message and its exit code."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


def report(error: Exception, *, where: str = "") -> ExitCode:
    """Say on stderr, in one line, what `error` means; the exit code. `where` stands before it (`line 3`)."""
    message, code = _judged(error)
    note(f"onepen: {where}: {message}" if where else f"onepen: {message}")
    return code


def _judged(error: Exception) -> tuple[str, ExitCode]:
    if isinstance(error, Failure):
        return str(error), error.code
    if type(error).__module__.startswith("pydantic") and hasattr(error, "errors"):
        return _of_settings(error), ExitCode.USAGE
    for kind in type(error).__mro__:
        driver = _DRIVERS.get(kind.__module__.partition(".")[0])
        if driver is not None:
            return _of_driver(driver, error)
    if isinstance(error, RuntimeError) and type(error).__module__.startswith("onepen."):
        # What the stack's parts raise is written for the terminal, with the end of a log where that helps.
        code = ExitCode.CONFLICT if type(error).__name__ == "DataDirError" else ExitCode.FINDING
        return str(error), code
    for known, code in _CODES:
        if isinstance(error, known):
            return _one_line(error), code
    if os.environ.get("ONEPEN_TRACEBACK"):
        note("".join(traceback.format_exception(error)).rstrip())
    return f"internal error: {type(error).__name__}: {_one_line(error)}", ExitCode.INTERNAL


def _of_driver(driver: str, error: Exception) -> tuple[str, ExitCode]:
    if type(error).__name__ == "UndefinedTableError":
        return "the tables are missing in PostgreSQL; to mend: onepen migrate", ExitCode.FINDING
    # confluent_kafka carries its error as a value that knows its own text.
    told = getattr(error.args[0], "str", None) if error.args else None
    text = told() if callable(told) else _one_line(error)
    return f"{driver}: {text}", ExitCode.NO_ANSWER


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _of_settings(error: Exception) -> str:
    """The first error of a pydantic ValidationError, naming the field and never the value (it may be a secret)."""
    first = error.errors(include_input=False, include_url=False)[0]  # type: ignore[attr-defined]
    field = ".".join(str(part) for part in first["loc"]) or "settings"
    return f"{field}: {first['msg']}"
