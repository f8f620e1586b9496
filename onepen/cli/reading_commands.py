"""`onepen session|run|input`: what the tables and the log say about sessions, runs and inputs.

Rule: lists and states come from PostgreSQL, which follows the log; a replay comes from the log itself.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from onepen.cli.app_groups import CONTEXT, new_group
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.options import (
    BootstrapOption,
    DataDirOption,
    FormatOption,
    LimitOption,
    TenantOption,
    checked_id,
    settings_of,
)
from onepen.cli.output import Format, note, show_record, show_rows, write_data
from onepen.cli.terminal_text import json_text, printable
from onepen.schemas.statuses import ACTIVE, RunStatus

DEFAULT_LIMIT = 50
TITLE_CHARS_MAX = 48

CursorOption = Annotated[
    str | None, typer.Option("--cursor", metavar="CURSOR", help="Go on where the last page ended.")
]
SessionOption = Annotated[str | None, typer.Option("--session", metavar="SESSION", help="Only of this session.")]

session_group = new_group(
    "session",
    """Sessions, as the tables have them.

    \b
    Examples:
      onepen session list
      onepen session show session-42 -o json
    """,
)
run_group = new_group(
    "run",
    """Runs: list, state, and the full replay from the log.

    \b
    Examples:
      onepen run list --active
      onepen run show run-9f27…
      onepen run replay run-9f27…
    """,
)
input_group = new_group(
    "input",
    """Inputs: what became of one.

    \b
    Example:
      onepen input show in-4711
    """,
)


def register(app: typer.Typer) -> None:
    """Hang the groups into the command tree."""
    app.add_typer(session_group, short_help="List and show sessions.")
    app.add_typer(run_group, short_help="List, show and replay runs.")
    app.add_typer(input_group, short_help="Show what became of an input.")


@session_group.command("list", context_settings=dict(CONTEXT))
def list_sessions(
    limit: LimitOption = DEFAULT_LIMIT,
    cursor: CursorOption = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """List the tenant's sessions, the last changed first.

    \b
    Examples:
      onepen session list --limit 10
      onepen session list -o jsonl
    """
    from onepen.cli.tables import Tables

    rows, more = Tables(settings_of(data_dir=data_dir, tenant=tenant)).sessions(limit, cursor)
    shown = [row | {"title": _short(row["title"])} for row in rows] if output is Format.TEXT else rows
    columns = ("sessionId", "runs", "status", "activeRunId", "updatedAt", "title")
    show_rows(_for_people(shown, output), columns, output, empty="no sessions yet")
    _tell_more(more)


@session_group.command("show", context_settings=dict(CONTEXT))
def show_session(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")],
    limit: LimitOption = 10,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show a session and its latest runs.

    \b
    Example:
      onepen session show session-42
    """
    from onepen.cli.tables import Tables

    checked_id(session, "session_id")
    found = Tables(settings_of(data_dir=data_dir, tenant=tenant)).session(session, limit)
    if found is None:
        raise Failure(f"no session {session} in the tables", ExitCode.NOT_FOUND)
    if output is not Format.TEXT:
        show_record(found, output)
        return
    runs = found.pop("latestRuns")
    show_record(_with_times(found), output)
    write_data("")
    _show_runs(runs, output)


@run_group.command("list", context_settings=dict(CONTEXT))
def list_runs(
    session: SessionOption = None,
    active: Annotated[bool, typer.Option("--active", help="Only those that have not ended.")] = False,
    status: Annotated[
        list[RunStatus] | None,
        typer.Option("--status", metavar="STATUS", help=f"Only these (may be repeated): {', '.join(RunStatus)}."),
    ] = None,
    limit: LimitOption = DEFAULT_LIMIT,
    cursor: CursorOption = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """List runs, newest first.

    \b
    Examples:
      onepen run list --session session-42
      onepen run list --active -o jsonl
      onepen run list --status failed --status timed_out
    """
    from onepen.cli.tables import Tables

    if session is not None:
        checked_id(session, "session_id")
    if active and status:
        raise Failure("--active and --status: name one of them", ExitCode.USAGE)
    tables = Tables(settings_of(data_dir=data_dir, tenant=tenant))
    rows, more = tables.runs(session, ACTIVE if active else status or None, limit, cursor)
    _show_runs(rows, output)
    _tell_more(more)


@run_group.command("show", context_settings=dict(CONTEXT))
def show_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show a run: status, lease, actions, and worker records that were refused in its name.

    \b
    Example:
      onepen run show run-9f27… -o json
    """
    from onepen.cli.tables import Tables

    checked_id(run, "run_id")
    found = Tables(settings_of(data_dir=data_dir, tenant=tenant)).run(run)
    if found is None:
        raise Failure(f"no run {run} in the tables", ExitCode.NOT_FOUND)
    if output is not Format.TEXT:
        show_record(found, output)
        return
    actions, refused = found.pop("actions"), found.pop("refused")
    show_record(_with_times(found), output)
    if actions:
        write_data("\nactions")
        show_rows(actions, ("name", "actionKey", "state", "reason", "approvalDecision"), output, empty="")
    if refused:
        write_data("\nrefused worker records")
        columns = ("partition", "offset", "record", "reportNo", "generation", "reason", "workerId")
        show_rows(refused, columns, output, empty="")


@run_group.command("replay", context_settings=dict(CONTEXT))
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    session: Annotated[
        str | None, typer.Option("--session", metavar="SESSION", help="Its session: saves looking for it.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The whole envelope: time, cause, generation, hashes.")] = False,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.JSONL,
) -> int:
    """Print every event of a run from the log, in order, one JSON object a line, and check that none is missing.

    The shape is {"sessionId", "runId", "seq", "type", "payload"}; a run that has not ended is shown as far as it is.

    \b
    Examples:
      onepen run replay run-9f27…
      onepen run replay run-9f27… --full | jq .hash
      onepen run replay run-9f27… -o text
    """
    from onepen.cli.event_log import EventLog, no_such_run, session_of_run
    from onepen.cli.rendering import show_event
    from onepen.schemas.events import RUN_FINISHED, Event, render
    from onepen.streams.subscriber import follows

    checked_id(run, "run_id")
    if session is not None:
        checked_id(session, "session_id")
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant)
    where = session if session is not None else session_of_run(settings, run)
    document: list[dict[str, Any]] = []
    last: Event | None = None
    with EventLog(settings, session_id=where, from_start=True) as log:
        for event in log.present():
            if event.run_id != run or event.tenant_id != settings.tenant_id:
                continue
            if last is not None and not follows(last, event):
                continue
            last = event
            if output is Format.JSON:
                document.append(render(event, full=full))
            else:
                show_event(event, output, full=full)
            if event.type == RUN_FINISHED:
                break
    if last is None:
        raise no_such_run(run)
    if output is Format.JSON:
        write_data(json_text(document, indent=True))
    if last.type != RUN_FINISHED:
        note(f"onepen: run {run} has not ended; its last event so far is {last.seq}")
    return ExitCode.OK


@input_group.command("show", context_settings=dict(CONTEXT))
def show_input(
    input_id: Annotated[str, typer.Argument(metavar="ID", help="The input's id.")],
    session: SessionOption = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show what became of an input: its verdict, and its final disposition when it has one. Repeats follow it.

    \b
    Examples:
      onepen input show in-4711
      onepen input show in-4711 --session session-42 -o json
    """
    from onepen.cli.tables import Tables

    checked_id(input_id, "input_id")
    if session is not None:
        checked_id(session, "session_id")
    found = Tables(settings_of(data_dir=data_dir, tenant=tenant)).inputs(input_id, session)
    if not found:
        raise Failure(f"no input {input_id} in the tables", ExitCode.NOT_FOUND)
    columns = ("sessionId", "mode", "verdict", "verdictReason", "disposition", "dispositionReason", "dispositionRunId")
    show_rows(found, columns, output, empty="")


def _show_runs(rows: list[dict[str, Any]], output: Format) -> None:
    columns = ("runId", "sessionId", "runNo", "status", "generation", "leaseOwner", "lastSeq", "createdAt")
    show_rows(_for_people(rows, output), columns, output, empty="no runs yet")


def _for_people(rows: list[dict[str, Any]], output: Format) -> list[dict[str, Any]]:
    return [_with_times(row) for row in rows] if output is Format.TEXT else rows


def _with_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _time(value) if name.endswith("At") else value for name, value in row.items()}


def _time(value: Any) -> Any:
    if not isinstance(value, int):
        return value
    return datetime.fromtimestamp(value / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _short(title: str | None) -> str | None:
    if title is None or len(title) <= TITLE_CHARS_MAX:
        return title
    return title[: TITLE_CHARS_MAX - 1] + "…"


def _tell_more(cursor: str | None) -> None:
    if cursor is not None:
        note(f"onepen: there are more: --cursor {printable(cursor)}")
