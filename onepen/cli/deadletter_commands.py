"""`onepen deadletters list|show|redrive`: records that could not be decided, what is wrong with them, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from onepen.cli.app_groups import CONTEXT, new_group
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.moments import moment_ms, moment_text
from onepen.cli.options import BootstrapOption, DataDirOption, FormatOption, LimitOption, settings_of
from onepen.cli.output import Format, note, show_record, show_rows
from onepen.schemas.errors import Invalid

if TYPE_CHECKING:
    from onepen.streams.dead_letters_reading import Letter
    from onepen.streams.dead_letters_redrive import Redriven
    from onepen.streams.settings import Settings

T = TypeVar("T")

group = new_group(
    "deadletters",
    """Records that could not be decided or written: list them, look at one, put them back.

    \b
    Examples:
      onepen deadletters list --since 24h
      onepen deadletters show 3-17
      onepen deadletters redrive 3-17 3-18
    """,
)

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="PARTITION-OFFSET as list shows it.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="REASON", help="Only letters of this reason.")]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="AGE|TIME", help="Only newer ones: 15m, 2h, 7d or a time.")
]
COLUMNS = ("id", "at", "reason", "topic", "partition", "offset", "key", "sizeBytes", "redriven")


def register(app: typer.Typer) -> None:
    """Hang the group into the command tree."""
    app.add_typer(group, short_help="Dead letters: list, show, put back.")


@group.command("list", context_settings=dict(CONTEXT))
def list_letters(
    reason: ReasonOption = None,
    since: SinceOption = None,
    limit: LimitOption = 100,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """List dead letters, the newest ones last. Values are not shown.

    \b
    Examples:
      onepen deadletters list
      onepen deadletters list --reason internal_error --since 2h -o jsonl
    """
    from onepen.streams.dead_letters_reading import Wanted, find

    wanted = Wanted(reason, _since_ms(since))
    letters, count = find(settings_of(data_dir=data_dir, bootstrap=bootstrap), wanted, limit)
    rows = [letter.summary() for letter in letters]
    if output is Format.TEXT:
        rows = [row | {"at": moment_text(row["at"])} for row in rows]
    show_rows(rows, COLUMNS, output, empty="onepen: no such dead letters")
    if count > len(letters):
        note(f"onepen: the newest {len(letters)} of {count}; --limit shows more")


@group.command("show", context_settings=dict(CONTEXT))
def show_letter(
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="PARTITION-OFFSET as list shows it.")],
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show where a dead letter stood, why it was set aside, and what it is, without tokens and other long words.

    \b
    Example:
      onepen deadletters show 3-17 -o json
    """
    from onepen.streams.dead_letters_reading import LetterId, get, preview

    wanted = LetterId.parse(letter_id)
    letter = _known(lambda: get(settings_of(data_dir=data_dir, bootstrap=bootstrap), [wanted]))[0]
    shown: dict[str, Any] = letter.summary()
    if output is Format.TEXT:
        shown |= {"at": moment_text(letter.at_ms), "redrivenAt": moment_text(shown["redrivenAt"])}
    show_record(shown | {"value": preview(letter.value)}, output)


@group.command("redrive", context_settings=dict(CONTEXT))
def redrive_letters(
    ids: IdsArgument = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    all_: Annotated[bool, typer.Option("--all", help="All letters of the inputs topic.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also those that were redriven before.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Required without a terminal.")] = False,
    limit: LimitOption = 1_000,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Put records back on the inputs topic, byte for byte, with headers that say which letter each was.

    They are decided at their new place as if they came now. A letter that was redriven before is skipped, so the same
    command may be run again. All are written in one transaction, or none. What the sink set aside cannot be put back.

    \b
    Examples:
      onepen deadletters redrive 3-17 --dry-run
      onepen deadletters redrive --reason internal_error --since 7d
      onepen deadletters redrive 3-17 --again --yes
    """
    from onepen.streams.dead_letters_redrive import redrive

    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap)
    read = _selection(settings, ids, reason, since, all_, again, limit)
    if dry_run or not yes:
        planned, letters = _planned(settings, read, again)
        if dry_run:
            _show(planned, letters, output)
            return ExitCode.OK
        if not any(one.action == "redrive" for one in planned):
            _show(planned, letters, output)
            note("onepen: nothing to redrive")
            return ExitCode.OK
        if not _confirmed(sum(one.action == "redrive" for one in planned), settings):
            note("onepen: nothing was redriven")
            return ExitCode.FINDING
    done, letters = _known(lambda: redrive(settings, read, again=again))
    _show(done, letters, output)
    left = sum(one.action == "left" for one in done)
    if left:
        note(f"onepen: {left} letters did not fit in one transaction; run it again")
    return ExitCode.OK


def _selection(
    settings: Settings,
    ids: Sequence[str] | None,
    reason: str | None,
    since: str | None,
    all_: bool,
    again: bool,
    limit: int,
) -> Callable[[], Sequence[Letter]]:
    """How to read the letters that are meant. Raises `Invalid` when the arguments name none, or name them twice."""
    from onepen.streams.dead_letters_reading import LetterId, Wanted, find, get, pending

    by_filter = all_ or reason is not None or since is not None
    if bool(ids) == by_filter:
        raise Invalid("id: name letters, or choose them by --reason, --since or --all", field="id")
    if ids:
        named = list(dict.fromkeys(LetterId.parse(text) for text in ids))
        return lambda: get(settings, named)
    wanted = Wanted(reason, _since_ms(since), settings.topics.inputs)
    if again:
        return lambda: get(settings, [letter.id for letter in find(settings, wanted, limit)[0]])
    return lambda: get(settings, pending(settings, wanted, limit))


def _planned(
    settings: Settings, read: Callable[[], Sequence[Letter]], again: bool
) -> tuple[list[Redriven], Sequence[Letter]]:
    from onepen.streams.dead_letters_redrive import plan_redrive
    from onepen.streams.outside_reader import end_offsets

    letters = _known(read)
    partitions = len(end_offsets(settings, settings.topics.inputs))
    return plan_redrive(settings, letters, partitions, again=again), letters


def _known(read: Callable[[], T]) -> T:
    """`read`, with an unknown id as the end of the command."""
    from onepen.streams.dead_letters_reading import NoSuchLetter

    try:
        return read()
    except NoSuchLetter as error:
        raise Failure(str(error), ExitCode.NOT_FOUND) from None


def _confirmed(count: int, settings: Settings) -> bool:
    what = f"{count} dead letter{'s' if count != 1 else ''} would be put back on {settings.topics.inputs}"
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        raise Failure(f"{what}: say --yes (there is no terminal to ask)", ExitCode.USAGE)
    note(f"onepen: {what}. Type yes to go on:")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _show(done: Sequence[Redriven], letters: Sequence[Letter], output: Format) -> None:
    rows = [
        {
            "id": str(one.id),
            "reason": letter.reason,
            "action": one.action,
            "partition": one.partition if one.partition >= 0 else None,
            "offset": one.offset if one.offset >= 0 else None,
            "why": one.why or None,
        }
        for one, letter in zip(done, letters, strict=True)
    ]
    show_rows(rows, ("id", "reason", "action", "partition", "offset", "why"), output, empty="onepen: no such letters")


def _since_ms(since: str | None) -> int:
    return 0 if since is None else moment_ms(since, "since")
