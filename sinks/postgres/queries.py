"""Access to `queries.sql`, the one place where SQL is written: `sql("claim_partition")` is the statement's text."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

__all__ = ["STATEMENTS", "sql"]

_NAME: Final = re.compile(r"^-- ([a-z_]+) --$", re.MULTILINE)


def _read() -> dict[str, str]:
    parts = _NAME.split((files(__package__) / "queries.sql").read_text("utf-8"))[1:]
    named = dict(zip(parts[::2], (text.strip().removesuffix(";") for text in parts[1::2]), strict=True))
    if len(named) * 2 != len(parts):
        raise ValueError("queries.sql: a name stands twice")
    return named


STATEMENTS: Final = _read()


def sql(name: str) -> str:
    """The statement of that name; `KeyError` when there is none."""
    return STATEMENTS[name]
