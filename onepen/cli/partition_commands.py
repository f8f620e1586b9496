"""`onepen partition list|mend`: where each partition stands, and the mending of one that stands still."""

from __future__ import annotations

from typing import Annotated

import typer

from onepen.cli.app_groups import CONTEXT, new_group
from onepen.cli.exit_codes import ExitCode
from onepen.cli.options import BootstrapOption, DataDirOption, FormatOption, settings_of
from onepen.cli.output import Format, note, show_record, show_rows

group = new_group(
    "partition",
    """Where each partition of the inputs stands, and the mending of one that a processor refused.

    \b
    Examples:
      onepen partition list
      onepen partition mend 3
    """,
)

HEALTHY = ("agree", "fresh", "offset_missing")
COLUMNS = ("partition", "verdict", "recordOffset", "committedOffset", "inputsStart", "inputsEnd", "writerSlot")


def register(app: typer.Typer) -> None:
    """Hang the group into the command tree."""
    app.add_typer(group, short_help="Where partitions stand; mend one that stands still.")


@group.command("list", context_settings=dict(CONTEXT))
def list_partitions(
    data_dir: DataDirOption = None, bootstrap: BootstrapOption = None, output: FormatOption = Format.TEXT
) -> int:
    """Compare partition record, committed offset and inputs of every partition: exit 0 when all agree, 1 when not.

    While processors run, a partition may be caught between two of its transactions: look twice before you mend.

    \b
    Example:
      onepen partition list -o json
    """
    from onepen.streams.partition_mending import survey

    found = list(survey(settings_of(data_dir=data_dir, bootstrap=bootstrap)))
    show_rows([one.row() for one in found], COLUMNS, output, empty="onepen: there are no partitions")
    wrong = [one for one in found if one.verdict not in HEALTHY]
    for one in wrong:
        note(f"onepen: partition {one.partition}: {one.sentence()}")
    return ExitCode.FINDING if wrong else ExitCode.OK


@group.command("mend", context_settings=dict(CONTEXT))
def mend_partition(
    partition: Annotated[int, typer.Argument(metavar="PARTITION", min=0, help="As the processor named it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; else only what would be done is shown.")] = False,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Where inputs are gone that were never decided: go on behind them.")
    ] = False,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Set the group's committed offset to the next input of the partition record: the state is the truth.

    Shows both offsets and what would be done; `--yes` does it. Refused while a processor is a member of the group, and
    when the log holds decisions that the state does not know.

    \b
    Examples:
      onepen partition mend 3
      onepen partition mend 3 --yes
    """
    from onepen.streams.partition_mending import members, mend, survey

    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap)
    found = mend(settings, partition, skip_lost=skip_lost) if yes else next(survey(settings, [partition]))
    show_record(found.row(), output)
    if yes:
        after = next(survey(settings, [partition]))
        note(f"onepen: partition {partition}: the committed offset is {after.committed}; {after.sentence()}")
        return ExitCode.OK if after.verdict in HEALTHY else ExitCode.FINDING
    note(f"onepen: partition {partition}: {found.sentence()}")
    if owners := members(settings):
        note(f"onepen: processors run ({', '.join(owners)}): what is shown may be between two transactions of theirs")
    return ExitCode.OK if found.verdict in HEALTHY else ExitCode.FINDING
