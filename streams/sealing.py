"""An input made ready to be sent: its bytes, and the content that has to be stored before them.

Rule: no I/O here. What is too large for a record, or has to be erasable, becomes a pointer, or is refused with the
sentence that says what to do; nothing is cut or sent half.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from onepen.schemas import codec
from onepen.schemas.edge import encode_input
from onepen.schemas.errors import Invalid
from onepen.schemas.inputs import Input
from onepen.schemas.limits import RECORD_BYTES_MAX
from onepen.streams.objects import OBJECT_BYTES_MAX, ObjectStore, pointer_to

__all__ = ["Sealed", "seal"]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A record, its framed bytes, and what has to be stored first (None: nothing)."""

    record: Input
    data: bytes
    content: bytes | None = None


def seal(record: Input, store: ObjectStore | None, *, erasable: bool) -> Sealed:
    """Encode a record, its content by pointer where it must be. Raises `Invalid` naming the field."""
    content = record.content
    if content is None or content.data is None:
        return Sealed(record, encode_input(record))
    if erasable and store is None:
        raise Invalid(
            "erasable: the content has to lie in an object store, and none is configured (ONEPEN_OBJECTS_ROOT)",
            field="erasable",
        )
    if store is None or (not erasable and len(codec.encode(record)) <= RECORD_BYTES_MAX):
        return Sealed(record, encode_input(record))
    if len(content.data) > OBJECT_BYTES_MAX:
        sentence = f"content: {len(content.data)} bytes; objects have at most {OBJECT_BYTES_MAX}"
        raise Invalid(sentence, field="content")
    pointer = pointer_to(store, record.tenant_id, record.session_id, content.media_type, content.data)
    pointing = msgspec.structs.replace(record, content=pointer)
    return Sealed(pointing, encode_input(pointing), content.data)
