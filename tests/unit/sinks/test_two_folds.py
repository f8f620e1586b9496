"""The sink's fold against the audit's, which was written apart: the same rows from the same log, column by column."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
import pytest

from onepen.streams.audit import fold as outside
from onepen.streams.audit.evidence import Evidence, LoggedEvent, LoggedReceipt
from tests.event_streams import Generator, Streams
from tests.unit.sinks.table_model import records_of, whole

KEYS = frozenset(
    ("tenant_id", "session_key", "run_key", "seq", "action_name", "action_key", "call_id", "input_partition",
     "input_offset", "record_partition", "record_offset")
)  # fmt: skip


def evidence_of(streams: Streams) -> Evidence:
    events = [
        LoggedEvent(partition, offset, data, event)
        for partition, records in streams.events.items()
        for offset, (event, data) in enumerate(records)
    ]
    receipts = [
        LoggedReceipt(partition, offset, receipt)
        for partition, records in streams.receipts.items()
        for offset, (receipt, _) in enumerate(records)
    ]
    return Evidence(events, receipts, [])


def columns_of(row: Any) -> dict[str, Any]:
    """A row of the sink under the names of the columns."""
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        name = "lease_expires_at" if field.name == "lease_expires_ms" else field.name
        shown[name.removesuffix("_ms") + "_at" if name.endswith("_ms") else name] = value
    return shown


def without_nul(value: Any) -> Any:
    """As jsonb shows it."""
    return None if value is None else orjson.loads(orjson.dumps(value).replace(b"\\u0000", b"\\ufffd"))


def assert_same(table: str, found: dict[Any, dict[str, Any]], expected: outside.Rows) -> None:
    assert found.keys() == expected.keys(), table
    for key, wanted in expected.items():
        checked = {name: value for name, value in wanted.items() if name not in KEYS}
        assert {name: found[key].get(name) for name in checked} == checked, (table, key)


@pytest.mark.parametrize("seed", range(12))
def test_both_make_the_same_rows(seed: int) -> None:
    streams = Generator(seed, sessions=5, erase=0.2).make(25)
    tables, evidence = whole(records_of(streams)[::-1]), evidence_of(streams)
    runs = {run.run_key: columns_of(run) | {"last_hash": run.last_hash.hex()} for run in tables.stored.runs.values()}
    assert_same("runs", runs, outside.expected_runs(evidence))
    actions = {key: columns_of(row) for key, row in tables.stored.actions.items()}
    for row in actions.values():
        row["result"] = None if row["result"] is None else orjson.loads(row["result"])
    expected = outside.expected_actions(evidence)
    for row in expected.values():
        row["result"] = without_nul(row["result"])
    assert_same("actions", actions, expected)
    assert_same("inputs", {k: columns_of(r) for k, r in tables.inputs.items()}, outside.expected_inputs(evidence))
    assert_same("refused", {k: columns_of(r) for k, r in tables.refused.items()}, outside.expected_refused(evidence))
    checkpoints = {key: columns_of(row) for key, row in tables.checkpoints.items()}
    assert_same("checkpoints", checkpoints, outside.expected_checkpoints(evidence))
    subtasks = {key[2:]: columns_of(row) for key, row in tables.subtasks.items()}
    assert_same("subtasks", subtasks, outside.expected_subtasks(evidence))
