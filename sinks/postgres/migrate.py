"""Plain forward-only migrations: numbered `.sql` files, each applied once, in order, in a transaction of its own.

Rule: a released file is never edited; its checksum is stored and compared. Two runners at once are safe (advisory
lock). There is no way back: a mistake is mended by the next file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import asyncpg

from onepen.schemas.errors import Fatal, Retryable
from onepen.sinks.postgres.connecting import CONNECT_TIMEOUT_S, Connection
from onepen.sinks.postgres_dsn import answering

__all__ = ["Migration", "migrate", "migrations", "pending", "statements"]

ADVISORY_LOCK = 0x6F6E6570656E  # "onepen"
LOCK_WAIT_S: Final = 60
"""For another runner, or a transaction that uses the tables. A statement at work has no limit: tables may be large."""

_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_STATEMENT_END = re.compile(r";[ \t]*\n[ \t]*\n")
_COMMENT_LINE = re.compile(r"^\s*--.*$", re.MULTILINE)

_CREATE_LEDGER = """
create table if not exists schema_migrations (
    version integer primary key,
    name text not null,
    checksum text not null,
    applied_at timestamptz not null default now()
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: its number, its name and its text."""

    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the text; stored when it is applied."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations() -> list[Migration]:
    """The migrations of this release in their order. Raises `Fatal` when a number is missing or stands twice."""
    found = []
    for entry in (files(__package__) / "migrations").iterdir():
        match = _NAME.fullmatch(entry.name)
        if match:
            found.append(Migration(int(match[1]), match[2], entry.read_text("utf-8")))
    found.sort(key=lambda migration: migration.version)
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise Fatal("the migration files are not numbered 0001, 0002, … without gap")
    return found


def statements(sql: str) -> list[str]:
    """The statements of a file: each ends with a semicolon at the end of a line before an empty line."""
    parts = (part.strip() for part in _STATEMENT_END.split(sql.rstrip() + "\n\n"))
    return [part for part in parts if _COMMENT_LINE.sub("", part).strip()]


async def migrate(
    dsn: str,
    progress: Callable[[str], None] = lambda _: None,
    *,
    steps: list[Migration] | None = None,
) -> list[str]:
    """Apply what is missing; answers the names applied. `progress` gets a sentence per statement.

    Raises `Fatal` when an applied file was edited since, or when the database is newer than this release, and
    `Retryable` when nobody answers, or when a lock is not to be had in time.
    """
    limit = {"lock_timeout": f"{LOCK_WAIT_S}s"}
    with answering(dsn):
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S, server_settings=limit)
    try:
        await connection.execute("select pg_advisory_lock($1)", ADVISORY_LOCK)
        await _check_encoding(connection)
        await connection.execute(_CREATE_LEDGER)
        waiting = await _waiting(connection, migrations() if steps is None else steps)
        for migration in waiting:
            await _apply(connection, migration, progress)
        return [f"{migration.version:04}_{migration.name}" for migration in waiting]
    except asyncpg.LockNotAvailableError:
        raise Retryable(
            f"a lock in the database was not to be had within {LOCK_WAIT_S} s: another migration, or a transaction "
            "that stays open, holds it (pg_locks); try again"
        ) from None
    finally:
        await connection.close()


async def pending(connection: Connection) -> list[str]:
    """Names of the migrations that the database lacks. Raises `Fatal` as `migrate` does."""
    exists = await connection.fetchval("select to_regclass('schema_migrations') is not null")
    waiting = await _waiting(connection, migrations()) if exists else migrations()
    return [f"{migration.version:04}_{migration.name}" for migration in waiting]


async def _check_encoding(connection: Connection) -> None:
    encoding = await connection.fetchval("show server_encoding")
    if encoding != "UTF8":
        raise Fatal(f"the database's encoding is {encoding}; create it with ENCODING 'UTF8'")


async def _waiting(connection: Connection, steps: list[Migration]) -> list[Migration]:
    applied = await connection.fetch("select version, name, checksum from schema_migrations order by version")
    known = {migration.version: migration for migration in steps}
    for row in applied:
        migration = known.get(row["version"])
        named = f"{row['version']:04}_{row['name']}"
        if migration is None:
            raise Fatal(f"the database has migration {named}, which this release does not know: upgrade onepen")
        if migration.checksum != row["checksum"]:
            raise Fatal(f"migration {named} was changed after it was applied: restore the released file")
    done = {row["version"] for row in applied}
    return [migration for migration in steps if migration.version not in done]


async def _apply(connection: Connection, migration: Migration, progress: Callable[[str], None]) -> None:
    parts = statements(migration.sql)
    async with connection.transaction():
        for number, statement in enumerate(parts, 1):
            progress(f"migration {migration.version:04}_{migration.name}: statement {number} of {len(parts)}")
            try:
                await connection.execute(statement)
            except asyncpg.InsufficientPrivilegeError as error:
                raise Fatal(
                    f"migration {migration.version:04}_{migration.name}: {error}; "
                    "apply migrations as the owner of the database with the right to create roles"
                ) from None
        await connection.execute(
            "insert into schema_migrations (version, name, checksum) values ($1, $2, $3)",
            migration.version,
            migration.name,
            migration.checksum,
        )
