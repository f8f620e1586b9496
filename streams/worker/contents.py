"""Content that may lie elsewhere, as bodies see it: resolved where this worker can, named where it cannot.

Rule: what was loaded has the digest that the log names, or is refused. A pointer into a store that is not this
worker's is handed to the body as it is: the body knows what to do with it, or the run fails by its own word.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from onepen.schemas.edge import Pointer, content_value
from onepen.schemas.errors import Invalid, Retryable
from onepen.schemas.inputs import Content
from onepen.streams import objects
from onepen.streams.objects import ObjectRefused, ObjectStore

__all__ = ["Contents"]


class Contents:
    """Objects of one tenant, for one worker. `erasable`: what it writes for others goes by pointer, whatever its
    size."""

    def __init__(self, tenant_id: int, store: ObjectStore | None, *, erasable: bool = False) -> None:
        self._tenant_id = tenant_id
        self._store = store
        self.erasable = erasable

    async def value(self, content: Content | None) -> Any:
        """Text, JSON value or bytes; a `Pointer` for content that lies in no store of this worker."""
        if content is None or content.data is not None or content.uri is None:
            return content_value(content)
        if self._store is None or not self._store.serves(self._tenant_id, content.uri):
            return pointer_of(content)
        data = await self.load(content.uri, content.digest or "")
        try:
            return content_value(Content(media_type=content.media_type, data=data))
        except msgspec.DecodeError as error:
            raise ObjectRefused(f"{content.uri} is not the {content.media_type} it is said to be ({error})") from None

    async def load(self, uri: str, digest: str) -> bytes:
        """The bytes of an object. Raises `ObjectRefused`, `Invalid` (no store), `Retryable` (cannot be read now)."""
        store = self._named_store()
        try:
            return await asyncio.to_thread(objects.load, store, self._tenant_id, uri, digest)
        except OSError as error:
            raise Retryable(f"{uri} cannot be read now ({error})") from None

    async def put(self, session_id: str, media_type: str, data: bytes) -> Pointer:
        """Store an object for a session. Raises `Invalid` (no store, too large), `Retryable` (not now)."""
        store = self._named_store()
        try:
            await asyncio.to_thread(store.put, self._tenant_id, session_id, data)
        except OSError as error:
            raise Retryable(f"an object of session {session_id} could not be stored ({error})") from None
        return pointer_of(objects.pointer_to(store, self._tenant_id, session_id, media_type, data))

    def _named_store(self) -> ObjectStore:
        if self._store is None:
            raise Invalid("objects: this worker has no object store (ONEPEN_OBJECTS_ROOT)", field="objects_root")
        return self._store


def pointer_of(content: Content) -> Pointer:
    """The pointer as it stands in the log; only loading judges it."""
    return Pointer.model_construct(
        uri=content.uri or "",
        digest=content.digest or "",
        size_bytes=content.size_bytes,
        media_type=content.media_type,
    )
