"""The worker that `onepen up` and `onepen worker` run when no other is named: small, but it does what real ones do.

Rule: it talks to no model and sends no mail, and says so in its answer. A prompt with the word `slowly` takes about 20
seconds, so that there is time to steer or abort it; one with the word `mail` asks for an approval of an action; with
`delegate` a subtask in session `SESSION.helper` counts the words; with `compact` the context is compacted at the end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onepen.cli.terminal_text import json_text
from onepen.schemas.ids import ID_CHARS_MAX
from onepen.streams.worker import RunContext, Worker

if TYPE_CHECKING:
    from onepen.streams.settings import Settings
    from onepen.streams.worker import ActionPermit

STEPS = 4
QUICK_STEP_S = 0.05
SLOW_STEP_S = 5.0
READY_TIMEOUT_MS = 600_000
SPECIAL_WORDS = ("delegate", "compact", "mail", "slowly")
HELPER_SUFFIX = ".helper"


def example_worker(settings: Settings) -> Worker:
    """The example, ready to serve."""
    worker = Worker("example", max_runs=8, settings=settings)

    @worker.run
    async def answer(ctx: RunContext) -> dict[str, Any]:
        question = ctx.input if isinstance(ctx.input, str) else json_text(ctx.input)
        words = question.lower().split()
        step_s = SLOW_STEP_S if "slowly" in words else QUICK_STEP_S
        text = await _counted(ctx, question, words)
        hints: list[str] = []
        for _ in range(STEPS):
            async with ctx.model_request(model="none"):
                await asyncio.sleep(step_s)
            hints += [str(steer) for steer in await ctx.steers()]
        if "mail" in words:
            await ctx.action("send_mail", {"to": "nobody", "text": question[:200]}, perform=_no_mail, approval=True)
        if hints:
            text += f" and {len(hints)} hints: {'; '.join(hints)}"
        await ctx.message(text)
        if "compact" in words:
            await ctx.compact(lambda compaction: {"through": compaction.through_seq, "summary": text})
        return {"answer": text}

    return worker


async def _counted(ctx: RunContext, question: str, words: list[str]) -> str:
    if "delegate" in words:
        asked = " ".join(word for word in question.split() if word.lower() not in SPECIAL_WORDS)
        found = await ctx.subtask("helper", asked or "nothing", session_id=_helper_of(ctx.session_id))
        return f"The helper said: {found['answer']}"
    count = await ctx.tool("count_words", _count_words, text=question[:1_000])
    return f"The example worker read {count} words"


def _helper_of(session_id: str) -> str:
    """A session of its own for the subtask; its id has a limit too."""
    return f"{session_id[: ID_CHARS_MAX - len(HELPER_SUFFIX)]}{HELPER_SUFFIX}"


def _count_words(text: str) -> int:
    return len(text.split())


async def _no_mail(args: Any, permit: ActionPermit) -> dict[str, Any]:
    """Stands for the call of a mail server."""
    return {"sent": False, "why": "the example worker has no mail server"}


def tell_when_ready(worker: Worker, tell: Callable[[], None]) -> None:
    """Call `tell`, from a thread, once the worker has its share of the offers."""

    def wait() -> None:
        if worker.wait_ready(READY_TIMEOUT_MS):
            tell()

    threading.Thread(target=wait, daemon=True).start()
