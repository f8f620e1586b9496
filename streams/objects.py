"""Objects: content that log and tables only point to. Stored once, named by what they hold, judged when loaded.

Rule 1: an object's name is the SHA-256 of its bytes, so storing it again changes nothing, and who repeats a call points
to the same place. It lies in the folder of its tenant and session, so that an erase finds it.
Rule 2: whatever is loaded must have the digest that the log names; anything else is refused, never used.
Rule 3: a URI comes from the log, so it is somebody else's wish: only what lies in the tenant's own folder is read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from pathlib import Path, PurePosixPath
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from onepen.schemas.errors import Invalid, OnepenError
from onepen.schemas.ids import object_folder
from onepen.schemas.inputs import Content
from onepen.streams.settings import Settings

__all__ = ["FileStore", "ObjectRefused", "ObjectStore", "load", "object_store", "pointer_to", "sha256_hex"]

OBJECT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest object that is stored or loaded as a whole."""
_NO_OBJECT: Final = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


class ObjectRefused(OnepenError):
    """The object cannot be used: it is not there, is not what the log names, or lies where it must not."""


class ObjectStore(Protocol):
    """Where objects lie. `uri_of` only reckons; `put` and `get` may block."""

    def uri_of(self, tenant_id: int, session_id: str, digest: str) -> str:
        """Where the object with this digest (hex) is, or would be."""

    def put(self, tenant_id: int, session_id: str, data: bytes) -> str:
        """Store it durably and answer its URI. Raises `OSError` when it may work later."""

    def serves(self, tenant_id: int, uri: str) -> bool:
        """True when `get` would look for it here."""

    def get(self, tenant_id: int, uri: str) -> bytes:
        """The bytes. Raises `ObjectRefused`, or `OSError` when it may work later."""


class FileStore:
    """`file://` objects: `<root>/<tenant_id>/<hash of the session id>/<digest>`. Workers and clients share the root.

    The root itself must be there: one that is not mounted must not look like an empty one.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def uri_of(self, tenant_id: int, session_id: str, digest: str) -> str:
        return self._path(tenant_id, session_id, digest).as_uri()

    def put(self, tenant_id: int, session_id: str, data: bytes) -> str:
        if len(data) > OBJECT_BYTES_MAX:
            raise Invalid(f"content: {len(data)} bytes; objects have at most {OBJECT_BYTES_MAX}", field="content")
        path = self._path(tenant_id, session_id, sha256_hex(data))
        if not self._root.is_dir():
            raise FileNotFoundError(f"the root of the object store is not there: {self._root}")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, data)
        for folder in (path.parent, path.parent.parent, self._root):
            _sync(folder)  # a name is on the disk when its folder is; another process may just have made it
        return path.as_uri()

    def serves(self, tenant_id: int, uri: str) -> bool:
        return self._parts(tenant_id, uri) is not None

    def get(self, tenant_id: int, uri: str) -> bytes:
        parts = self._parts(tenant_id, uri)
        if parts is None:
            raise ObjectRefused(f"{uri} lies outside of the tenant's folder in the object store")
        try:
            with os.fdopen(_open_below(self._root, parts), "rb") as file:
                data = file.read(OBJECT_BYTES_MAX + 1)
        except FileNotFoundError:
            if not self._root.is_dir():
                raise
            raise ObjectRefused(f"{uri} is not there; was its session erased?") from None
        except OSError as error:
            if error.errno in _NO_OBJECT:
                raise ObjectRefused(f"{uri} is no object") from None
            raise
        if len(data) > OBJECT_BYTES_MAX:
            raise ObjectRefused(f"{uri} is larger than {OBJECT_BYTES_MAX} bytes")
        return data

    def _path(self, tenant_id: int, session_id: str, digest: str) -> Path:
        return self._root / str(tenant_id) / object_folder(session_id) / digest

    def _parts(self, tenant_id: int, uri: str) -> tuple[str, ...] | None:
        """Names below the root, the tenant's folder first; None when the URI leads elsewhere."""
        try:
            split = urlsplit(uri)
        except ValueError:
            return None
        text = unquote(split.path)
        path = PurePosixPath(text)
        if split.scheme != "file" or split.netloc not in ("", "localhost") or split.query or split.fragment:
            return None
        if "\x00" in text or ".." in path.parts:
            return None
        for root in (self._root, self._root.resolve()):
            if path.is_relative_to(root):
                parts = path.relative_to(root).parts
                return parts if len(parts) >= 2 and parts[0] == str(tenant_id) else None
        return None


def _open_below(root: Path, parts: tuple[str, ...]) -> int:
    """A file below `root`, opened step by step: symbolic links on the way are not followed."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def _write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing. Its bytes are on the disk before it has its name."""
    draft = path.parent / f".{path.name[:16]}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def object_store(settings: Settings) -> ObjectStore | None:
    """The store that the settings name (ONEPEN_OBJECTS_ROOT), or None."""
    return None if settings.objects_root is None else FileStore(settings.objects_root)


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pointer_to(store: ObjectStore, tenant_id: int, session_id: str, media_type: str, data: bytes) -> Content:
    """Content by pointer for bytes that are, or will be, stored for a session."""
    digest = sha256_hex(data)
    uri = store.uri_of(tenant_id, session_id, digest)
    return Content(media_type=media_type, uri=uri, digest=digest, size_bytes=len(data))


def load(store: ObjectStore, tenant_id: int, uri: str, digest: str) -> bytes:
    """The bytes of an object, after their digest was compared. Raises `ObjectRefused`, or `OSError`."""
    data = store.get(tenant_id, uri)
    found = sha256_hex(data)
    if found != digest.removeprefix("sha256:"):
        raise ObjectRefused(f"{uri} has the digest {found[:16]}…, and the log names {digest[:16]}…")
    return data
