"""What a batch says of its sessions, before any row is read: first and last moment, user, title, and whether erased.

Rule: a session counts as erased from the receipt that says `erase ... done`, wherever that stands among the records.
Every column is a least, a greatest or the first one known, so the order of topics and batches does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from onepen.schemas import events as ev
from onepen.schemas.events import Event
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import Disposition, Mode
from onepen.sinks.postgres.members import Payload, int64_of, shown
from onepen.sinks.postgres.payloads import parsed
from onepen.sinks.postgres.rows import Placed, SessionKey, SessionRow

__all__ = ["is_erase", "session_rows"]

TITLE_CHARS_MAX: Final = 80


def session_rows(records: Iterable[Placed]) -> dict[SessionKey, SessionRow]:
    """One row per session that the records name. Of an erased one neither user nor title is told."""
    rows: dict[SessionKey, SessionRow] = {}
    for placed in records:
        record = placed.record
        row = _touched(rows, (record.tenant_id, record.session_id), record.at_ms)
        if isinstance(record, Receipt):
            if is_erase(record) and record.disposition == Disposition.DONE:
                row.erased_ms = record.at_ms if row.erased_ms is None else min(row.erased_ms, record.at_ms)
        elif record.type == ev.RUN_STARTED and record.run_no == 1:
            _introduce(row, record)
    for row in rows.values():
        if row.erased_ms is not None:
            row.user_id = row.title = None
    return rows


def is_erase(receipt: Receipt) -> bool:
    """Whether a receipt is about an erase input: of an erased session only these keep their rows."""
    return receipt.kind == "input" and receipt.mode == Mode.ERASE


def _touched(rows: dict[SessionKey, SessionRow], key: SessionKey, at_ms: int) -> SessionRow:
    row = rows.get(key)
    if row is None:
        row = rows[key] = SessionRow(created_ms=at_ms, updated_ms=at_ms)
    else:
        row.created_ms = min(row.created_ms, at_ms)
        row.updated_ms = max(row.updated_ms, at_ms)
    return row


def _introduce(row: SessionRow, event: Event) -> None:
    payload = parsed(event.payload)
    row.user_id = int64_of(payload, "userId")
    row.title = _title(payload)


def _title(payload: Payload) -> str | None:
    content = payload.get("content")
    if not isinstance(content, str):
        return None
    line = content.strip().partition("\n")[0].strip()
    return shown(line[:TITLE_CHARS_MAX]) or None
