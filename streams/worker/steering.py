"""Steers: what users add to a run while it works, handed to the body in the order of the log.

Rule: each one is reported applied first and only those whose application was accepted are handed out. While the
context is being compacted none is: they wait in the log. A run that begins again from its inputs (`recovery: rerun`)
gets the steers that earlier holders had applied first, as the log has them.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import Any, Final

import orjson

from onepen.schemas import events as ev
from onepen.schemas.events import Event
from onepen.schemas.inputs import JSON, TEXT, Content
from onepen.schemas.statuses import Reason, Recovery, RunStatus
from onepen.schemas.views import PendingSteer
from onepen.streams.worker.calls import OpenCalls
from onepen.streams.worker.contents import Contents
from onepen.streams.worker.history import History
from onepen.streams.worker.machine import ACCEPTED, Machine, Now

HISTORY_TIMEOUT_MS: Final = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Steer:
    """A steer whose application the log has accepted. `str(steer)` is its text."""

    input_id: str
    user_id: int
    source: str
    content: Any

    def __str__(self) -> str:
        return self.content if isinstance(self.content, str) else repr(self.content)


class Steering:
    """The steers of one run."""

    def __init__(self, calls: OpenCalls, history: History, contents: Contents) -> None:
        self._calls = calls
        self._held = calls.held
        self._history = history
        self._contents = contents
        offer = self._held.offer
        self._begins_again = offer.recovery == Recovery.RERUN and offer.had_owner
        self.compactions = 0
        """How many compactions this body has begun and has not seen the end of."""

    async def take(self) -> list[Steer]:
        """Those to use now; none while the context is being compacted."""
        await self._calls.gate()
        taken = await self._applied_before()
        while not self._closed():
            pending = await self._pending()
            if not pending:
                break
            # Loaded before they are applied: what cannot be loaded is not used up.
            steers = [await self._steer(steer, content) for steer, content in pending]
            tickets = [(s, self._held.report(ev.INPUT_APPLIED, {"inputId": s.input_id})) for s in steers]
            fates = [(steer, await self._held.fate(ticket)) for steer, ticket in tickets]
            taken += [steer for steer, fate in fates if fate == ACCEPTED]
            if self._held.ended is not None:
                raise asyncio.CancelledError(self._held.ended)
            if any(fate == Reason.COMPACTING for _, fate in fates):
                break
            await self._calls.gate()
        return taken

    def _closed(self) -> bool:
        return self.compactions > 0 or self._held.look(lambda m, _: m.status == RunStatus.COMPACTING)

    async def _pending(self) -> list[tuple[PendingSteer, Content | None]]:
        """The pending steers from the front whose contents are here; asks for contents when there is none."""

        def ask(machine: Machine, _: Now) -> bool | None:
            if machine.ended is not None or machine.cancelling:
                raise asyncio.CancelledError("the run has to stop")
            if not machine.granted:
                return None
            missing = bool(machine.pending) and machine.pending[0].input_id not in machine.contents
            machine.want_contents = machine.want_contents or missing
            return missing

        def ready(machine: Machine, now: Now) -> list[tuple[PendingSteer, Content | None]] | None:
            if ask(machine, now):
                return None
            found = []
            for steer in machine.pending:
                if steer.input_id not in machine.contents:
                    break
                found.append((steer, machine.contents[steer.input_id]))
            return found

        if await self._held.until(ask):
            self._held.renew_now()
        return await self._held.until(ready) or []

    async def _steer(self, steer: PendingSteer, content: Content | None) -> Steer:
        value = await self._contents.value(content)
        return Steer(input_id=steer.input_id, user_id=steer.user_id, source=steer.source, content=value)

    async def _applied_before(self) -> list[Steer]:
        """The first time, when the run begins again: the steers applied under earlier generations."""
        if not self._begins_again:
            return []
        events = await asyncio.to_thread(self._history.before, self._held.offer, HISTORY_TIMEOUT_MS)
        run_id = self._held.offer.run_id
        applied = [e for e in events if e.run_id == run_id and e.type == ev.INPUT_APPLIED]
        steers = [await self._again(event) for event in applied]
        self._begins_again = False
        return steers

    async def _again(self, event: Event) -> Steer:
        payload = orjson.loads(event.payload)
        value = await self._contents.value(_content(payload))
        return Steer(input_id=payload["inputId"], user_id=payload["userId"], source=payload["source"], content=value)


def _content(payload: dict[str, Any]) -> Content | None:
    """Content as it stands in an event (see `schemas.events`)."""
    media_type, pointer, value = payload.get("mediaType", TEXT), payload.get("pointer"), payload.get("content")
    if pointer is not None:
        return Content(
            media_type=media_type, uri=pointer["uri"], digest=pointer["digest"], size_bytes=pointer["sizeBytes"]
        )
    if media_type == TEXT and isinstance(value, str):
        return Content(data=value.encode())
    if isinstance(value, dict) and media_type not in (TEXT, JSON):
        return Content(media_type=media_type, data=base64.b64decode(value["base64"]))
    return None if value is None else Content(media_type=JSON, data=orjson.dumps(value))
