"""The address of PostgreSQL, a URL with a password in it: judged before it is used, and told without what is secret.

Rule: nothing that is said here quotes the URL. Where a password is not percent-encoded, a part of it stands for a host,
a port, a path or a query as soon as somebody takes the URL apart, and so it would be in their messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from onepen.schemas.errors import Retryable

__all__ = ["answering", "checked", "hosts", "place"]

DEFAULT_PORT: Final = "5432"
PORT_MAX: Final = 65_535
FORM: Final = (
    "is not postgresql://user:password@host:port/database; percent-encode what is neither a letter nor a digit nor one "
    "of -._~ in user and password"
)
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:,]+)(?::(\d+))?")


def checked(dsn: str) -> str:
    """The same address. Raises `ValueError`, which says what is expected and nothing of what there is."""
    try:
        parts = urlsplit(dsn)
        if parts.scheme not in ("postgresql", "postgres") or parts.fragment:
            raise ValueError(FORM)
        # One sign ends the password: a second one was a part of it, and so was a slash or a question mark before it.
        at = parts.netloc.count("@")
        if at > 1 or "@" in parts.path or (not at and "@" in parts.query):
            raise ValueError(FORM)
        if not all(0 < int(port) <= PORT_MAX for _, port in hosts(dsn)):
            raise ValueError(FORM)
    except ValueError:
        raise ValueError(FORM) from None
    return dsn


def hosts(dsn: str) -> list[tuple[str, str]]:
    """(host, port) in their order: drivers try one after another. Of an address that was `checked`."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    default = query.get("port", [DEFAULT_PORT])[-1]
    named = parts.netloc.rpartition("@")[2]
    if not named:
        return [(query.get("host", ["localhost"])[-1], default)]
    matches = [_HOST.fullmatch(one) for one in named.split(",")]
    if None in matches:
        raise ValueError(FORM)
    return [(unquote(match[1].strip("[]")), match[2] or default) for match in matches if match is not None]


def place(dsn: str) -> str:
    """The hosts with their ports, as messages name them."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts(dsn))


@contextmanager
def answering(dsn: str) -> Iterator[None]:
    """Of a block that connects: raises `Retryable` that names the place when nobody answers there."""
    try:
        yield
    except OSError as error:  # a time-out is one as well
        raise Retryable(f"PostgreSQL at {place(dsn)} does not answer: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError) and error.errno is None:
        return "no answer in time"
    if error.errno is None:  # several addresses of one name were tried
        return str(error)
    # asyncio writes the address into the text of the system's errors; names that do not resolve have negative codes.
    return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
