"""Judges a piece of history from outside: log records, table rows and the ledgers of the world.

Rule 1: nothing here knows how a decision is made. It imports the vocabulary (`onepen.schemas`) and nothing of
`processors`, `sinks` or the rest of `streams`; the fold, the table of modes and the tables' expected rows are a second
implementation, written apart.
Rule 2: pure. Every check takes plain lists that somebody else has read and returns the violations it found.
Rule 3: a check that cannot fail is no check: tests/unit/audit hands each one damaged copies that it must reject.
"""

from onepen.streams.audit.evidence import (
    Effect,
    Evidence,
    LoggedEvent,
    LoggedInput,
    LoggedReceipt,
    Tables,
    Violation,
)

__all__ = ["Effect", "Evidence", "LoggedEvent", "LoggedInput", "LoggedReceipt", "Tables", "Violation"]
