"""Rows as typed values, field by field of the same name: a row's type says once which columns are read.

Rule: a moment `x_at` becomes `x_ms` in milliseconds of the log; a view's `session_id` and `run_id` are the callers'
texts, so they come from `session_key` and `run_key`; a field of any type is the JSON value of its column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar, get_type_hints

import asyncpg
import orjson

__all__ = ["EPOCH", "reading"]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MS: Final = timedelta(milliseconds=1)

Row = asyncpg.Record | Mapping[str, Any]
T = TypeVar("T")


def reading(kind: type[T], **differing: str) -> Callable[[Row], T]:
    """What makes a `kind` of a row; `differing` names the columns of fields that break the rule.

    A column that is missing is a `KeyError`, whatever default its field has.
    """
    fields = [
        (name, differing.get(name) or _column(name), _from(name, of)) for name, of in get_type_hints(kind).items()
    ]

    def read(row: Row) -> T:
        return kind(**{name: value_of(row[column]) for name, column, value_of in fields})

    return read


def _ms(moment: datetime | None) -> int | None:
    """A timestamp as a moment of the log."""
    return None if moment is None else (moment - EPOCH) // MS


def _column(field: str) -> str:
    return re.sub(r"(?<![^_])(session|run)_id$", r"\1_key", re.sub(r"_ms$", "_at", field))


def _from(field: str, of: Any) -> Callable[[Any], Any]:
    if field.endswith("_ms"):
        return _ms
    return _json if of is Any else _same


def _json(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)


def _same(value: Any) -> Any:
    return value
