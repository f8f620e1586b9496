"""Compaction: the body shrinks its context, the new one lies in an object store, only the pointer enters the log.

Rule: what was started is ended, well or badly; steers wait meanwhile. A checkpoint counts when the log has accepted
its pointer, and what is loaded by it has its digest.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from onepen.schemas import events as ev
from onepen.schemas.errors import Invalid
from onepen.schemas.statuses import Reason, RunStatus
from onepen.schemas.views import Checkpoint
from onepen.streams.worker.calls import OpenCalls
from onepen.streams.worker.machine import ACCEPTED, Machine, Now, Ticket
from onepen.streams.worker.outcomes import CompactionFailed
from onepen.streams.worker.payloads import error_of
from onepen.streams.worker.steering import Steering


class Compaction:
    """`async with ctx.compaction() as c:` write the new context, then `c.finish(...)`.

    Left without `finish`, or by an exception, it has failed: the old checkpoint stays. Raises `CompactionFailed` when
    the log does not accept its start (one is open already) or its end (its deadline has passed).
    """

    def __init__(self, calls: OpenCalls, steering: Steering, members: dict[str, Any]) -> None:
        self._calls = calls
        self._held = calls.held
        self._steering = steering
        self._members = members
        self._pointer: dict[str, Any] | None = None
        self.compaction_id = ""
        self.through_seq = 0
        """The last event of the run before the compaction: what a context made now contains."""

    def finish(self, uri: str, digest: str, size_bytes: int, through_seq: int | None = None) -> None:
        """The new context is stored: where, its SHA-256 (hex), its size. It holds everything through `through_seq`."""
        through = self.through_seq if through_seq is None else through_seq
        if not 1 <= through <= self.through_seq:
            raise Invalid(f"through_seq: must lie between 1 and {self.through_seq}", field="through_seq")
        self._pointer = {
            "uri": uri,
            "digest": digest.removeprefix("sha256:"),
            "bytes": size_bytes,
            "throughSeq": through,
        }

    async def __aenter__(self) -> Compaction:
        await self._calls.gate()
        self._open = self._calls.open()
        number = self._open.__enter__()
        self._steering.compactions += 1
        self.compaction_id = f"compaction-{self._held.offer.generation}-{number}"
        ticket = Ticket()
        try:
            members = {**self._members, "compactionId": self.compaction_id}
            ticket = self._held.report(ev.COMPACTION_STARTED, members)
            self._judge(await self._held.fate(ticket))
        except BaseException:
            if ticket.no and ticket.fate is None:
                self._failed("cancelled")  # it may have begun: then this is its end
            self._leave()
            raise
        # The view that accepted the start names the events before it; later ones are not in the new context.
        self.through_seq = self._held.look(lambda m, _: m.last_seq)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._pointer is not None:
                members = {"compactionId": self.compaction_id, "checkpoint": self._pointer}
                self._judge(await self._held.fate(self._held.report(ev.COMPACTION_FINISHED, members)))
                return
            if error is None:
                await self._held.fate(self._failed("no_checkpoint"))
            elif isinstance(error, asyncio.CancelledError):
                self._failed("cancelled")
            else:
                self._failed("error", error=error_of(error))
        finally:
            self._leave()

    def _failed(self, reason: str, **members: Any) -> Ticket:
        return self._held.report(
            ev.COMPACTION_FAILED, {**members, "compactionId": self.compaction_id, "reason": reason}
        )

    def _leave(self) -> None:
        self._steering.compactions -= 1
        self._open.__exit__(None, None, None)

    def _judge(self, fate: str) -> None:
        if fate == ACCEPTED:
            return
        if self._held.ended is not None or fate == Reason.RUN_CANCELLING:
            raise asyncio.CancelledError(fate)
        raise CompactionFailed(self.compaction_id, fate)


def checkpoint_of(machine: Machine, _: Now) -> tuple[Checkpoint | None] | None:
    """The session's last checkpoint (or none) by the newest view; None before the first view."""
    if machine.ended is not None or machine.status == RunStatus.CANCELLING:
        raise asyncio.CancelledError("the run has to stop")
    if not machine.granted:
        return None
    return (machine.checkpoint,)
