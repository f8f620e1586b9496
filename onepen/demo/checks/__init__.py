"""The questions of the launch checklist, answered from outside by the checks of `onepen.streams.audit`."""

from onepen.demo.checks.checklist import Answer, Expectations, answer_all, exit_code
from onepen.streams.audit import (
    Effect,
    Evidence,
    LoggedEvent,
    LoggedInput,
    LoggedReceipt,
    Tables,
    Violation,
)

__all__ = [
    "Answer",
    "Effect",
    "Evidence",
    "Expectations",
    "LoggedEvent",
    "LoggedInput",
    "LoggedReceipt",
    "Tables",
    "Violation",
    "answer_all",
    "exit_code",
]
