"""Prints the answers of the checks, and the live views beside SQL."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from onepen.demo.checks import Answer
from onepen.sinks.postgres_outside import ACTIVE_QUERY, OUTCOMES_QUERY, read_outcomes
from onepen.streams.deadline import Deadline
from onepen.streams.settings import Settings
from onepen.streams.views import Views, read_views

__all__ = ["Agreement", "compare_views", "print_agreement", "print_answers"]

POLL_S = 0.1
VIOLATIONS_SHOWN = 3
OUTCOMES_SHOWN = 6
"""The last ones; all are compared."""
Minute = tuple[int, str]


def print_answers(console: Console, answers: Sequence[Answer]) -> None:
    """One line per question, what it rests on below it, and what speaks against it in red."""
    for answer in answers:
        mark, style = ("green", "green") if answer.green else ("RED", "bold red")
        line = Text(f"{answer.number} {mark:<6}", style=style)
        line.append(answer.question, style="bold")
        console.print(line)
        for sentence in answer.rests_on:
            console.print(Text(f"    {sentence}", style="dim"), soft_wrap=True)
        for violation in answer.violations[:VIOLATIONS_SHOWN]:
            console.print(Text(f"    ! {violation}", style="red"), soft_wrap=True)
        if len(answer.violations) > VIOLATIONS_SHOWN:
            console.print(Text(f"    ! and {len(answer.violations) - VIOLATIONS_SHOWN} more", style="red"))


@dataclass(frozen=True)
class Agreement:
    """The same figures twice: by Faust over the committed log, by SQL over the tables, both past the same offsets."""

    offsets: Mapping[int, int]
    faust_active: int
    sql_active: int
    faust_outcomes: Mapping[Minute, int]
    sql_outcomes: Mapping[Minute, int]

    @property
    def holds(self) -> bool:
        return self.faust_active == self.sql_active and self.faust_outcomes == self.sql_outcomes


def compare_views(
    settings: Settings, views_path: Path, tenant_id: int, reach: Mapping[int, int], *, timeout_ms: int
) -> Agreement:
    """Wait until views and tables have both counted the events up to `reach` (partition -> last offset), then compare.

    The tenant must be at rest behind `reach`. Raises `DeadlineExpired` naming who is behind.
    """
    deadline = Deadline(timeout_ms)
    pause = threading.Event()
    while True:
        views = read_views(views_path)
        views_behind = views is None or any(views.offsets.get(p, 0) <= o for p, o in reach.items())
        active, outcomes, applied = read_outcomes(settings.require_dsn(), tenant_id)
        sink_behind = any(applied.get((settings.topics.events, p), 0) <= o for p, o in reach.items())
        if views is not None and not views_behind and not sink_behind:
            return _agreement(views, active, outcomes, tenant_id, reach)
        deadline.check(f"{'the views' if views_behind else 'the sink'} did not reach the end of the story")
        pause.wait(POLL_S)


def _agreement(
    views: Views, active: int, outcomes: Mapping[Minute, int], tenant_id: int, reach: Mapping[int, int]
) -> Agreement:
    return Agreement(
        offsets={p: o + 1 for p, o in sorted(reach.items())},
        faust_active=sum(a.runs for a in views.active if a.tenant_id == tenant_id),
        sql_active=active,
        faust_outcomes={(o.minute_at_ms, o.status): o.runs for o in views.outcomes if o.tenant_id == tenant_id},
        sql_outcomes=outcomes,
    )


def print_agreement(console: Console, agreement: Agreement) -> None:
    """The figures side by side."""
    style = "green" if agreement.holds else "bold red"
    verdict = "agree" if agreement.holds else "DIFFER"
    offsets = ", ".join(f"{p}:{o}" for p, o in agreement.offsets.items())
    console.print(Text(f"views {verdict}: Faust beside SQL, both past events {offsets}", style=style), soft_wrap=True)
    console.print(Text(f"    active runs      {agreement.faust_active:>4} | {agreement.sql_active:<4}"))
    for minute, status in sorted(agreement.faust_outcomes.keys() | agreement.sql_outcomes.keys())[-OUTCOMES_SHOWN:]:
        at = datetime.fromtimestamp(minute / 1000, UTC).strftime("%H:%M")
        left = agreement.faust_outcomes.get((minute, status), 0)
        right = agreement.sql_outcomes.get((minute, status), 0)
        console.print(Text(f"    {at} {status:<10} {left:>4} | {right:<4}"))
    console.print(Text(f"    {ACTIVE_QUERY}\n    {OUTCOMES_QUERY}", style="dim"), soft_wrap=True)
