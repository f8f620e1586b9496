"""Events and answers as people and scripts see them.

Rule: JSON of an event is the shape of protocol section 5 (`events.render`); of an answer, the same words in the same
style. Text is one line each, made printable by `output`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from shlex import quote
from typing import TYPE_CHECKING, Any

import orjson

from onepen.cli.exit_codes import ExitCode
from onepen.cli.output import Format, coloured, note, write_data
from onepen.cli.terminal_text import json_text, printable
from onepen.schemas.events import APPROVAL_REQUESTED, RUN_FINISHED, Event, render
from onepen.schemas.statuses import RunStatus, Verdict

if TYPE_CHECKING:
    from onepen.streams.client import InputResult, Sent

SUMMARY_CHARS_MAX = 160
_STATUS_COLOURS = {"completed": "green", "failed": "red", "timed_out": "red", "cancelled": "yellow"}


def clock_time(at_ms: int) -> str:
    """Time of the log in the local zone, to the millisecond."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).astimezone().strftime("%H:%M:%S.") + f"{at_ms % 1000:03d}"


def show_event(event: Event, form: Format, *, full: bool = False, name_session: bool = False) -> None:
    """One event on one line."""
    if form is not Format.TEXT:
        write_data(json_text(render(event, full=full)))
        return
    where = f"{event.session_id} " if name_session else ""
    kind = coloured(printable(event.type), _colour_of(event))
    line = f"{clock_time(event.at_ms)}  {printable(where)}run {event.run_no} #{event.seq:<3} {kind}"
    summary = _shortened(json_text(orjson.loads(event.payload)))
    write_data(f"{line}  {coloured(summary, 'dim')}" if summary != "{}" else line)
    if event.type == APPROVAL_REQUESTED:
        note(f"  to answer it: {answer_command(event)}")


def answer_command(event: Event) -> str:
    """The command to paste that approves what an `approval.requested` asks for."""
    payload = orjson.loads(event.payload)
    key, name, digest = (quote(str(payload.get(member))) for member in ("actionKey", "name", "argsDigest"))
    tenant = f" --tenant {event.tenant_id}" if event.tenant_id != 1 else ""
    return f"onepen answer {quote(event.session_id)} approve --key {key} --name {name} --digest {digest}{tenant}"


def _colour_of(event: Event) -> str:
    if event.type == RUN_FINISHED:
        return _STATUS_COLOURS.get(str(terminal_status(event)), "bold")
    return "bold"


def terminal_status(event: Event) -> str | None:
    """How the run ended, from its last event."""
    payload = orjson.loads(event.payload)
    status = payload.get("terminalStatus") if isinstance(payload, dict) else None
    return status if isinstance(status, str) else None


def run_exit_code(status: str | None) -> ExitCode:
    """Exit code of a command that followed a run to its end."""
    return ExitCode.OK if status == RunStatus.COMPLETED else ExitCode.FINDING


def _shortened(text: str) -> str:
    return text if len(text) <= SUMMARY_CHARS_MAX else text[: SUMMARY_CHARS_MAX - 1] + "…"


def result_fields(sent: Sent, result: InputResult) -> dict[str, Any]:
    """The answer to an input as JSON members; absent ones are left out."""
    fields: dict[str, Any] = {
        "sessionId": sent.session_id,
        "inputId": sent.input_id,
        "issuedAt": sent.issued_at_ms,
        "mode": sent.record.mode,
        "verdict": str(result.verdict),
        "disposition": None if result.disposition is None else str(result.disposition),
        "reason": result.reason,
        "runId": result.run_id,
        "runNo": result.run_no,
        "position": {"partition": result.partition, "offset": result.offset},
        "at": result.at_ms,
        "detail": result.detail or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def show_result(sent: Sent, result: InputResult, form: Format) -> None:
    """The answer to an input: `started  run-…` and what belongs to it, or the JSON object."""
    fields = result_fields(sent, result)
    if form is not Format.TEXT:
        write_data(json_text(fields, indent=form is Format.JSON))
        return
    refused = verdict_exit_code(result) is not ExitCode.OK
    parts = [coloured(printable(str(result.verdict)), "red" if refused else "green")]
    if result.reason:
        parts.append(printable(result.reason))
    if result.run_id:
        number = f" (run {result.run_no})" if result.run_no else ""
        parts.append(printable(result.run_id) + number)
    parts.append(f"input {printable(sent.input_id)}")
    if result.detail:
        parts.append(json_text(result.detail))
    write_data("  ".join(parts))


def verdict_exit_code(result: InputResult) -> ExitCode:
    """Exit code of a submitting command: 3 when refused; a repeat exits as its first verdict did."""
    verdict: str = result.verdict
    if verdict == Verdict.DUPLICATE and result.detail is not None:
        first = result.detail.get("verdict")
        verdict = first if isinstance(first, str) else verdict
    return ExitCode.REFUSED if verdict == Verdict.REFUSED else ExitCode.OK
