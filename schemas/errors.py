"""Exceptions, named by what the caller must do. A refusal by the protocol is a value, never an exception."""

from __future__ import annotations


class OnepenError(Exception):
    """Base of everything this package raises on purpose."""


class Invalid(OnepenError, ValueError):
    """The caller's value breaks a rule; correct it and call again. `field` names the culprit."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Retryable(OnepenError):
    """The same call may succeed later, after about `retry_after_ms`."""

    def __init__(self, message: str, *, retry_after_ms: int = 100) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class UnknownOutcome(OnepenError):
    """The record may or may not have been written. Sending the same handle again is safe."""


class Fenced(OnepenError):
    """Somebody else owns it: drop the state, write nothing, close."""


class Poison(OnepenError):
    """This record never works: dead-letter it with `reason` and go on."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason


class Fatal(OnepenError):
    """Stop the process (or the partition); a person has to look. The message says what mends it."""
