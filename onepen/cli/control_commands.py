"""`onepen abort|answer|erase`: one input each that adds nothing to a session, its verdict in the exit code.

Rule: arguments become one `edge.Request`, which judges the form; what is admitted is decided by the log alone.
"""

from __future__ import annotations

from typing import Annotated

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.options import (
    DEFAULT_TIMEOUT_MS,
    BootstrapOption,
    DataDirOption,
    FormatOption,
    TenantOption,
    TimeoutOption,
    UserOption,
    settings_of,
)
from onepen.cli.output import Format
from onepen.cli.submission import Wish, submit
from onepen.cli.submit_options import (
    DEFAULT_SOURCE,
    FollowOption,
    InputIdOption,
    IssuedAtOption,
    SessionArgument,
    SourceOption,
    WaitOption,
    origin_fields,
)


def register(app: typer.Typer) -> None:
    """Hang the commands into the command tree."""
    add_command(app, abort, "Stop a run or withdraw an input.")
    add_command(app, answer, "Answer an approval, or settle an action in doubt.")
    add_command(app, erase, "Erase a session for ever.")


def abort(
    session: SessionArgument,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Stop this run; if another is active, nothing.")
    ] = None,
    target_input: Annotated[
        str | None, typer.Option("--input", metavar="ID", help="Withdraw this input, or stop the run it started.")
    ] = None,
    active: Annotated[bool, typer.Option("--active", help="Stop whatever run is active.")] = False,
    scope: Annotated[
        str | None,
        typer.Option("--scope", metavar="SCOPE", help="run (default), or run_and_queue: discard what waits too."),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Kept in the log.")] = None,
    source: SourceOption = DEFAULT_SOURCE,
    tenant: TenantOption = None,
    user: UserOption = None,
    input_id: InputIdOption = None,
    issued_at: IssuedAtOption = None,
    wait: WaitOption = True,
    follow: FollowOption = False,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Stop a run or withdraw an input. Exactly one of --run, --input and --active says which.

    With --follow it exits 0 when the run ended as cancelled.

    \b
    Examples:
      onepen abort session-42 --active --reason "wrong customer"
      onepen abort session-42 --run run-9f27… --scope run_and_queue
      onepen abort session-42 --input in-4711
    """
    named = [
        name
        for name, given in (("--run", run), ("--input", target_input), ("--active", active or None))
        if given is not None
    ]
    if len(named) != 1:
        said = " and ".join(named) or "none"
        raise Failure(f"target: name exactly one of --run, --input, --active (given: {said})", ExitCode.USAGE)
    kind = {"--run": "run", "--input": "input", "--active": "active"}[named[0]]
    fields = {
        "target_kind": kind,
        "target_id": run if run is not None else target_input,
        "scope": scope,
        "reason": reason,
    }
    origin = origin_fields("abort", session, source, tenant, user, input_id, issued_at)
    return submit(
        settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user),
        origin | fields,
        Wish(wait, follow, timeout_ms, output),
    )


def answer(
    session: SessionArgument,
    decision: Annotated[
        str,
        typer.Argument(
            metavar="DECISION",
            help="approve or deny; for an action in doubt what was found out: ok, error, not_performed.",
        ),
    ],
    action_key: Annotated[str, typer.Option("--key", metavar="KEY", help="actionKey of the action.requested.")],
    action_name: Annotated[str, typer.Option("--name", metavar="NAME", help="name of the action.")],
    args_digest: Annotated[str, typer.Option("--digest", metavar="HEX", help="argsDigest of the action.requested.")],
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Kept in the log.")] = None,
    source: SourceOption = DEFAULT_SOURCE,
    tenant: TenantOption = None,
    user: UserOption = None,
    input_id: InputIdOption = None,
    issued_at: IssuedAtOption = None,
    wait: WaitOption = True,
    follow: FollowOption = False,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Answer an approval, or settle an action that was left in doubt by an earlier run.

    The first answer in the log decides; later ones are refused (exit 3) and named. The three values stand in the
    run's action.requested and approval.requested events (`onepen run replay RUN`).

    \b
    Examples:
      onepen answer session-42 approve --key send_mail:1 --name send_mail --digest 5f70bf18…
      onepen answer session-42 not_performed --key send_mail:1 --name send_mail --digest 5f70bf18…
    """
    fields = {
        "decision": decision,
        "action_key": action_key,
        "action_name": action_name,
        "args_digest": args_digest,
        "reason": reason,
    }
    origin = origin_fields("answer", session, source, tenant, user, input_id, issued_at)
    return submit(
        settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user),
        origin | fields,
        Wish(wait, follow, timeout_ms, output),
    )


def erase(
    session: SessionArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do it: there is no way back.")] = False,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Kept in the log.")] = None,
    source: SourceOption = DEFAULT_SOURCE,
    tenant: TenantOption = None,
    user: UserOption = None,
    input_id: InputIdOption = None,
    issued_at: IssuedAtOption = None,
    wait: WaitOption = True,
    follow: FollowOption = False,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Erase a session for ever: its state, its rows and its objects go, and its id is never used again.

    A run that is active is cancelled first, with all that waits. Exits after the verdict; with --follow when the
    erase is done, which is after the end of that run. What the log itself holds by value stays until its retention
    is over: content sent with --erasable is in no log.

    \b
    Example:
      onepen erase session-42 --yes --reason "asked by the customer" --follow
    """
    if not yes:
        raise Failure(f"erase: everything of session {session} would go for ever; --yes does it", ExitCode.USAGE)
    origin = origin_fields("erase", session, source, tenant, user, input_id, issued_at)
    fields = {"reason": reason}
    return submit(
        settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user),
        origin | fields,
        Wish(wait, follow, timeout_ms, output),
    )
