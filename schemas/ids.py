"""Identifiers: what text may be an id, and the ids that are derived instead of drawn.

Ids are text and nothing else: refused if they do not fit, never normalised or converted (protocol section 1).
Nothing here is random: a run id is a function of tenant, session and run number, so a replay derives it again.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TypeGuard

from onepen.schemas.errors import Invalid

ID_CHARS_MAX = 128
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def id_ok(text: object) -> TypeGuard[str]:
    """True when `text` is 1-128 bytes of printable ASCII without blanks."""
    return (
        isinstance(text, str)
        and 0 < len(text) <= ID_CHARS_MAX
        and text.isascii()
        and text.isprintable()
        and " " not in text
    )


def check_id(text: object, field: str) -> str:
    """Return `text` unchanged; raise `Invalid` naming `field` when it is no id."""
    if not isinstance(text, str):
        raise Invalid(f"{field}: must be text, not {type(text).__name__}", field=field)
    if not text:
        raise Invalid(f"{field}: must not be empty", field=field)
    if len(text) > ID_CHARS_MAX:
        raise Invalid(f"{field}: longer than {ID_CHARS_MAX} characters", field=field)
    if not id_ok(text):
        raise Invalid(f"{field}: only printable ASCII without blanks is allowed", field=field)
    return text


def check_int64(value: object, field: str) -> int:
    """Return `value` unchanged; raise `Invalid` when it is no 64-bit integer (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(f"{field}: must be an integer, not {type(value).__name__}", field=field)
    if not INT64_MIN <= value <= INT64_MAX:
        raise Invalid(f"{field}: does not fit 64 bits", field=field)
    return value


@lru_cache(maxsize=1024)
def run_id(tenant_id: int, session_id: str, run_no: int) -> str:
    """`run-` and 32 hex digits derived from tenant, session and run number."""
    text = f"{tenant_id}/{run_no}/{session_id}"
    return "run-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def object_folder(session_id: str) -> str:
    """Name of the folder that a session's objects lie in: an id may hold slashes and dots, its hash is a plain name."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]


def output_key(tenant_id: int, session_id: str) -> bytes:
    """Key of events and receipts: `tenant/session`, unambiguous because the tenant is a number."""
    return f"{tenant_id}/{session_id}".encode()
