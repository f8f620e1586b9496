"""One held run between the threads and the event loop: the machine under a lock, waits that wake up.

Rule: whoever changes the machine sends what it answers before letting go of the lock, so records leave in the
order in which they were decided. Bodies wait in the event loop; nothing here waits for the broker.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from onepen.schemas import events as ev
from onepen.schemas.offers import Offer
from onepen.schemas.statuses import Reason
from onepen.schemas.views import View
from onepen.schemas.worker_records import Release, ReportEvent, WorkerRecord
from onepen.streams.worker.machine import Machine, Now, Ticket
from onepen.streams.worker.payloads import payload

log = logging.getLogger("onepen.worker")

T = TypeVar("T")

UNSETTLED_MAX: Final = 500
_EVIDENCE = frozenset({ev.ACTION_FINISHED, ev.TOOL_FINISHED, ev.MODEL_FINISHED})
_ENDED_WELL = frozenset({Reason.RECORDED, "released"})


def read_clocks() -> Now:
    """The moment on both clocks."""
    return Now(time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000)


class HeldRun:
    """`claim`, `tick`, `on_view` and `give_up` may come from any thread; all others from the event loop only."""

    def __init__(
        self,
        machine: Machine,
        send: Callable[[WorkerRecord], None],
        loop: asyncio.AbstractEventLoop,
        clocks: Callable[[], Now] = read_clocks,
    ) -> None:
        self.machine = machine
        self.only_waits = False
        """The body only waits for a person or a child: its run takes no place from others. Any thread may look."""
        self._send = send
        self._loop = loop
        self._clocks = clocks
        self._lock = threading.Lock()
        self._waiters: list[asyncio.Future[None]] = []
        self._wake_posted = False
        self._flush_posted = False

    @property
    def offer(self) -> Offer:
        return self.machine.offer

    @property
    def ended(self) -> str | None:
        return self.machine.ended

    # -- from any thread ---------------------------------------------------------------------------------------

    def claim(self) -> None:
        with self._lock:
            self._send(self.machine.claim(self._clocks()))

    def tick(self) -> None:
        with self._lock:
            for record in self.machine.tick(self._clocks()):
                self._send(record)

    def on_view(self, view: View) -> None:
        with self._lock:
            for record in self.machine.on_view(view, self._clocks()):
                self._send(record)
            self._tell_unsent()
        self.wake()

    def give_up(self, reason: str) -> None:
        """A newer generation of the run is known; nothing is sent any more."""
        with self._lock:
            if self.machine.ended is None:
                self.machine.give_up(reason)
            self._tell_unsent()
        self.wake()

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self._lock:
            if self._wake_posted:
                return
            self._wake_posted = True
        try:
            self._loop.call_soon_threadsafe(self._wake_now)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("a wake came after the loop was closed")

    # -- from the event loop -----------------------------------------------------------------------------------

    def _wake_now(self) -> None:
        with self._lock:
            self._wake_posted = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def look(self, find: Callable[[Machine, Now], T]) -> T:
        """What `find` makes of the machine at this moment."""
        with self._lock:
            return find(self.machine, self._clocks())

    async def until(self, find: Callable[[Machine, Now], T | None], *, timeout_ms: int | None = None) -> T | None:
        """Wait until `find` answers something other than None; None when `timeout_ms` has passed first."""
        end_s = None if timeout_ms is None else self._loop.time() + timeout_ms / 1000
        while True:
            found = self.look(find)
            if found is not None:
                return found
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            if end_s is None:
                await waiter
                continue
            left_s = end_s - self._loop.time()
            if left_s <= 0:
                return None
            await asyncio.wait([waiter], timeout=left_s)

    def report(self, event_type: str, members: dict[str, Any]) -> Ticket:
        """Queue an event; those queued before the loop turns go out as one report. Raises `Invalid` (size)."""
        event = ReportEvent(type=event_type, payload=payload(members))
        with self._lock:
            ticket = self.machine.queue(event)
            if ticket.fate is not None:
                self._evidence(event)
                return ticket
        self._post_flush()
        return ticket

    def report_final(self, members: dict[str, Any]) -> Ticket:
        """Queue the event that ends the run."""
        event = ReportEvent(type=ev.RUN_FINISHED, payload=payload(members))
        with self._lock:
            ticket = self.machine.queue_final(event)
        self._post_flush()
        return ticket

    def release(self, reason: str) -> None:
        """Give the run back, unless it is over."""
        with self._lock:
            if self.machine.ended is None:
                record: Release = self.machine.release(reason)
                self._send(record)
        self.wake()

    def renew_now(self) -> None:
        """A renewal out of turn: something the view has to tell is needed now."""
        with self._lock:
            if self.machine.ended is None:
                self._send(self.machine.renew(self._clocks()))

    async def pace(self) -> None:
        """Wait while too many reported events are undecided, so that a chatty body cannot fill the memory."""
        await self.until(lambda m, _: True if m.ended or m.unsettled < UNSETTLED_MAX else None)

    async def fate(self, ticket: Ticket) -> str:
        """Wait for what became of a reported event: `accepted`, a reason, or why the run is over."""
        found = await self.until(lambda _, __: ticket.fate)
        assert found is not None
        return found

    def _evidence(self, event: ReportEvent) -> None:
        # Ends that come after the lease was lost are refused, and kept by the log: what became of an effect.
        machine = self.machine
        # One that began before its claim was answered may have had an effect as well, once it has reported anything.
        spoke = machine.granted or machine.report_no > 0
        if event.type in _EVIDENCE and spoke and machine.ended not in _ENDED_WELL:
            self._send(machine.late_report(event))

    def _tell_unsent(self) -> None:
        """A worker that wakes up reports an end and learns of its loss at the same time."""
        unsent, self.machine.unsent = self.machine.unsent, []
        for event in unsent:
            self._evidence(event)

    def _post_flush(self) -> None:
        if not self._flush_posted:
            self._flush_posted = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_posted = False
        with self._lock:
            for report in self.machine.flush(self._clocks()):
                self._send(report)
