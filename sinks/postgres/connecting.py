"""One connection with the settings that a writer or reader needs, and what an error of it means to the caller.

Rule: an error is about the data, or passes with time, or needs a person; nothing is guessed from its text.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import Final, TypeAlias

import asyncpg

__all__ = ["Connection", "Consequence", "connect", "consequence"]

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

CONNECT_TIMEOUT_S: Final = 10
COMMAND_TIMEOUT_S: Final = 60

SERVER_SETTINGS: Final = {
    # A frozen owner must not hold a partition's row for ever: its transaction ends, and the next one goes on. (One that
    # is frozen in the middle of a COPY is not idle to the server: see `Writer.claim_free`.)
    "idle_in_transaction_session_timeout": "20s",
    "lock_timeout": "30s",
    "timezone": "UTC",
}

_PASSES = ("08", "40", "53", "55", "57", "58", "XX")
_READ_ONLY = "25006"
"""A replica, or a primary that was just demoted: waited out like any failover."""


class Consequence(Enum):
    """What an error of the database means."""

    DATA = auto()
    """These rows will never be taken; the connection is fine."""
    PASSES = auto()
    """Discard the connection and try again: loss, restart, failover, lock, resources."""
    STOP = auto()
    """A person has to look: rights, missing tables, wrong password."""


def consequence(error: BaseException) -> Consequence:
    """Classify an exception of asyncpg or of the network."""
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        if state.startswith(("22", "23", "54")):  # 54: a value too large for an index, nested too deep for the stack
            return Consequence.DATA
        if state.startswith(_PASSES) or state == _READ_ONLY:
            return Consequence.PASSES
        return Consequence.STOP
    if isinstance(error, ValueError | OverflowError | TypeError):  # a value that the driver cannot encode
        return Consequence.DATA
    if isinstance(error, OSError | EOFError | asyncpg.InterfaceError | asyncpg.InternalClientError):
        return Consequence.PASSES
    return Consequence.STOP


async def connect(dsn: str, *, application_name: str) -> Connection:
    """A new connection. Raises what asyncpg raises; `consequence` says what it means."""
    return await asyncpg.connect(
        dsn,
        timeout=CONNECT_TIMEOUT_S,
        command_timeout=COMMAND_TIMEOUT_S,
        server_settings={**SERVER_SETTINGS, "application_name": application_name},
    )


async def discard(connection: Connection) -> None:
    """End a connection of which nothing is known any more, without waiting for the server."""
    connection.terminate()
    await asyncio.sleep(0)
