"""`onepen why`: what became of an input and why, in plain words.

Rule: told from the log, never from tables; ids and texts of others reach the terminal through `printable` only.
"""

from __future__ import annotations

from typing import Annotated

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.options import BootstrapOption, DataDirOption, FormatOption, TenantOption, checked_id, settings_of
from onepen.cli.output import Format, coloured, write_data
from onepen.cli.terminal_text import json_text, printable


def register(app: typer.Typer) -> None:
    """Hang the command into the command tree."""
    add_command(app, why, "Tell what became of an input and why.")


def why(
    input_id: Annotated[str, typer.Argument(metavar="INPUT_ID", help="The input's id.")],
    session: Annotated[
        str | None, typer.Option("--session", metavar="SESSION", help="Its session: saves looking for it.")
    ] = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Tell what became of an input and why: its verdict, what was active then, its final disposition.

    Every record that carried the id is told of, in the order of the log; repeats follow the first.

    \b
    -o json: a list of {inputId, sessionId, tenantId, mode, source, userId, position, activeRunId, cancelling, verdict,
    reason, disposition, dispositionReason, runId, deadLetter, receipts, events, told}; receipts and events carry their
    positions, told is what the text says.

    \b
    Exit codes: 0 told, 2 usage, 4 unreachable, 6 no such input in the log.

    \b
    Examples:
      onepen why in-4711
      onepen why in-4711 --session session-42 -o json
    """
    checked_id(input_id, "input_id")
    if session is not None:
        checked_id(session, "session_id")
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant)
    from onepen.streams.explaining import explain, look_up

    accounts = [account for facts in look_up(settings, input_id, session) for account in explain(facts)]
    if not accounts:
        raise Failure(f"no input {input_id} in the log", ExitCode.NOT_FOUND)
    if output is Format.JSON:
        write_data(json_text(accounts, indent=True))
    elif output is Format.JSONL:
        for account in accounts:
            write_data(json_text(account))
    else:
        for number, account in enumerate(accounts):
            if number:
                write_data("")
            became = (
                account["disposition"] or account["verdict"] or ("dead letter" if account["deadLetter"] else "waits")
            )
            write_data(
                f"{coloured(printable(input_id), 'bold')} of session {printable(account['sessionId'])}: {became}"
            )
            for sentence in account["told"]:
                write_data(f"  {printable(sentence)}")
    return ExitCode.OK
