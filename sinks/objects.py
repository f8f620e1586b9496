"""Deleting objects that log and tables only point to, when the session they belong to is erased.

Rule 1: a URI comes from the log, so it is somebody else's wish: only what lies in the tenant's own folder below the
configured root is deleted, `<root>/<tenant_id>/...`; everything else is refused with a reason, and nothing happens.
Rule 2: deleting again is fine: an object that is not there is gone.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

from onepen.schemas.errors import OnepenError

__all__ = ["FileObjects", "ObjectRefused", "Objects"]


class ObjectRefused(OnepenError):
    """This URI will never be deleted here; the text says why."""


class Objects(Protocol):
    """A store of objects. Calls may block; they are made from a thread of their own."""

    def delete(self, tenant_id: int, uri: str) -> None:
        """Returns when the object is gone. Raises `ObjectRefused` for good, `OSError` when it may work later."""


class FileObjects:
    """`file://` objects below a root folder, one folder per tenant. Symbolic links below the root are not followed."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def delete(self, tenant_id: int, uri: str) -> None:
        """See `Objects`."""
        *folders, name = self._parts(tenant_id, uri)
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in folders:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = below
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return
        except (NotADirectoryError, IsADirectoryError):
            raise ObjectRefused("the path leads through something else than folders, or to no file") from None
        finally:
            os.close(folder)

    def _parts(self, tenant_id: int, uri: str) -> tuple[str, ...]:
        """Names below the root, the tenant's folder first. Raises `ObjectRefused` when the URI leads elsewhere."""
        try:
            split = urlsplit(uri)
        except ValueError:
            raise ObjectRefused("not a URI") from None
        if split.scheme != "file":
            raise ObjectRefused("only file:// objects are deleted here")
        if split.netloc not in ("", "localhost") or split.query or split.fragment:
            raise ObjectRefused("not the URI of a local file")
        text = unquote(split.path)
        path = PurePosixPath(text)
        if "\x00" in text or ".." in path.parts:
            raise ObjectRefused("not a plain path")
        for root in (self._root, self._root.resolve()):
            if path.is_relative_to(root):
                parts = path.relative_to(root).parts
                if len(parts) < 2 or parts[0] != str(tenant_id):
                    raise ObjectRefused("outside of the tenant's folder")
                return parts
        raise ObjectRefused("outside of the configured root")
