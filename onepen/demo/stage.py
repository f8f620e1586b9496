"""What the audience sees, and what the story waits for: the committed log as it grows, one screen of it.

Rule: everything shown as coming from the log was read from the log by a read-committed reader; the story itself only
says who does what. Waiting is always for a record, with a deadline that names it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from onepen.demo.checks import LoggedEvent, LoggedReceipt
from onepen.demo.gather import Starts
from onepen.schemas import codec
from onepen.schemas import events as names
from onepen.schemas.errors import Fatal, OnepenError
from onepen.schemas.events import Event
from onepen.schemas.receipts import Receipt
from onepen.streams.deadline import Deadline
from onepen.streams.outside_reader import Follower
from onepen.streams.settings import Settings

__all__ = ["Scene", "Stage"]

T = TypeVar("T")

LINES_SHOWN: Final = 22
LINES_AROUND: Final = 8
"""The table of sessions and a line of air: what is left of a low terminal goes to the lines."""
POLL_S: Final = 0.1
CLOSE_S: Final = 5.0
COLOURS: Final = {
    "running": "cyan", "cancelling": "yellow", "cancelled": "yellow", "completed": "green", "failed": "red",
    "timed_out": "magenta",
}  # fmt: skip
QUIET_TYPES: Final = frozenset(
    {names.MODEL_STARTED, names.MODEL_FINISHED, names.MESSAGE_COMPLETED, names.INPUT_STEERED}
)
"""Shown in the table of sessions only, not as lines of their own."""


@dataclass
class Scene:
    """One session as the audience sees it."""

    session: str
    title: str
    run_no: int = 0
    status: str = ""
    generation: int = 0
    holder: str = ""
    last: str = ""
    runs: list[str] = field(default_factory=list)


class Stage:
    """Follows the log of some sessions and shows it. A context manager; `say` and `await_*` from one thread."""

    def __init__(self, settings: Settings, console: Console, tenant_id: int, starts: Starts) -> None:
        self._console = console
        self._tenant_id = tenant_id
        topics = settings.topics
        self._events_topic = topics.events
        self._follower = Follower(settings, {topics.events: starts.events, topics.receipts: starts.receipts})
        self._scenes: dict[str, Scene] = {}
        self._events: list[LoggedEvent] = []
        self._receipts: list[LoggedReceipt] = []
        self._lines: deque[Text] = deque(maxlen=LINES_SHOWN)
        self._began_s = time.monotonic()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, name="stage")
        self._live = Live(console=console, get_renderable=self._screen, refresh_per_second=8, transient=False)

    def __enter__(self) -> Stage:
        self._thread.start()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)
        self._follower.close()
        if self._console.is_terminal:
            self._live.stop()

    # -- what the story does -----------------------------------------------------------------------------------

    def open(self, session: str, title: str) -> None:
        """Put a session on the stage."""
        with self._changed:
            self._scenes[session] = Scene(session, title)

    def say(self, who: str, what: str, style: str = "bold") -> None:
        """One line of the story, with the time since it began."""
        line = Text(f"{time.monotonic() - self._began_s:5.1f}s ", style="dim")
        line.append(f"{who:<10} ", style=style)
        line.append(what)
        with self._changed:
            self._lines.append(line)
        if not self._console.is_terminal:
            self._console.print(line)

    def await_event(
        self, session: str, kind: str, timeout_ms: int, *, run_no: int | None = None, **payload: Any
    ) -> LoggedEvent:
        """The first event of that type (of that run) and with these members, already there or to come."""

        def match(one: LoggedEvent) -> bool:
            return (
                one.event.session_id == session
                and one.event.type == kind
                and run_no in (None, one.event.run_no)
                and all(one.payload.get(name) == value for name, value in payload.items())
            )

        return self._await(lambda: next(filter(match, self._events), None), timeout_ms, f"{kind} in {session}")

    def await_receipt(self, match: Callable[[Receipt], bool], timeout_ms: int, what: str) -> LoggedReceipt:
        """The first receipt that matches, already there or to come."""
        return self._await(lambda: next((r for r in self._receipts if match(r.receipt)), None), timeout_ms, what)

    def _await(self, find: Callable[[], T | None], timeout_ms: int, what: str) -> T:
        deadline = Deadline(timeout_ms)
        with self._changed:
            while True:
                if self._failure is not None:
                    raise Fatal(f"the stage cannot read the log: {self._failure!r}") from self._failure
                found = find()
                if found is not None:
                    return found
                deadline.check(f"waiting for {what}")
                self._changed.wait(min(POLL_S, deadline.remaining_s()))

    # -- what the log says -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                for topic, raw in self._follower.poll(POLL_S):
                    if topic == self._events_topic:
                        event = codec.decode_as(Event, raw.value)
                        self._see_event(LoggedEvent(raw.partition, raw.offset, raw.value or b"", event))
                    else:
                        self._see_receipt(LoggedReceipt(raw.partition, raw.offset, codec.decode_as(Receipt, raw.value)))
        except (OnepenError, Exception) as error:  # told to whoever waits
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _see_event(self, one: LoggedEvent) -> None:
        scene = self._scenes.get(one.event.session_id)
        if scene is None or one.event.tenant_id != self._tenant_id:
            return
        with self._changed:
            self._events.append(one)
            _advance(scene, one)
            self._changed.notify_all()
        if one.event.type not in QUIET_TYPES:
            self.say("log", f"{scene.title}: {described(one)}", "blue")

    def _see_receipt(self, one: LoggedReceipt) -> None:
        receipt = one.receipt
        if receipt.tenant_id != self._tenant_id or receipt.session_id not in self._scenes:
            return
        with self._changed:
            self._receipts.append(one)
            self._changed.notify_all()
        title = self._scenes[receipt.session_id].title
        if receipt.record in ("report", "claim"):
            self.say("refused", f"{title}: {receipt.record} of {receipt.worker_id}: {receipt.reason}", "red")
        elif receipt.verdict is not None:
            reason = f" ({receipt.reason})" if receipt.reason else ""
            self.say("verdict", f"{title}: {receipt.mode} from {receipt.source}: {receipt.verdict}{reason}", "green")

    # -- how it looks ------------------------------------------------------------------------------------------

    def _screen(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("session", "run", "status", "gen", "holder", "last event"):
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        with self._changed:
            for scene in self._scenes.values():
                status = Text(scene.status, style=COLOURS.get(scene.status, ""))
                row = (str(scene.run_no or ""), status, str(scene.generation or ""), scene.holder, scene.last)
                table.add_row(f"{scene.title} ({scene.session})", *row)
            room = max(1, min(LINES_SHOWN, self._console.height - LINES_AROUND))
            lines = [Text.assemble(line) for line in list(self._lines)[-room:]]
        for line in lines:
            line.truncate(self._console.width, overflow="ellipsis")
        return Group(table, Text(""), *lines)


def _advance(scene: Scene, one: LoggedEvent) -> None:
    event = one.event
    scene.run_no, scene.generation = event.run_no, event.generation
    scene.last = f"{event.type} (seq {event.seq}, events {one.partition}:{one.offset})"
    if event.type == names.RUN_STARTED:
        scene.status, scene.holder = "running", ""
    elif event.type == names.RUN_LEASED:
        scene.holder = str(one.payload.get("workerId"))
    elif event.type in (names.RUN_LEASE_LOST, names.RUN_RELEASED):
        scene.holder = ""
    elif event.type == names.RUN_CANCEL_REQUESTED:
        scene.status = "cancelling"
    elif event.type == names.RUN_FINISHED:
        scene.status, scene.holder = str(one.payload.get("terminalStatus")), ""
        scene.runs.append(scene.status)


def described(one: LoggedEvent) -> str:
    """An event in one line: what it is, and the members that matter to a spectator."""
    payload = one.payload
    shown = [one.event.type, f"run {one.event.run_no}"]
    for member in ("source", "workerId", "toolName", "actionKey", "decision", "status", "terminalStatus", "reason"):
        value = payload.get(member)
        if isinstance(value, str | int) and not isinstance(value, bool):
            shown.append(f"{member}={value}")
    if one.event.type in (names.RUN_LEASED, names.RUN_LEASE_LOST):
        shown.append(f"generation {one.event.generation}")
    return " ".join(shown)
