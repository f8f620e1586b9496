"""What the reading commands ask of PostgreSQL, as JSON members in the words of the protocol.

Rule: one short connection per command; the queries and the tenants' separation are those of `sinks.postgres.readers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from onepen.sinks.postgres_dsn import answering

if TYPE_CHECKING:
    from onepen.schemas.statuses import RunStatus
    from onepen.sinks.postgres.history import Pool
    from onepen.streams.settings import Settings

T = TypeVar("T")

_NAMES = {"created_ms": "createdAt", "updated_ms": "updatedAt", "timeout_ms": "timeoutAt"}


class Tables:
    """The tables of one tenant. Raises `Invalid` without an address, and what the driver raises."""

    def __init__(self, settings: Settings) -> None:
        self._dsn = settings.require_dsn()
        self._tenant_id = settings.tenant_id

    def sessions(self, limit: int, cursor: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """A page of sessions, the last changed first, and the cursor of the next page."""
        from onepen.sinks.postgres.readers import list_sessions

        page = self._ask(lambda pool: list_sessions(pool, self._tenant_id, limit=limit, cursor=cursor))
        return [members(one) for one in page.items], page.next_cursor

    def session(self, session_id: str, runs: int) -> dict[str, Any] | None:
        """One session with its latest runs."""
        from onepen.sinks.postgres.readers import get_session

        found = self._ask(lambda pool: get_session(pool, self._tenant_id, session_id, runs=runs))
        if found is None:
            return None
        return members(found.session) | {
            "openInputs": found.open_inputs,
            "latestRuns": [members(run) for run in found.runs],
        }

    def runs(
        self, session_id: str | None, statuses: Collection[RunStatus] | None, limit: int, cursor: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """A page of runs, newest first, and the cursor of the next page."""
        from onepen.sinks.postgres.readers import list_runs

        page = self._ask(
            lambda pool: list_runs(pool, self._tenant_id, session_id, statuses=statuses, limit=limit, cursor=cursor)
        )
        return [members(one) for one in page.items], page.next_cursor

    def run(self, run_id: str) -> dict[str, Any] | None:
        """One run with its actions and the worker records that were refused in its name."""
        from onepen.sinks.postgres.readers import get_run

        found = self._ask(lambda pool: get_run(pool, self._tenant_id, run_id))
        if found is None:
            return None
        return members(found.run) | {
            "actions": [members(action) for action in found.actions],
            "refused": [members(record) for record in found.refused],
        }

    def inputs(self, input_id: str, session_id: str | None) -> list[dict[str, Any]]:
        """The records that carried this input id, in log order."""
        from onepen.sinks.postgres.readers import show_input

        found = self._ask(lambda pool: show_input(pool, self._tenant_id, input_id, session_id))
        return [members(one) for one in found]

    def _ask(self, question: Callable[[Pool], Awaitable[T]]) -> T:
        async def ask() -> T:
            from onepen.sinks.postgres.history import open_pool

            pool = await open_pool(self._dsn, application_name="onepen-cli", size_max=1)
            try:
                return await question(pool)
            finally:
                pool.terminate()

        with answering(self._dsn):
            return asyncio.run(ask())


def members(view: msgspec.Struct) -> dict[str, Any]:
    """A row as JSON members: camelCase, moments `…At` in ms of the log, hashes in hex."""
    return {_name(name): _value(getattr(view, name)) for name in view.__struct_fields__}


def _name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    if name.endswith("_ms"):
        name = name.removesuffix("_ms") + "_at"
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _value(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
