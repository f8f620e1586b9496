"""`onepen simulate-policy`: which recorded inputs would have got another verdict under another policy.

Rule: nothing is written to any topic or table; the policy stays on this machine.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.content import read_document
from onepen.cli.exit_codes import ExitCode
from onepen.cli.options import (
    ArchiveOption,
    BootstrapOption,
    DataDirOption,
    FormatOption,
    PartitionOption,
    TenantOption,
    settings_of,
)
from onepen.cli.output import Format, note, show_record, show_rows, write_data
from onepen.cli.terminal_text import json_text, printable
from onepen.schemas.errors import Invalid
from onepen.schemas.limits import RECORD_BYTES_MAX
from onepen.schemas.policies import Policy, parse_policy

if TYPE_CHECKING:
    from onepen.streams.simulating import Simulation

SHOWN_MAX = 50


def register(app: typer.Typer) -> None:
    """Hang the command into the command tree."""
    add_command(app, simulate_policy, "Which verdicts would differ under another policy.", name="simulate-policy")


def simulate_policy(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A policy as JSON; - reads stdin.")],
    partition: PartitionOption = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Compare inputs from here on: ISO 8601, or ms since the epoch."),
    ] = None,
    start: ArchiveOption = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Decide the recorded inputs of a tenant again under another policy and show which verdicts would differ.

    The document holds from the start in place of every policy the tenant had. Records of workers and timers are taken
    as they are; those that no longer fit are counted. Needs the token key of the processor.

    \b
    -o json: {"inputs", "differing", "before": {verdict: count}, "after": {verdict: count},
    "changes": {"a -> b": count}, "unfitWorkerRecords",
    "differences": [{inputId, sessionId, mode, position, at, before, after}]}.

    \b
    Exit codes: 0 compared, 1 the inputs are not kept any more, 2 a policy that contradicts itself, no token key or
    another one; 4 unreachable.

    \b
    Examples:
      onepen simulate-policy policy.json
      echo '{"onBusy": "reject"}' | onepen simulate-policy - --tenant 7 --since 2030-05-01 -o json
    """
    policy = _policy(file)
    since_ms = 0 if since is None else _moment(since)
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant)
    from onepen.cli.progress import PartitionProgress
    from onepen.streams.archive import archives_in
    from onepen.streams.simulating import simulate

    archives = None if start is None else archives_in(start, prefix=settings.prefix)
    with PartitionProgress("deciding") as bar:
        found = simulate(settings, policy, partition=partition, since_ms=since_ms, archives=archives, progress=bar.show)
    _show(found, output)
    return ExitCode.OK


def _policy(file: str) -> Policy:
    data = read_document(file, "policy")
    if len(data) > RECORD_BYTES_MAX:
        raise Invalid(f"policy: more than {RECORD_BYTES_MAX // 1024} KiB", field="policy")
    return parse_policy(data, 1)


def _moment(text: str) -> int:
    """A moment in ms since the epoch. Raises `Invalid`."""
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"since: {text!r} is neither ISO 8601 nor a number of ms", field="since") from None
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _show(found: Simulation, output: Format) -> None:
    differences = [one.shown() for one in found.differences]
    if output is not Format.TEXT:
        document = {
            "inputs": found.inputs,
            "differing": found.differing,
            "before": dict(found.before),
            "after": dict(found.after),
            "changes": dict(found.changes),
            "unfitWorkerRecords": found.unfit_worker_records,
            "differences": differences,
        }
        write_data(json_text(document, indent=output is Format.JSON))
        return
    show_record(
        {"inputs": found.inputs, "differing": found.differing, "unfit worker records": found.unfit_worker_records},
        output,
    )
    for change, count in found.changes.most_common():
        write_data(f"{count:>8}  {printable(change)}")
    rows = [
        {
            "inputId": one["inputId"],
            "sessionId": one["sessionId"],
            "position": f"{one['position']['partition']}:{one['position']['offset']}",
            "before": " ".join(str(part) for part in one["before"].values() if part),
            "after": " ".join(str(part) for part in one["after"].values() if part),
        }
        for one in differences[:SHOWN_MAX]
    ]
    if rows:
        write_data("")
        show_rows(rows, ("inputId", "sessionId", "position", "before", "after"), output, empty="")
    if found.differing > len(rows):
        note(f"onepen: {found.differing} inputs differ in all; -o json lists more of them")
