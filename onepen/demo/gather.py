"""Collects the evidence: committed records of the topics and one snapshot of the tables, for some sessions of a tenant.

Rule: the tables count only once the sink has applied what the log held, and the log only up to where that snapshot of
the tables stands; so a difference is a fault and no lag.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from onepen.demo.checks import Effect, Evidence, LoggedEvent, LoggedInput, LoggedReceipt, Tables
from onepen.schemas import codec
from onepen.schemas.errors import Poison
from onepen.schemas.events import Event
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.receipts import Receipt
from onepen.schemas.topics import Topics
from onepen.sinks.postgres_outside import TableRows, read_tables
from onepen.streams.deadline import Deadline
from onepen.streams.outside_reader import RawRecord, end_offsets, read_topic
from onepen.streams.settings import Settings

__all__ = ["Starts", "gather", "starts_now"]

POLL_S = 0.1


@dataclass(frozen=True)
class Starts:
    """Where a piece of history begins on each topic: partition -> offset."""

    inputs: Mapping[int, int]
    events: Mapping[int, int]
    receipts: Mapping[int, int]


def starts_now(settings: Settings) -> Starts:
    """The ends of the topics: what comes from now on lies behind them."""
    t = settings.topics
    return Starts(end_offsets(settings, t.inputs), end_offsets(settings, t.events), end_offsets(settings, t.receipts))


def gather(
    settings: Settings,
    tenant_id: int,
    sessions: Collection[str],
    starts: Starts,
    *,
    effects: Sequence[Effect] = (),
    quiet: bool = True,
    timeout_ms: int = 60_000,
) -> Evidence:
    """All that topics and tables hold of these sessions since `starts`. The sessions must have begun behind them.

    Raises `DeadlineExpired` when the sink does not catch up in time, `Retryable` when a topic cannot be read.
    """
    deadline = Deadline(timeout_ms)
    topics = settings.topics
    wanted = {(tenant_id, session) for session in sessions}
    raw = {topic: read_topic(settings, topic, begin) for topic, begin in _followed(topics, starts)}
    events, receipts = _events(raw[topics.events], wanted), _receipts(raw[topics.receipts], wanted)
    rows = _tables_at(settings, tenant_id, sessions, _reach(topics, events, receipts), deadline)
    # The tables may have gone on since: take the log up to exactly where the snapshot stands.
    for topic, begin in _followed(topics, starts):
        more = read_topic(settings, topic, {**begin, **{r.partition: r.offset + 1 for r in raw[topic]}})
        raw[topic] = [r for r in (*raw[topic], *more) if r.offset < rows.next_offsets.get((topic, r.partition), 0)]
        raw[topic].sort(key=lambda r: (r.partition, r.offset))
    events, receipts = _events(raw[topics.events], wanted), _receipts(raw[topics.receipts], wanted)
    inputs = _inputs(read_topic(settings, topics.inputs, starts.inputs), wanted)
    tables = Tables(rows.runs, rows.events, rows.inputs, rows.actions, rows.refused)
    return Evidence(events, receipts, inputs, list(effects), tables, quiet=quiet)


def _followed(topics: Topics, starts: Starts) -> tuple[tuple[str, Mapping[int, int]], ...]:
    """The topics that the tables are made of."""
    return (topics.events, starts.events), (topics.receipts, starts.receipts)


def _events(records: Sequence[RawRecord], wanted: Collection[tuple[int, str]]) -> list[LoggedEvent]:
    found = []
    for raw in records:
        event = codec.decode_as(Event, raw.value)
        if (event.tenant_id, event.session_id) in wanted:
            found.append(LoggedEvent(raw.partition, raw.offset, raw.value or b"", event))
    return found


def _receipts(records: Sequence[RawRecord], wanted: Collection[tuple[int, str]]) -> list[LoggedReceipt]:
    found = []
    for raw in records:
        receipt = codec.decode_as(Receipt, raw.value)
        if (receipt.tenant_id, receipt.session_id) in wanted:
            found.append(LoggedReceipt(raw.partition, raw.offset, receipt))
    return found


def _inputs(records: Sequence[RawRecord], wanted: Collection[tuple[int, str]]) -> list[LoggedInput]:
    found = []
    for raw in records:
        try:
            record = codec.decode_inputs(raw.value)
        except Poison:
            continue  # a dead letter of somebody: it belongs to no session
        if not isinstance(record, PolicyRecord) and (record.tenant_id, record.session_id) in wanted:
            found.append(LoggedInput(raw.partition, raw.offset, raw.at_ms, record))
    return found


def _reach(
    topics: Topics, events: Sequence[LoggedEvent], receipts: Sequence[LoggedReceipt]
) -> dict[tuple[str, int], int]:
    """What the sink must have applied: the last record of these sessions on each partition."""
    reach: dict[tuple[str, int], int] = {}
    for topic, records in ((topics.events, events), (topics.receipts, receipts)):
        for one in records:
            reach[topic, one.partition] = max(one.offset, reach.get((topic, one.partition), -1))
    return reach


def _tables_at(
    settings: Settings,
    tenant_id: int,
    sessions: Collection[str],
    reach: Mapping[tuple[str, int], int],
    deadline: Deadline,
) -> TableRows:
    pause = threading.Event()
    while True:
        rows = read_tables(settings.require_dsn(), tenant_id, sorted(sessions))
        behind = [place for place, offset in reach.items() if rows.next_offsets.get(place, 0) <= offset]
        if not behind:
            return rows
        deadline.check(f"the sink has not applied {len(behind)} partitions of the log")
        pause.wait(POLL_S)
