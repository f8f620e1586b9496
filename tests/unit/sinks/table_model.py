"""The tables without a database: what the statements of queries.sql do to the rows that the fold makes of a batch.

tests/integration/test_sink_erase.py and test_sink_writer.py show the same of the real statements, in fewer orders.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson

from onepen.sinks.postgres.fold import fold
from onepen.sinks.postgres.object_uris import object_uri
from onepen.sinks.postgres.rows import (
    CheckpointRow,
    EventRow,
    InputRow,
    Placed,
    RefusedRow,
    RunRow,
    SessionKey,
    SessionRow,
    Stored,
    SubtaskRow,
)
from onepen.sinks.postgres.sessions import session_rows
from tests.event_streams import Streams
from tests.sink_tables import placed


@dataclasses.dataclass
class Tables:
    """A model of the database: what the statements of queries.sql do to the rows of a batch."""

    stored: Stored = dataclasses.field(default_factory=Stored)
    sessions: dict[Any, SessionRow] = dataclasses.field(default_factory=dict)
    events: dict[Any, EventRow] = dataclasses.field(default_factory=dict)
    inputs: dict[Any, InputRow] = dataclasses.field(default_factory=dict)
    subtasks: dict[Any, SubtaskRow] = dataclasses.field(default_factory=dict)
    checkpoints: dict[Any, CheckpointRow] = dataclasses.field(default_factory=dict)
    refused: dict[Any, RefusedRow] = dataclasses.field(default_factory=dict)
    objects: set[Any] = dataclasses.field(default_factory=set)

    def write(self, records: list[Placed]) -> None:
        touched = session_rows(records)
        for key, session in touched.items():
            self._session(key, session)
        self.stored.erased = frozenset(key for key, row in self.sessions.items() if row.erased_ms is not None)
        changes = fold(self.stored, records)
        for key, session in touched.items():
            if session.erased_ms is not None:
                self._erase(key)
        for row in changes.events:
            self.events.setdefault((row.event.run_id, row.event.seq), row)
        for run in sorted(changes.runs.values(), key=lambda run: run.active):
            self.stored.runs[run.run_key] = run
            keys = [r.run_key for r in self.stored.runs.values() if r.active and r.session_key == run.session_key
                    and r.tenant_id == run.tenant_id]  # fmt: skip
            assert len(keys) <= 1, "only_one_active_run_per_session"
        self.stored.actions.update(changes.actions)
        for place, input_row in changes.inputs.items():
            self.inputs[place] = self._merged(self.inputs.get(place), input_row)
        for key4, subtask in changes.subtasks.items():
            old = self.subtasks.setdefault(key4, subtask)
            for column in dataclasses.fields(subtask):
                if getattr(old, column.name) is None:
                    setattr(old, column.name, getattr(subtask, column.name))
        for checkpoint in changes.checkpoints:
            self.checkpoints.setdefault((checkpoint.run_key, checkpoint.seq), checkpoint)
        for place, refused in changes.refused.items():
            self.refused.setdefault(place, refused)
        self.objects |= changes.objects

    def _session(self, key: SessionKey, new: SessionRow) -> None:
        old = self.sessions.setdefault(key, new)
        old.created_ms = min(old.created_ms, new.created_ms)
        old.updated_ms = max(old.updated_ms, new.updated_ms)
        old.erased_ms = min((ms for ms in (old.erased_ms, new.erased_ms) if ms is not None), default=None)
        old.user_id = new.user_id if old.user_id is None else old.user_id
        old.title = old.title or new.title
        if old.erased_ms is not None:
            old.user_id = old.title = None

    def _erase(self, key: SessionKey) -> None:
        for row in self.events.values():
            uri = object_uri(row.event.type, orjson.loads(row.event.payload))
            if (row.event.tenant_id, row.event.session_id) == key and uri is not None:
                self.objects.add((*key, uri))
        self.events = {k: e for k, e in self.events.items() if (e.event.tenant_id, e.event.session_id) != key}
        self.stored.runs = {k: r for k, r in self.stored.runs.items() if owner(r) != key}
        self.stored.actions = {k: a for k, a in self.stored.actions.items() if k[:2] != key}
        self.subtasks = {k: t for k, t in self.subtasks.items() if k[:2] != key}
        self.checkpoints = {k: c for k, c in self.checkpoints.items() if owner(c) != key}
        self.refused = {k: f for k, f in self.refused.items() if owner(f) != key}
        self.inputs = {k: i for k, i in self.inputs.items() if owner(i) != key or i.mode == "erase"}

    @staticmethod
    def _merged(old: InputRow | None, new: InputRow) -> InputRow:
        if old is None:
            return new
        taken = {f.name: getattr(old, f.name) for f in dataclasses.fields(old)}
        for field in dataclasses.fields(old):
            group = field.name.partition("_")[0]
            if group in ("verdict", "disposition"):
                if getattr(old, group) is None:
                    taken[field.name] = getattr(new, field.name)
            elif taken[field.name] is None:
                taken[field.name] = getattr(new, field.name)
        return InputRow(**taken)


def owner(row: RunRow | CheckpointRow | RefusedRow | InputRow) -> SessionKey:
    return row.tenant_id, row.session_key


def records_of(streams: Streams) -> list[list[Placed]]:
    sources = [placed(p, list(records)) for p, records in streams.events.items()]
    return sources + [placed(p, list(records)) for p, records in streams.receipts.items()]


def whole(sources: list[list[Placed]]) -> Tables:
    tables = Tables()
    for records in sources:
        tables.write(records)
    return tables


def cut(sources: list[list[Placed]], takes: list[tuple[int, int, bool]]) -> Tables:
    """A batch takes the next records of some of the partitions, of both topics, as the consumer had them."""
    tables = Tables()
    positions = [0] * len(sources)
    batch: list[Placed] = []
    for index, size, written in takes:
        records = sources[index]
        batch += records[positions[index] : positions[index] + size]
        positions[index] = min(len(records), positions[index] + size)
        if written:
            tables.write(batch)
            batch = []
    for index, records in enumerate(sources):
        batch += records[positions[index] :]
    tables.write(batch)
    return tables
