"""`onepen verify|archive|audit`: re-execute what is recorded and compare; keep the state to start from; judge it all.

Rule: nothing is written to any topic or table. What is wrong is a finding with its position and ends with 1; what
cannot be looked at is an error and never counts as clean.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.options import (
    ArchiveOption,
    BootstrapOption,
    DataDirOption,
    FormatOption,
    PartitionOption,
    TenantOption,
    checked_id,
    settings_of,
)
from onepen.cli.output import Format, coloured, note, show_record, show_rows, write_data
from onepen.cli.terminal_text import json_text, printable

if TYPE_CHECKING:
    from onepen.streams.comparing import Findings
    from onepen.streams.settings import Settings
    from onepen.streams.verifying import Target

SHOWN_MAX = 20
ARCHIVE_FOLDER = "archive"


def register(app: typer.Typer) -> None:
    """Hang the commands into the command tree."""
    add_command(app, verify, "Re-execute the inputs and compare events, receipts and hash chain.")
    add_command(app, audit, "Check the invariants on topics and tables.")
    add_command(app, archive, "Write the state of the partitions, for verify to start from.")


def verify(
    session: Annotated[str | None, typer.Option("--session", metavar="SESSION", help="This session.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="This run, with all that led to it, up to its end.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every partition, all tenants.")] = False,
    start: ArchiveOption = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Decide the recorded inputs again and compare every event and receipt byte for byte, and the hash chain.

    Works beside a running system: inputs that no processor has decided yet are left alone, and so is what follows
    from them. Needs the token key of the processor (ONEPEN_TOKEN_KEY or ONEPEN_TOKEN_KEY_FILE). Dead letters are taken
    as given.

    \b
    -o json: {"inputs", "events", "receipts": numbers; "mismatches": [{topic, partition, inputOffset, offset, what}];
    "chain_errors": [{partition, offset, sessionId, what}]}. At most 1000 of each are listed. inputOffset is the input
    whose decision asks for the record (null: none does), offset the record on the topic (null: it is missing).

    \b
    Exit codes: 0 all as it must be, 1 a difference (or inputs that are not kept any more), 2 usage, no token key, an
    archive that is torn, changed or of other topics; 4 unreachable, 6 no such session or run.

    \b
    Examples:
      onepen verify --all
      onepen verify --session session-42 -o json
      onepen verify --run run-9f27…
      onepen verify --all --from /var/lib/onepen/archive
    """
    if [session is not None, run is not None, everything].count(True) != 1:
        raise Failure("target: name exactly one of --session, --run, --all", ExitCode.USAGE)
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant)
    from onepen.cli.progress import PartitionProgress
    from onepen.streams import verifying
    from onepen.streams.archive import archives_in

    verifying.token_keys(settings)
    archives = None if start is None else archives_in(start, prefix=settings.prefix)
    target = _target(settings, session, run)
    with PartitionProgress("verifying") as bar:
        findings, met = verifying.verify(settings, target, archives, progress=bar.show)
    if not met:
        raise Failure(f"run {run} has not ended (or does not follow from the inputs)", ExitCode.NOT_FOUND)
    if target.session is not None and not (findings.inputs or findings.mismatch_count):
        raise Failure(f"no input of session {target.session[1]} in the log", ExitCode.NOT_FOUND)
    _show(findings, output)
    return ExitCode.OK if findings.clean else ExitCode.FINDING


def _target(settings: Settings, session: str | None, run: str | None) -> Target:
    from onepen.streams.verifying import Target, session_of_run

    if session is not None:
        return Target((settings.tenant_id, checked_id(session, "session_id")))
    if run is None:
        return Target()
    home = session_of_run(settings, settings.tenant_id, checked_id(run, "run_id"))
    if home is None:
        raise Failure(f"no run {run} in the log", ExitCode.NOT_FOUND)
    return Target((settings.tenant_id, home), run)


def _show(findings: Findings, output: Format) -> None:
    mismatches = [one.shown() for one in findings.mismatches]
    chain_errors = [one.shown() for one in findings.chain_errors]
    counts: dict[str, Any] = {
        "inputs": findings.inputs,
        "events": findings.events,
        "receipts": findings.receipts,
    }
    if output is not Format.TEXT:
        document = counts | {"mismatches": mismatches, "chain_errors": chain_errors}
        write_data(json_text(document, indent=output is Format.JSON))
    else:
        show_record(
            counts | {"mismatches": findings.mismatch_count, "chain errors": findings.chain_error_count}, output
        )
        for one in mismatches[:SHOWN_MAX]:
            place = "-" if one["offset"] is None else one["offset"]
            cause = "no input" if one["inputOffset"] is None else f"input {one['partition']}:{one['inputOffset']}"
            _say(f"{one['topic']} {one['partition']}:{place}  {one['what']}  ({cause})")
        for one in chain_errors[:SHOWN_MAX]:
            _say(f"events {one['partition']}:{one['offset']}  {one['what']}  (session {one['sessionId']})")
    more = findings.mismatch_count + findings.chain_error_count
    if findings.wrong_key:
        note(
            f"onepen: none of the {findings.tokens_invalid} tokens in the workers' records fits the token key: "
            "ONEPEN_TOKEN_KEY (or its name) is probably not the processor's, and the differences follow from that"
        )
    if output is Format.TEXT and more > len(mismatches[:SHOWN_MAX]) + len(chain_errors[:SHOWN_MAX]):
        note(f"onepen: {more} findings in all; -o json lists more of them")


def _say(line: str) -> None:
    write_data(coloured(printable(line), "red"))


def archive(
    partition: PartitionOption = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where to write [archive/ in the data directory].")
    ] = None,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Write the state of each partition at an offset to a file that `onepen verify --from` can start from.

    Works beside a running system. A file is checksummed, written whole and then renamed; archives that are there stay.

    \b
    Exit codes: 0 written, 2 usage, 4 unreachable.

    \b
    Examples:
      onepen archive
      onepen archive --partition 3 --to /var/lib/onepen/archive
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap)
    from onepen.streams.archiving import archive_partitions

    folder = to if to is not None else settings.data_dir / ARCHIVE_FOLDER
    wanted = None if partition is None else [partition]
    rows = []
    for one in archive_partitions(settings, folder, wanted):
        rows.append(
            {
                "partition": one.partition,
                "nextInputOffset": one.next_input_offset,
                "sessions": one.sessions,
                "records": one.records,
                "fileBytes": one.file_bytes,
                "file": str(one.path),
            }
        )
    show_rows(rows, ("partition", "nextInputOffset", "sessions", "records", "fileBytes", "file"), output, empty="")
    return ExitCode.OK


def audit(
    topics_only: Annotated[bool, typer.Option("--topics-only", help="Leave the tables out.")] = False,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Check the invariants on everything that topics and tables hold, judged from outside: no decision is repeated.

    One active run, no gap, unbroken chain, one verdict or dead letter and one disposition per input, verdicts by the
    table of modes, generations, deadlines, bounds, steers, queue order, cancel as a barrier, subtasks, whole
    transactions; and the tables equal to a second fold of the log. Works beside a running system.

    \b
    -o json: {"checked": {name: how many were looked at}, "violations": [{check, where, what}]}. At most 1000 are
    listed. `where` names topic or table with the position.

    \b
    Exit codes: 0 nothing found, 1 a violation, 2 usage (no address of PostgreSQL), 4 unreachable.

    \b
    Examples:
      onepen audit
      onepen audit --topics-only -o json
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap)
    from onepen.cli.progress import PartitionProgress
    from onepen.streams.auditing import audit as judge

    dsn = None if topics_only else settings.require_dsn()
    with PartitionProgress("auditing") as bar:
        found = judge(settings, dsn, progress=bar.show)
    violations = [{"check": name, "where": one.where, "what": one.what} for name, one in found.violations]
    if output is not Format.TEXT:
        write_data(json_text({"checked": dict(found.checked), "violations": violations}, indent=output is Format.JSON))
    else:
        per_check = Counter(name for name, _ in found.violations)
        rows = [
            {"check": name, "lookedAt": count, "violations": per_check[name]} for name, count in found.checked.items()
        ]
        show_rows(rows, ("check", "lookedAt", "violations"), output, empty="")
        for one in violations[:SHOWN_MAX]:
            _say(f"{one['check']}: {one['where']}: {one['what']}")
        if found.violation_count > SHOWN_MAX:
            note(f"onepen: {found.violation_count} violations in all; -o json lists more of them")
    return ExitCode.FINDING if found.violation_count else ExitCode.OK
