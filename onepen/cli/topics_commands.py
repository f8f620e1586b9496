"""`onepen topics plan|apply|check`: the declared topics, made and compared."""

from __future__ import annotations

import typer

from onepen.cli.app_groups import CONTEXT, new_group
from onepen.cli.exit_codes import ExitCode
from onepen.cli.options import BootstrapOption, DataDirOption, FormatOption, settings_of
from onepen.cli.output import Format, note, show_rows, write_data
from onepen.cli.terminal_text import printable

group = new_group(
    "topics",
    """The declared topics: show the plan, make the broker so, compare.

    \b
    Examples:
      onepen topics plan -o json
      onepen topics apply
      onepen topics check || echo "start-up would refuse these topics"
    """,
)


def register(app: typer.Typer) -> None:
    """Hang the group into the command tree."""
    app.add_typer(group, short_help="Plan, apply and check the topics.")


@group.command("plan", context_settings=dict(CONTEXT))
def show_plan(
    data_dir: DataDirOption = None, bootstrap: BootstrapOption = None, output: FormatOption = Format.TEXT
) -> None:
    """Print the declared topics. Asks no broker.

    \b
    Examples:
      onepen topics plan
      ONEPEN_PREFIX=staging ONEPEN_PARTITIONS=64 onepen topics plan -o jsonl
    """
    from onepen.streams.topic_admin import plan_topics

    topics = plan_topics(settings_of(data_dir=data_dir, bootstrap=bootstrap))
    if output is Format.TEXT:
        rows = [
            {
                "topic": topic.name,
                "partitions": topic.partitions,
                "settings": " ".join(f"{name}={value}" for name, value in sorted(topic.settings.items())),
            }
            for topic in topics
        ]
    else:
        rows = [{"topic": t.name, "partitions": t.partitions, "settings": t.settings} for t in topics]
    show_rows(rows, ("topic", "partitions", "settings"), output, empty="no topics are declared")


@group.command("apply", context_settings=dict(CONTEXT))
def apply_plan(data_dir: DataDirOption = None, bootstrap: BootstrapOption = None) -> None:
    """Create what is missing and set what differs. Never deletes a topic, never changes a partition count.

    \b
    Example:
      ONEPEN_BOOTSTRAP=kafka-1:9092 onepen topics apply
    """
    from onepen.streams.topic_admin import apply

    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap)
    done = apply(settings)
    for sentence in done:
        write_data(printable(sentence))
    if not done:
        note(f"onepen: nothing to do: the topics on {settings.bootstrap} are as planned")


@group.command("check", context_settings=dict(CONTEXT))
def check_plan(
    data_dir: DataDirOption = None, bootstrap: BootstrapOption = None, output: FormatOption = Format.TEXT
) -> int:
    """Compare the broker with the plan: exit 0 when equal, 1 when not. Changes nothing.

    \b
    Example:
      onepen topics check -o jsonl
    """
    from onepen.streams.topic_admin import check

    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap)
    found = check(settings)
    if output is Format.TEXT:
        for difference in found:
            write_data(printable(str(difference)))
        if not found:
            note(f"onepen: the topics on {settings.bootstrap} are as planned")
    else:
        rows = [{"topic": d.topic, "difference": d.sentence, "mend": d.mend} for d in found]
        show_rows(rows, ("topic", "difference", "mend"), output, empty="")
    return ExitCode.FINDING if found else ExitCode.OK
