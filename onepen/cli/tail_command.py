"""`onepen tail`: events as they are committed, of a session, a run, a tenant, or all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.options import (
    BootstrapOption,
    DataDirOption,
    FormatOption,
    TenantOption,
    checked_id,
    settings_of,
)
from onepen.cli.output import Format, note

if TYPE_CHECKING:
    from onepen.streams.settings import Settings


def register(app: typer.Typer) -> None:
    """Hang the command into the command tree."""
    add_command(app, tail, "Follow events as they are committed.")


def tail(
    session: Annotated[str | None, typer.Argument(metavar="[SESSION]", help="Events of this session.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Of this run, from its first to its last.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all sessions of the tenant.")] = False,
    every_tenant: Annotated[bool, typer.Option("--every-tenant", help="Of all sessions of all tenants.")] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin with what is there; else from now on.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="With -o json/jsonl: the whole envelope.")] = False,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Follow events as they are committed, until Ctrl-C; with --run until the run has ended, and exit by that.

    \b
    Examples:
      onepen tail session-42
      onepen tail session-42 --from-start -o jsonl > history.jsonl
      onepen tail --run run-9f27…
      onepen tail --all
    """
    named = [session is not None, run is not None, everything, every_tenant]
    if named.count(True) != 1:
        raise Failure("target: name exactly one of SESSION, --run, --all, --every-tenant", ExitCode.USAGE)
    if session is not None:
        checked_id(session, "session_id")
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant)
    # json means one document, and there is no end to this one.
    form = Format.JSONL if output is Format.JSON else output
    if run is not None:
        return _tail_run(settings, checked_id(run, "run_id"), form, full)
    from onepen.cli.event_log import EventLog
    from onepen.cli.rendering import show_event

    with EventLog(settings, session_id=session, from_start=from_start) as log:
        note("onepen: following; Ctrl-C ends it")
        for event in log.endless():
            if every_tenant or event.tenant_id == settings.tenant_id:
                show_event(event, form, full=full, name_session=session is None)
    return ExitCode.OK


def _tail_run(settings: Settings, run_id: str, form: Format, full: bool) -> int:
    from onepen.cli.event_log import no_such_run, session_of_run
    from onepen.cli.rendering import run_exit_code, show_event, terminal_status
    from onepen.streams.subscriber import Subscriber, UnknownRun

    status: str | None = None
    session = session_of_run(settings, run_id)
    try:
        with Subscriber(settings=settings).run(run_id, session_id=session) as events:
            for event in events:
                show_event(event, form, full=full)
                status = terminal_status(event)
    except UnknownRun:
        raise no_such_run(run_id) from None
    return run_exit_code(status)
