"""Moments given as arguments: an age (`15m`, `2h`, `7d`) or a time (`2026-07-01T12:00:00Z`); and as they are shown."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from onepen.schemas.errors import Invalid

_AGE = re.compile(r"(\d{1,6})(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def moment_ms(text: str, field: str) -> int:
    """Milliseconds since the epoch of `text`, an age before now or a time. Raises `Invalid` naming `field`.

    A time without a zone is UTC.
    """
    age = _AGE.fullmatch(text)
    if age is not None:
        return max(0, time.time_ns() // 1_000_000 - int(age[1]) * _UNIT_MS[age[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(
            f"{field}: {text!r} is neither an age (15m, 2h, 7d) nor a time (2026-07-01T12:00Z)", field=field
        ) from None
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1_000)


def moment_text(at_ms: int | None) -> str | None:
    """A moment for people: UTC, to the second."""
    if at_ms is None:
        return None
    return datetime.fromtimestamp(at_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
