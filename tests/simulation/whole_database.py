"""The tables as the real writer meets them: its own statements, carried out on dictionaries, with what they enforce.

Rule 1: a statement is known by its text in `queries.sql`; one that is not known here is an error, so this cannot lag
behind unnoticed. What the text says in columns is read from the text.
Rule 2: transactions are serial: the first statement takes the one lock, the end gives it back, a death or an idle
time-out rolls back. The partial unique index and the uniqueness of keys hold; a trigger watches the epochs.
Rule 3: a statement is a place where the writer's process may stand still, lose its connection or die.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import asyncpg

from onepen.schemas.statuses import ACTIVE
from onepen.sinks.postgres.queries import STATEMENTS, sql
from tests.simulation.whole_broker import Violation
from tests.simulation.whole_time import Timeline

IDLE_TIMEOUT_MS: Final = 8_000
ONE_ACTIVE: Final = "only_one_active_run_per_session"
Row = dict[str, Any]
_COLUMNS: Final = re.compile(r"insert into \w+(?: as \w+)? \(([^)]*)\)")


class Pause:
    """Awaited: the process goes on after `ms`, or when `until` says so."""

    def __init__(self, ms: int, until: Callable[[], bool] | None = None) -> None:
        self.ms, self.until = ms, until

    def __await__(self) -> Generator[Pause, None, None]:
        yield self


def columns_of(name: str) -> list[str]:
    found = _COLUMNS.search(sql(name))
    assert found is not None, name
    return [column.strip() for column in found.group(1).split(",")]


class Database:
    """The tables. `fenced` is what the mutants switch off."""

    def __init__(self, time: Timeline) -> None:
        self.time = time
        self.reachable = True
        self.fenced = True
        self.tables: dict[str, dict[Any, Row]] = {name: {} for name in TABLES}
        self.sequence = 0
        self.holder: Session | None = None

    def rows(self, table: str) -> list[Row]:
        return list(self.tables[table].values())

    def next_id(self) -> int:
        self.sequence += 1
        return self.sequence


TABLES: Final = ("partitions", "sessions", "runs", "events", "inputs", "actions", "subtasks", "checkpoints", "refused",
                 "objects")  # fmt: skip
_KEYS: Final[dict[str, tuple[str, tuple[str, ...], str]]] = {
    # statement -> table, key columns, on conflict: nothing, fill (what stands first stays) or newer
    "append_events": ("events", ("session_id", "run_id", "seq"), "nothing"),
    "put_runs": ("runs", ("run_key",), "newer"),
    "put_inputs": ("inputs", ("input_partition", "input_offset"), "fill"),
    "put_actions": ("actions", ("session_id", "action_name", "action_key"), "newer"),
    "put_subtasks": ("subtasks", ("session_id", "run_key", "call_id"), "fill"),
    "put_checkpoints": ("checkpoints", ("session_id", "run_key", "seq"), "nothing"),
    "put_refused_reports": ("refused", ("record_partition", "record_offset"), "nothing"),
    "put_objects_to_delete": ("objects", ("session_id", "uri_sha256"), "nothing"),
}
_NEWER: Final = {"put_runs": ("last_seq",), "put_actions": ("last_run_no", "last_seq")}
_GUARDED: Final = {"verdict": ("verdict_reason", "verdict_run_key", "verdict_detail"),
                   "disposition": ("disposition_reason", "disposition_run_key", "disposition_detail")}  # fmt: skip
_INSERTS: Final = {sql(name): (name, columns_of(name), *_KEYS[name]) for name in _KEYS}
_ERASES: Final = {sql(f"erase_{name}"): table for name, table in (
    ("events", "events"), ("runs", "runs"), ("actions", "actions"), ("subtasks", "subtasks"),
    ("checkpoints", "checkpoints"), ("refused_reports", "refused"), ("inputs", "inputs"))}  # fmt: skip
_NAMES: Final = {text: name for name, text in STATEMENTS.items()}


class Session:
    """One connection, as far as the writer uses it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.time = database.time
        self.alive = True
        self.fault = ""
        """die_before_commit or die_after_commit: the connection is lost around the next COMMIT."""
        self.still_ms = 0
        """Stand still for so long before the next COMMIT."""
        self._undo: list[tuple[dict[Any, Row], Any, Row | None]] = []
        self._staged: list[tuple[Any, ...]] = []
        self._moved: list[tuple[tuple[str, int], int]] = []
        self._in_transaction = False
        self._idling = False

    # -- the part of asyncpg's interface that is used --------------------------------------------------------------

    def is_closed(self) -> bool:
        return not self.alive

    def terminate(self) -> None:
        self._lose()

    async def close(self, *, timeout: float = 0.0) -> None:  # noqa: ASYNC109
        self._lose()

    def transaction(self) -> Session:
        return self

    async def __aenter__(self) -> None:
        await self._lock()
        self._in_transaction = True

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._in_transaction = False
        if kind is not None:
            self._end(commit=False)
            return
        if self.still_ms:
            self.time.facts["sink stood still in a transaction"] += 1
            still_ms, self.still_ms = self.still_ms, 0
            self.time.after(IDLE_TIMEOUT_MS, self._idle)
            self._idling = True
            await Pause(still_ms)
            self._idling = False
        self._require()
        fault, self.fault = self.fault, ""
        if fault == "die_before_commit":
            self._lost("commit unknown to the sink: was not carried out")
        self._check_epochs()
        self._end(commit=True)
        if fault == "die_after_commit":
            self._lost("commit unknown to the sink: was carried out")

    async def fetch(self, query: str, *args: Any, timeout: float = 0.0) -> list[Row]:  # noqa: ASYNC109
        return await self._run(query, args)

    async def fetchrow(self, query: str, *args: Any) -> Row | None:
        found = await self._run(query, args)
        return found[0] if found else None

    async def execute(self, query: str, *args: Any, timeout: float = 0.0) -> str:  # noqa: ASYNC109
        await self._run(query, args)
        return ""

    async def copy_records_to_table(self, table: str, *, records: Sequence[tuple[Any, ...]]) -> str:
        assert table == "staged_events"
        self._require()
        self._staged = list(records)
        return ""

    # -- the connection --------------------------------------------------------------------------------------------

    def _require(self) -> None:
        if not self.alive or not self.database.reachable:
            self._lost("")

    def _lost(self, fact: str) -> None:
        if fact:
            self.time.facts[fact] += 1
        self._lose()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    def _lose(self) -> None:
        self.alive = False
        self._end(commit=False)

    async def _lock(self) -> None:
        database = self.database
        while database.holder not in (None, self):
            await Pause(50, lambda: database.holder is None)
        self._require()
        database.holder = self

    def _idle(self) -> None:
        if self._idling and self.alive:
            self.time.facts["idle database transaction ended"] += 1
            self._lose()

    def _end(self, *, commit: bool) -> None:
        if self.database.holder is not self:
            return
        if not commit:
            for table, key, old in reversed(self._undo):
                if old is None:
                    del table[key]
                else:
                    table[key] = old
        self._undo, self._staged, self._moved = [], [], []
        self.database.holder = None

    def _put(self, table: str, key: Any, row: Row | None) -> None:
        rows = self.database.tables[table]
        old = rows.get(key)
        self._undo.append((rows, key, old))
        if row is None:
            del rows[key]
        else:
            rows[key] = row

    def _check_epochs(self) -> None:
        """The trigger: whoever writes under an epoch that is not the stored one has slipped through the fence."""
        for place, epoch in self._moved:
            stored = self.database.tables["partitions"][place]
            if stored["epoch"] != epoch:
                raise Violation(f"I19: {place} was written under epoch {epoch}, its owner has {stored['epoch']}")

    # -- statements ------------------------------------------------------------------------------------------------

    async def _run(self, query: str, args: tuple[Any, ...]) -> list[Row]:
        self._require()
        if not self._in_transaction:
            await self._lock()
        try:
            insert = _INSERTS.get(query)
            if insert is not None:
                self._insert(*insert, args)
                return []
            if query in _ERASES:
                self._erase(_ERASES[query], set(args[0]))
                return []
            found: list[Row] = getattr(self, "_" + _NAMES[query])(*args)
            return found
        finally:
            if not self._in_transaction:
                self._end(commit=True)

    def _insert(self, name: str, columns: list[str], table: str, key: tuple[str, ...], rule: str, args: Any) -> None:
        tuples = self._staged if name == "append_events" else list(zip(*args, strict=True))
        rows = self.database.tables[table]
        for values in tuples:
            row = dict(zip(columns, values, strict=True))
            where = tuple(row[column] for column in key)
            old = rows.get(where)
            if old is not None:
                if rule == "nothing":
                    continue
                if rule == "newer":
                    newer = tuple(row[c] for c in _NEWER[name]), tuple(old[c] for c in _NEWER[name])
                    if newer[0] < newer[1] or (name == "put_runs" and newer[0] == newer[1]):
                        continue
                    if name == "put_runs":
                        row["id"] = old["id"]
                else:
                    row = _filled(old, row)
            if name == "put_runs":
                self._one_active(row)
            self._put(table, where, row)

    def _one_active(self, row: Row) -> None:
        if row["status"] not in ACTIVE:
            return
        for other in self.database.tables["runs"].values():
            if other["session_id"] == row["session_id"] and other["status"] in ACTIVE and other is not row:
                if other["run_key"] == row["run_key"]:
                    continue
                error = asyncpg.UniqueViolationError("duplicate key")
                error.constraint_name = ONE_ACTIVE
                error.detail = f"Key (session_id)=({row['session_id']}) already exists."
                raise error

    def _erase(self, table: str, sessions: set[int]) -> None:
        gone = [key for key, row in self.database.tables[table].items()
                if row["session_id"] in sessions and not (table == "inputs" and row["mode"] == "erase")]  # fmt: skip
        for key in gone:
            self._put(table, key, None)

    def _wait_for_locks(self, _: str) -> list[Row]:
        return []

    def _claim_partition(self, topic: str, partition: int) -> list[Row]:
        old = self.database.tables["partitions"].get((topic, partition), {"epoch": 0, "next_offset": 0})
        row = old | {"epoch": old["epoch"] + 1}
        self._put("partitions", (topic, partition), row)
        return [row]

    def _advance_partitions(self, *columns: list[Any]) -> list[Row]:
        found = []
        for topic, partition, epoch, first_offset, next_offset in zip(*columns, strict=True):
            row = self.database.tables["partitions"][topic, partition]
            held = row["epoch"] == epoch and row["next_offset"] == first_offset
            if held or not self.database.fenced:
                self._put("partitions", (topic, partition), row | {"next_offset": next_offset})
                self._moved.append(((topic, partition), epoch))
                found.append({"topic": topic, "partition": partition})
        return found

    def _read_partition(self, topic: str, partition: int) -> list[Row]:
        row = self.database.tables["partitions"].get((topic, partition))
        return [row] if row else []

    def _put_sessions(self, *columns: list[Any]) -> list[Row]:
        found = []
        for tenant_id, key, created, updated, user_id, title, erased in zip(*columns, strict=True):
            old = self.database.tables["sessions"].get((tenant_id, key))
            row = {"id": self.database.next_id() if old is None else old["id"], "tenant_id": tenant_id,
                   "session_key": key, "created_at": created, "updated_at": updated, "erased_at": erased,
                   "user_id": user_id, "title": title}  # fmt: skip
            if old is not None:
                row["created_at"] = min(created, old["created_at"])
                row["updated_at"] = max(updated, old["updated_at"])
                row["erased_at"] = min((at for at in (erased, old["erased_at"]) if at is not None), default=None)
                for column in ("user_id", "title"):
                    kept = old[column] if old[column] is not None else row[column]
                    row[column] = None if row["erased_at"] is not None else kept
            self._put("sessions", (tenant_id, key), row)
            found.append(row | {"erased": row["erased_at"] is not None})
        return found

    def _key_of(self, session_id: int) -> str:
        rows = self.database.rows("sessions")
        return next(str(row["session_key"]) for row in rows if row["id"] == session_id)

    def _stored_runs(self, run_keys: list[str]) -> list[Row]:
        found = [self.database.tables["runs"].get((key,)) for key in run_keys]
        return [row | {"session_key": self._key_of(row["session_id"])} for row in found if row is not None]

    def _stored_actions(self, *columns: list[Any]) -> list[Row]:
        found = []
        for tenant_id, session_key, name, key in zip(*columns, strict=True):
            session = self.database.tables["sessions"].get((tenant_id, session_key))
            row = None if session is None else self.database.tables["actions"].get((session["id"], name, key))
            if row is not None:
                found.append(row | {"session_key": session_key})
        return found

    def _new_run_ids(self, count: int) -> list[Row]:
        return [{"id": self.database.next_id()} for _ in range(count)]

    def _active_run_of_session(self, session_id: int) -> list[Row]:
        return [row for row in self.database.tables["runs"].values()
                if row["session_id"] == session_id and row["status"] in ACTIVE]  # fmt: skip

    def _pointing_events(self, sessions: list[int], kinds: list[str]) -> list[Row]:
        keys = {row["id"]: row for row in self.database.tables["sessions"].values()}
        return [row | {"session_key": keys[row["session_id"]]["session_key"]}
                for row in self.database.tables["events"].values()
                if row["session_id"] in sessions and row["event_type"] in kinds
                and ('"pointer"' in row["payload"] or '"checkpoint"' in row["payload"])]  # fmt: skip


def _filled(old: Row, new: Row) -> Row:
    """What stands first of a kind stays; what goes with it is taken or left together with it."""
    guarded = {column: first for first, columns in _GUARDED.items() for column in columns if first in new}
    row = {}
    for column, value in new.items():
        first = guarded.get(column)
        if first is not None:
            row[column] = old[column] if old[first] is not None else value
        else:
            row[column] = old[column] if old[column] is not None else value
    return row
