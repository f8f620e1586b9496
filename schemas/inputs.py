"""What a client asks: the input record, and its digest. Rules of meaning live in `processors`, of form in `edge`."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

TEXT: Final = "text/plain"
JSON: Final = "application/json"
OPAQUE: Final = "application/octet-stream"


class Content(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Content by value (`data`, with its media type) or by pointer (`uri`, `digest`, `size_bytes`)."""

    media_type: str = TEXT
    data: bytes | None = None
    uri: str | None = None
    digest: str | None = None
    size_bytes: int = 0


class Parent(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Set by the processor only, on the inputs of child runs: who waits for the answer, and the chain of ancestors
    (session ids, the outermost first, the parent last). On an abort `cancel_deadline_ms` is the parent's (0: none)."""

    session_id: str
    run_id: str
    call_id: str
    ancestors: tuple[str, ...]
    cancel_deadline_ms: int = 0


class Input(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One input record. `input_id` and `issued_at_ms` are minted once by the client and sent unchanged on a repeat."""

    input_id: str
    issued_at_ms: int
    tenant_id: int
    user_id: int
    session_id: str
    mode: str
    source: str
    content: Content | None = None
    expected_run_id: str | None = None
    on_busy: str | None = None
    if_missed: str | None = None
    ttl_ms: int | None = None
    retry_of: str | None = None
    recovery: str | None = None
    timeout_ms: int | None = None
    max_attempts: int | None = None
    parent: Parent | None = None
    target_kind: str | None = None
    target_id: str | None = None
    scope: str | None = None
    reason: str | None = None
    action_key: str | None = None
    action_name: str | None = None
    args_digest: str | None = None
    decision: str | None = None


_encoder = msgspec.json.Encoder(order="deterministic")


def digest(record: Input) -> str:
    """SHA-256 (hex) over every field the client sets; absent ones do not count, so a new optional field is harmless."""
    return hashlib.sha256(_encoder.encode(record)).hexdigest()


def content_bytes(content: Content | None) -> int:
    """Size that counts against bounds: the bytes carried in the record (a pointer carries none)."""
    return len(content.data) if content is not None and content.data is not None else 0
