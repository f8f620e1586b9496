"""Members of foreign JSON, taken only when they have the declared type: else they count as absent, and nothing fails.

Text is given as text columns can hold it: U+0000 is shown as U+FFFD.
"""

from __future__ import annotations

from typing import Any

from onepen.schemas.strict_json import canonical
from onepen.sinks.postgres.payloads import NUL, NUL_SHOWN, stored

__all__ = ["Payload", "boolean_of", "int32_of", "int64_of", "json_text", "member_of", "shown", "text_of"]

Payload = dict[str, Any]


def shown(text: str | None) -> str | None:
    """Text columns hold no U+0000."""
    return text if text is None or NUL not in text else text.replace(NUL, NUL_SHOWN)


def text_of(payload: Payload, name: str) -> str | None:
    value = payload.get(name)
    return shown(value) if isinstance(value, str) else None


def int64_of(payload: Payload, name: str) -> int | None:
    value = payload.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        return None
    return value


def int32_of(payload: Payload, name: str) -> int | None:
    value = int64_of(payload, name)
    return value if value is None or -(2**31) <= value < 2**31 else None


def boolean_of(payload: Payload, name: str) -> bool | None:
    value = payload.get(name)
    return value if isinstance(value, bool) else None


def member_of(payload: Payload, name: str) -> Payload:
    """A member that is an object itself; the empty object when it is not."""
    value = payload.get(name)
    return value if isinstance(value, dict) else {}


def json_text(value: Any) -> str:
    """Text for a jsonb column."""
    return stored(canonical(value), value)[0]
