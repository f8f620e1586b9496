"""Tool calls and model requests: started, run, ended in the log, whatever happens to the body.

Rule: nothing new begins unless the lease is trusted and no cancel is known; every start reported gets its end.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from onepen.schemas import events as ev
from onepen.schemas.errors import Invalid
from onepen.schemas.ids import check_id
from onepen.schemas.limits import PROGRESS_RENEWALS_MAX
from onepen.schemas.statuses import BranchKind, Reason
from onepen.streams.worker.cancel_token import CancelToken, thread_of, to_its_end
from onepen.streams.worker.machine import Machine, Now, Ticket
from onepen.streams.worker.payloads import error_of, kept
from onepen.streams.worker.session import HeldRun

_IN_VAIN = (Reason.RUN_CANCELLING, None)
"""Fates of starts that the log refused for a cancel, or (None) is about to, once the cancel is known."""


class OpenCalls:
    """The gate before every start, and the calls that have not ended yet."""

    def __init__(self, held: HeldRun, cancelled: CancelToken) -> None:
        self.held = held
        self.cancelled = cancelled
        self._tasks: dict[int, asyncio.Task[Any] | None] = {}
        self._waiting: set[int] = set()
        self._count = 0
        self._starts: list[tuple[Ticket, dict[str, str]]] = []
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def gate(self) -> None:
        """Wait while the lease is not trusted (suspended). Raises `CancelledError` when the run has to stop."""

        def open_now(machine: Machine, now: Now) -> bool | None:
            reason = machine.ended or ("the run is cancelled" if machine.cancelling else self.cancelled.reason)
            if reason is not None:
                raise asyncio.CancelledError(reason)
            return True if machine.trusted(now) else None

        await self.held.pace()
        await self.held.until(open_now)  # last: what begins then begins in this very step

    @contextmanager
    def open(self) -> Iterator[int]:
        """Number a call and keep its task, so that `close` can end what the body left behind."""
        self._count += 1
        number = self._count
        self._tasks[number] = asyncio.current_task()
        self._none_open.clear()
        self._settle()
        try:
            yield number
        finally:
            del self._tasks[number]
            self._waiting.discard(number)
            self._settle()
            if not self._tasks:
                self._none_open.set()

    def start(self, kind: str, payload: dict[str, Any], branch: BranchKind, branch_id: str, name: str = "") -> None:
        """Report the start of what begins now, without waiting for the log's answer."""
        self._starts = [started for started in self._starts if started[0].fate in _IN_VAIN]
        naming = {"branch": branch.value, "id": branch_id, "name": name}
        self._starts.append((self.held.report(kind, payload), naming))

    def begun_in_vain(self) -> list[dict[str, str]]:
        """What was begun although the run was being cancelled, so that the log has no start of it (protocol section 7):
        what it refused for that, and, once the cancel is known, what it has not decided."""
        cancelling = self.held.look(lambda m, _: m.cancelling)
        fates = _IN_VAIN if cancelling else _IN_VAIN[:1]
        return [naming for ticket, naming in self._starts if ticket.fate in fates]

    def wait(self, number: int, waits: bool) -> None:
        """Note that an open call only waits for a person or a child (or no longer)."""
        if waits:
            self._waiting.add(number)
        else:
            self._waiting.discard(number)
        self._settle()

    def _settle(self) -> None:
        self.held.only_waits = bool(self._waiting) and len(self._waiting) == len(self._tasks)

    async def close(self) -> None:
        """Cancel calls left open in tasks the body did not wait for, and wait until all have ended."""
        for task in self._tasks.values():
            if task is not None:
                task.cancel()
        await self._none_open.wait()


class ModelTurn:
    """One request to a model; `note` adds members to its end (usage, stop reason)."""

    def __init__(self, turn_id: str) -> None:
        self.turn_id = turn_id
        self.noted: dict[str, Any] = {}

    def note(self, **members: Any) -> None:
        """Members for `model.request.finished`."""
        self.noted.update(members)


class ModelRequest:
    """`async with`: reports start and end; the end is `ok`, `error`, or `aborted` when the run is stopped."""

    def __init__(self, calls: OpenCalls, turn_id: str | None, members: dict[str, Any]) -> None:
        self._calls = calls
        self._turn_id = turn_id
        self._members = members

    async def __aenter__(self) -> ModelTurn:
        await self._calls.gate()
        self._open = self._calls.open()
        number = self._open.__enter__()
        generation = self._calls.held.offer.generation
        turn_id = self._turn_id or f"turn-{generation}-{number}"
        self._turn = ModelTurn(check_id(turn_id, "turn_id"))
        try:
            members = {**self._members, "turnId": turn_id}
            self._calls.start(ev.MODEL_STARTED, members, BranchKind.MODEL_REQUEST, turn_id)
        except BaseException:
            self._open.__exit__(None, None, None)
            raise
        return self._turn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        members: dict[str, Any] = {**self._turn.noted, "turnId": self._turn.turn_id, "status": "ok"}
        if isinstance(error, asyncio.CancelledError):
            members["status"] = "aborted"
        elif error is not None:
            members |= {"status": "error", "error": error_of(error)}
        try:
            self._calls.held.report(ev.MODEL_FINISHED, members)
        finally:
            self._open.__exit__(None, None, None)


async def call_tool(
    calls: OpenCalls,
    name: str,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    call_id: str | None = None,
    progress_renewals: int | None = None,
) -> Any:
    """Report the start, run the tool, report the end; answers its output as strict JSON where it is JSON."""
    check_id(name, "tool name")
    limit: dict[str, Any] = {}
    if progress_renewals is not None:
        limit = {"progressRenewals": _checked_limit(progress_renewals)}
    await calls.gate()
    with calls.open() as number:
        call_id = call_id or f"call-{calls.held.offer.generation}-{number}"
        naming = {"toolCallId": check_id(call_id, "call_id"), "toolName": name}
        members = {**naming, **limit, **kept("arguments", arguments)[1]}
        calls.start(ev.TOOL_STARTED, members, BranchKind.TOOL, call_id, name)
        end: dict[str, Any] = {**naming, "status": "unknown"}
        try:
            raw, cancelled = await run_call(function, **arguments)
            value, members = kept("result", raw)
            end |= {**members, "status": "cancelled" if cancelled else "ok"}
            if cancelled:
                raise asyncio.CancelledError(calls.cancelled.reason)
            return value
        except asyncio.CancelledError:
            end["status"] = "cancelled"
            raise
        except BaseException as error:
            end |= {"status": "error", "error": error_of(error)}
            raise
        finally:
            calls.held.report(ev.TOOL_FINISHED, end)


def _checked_limit(progress_renewals: int) -> int:
    if type(progress_renewals) is not int or not 1 <= progress_renewals <= PROGRESS_RENEWALS_MAX:
        sentence = f"progress_renewals: must lie between 1 and {PROGRESS_RENEWALS_MAX}"
        raise Invalid(sentence, field="progress_renewals")
    return progress_renewals


async def run_call(function: Callable[..., Any], *args: Any, **arguments: Any) -> tuple[Any, bool]:
    """(output, whether a cancel came while a thread worked). A thread is waited for: it cannot be cancelled."""
    if is_async(function):
        return await function(*args, **arguments), False
    future = thread_of(lambda: function(*args, **arguments))
    cancelled = await to_its_end(future)
    try:
        value = future.result()
    except BaseException:
        if cancelled:
            raise asyncio.CancelledError from None
        raise
    if inspect.isawaitable(value):
        value = await value
    return value, cancelled


def is_async(function: Callable[..., Any]) -> bool:
    """True when calling it gives a coroutine, so that it runs in the event loop."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
