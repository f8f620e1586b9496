"""Deleting objects that log and tables only point to, when the session they belong to is erased.

Rule 1: a URI comes from the log, so it is somebody else's wish: only what lies in the erased session's own folder below
the configured root is deleted, `<root>/<tenant_id>/<object_folder(session)>/...`; everything else is refused with a
reason, and nothing happens.
Rule 2: deleting again is fine: an object that is not there is gone.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from onepen.schemas.errors import OnepenError
from onepen.schemas.ids import object_folder

__all__ = ["FileObjects", "ObjectRefused", "Objects"]


_NO_OBJECT: Final = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


class ObjectRefused(OnepenError):
    """This URI will never be deleted here; the text says why."""


class Objects(Protocol):
    """A store of objects. Calls may block; they are made from a thread of their own."""

    def delete(self, tenant_id: int, session_id: str, uri: str) -> None:
        """Returns when the object of this session is gone. Raises `ObjectRefused` for good, `OSError` when it may work
        later."""

    def delete_all(self, tenant_id: int, session_id: str) -> None:
        """Returns when no object of this session is there, whoever points to it or not. Raises as `delete` does."""


class FileObjects:
    """`file://` objects below a root folder, one folder per tenant and in it one per session.

    Symbolic links below the root are not followed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def delete(self, tenant_id: int, session_id: str, uri: str) -> None:
        """See `Objects`."""
        *folders, name = self._parts(tenant_id, session_id, uri)
        self._inside(folders, lambda folder: os.unlink(name, dir_fd=folder))

    def delete_all(self, tenant_id: int, session_id: str) -> None:
        """See `Objects`."""
        name = object_folder(session_id)

        def remove(folder: int) -> None:
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            try:
                shutil.rmtree(name, dir_fd=folder)
            except FileNotFoundError:
                raise OSError(errno.EBUSY, "the session's folder is being changed") from None

        self._inside([str(tenant_id)], remove)

    def _inside(self, folders: Sequence[str], remove: Callable[[int], None]) -> None:
        """Call `remove` with the folder, opened step by step. What is not there is gone already."""
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in folders:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = below
            remove(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in _NO_OBJECT:
                raise ObjectRefused("the path leads through something else than folders, or to no file") from None
            raise
        finally:
            os.close(folder)

    def _parts(self, tenant_id: int, session_id: str, uri: str) -> tuple[str, ...]:
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
                if len(parts) < 3 or parts[:2] != (str(tenant_id), object_folder(session_id)):
                    raise ObjectRefused("outside of the session's folder")
                return parts
        raise ObjectRefused("outside of the configured root")
