"""Payloads of reported events: strict JSON, changes named, sizes bounded.

Rule: output of tools and models is never trusted to be JSON. What JSON cannot say is flattened and its place is
named in `flattened`; a result that is no JSON or too large is left out and named, and the run goes on.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from onepen.schemas.errors import Invalid
from onepen.schemas.ids import ID_CHARS_MAX
from onepen.schemas.strict_json import canonical, flatten
from onepen.streams.worker.machine import REPORT_BYTES_MAX

PAYLOAD_BYTES_MAX: Final = REPORT_BYTES_MAX - 4 * 1024
VALUE_BYTES_MAX: Final = PAYLOAD_BYTES_MAX - 16 * 1024
"""Largest result, output or argument list kept inside an event."""
FLATTENED_NAMED_MAX: Final = 20
ERROR_CHARS_MAX: Final = 2_000
KEY_CHARS_MAX: Final = ID_CHARS_MAX - 12
"""Derived keys leave room for what a retry appends."""


def payload(members: dict[str, Any]) -> bytes:
    """Canonical JSON text of an event's payload. Raises `Invalid` naming the member, or both sizes."""
    changed: list[str] = []
    flat: dict[str, Any] = {}
    for name, value in members.items():
        flat[name], flagged = flatten(value, name)
        changed += flagged
    if changed:
        flat["flattened"] = changed[:FLATTENED_NAMED_MAX]
    data = canonical(flat)
    if len(data) > PAYLOAD_BYTES_MAX:
        raise Invalid(
            f"payload: {len(data)} bytes encoded, {PAYLOAD_BYTES_MAX} are allowed; store it and report a pointer",
            field="payload",
        )
    return data


def kept(name: str, value: Any) -> tuple[Any, dict[str, Any]]:
    """`value` as strict JSON, and the members that report it: itself, or why it is left out and its digest.

    A value that is no JSON is answered as it came.
    """
    if value is None:
        return None, {}
    try:
        flat, flagged = flatten(value, name)
    except Invalid:
        return value, {f"{name}Omitted": "not_json"}
    data = canonical(flat)
    if len(data) > VALUE_BYTES_MAX:
        digest = hashlib.sha256(data).hexdigest()
        return flat, {f"{name}Omitted": "too_large", f"{name}Bytes": len(data), f"{name}Digest": digest}
    members: dict[str, Any] = {name: flat}
    if flagged:
        members["flattened"] = flagged[:FLATTENED_NAMED_MAX]
    return flat, members


def error_of(error: BaseException) -> dict[str, str]:
    """An exception as members of an event: its type and its first 2,000 characters."""
    return {"type": type(error).__name__, "message": str(error)[:ERROR_CHARS_MAX]}


def args_digest(args: Any) -> str:
    """SHA-256 of the canonical JSON of an action's arguments: the order of members does not matter."""
    return hashlib.sha256(canonical(args)).hexdigest()


def derived_key(lineage: str, name: str, ordinal: int) -> str:
    """Key of an action, or id of a call: the same for everybody who comes to the same call of the same lineage."""
    key = f"{lineage}:{name}:{ordinal}"
    return key if len(key) <= KEY_CHARS_MAX else f"{lineage}:{args_digest(name)[:32]}:{ordinal}"
