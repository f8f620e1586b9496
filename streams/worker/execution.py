"""From the grant to the recorded end: one run's body, its cancellation, its final report.

Rule: the final report is sent when the body and every call it opened have ended, and the lease is kept until the
log has recorded it; a finished result is sent again, never computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from onepen.schemas.errors import Invalid, Retryable
from onepen.schemas.statuses import Reason, RunStatus
from onepen.streams.worker.cancel_token import CancelToken, enter
from onepen.streams.worker.context import RunContext
from onepen.streams.worker.machine import Machine, Now, Ticket
from onepen.streams.worker.payloads import error_of, kept
from onepen.streams.worker.session import HeldRun

log = logging.getLogger("onepen.worker")

Body = Callable[[RunContext], Awaitable[Any]]

RECORDED_WITHIN_MS: Final = 600_000
"""How long an unanswered final report keeps the lease."""
BEGUN_NAMED_MAX: Final = 10
"""Names are long at most as ids are, and beside the largest output of a body 16 KiB are left."""
SHUTDOWN: Final = "shutdown"


class Execution:
    """Runs the body of one held run in the event loop."""

    def __init__(self, held: HeldRun, body: Body, context: RunContext, cancelled: CancelToken) -> None:
        self.held = held
        self._body = body
        self._context = context
        self._cancelled = cancelled
        self._stopping = False

    def stop(self) -> None:
        """Stop the body for a shutdown and give the run back; a body that has ended is finished as usual."""
        self._stopping = True
        self.held.wake()

    def abandon(self) -> None:
        """Give the run back and wait no longer for what does not end; the next cancel ends every wait."""
        self._cancelled.abandoned = True
        self.held.release(SHUTDOWN)

    async def run(self) -> None:
        """Everything from here to the end of the run for this worker. Raises nothing."""
        try:
            if not await self._may_begin():
                return
            outcome = await self._outcome()
            await self._context._calls.close()
            if self.held.ended is None:
                await self._finish(self._with_begun(outcome))
        except Exception:
            log.exception("run %s of this worker failed inside the SDK", self.held.offer.run_id)

    async def _may_begin(self) -> bool:
        def granted(machine: Machine, _: Now) -> bool | None:
            if machine.ended is not None or self._stopping:
                return False
            return True if machine.granted or machine.optimistic else None

        begin = bool(await self.held.until(granted))
        if not begin and self.held.ended is None:
            self.held.release(SHUTDOWN)
        return begin

    async def _outcome(self) -> dict[str, Any] | None:
        """Members of the final event; None when the body was stopped for a shutdown or the run is over."""
        enter(self._cancelled)
        body = asyncio.ensure_future(self._whole_body())
        watcher = asyncio.create_task(self._watch(body))
        try:
            await asyncio.wait([body])
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            if not body.done():  # this very task was cancelled: the loop is going down
                body.cancel()
        return self._members(body)

    async def _whole_body(self) -> Any:
        await self._context.open_input()
        return await self._body(self._context)

    async def _watch(self, body: asyncio.Future[Any]) -> None:
        def has_to_stop(machine: Machine, _: Now) -> str | None:
            if machine.ended is not None:
                return machine.ended
            if machine.cancelling:
                return machine.cancel_reason or "cancelled"
            return SHUTDOWN if self._stopping else None

        self._cancelled.set(str(await self.held.until(has_to_stop)))
        body.cancel()

    def _members(self, body: asyncio.Future[Any]) -> dict[str, Any] | None:
        cancelling = self.held.look(lambda m, _: m.cancelling)
        if body.cancelled():
            if cancelling:
                return {"terminalStatus": RunStatus.CANCELLED.value}
            if self._cancelled.is_set():
                return None
            return _failed(asyncio.CancelledError("the body cancelled itself"))
        error = body.exception()
        if error is not None:
            if not self._cancelled.is_set():
                log.warning("run %s failed: %s", self.held.offer.run_id, type(error).__name__, exc_info=error)
            elif not cancelling:
                return None
            return _failed(error)
        return {"terminalStatus": RunStatus.COMPLETED.value, **kept("output", body.result())[1]}

    def _with_begun(self, members: dict[str, Any] | None) -> dict[str, Any] | None:
        begun = self._context._calls.begun_in_vain()
        if members is None or not begun:
            return members
        return members | {"begun": begun[:BEGUN_NAMED_MAX], "begunCount": len(begun)}

    async def _finish(self, members: dict[str, Any] | None) -> None:
        if members is None:
            self.held.release(SHUTDOWN)
            return
        fate = await self._final(members)
        if self.held.ended is None and fate is not None:
            log.error("run %s: its end was refused (%s)", self.held.offer.run_id, fate)
            await self._final(_failed(Invalid(f"the final report was refused: {fate}")))
        if self.held.ended is None:
            # Not recorded in time, or refused twice: the lease ends by itself and the log decides.
            self.held.give_up("not_recorded")

    async def _final(self, members: dict[str, Any]) -> str | None:
        ticket: Ticket = self.held.report_final(members)
        return await self.held.until(lambda _, __: ticket.fate, timeout_ms=RECORDED_WITHIN_MS)

    @property
    def recorded(self) -> bool:
        """True when the log has this worker's final report."""
        return self.held.ended == Reason.RECORDED


def _failed(error: BaseException) -> dict[str, Any]:
    """An error that says of itself that the same may succeed later makes a run that may be retried."""
    retryable = isinstance(error, Retryable)
    return {"terminalStatus": RunStatus.FAILED.value, "error": error_of(error), "retryable": retryable}
