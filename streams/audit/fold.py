"""The rows that the tables must have, folded from the log a second time and independently of the sink.

Rule: only events and receipts go in, in log order; times are ms, text keys stand in place of surrogate ids. A foreign
member counts only when it has the declared type, and U+0000 in a text column is U+FFFD. Of an erased session nothing
remains but its erase inputs.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from onepen.schemas import events as names
from onepen.streams.audit.evidence import Evidence, LoggedEvent, LoggedReceipt, SessionKey

Rows = dict[Any, dict[str, Any]]
Payload = dict[str, Any]

_MOVES_DEADLINE: Final = (
    names.RUN_STARTED,
    names.APPROVAL_ANSWERED,
    names.APPROVAL_EXPIRED,
    names.APPROVAL_VOIDED,
    names.SUBTASK_FINISHED,
)
_ACTION_EVENTS: Final = ("action.", "approval.")


def text(payload: Payload, name: str) -> str | None:
    value = payload.get(name)
    return shown(value) if isinstance(value, str) else None


def shown(value: str | None) -> str | None:
    return value if value is None else value.replace("\0", "\ufffd")


def number(payload: Payload, name: str, bits: int = 64) -> int | None:
    value = payload.get(name)
    if type(value) is not int or not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        return None
    return value


def flag(payload: Payload, name: str) -> bool | None:
    value = payload.get(name)
    return value if isinstance(value, bool) else None


def inner(payload: Payload, name: str) -> Payload:
    value = payload.get(name)
    return value if isinstance(value, dict) else {}


def erased_sessions(evidence: Evidence) -> set[SessionKey]:
    """Sessions whose erase is done."""
    return {
        (r.receipt.tenant_id, r.receipt.session_id)
        for r in evidence.receipts
        if r.receipt.kind == "input" and r.receipt.mode == "erase" and r.receipt.disposition == "done"
    }


def _lasting(evidence: Evidence) -> list[LoggedEvent]:
    """Events of sessions that are not erased."""
    erased = erased_sessions(evidence)
    return [one for one in evidence.events if one.session not in erased]


def expected_runs(evidence: Evidence) -> Rows:
    """agent_runs by run_key."""
    rows: Rows = {}
    for one in _lasting(evidence):
        event, payload = one.event, one.payload
        if event.type == names.RUN_STARTED:
            rows[event.run_id] = _new_run(one)
        row = rows.get(event.run_id)
        if row is None:
            continue
        row |= {
            "generation": event.generation,
            "last_seq": event.seq,
            "last_hash": event.hash.hex(),
            "updated_at": event.at_ms,
        }
        if event.type in _MOVES_DEADLINE and "timeoutAt" in payload:
            row["timeout_at"] = number(payload, "timeoutAt")
        row |= _run_change(one, row["status"])
    return rows


def _new_run(one: LoggedEvent) -> dict[str, Any]:
    event, payload = one.event, one.payload
    position, parent = inner(payload, "inputPosition"), inner(payload, "parent")
    empty = dict.fromkeys(
        ("lease_owner", "lease_expires_at", "timeout_at", "cancel_requested_at", "cancel_reason", "terminal_status",
         "terminal_at", "terminal_reason", "retryable", "forced")
    )  # fmt: skip
    return empty | {
        "tenant_id": event.tenant_id,
        "session_key": event.session_id,
        "run_key": event.run_id,
        "run_no": event.run_no,
        "status": "running",
        "attempt": 0,
        "input_id": text(payload, "inputId"),
        "input_mode": text(payload, "inputMode"),
        "input_partition": number(position, "partition", 32),
        "input_offset": number(position, "offset"),
        "user_id": number(payload, "userId"),
        "source": text(payload, "source"),
        "recovery": text(payload, "recovery"),
        "lineage": text(payload, "lineage"),
        "retry_of": text(payload, "retryOf"),
        "parent_session_key": text(parent, "sessionId"),
        "parent_run_key": text(parent, "runId"),
        "parent_call_id": text(parent, "callId"),
        "created_at": event.at_ms,
    }


def _run_change(one: LoggedEvent, status: str) -> dict[str, Any]:
    event, payload = one.event, one.payload
    match event.type:
        case names.RUN_LEASED:
            return {
                "lease_owner": text(payload, "workerId"),
                "lease_expires_at": number(payload, "leaseExpiresAt"),
                "attempt": number(payload, "attempt", 32),
            }
        case names.RUN_LEASE_LOST | names.RUN_RELEASED:
            return {"lease_owner": None, "lease_expires_at": None}
        case names.RUN_CANCEL_REQUESTED:
            return {
                "status": "cancelling",
                "cancel_requested_at": event.at_ms,
                "cancel_reason": text(payload, "reason"),
            }
        case names.COMPACTION_STARTED if status == "running":
            return {"status": "compacting"}
        case names.COMPACTION_FINISHED | names.COMPACTION_FAILED if status == "compacting":
            return {"status": "running"}
        case names.RUN_FINISHED:
            return {
                "status": payload.get("terminalStatus"),
                "terminal_status": payload.get("terminalStatus"),
                "terminal_at": event.at_ms,
                "terminal_reason": text(payload, "reason"),
                "retryable": flag(payload, "retryable"),
                "forced": flag(payload, "forced"),
                "lease_owner": None,
                "lease_expires_at": None,
            }
    return {}


def expected_events(evidence: Evidence) -> Rows:
    """agent_run_events by (run_key, seq)."""
    return {
        (one.event.run_id, one.event.seq): {
            "tenant_id": one.event.tenant_id,
            "session_key": one.event.session_id,
            "run_key": one.event.run_id,
            "seq": one.event.seq,
            "event_type": one.event.type,
            "payload": orjson.loads(one.event.payload),
            "generation": one.event.generation,
            "cause_partition": one.event.cause.partition,
            "cause_offset": one.event.cause.offset,
            "cause_index": one.event.cause.index,
            "prev_hash": one.event.prev_hash.hex(),
            "hash": one.event.hash.hex(),
            "log_partition": one.partition,
            "log_offset": one.offset,
            "created_at": one.event.at_ms,
        }
        for one in _lasting(evidence)
    }


def expected_inputs(evidence: Evidence) -> Rows:
    """agent_inputs by position: what the receipts say of each input record."""
    erased = erased_sessions(evidence)
    rows: Rows = {}
    for one in evidence.receipts:
        receipt = one.receipt
        if receipt.kind != "input":
            continue
        if (receipt.tenant_id, receipt.session_id) in erased and receipt.mode != "erase":
            continue
        _book(rows.setdefault(one.about, _new_input(one)), one)
    return rows


def _new_input(one: LoggedReceipt) -> dict[str, Any]:
    receipt = one.receipt
    empty = dict.fromkeys(
        f"{part}{suffix}" for part in ("verdict", "disposition") for suffix in ("", "_reason", "_run_key", "_at")
    )
    return {
        "input_partition": receipt.partition,
        "input_offset": receipt.offset,
        "tenant_id": receipt.tenant_id,
        "session_key": receipt.session_id,
        "input_id": shown(receipt.input_id),
        "mode": shown(receipt.mode),
        "user_id": receipt.user_id,
        "source": shown(receipt.source),
        **empty,
    }


def _book(row: dict[str, Any], one: LoggedReceipt) -> None:
    receipt = one.receipt
    for part, value in (("verdict", receipt.verdict), ("disposition", receipt.disposition)):
        if value is not None and row[part] is None:
            row |= {
                part: value,
                f"{part}_reason": receipt.reason,
                f"{part}_run_key": receipt.run_id,
                f"{part}_at": receipt.at_ms,
            }


def expected_actions(evidence: Evidence) -> Rows:
    """agent_actions by (tenant, session, name, key): the state of each key at the end of the log."""
    rows: Rows = {}
    last_offset: dict[Any, int] = {}
    for one in _lasting(evidence):
        event, payload = one.event, one.payload
        name, key_text = text(payload, "name"), text(payload, "actionKey")
        if not event.type.startswith(_ACTION_EVENTS) or name is None or key_text is None:
            continue
        key = event.tenant_id, event.session_id, name, key_text
        if event.type == names.ACTION_REQUESTED:
            rows[key] = _new_action(one, name, key_text)
        row = rows.get(key)
        if row is not None:
            row |= _action_change(one)
            row |= {
                "run_key": event.run_id,
                "generation": event.generation,
                "last_run_no": event.run_no,
                "last_seq": event.seq,
            }
            last_offset[key] = event.cause.offset
    for settlement in evidence.receipts:
        _settle(rows, last_offset, settlement)
    return rows


def _new_action(one: LoggedEvent, name: str, key: str) -> dict[str, Any]:
    event = one.event
    empty = dict.fromkeys(
        ("permitted_at", "deadline_at", "ended_at", "reason", "result", "approval_requested_at", "approval_expires_at",
         "approval_decision", "approval_by", "approval_input_id")
    )  # fmt: skip
    return empty | {
        "tenant_id": event.tenant_id,
        "session_key": event.session_id,
        "action_name": name,
        "action_key": key,
        "state": "waiting",
        "args_digest": text(one.payload, "argsDigest"),
        "requested_at": event.at_ms,
    }


def _settle(rows: Rows, last_offset: dict[Any, int], one: LoggedReceipt) -> None:
    """An answer or a late report told how an action in doubt ended; a later event about the key overtakes it."""
    receipt = one.receipt
    if receipt.kind != "action" or receipt.detail is None:
        return
    detail = orjson.loads(receipt.detail)
    key = receipt.tenant_id, receipt.session_id, text(detail, "name"), text(detail, "actionKey")
    if key in rows and receipt.offset > last_offset[key]:
        rows[key] |= {"state": text(detail, "status"), "ended_at": receipt.at_ms}
        last_offset[key] = receipt.offset


def _action_change(one: LoggedEvent) -> dict[str, Any]:
    at_ms, payload = one.event.at_ms, one.payload
    match one.event.type:
        case names.APPROVAL_REQUESTED:
            return {"approval_requested_at": at_ms, "approval_expires_at": number(payload, "expiresAt")}
        case names.APPROVAL_ANSWERED:
            approved = payload.get("decision") == "approve"
            return {
                "approval_decision": text(payload, "decision"),
                "approval_by": number(payload, "by"),
                "approval_input_id": text(payload, "inputId"),
            } | ({"state": "approved"} if approved else {})
        case names.ACTION_PERMITTED:
            return {"state": "permitted", "permitted_at": at_ms, "deadline_at": number(payload, "deadlineAt")}
        case names.ACTION_FINISHED:
            return {"state": payload["status"], "ended_at": at_ms, "result": payload.get("result")}
        case names.ACTION_VOIDED:
            return {"state": "voided", "ended_at": at_ms, "reason": text(payload, "reason")}
        case names.ACTION_IN_DOUBT:
            return {"state": "in_doubt", "ended_at": at_ms, "reason": text(payload, "reason")}
    return {}


def expected_checkpoints(evidence: Evidence) -> Rows:
    """agent_checkpoints by (run_key, seq)."""
    rows: Rows = {}
    for one in _lasting(evidence):
        if one.event.type != names.COMPACTION_FINISHED:
            continue
        pointer = inner(one.payload, "checkpoint")
        rows[one.event.run_id, one.event.seq] = {
            "tenant_id": one.event.tenant_id,
            "session_key": one.event.session_id,
            "uri": text(pointer, "uri"),
            "digest": text(pointer, "digest"),
            "size_bytes": number(pointer, "bytes"),
            "through_seq": number(pointer, "throughSeq"),
            "created_at": one.event.at_ms,
        }
    return rows


def expected_subtasks(evidence: Evidence) -> Rows:
    """agent_subtasks by (run_key, call_id)."""
    rows: Rows = {}
    for one in _lasting(evidence):
        event, payload = one.event, one.payload
        call_id = text(payload, "callId")
        if event.type == names.SUBTASK_STARTED:
            rows[event.run_id, call_id] = {
                "tenant_id": event.tenant_id,
                "session_key": event.session_id,
                "child_session_key": text(payload, "sessionId"),
                "child_input_id": text(payload, "inputId"),
                "child_run_key": None,
                "status": None,
                "reason": None,
                "started_at": event.at_ms,
                "ended_at": None,
            }
        elif event.type == names.SUBTASK_FINISHED and (event.run_id, call_id) in rows:
            rows[event.run_id, call_id] |= {
                "child_run_key": text(payload, "runId"),
                "status": text(payload, "status"),
                "reason": text(payload, "reason"),
                "ended_at": event.at_ms,
            }
    return rows


def expected_refused(evidence: Evidence) -> Rows:
    """agent_refused_reports by the position of the refused record; a child's end that came too late is one of them."""
    erased = erased_sessions(evidence)
    return {
        one.about: {
            "record_partition": one.receipt.partition,
            "record_offset": one.receipt.offset,
            "tenant_id": one.receipt.tenant_id,
            "session_key": one.receipt.session_id,
            "run_key": shown(one.receipt.run_id),
            "generation": one.receipt.generation,
            "worker_id": shown(one.receipt.worker_id),
            "record": "notice" if one.receipt.kind == "notice" else one.receipt.record,
            "report_no": one.receipt.report_no,
            "reason": one.receipt.reason,
            "created_at": one.receipt.at_ms,
        }
        for one in evidence.receipts
        if one.receipt.kind in ("worker", "notice") and (one.receipt.tenant_id, one.receipt.session_id) not in erased
    }
