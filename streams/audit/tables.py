"""The tables against the log: every row equal to the independent fold, no row more, no row less."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

from onepen.schemas.events import render
from onepen.schemas.statuses import ACTIVE
from onepen.streams.audit import fold
from onepen.streams.audit.evidence import Evidence, Row, Tables, Violation, grouped

REPLAY_QUERY: Final = (
    "select seq, event_type, payload from agent_run_events e join agent_runs r on r.id = e.run_id "
    "where r.run_key = $1 order by seq"
)
SHOWN: Final = 5
"""Differing rows listed per table; the rest is counted."""

_NOT_READ = Violation("tables", "the evidence", "the tables were not read")


def counts(evidence: Evidence) -> str:
    """Rows per table, for people."""
    if evidence.tables is None:
        return "no"
    t = evidence.tables
    return " + ".join(str(len(rows)) for rows in (t.runs, t.events, t.inputs, t.actions, t.refused))


def active_rows(evidence: Evidence) -> str:
    """Rows in an active status, for people."""
    return "not read" if evidence.tables is None else str(len(_active(evidence.tables.runs)))


def _active(runs: Iterable[Row]) -> list[Row]:
    return [row for row in runs if row["status"] in ACTIVE]


def one_active_in_table(evidence: Evidence) -> list[Violation]:
    """At most one active row per session; none when all is quiet."""
    if evidence.tables is None:
        return [_NOT_READ]
    active = _active(evidence.tables.runs)
    groups = grouped(active, lambda row: (row["tenant_id"], row["session_key"]))
    found = [
        Violation("one active run", f"agent_runs of {session}", f"{len(rows)} active rows")
        for (_, session), rows in groups.items()
        if len(rows) > 1
    ]
    if evidence.quiet:
        found += [Violation("one active run", f"agent_runs {row['run_key']}", "is still active") for row in active]
    return found


def _compare(table: str, rows: Iterable[Row], expected: fold.Rows, key: Callable[[Row], Hashable]) -> list[Violation]:
    found: list[Violation] = []
    left = dict(expected)
    for row in rows:
        name = key(row)
        wanted: dict[str, Any] | None = left.pop(name, None)
        if wanted is None:
            twice = "stands twice" if name in expected else "has nothing in the log to rest on"
            found.append(Violation("tables", f"{table} {name}", twice))
            continue
        off = [f"{c}: {row.get(c)!r}, the log says {v!r}" for c, v in wanted.items() if row.get(c) != v]
        if off:
            found.append(Violation("tables", f"{table} {name}", "; ".join(off[:SHOWN])))
    found += [Violation("tables", f"{table} {name}", "is missing") for name in left]
    if len(found) > SHOWN:
        found = [*found[:SHOWN], Violation("tables", table, f"{len(found) - SHOWN} more rows differ")]
    return found


def equal_to_fold(evidence: Evidence) -> list[Violation]:
    """Every table, compared row by row, column by column."""
    if evidence.tables is None:
        return [_NOT_READ]
    t = evidence.tables
    return [
        *_compare("agent_runs", t.runs, fold.expected_runs(evidence), lambda r: r["run_key"]),
        *_compare("agent_run_events", t.events, fold.expected_events(evidence), lambda r: (r["run_key"], r["seq"])),
        *_compare(
            "agent_inputs",
            t.inputs,
            fold.expected_inputs(evidence),
            lambda r: (r["input_partition"], r["input_offset"]),
        ),
        *_compare(
            "agent_actions",
            t.actions,
            fold.expected_actions(evidence),
            lambda r: (r["tenant_id"], r["session_key"], r["action_name"], r["action_key"]),
        ),
        *_compare(
            "agent_refused_reports",
            t.refused,
            fold.expected_refused(evidence),
            lambda r: (r["record_partition"], r["record_offset"]),
        ),
        *_pointers_and_children(evidence, t),
    ]


def _pointers_and_children(evidence: Evidence, t: Tables) -> list[Violation]:
    found = []
    if t.checkpoints is not None:
        expected = fold.expected_checkpoints(evidence)
        found += _compare("agent_checkpoints", t.checkpoints, expected, lambda r: (r["run_key"], r["seq"]))
    if t.subtasks is not None:
        expected = fold.expected_subtasks(evidence)
        found += _compare("agent_subtasks", t.subtasks, expected, lambda r: (r["run_key"], r["call_id"]))
    return found


def disposed_in_tables(evidence: Evidence) -> list[Violation]:
    """By the tables alone: an input without disposition belongs to a session that has an active run (conservation)."""
    if evidence.tables is None:
        return [_NOT_READ]
    if not evidence.tables.caught_up:
        return []
    active = {(row["tenant_id"], row["session_key"]) for row in _active(evidence.tables.runs)}
    return [
        Violation(
            "conservation",
            f"agent_inputs ({row['input_partition']}, {row['input_offset']})",
            f"{row['verdict']}, without disposition, and no run of session {row['session_key']} is active",
        )
        for row in evidence.tables.inputs
        if row["disposition"] is None and (row["tenant_id"], row["session_key"]) not in active
    ]


def replay_by_run(evidence: Evidence) -> list[Violation]:
    """The rows of a run in the order of seq, in the JSON shape of protocol section 5, are its events of the log."""
    if evidence.tables is None:
        return [_NOT_READ]
    found = []
    replayed = grouped(sorted(evidence.tables.events, key=lambda r: r["seq"]), lambda r: r["run_key"])
    erased = fold.erased_sessions(evidence)
    for run, events in evidence.by_run.items():
        if events[0].session in erased:
            continue
        from_log = [render(one.event) for one in events]
        from_table = [
            {
                "sessionId": row["session_key"],
                "runId": row["run_key"],
                "seq": row["seq"],
                "type": row["event_type"],
                "payload": row["payload"],
            }
            for row in replayed.get(run, [])
        ]
        if from_log != from_table:
            found.append(Violation("replay", run, "its rows in order of seq are not its events in order of the log"))
    return found[:SHOWN]


def below_offset(evidence: Evidence) -> list[Violation]:
    """No row rests on a record that the tables do not claim to have (invariant I19)."""
    if evidence.tables is None:
        return [_NOT_READ]
    reach = evidence.tables.events_until
    return [
        Violation("tables", f"agent_run_events {row['run_key']} {row['seq']}", f"rests on offset {row['log_offset']}")
        for row in evidence.tables.events
        if reach is not None and row["log_offset"] >= reach.get(row["log_partition"], 0)
    ]
