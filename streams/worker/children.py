"""Subtasks: child runs in other sessions, waited for (protocol section 10).

Rule: the call id is made of the run's lineage, the name and the ordinal among calls of it, so a takeover (or a retry)
that comes to the same call joins the open branch or gets the recorded end, and no second child is started.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from onepen.schemas import events as ev
from onepen.schemas.edge import Pointer, to_content
from onepen.schemas.errors import Invalid
from onepen.schemas.ids import check_id
from onepen.schemas.inputs import JSON, TEXT
from onepen.schemas.limits import DURATION_MS_MAX
from onepen.schemas.statuses import Disposition, Reason, RunStatus
from onepen.schemas.views import SubtaskView
from onepen.streams.worker.calls import OpenCalls
from onepen.streams.worker.contents import Contents
from onepen.streams.worker.history import History
from onepen.streams.worker.machine import ACCEPTED, Machine, Now, Ticket
from onepen.streams.worker.outcomes import (
    SubtaskCancelled,
    SubtaskCycle,
    SubtaskEnded,
    SubtaskFailed,
    SubtaskNotStarted,
    SubtaskRefused,
    SubtaskTimedOut,
)
from onepen.streams.worker.payloads import VALUE_BYTES_MAX, derived_key

RESULT_TIMEOUT_MS: Final = 30_000
OPEN: Final = "open"
ABORTED: Final = "aborted"

_NOT_STARTED = frozenset((Disposition.WITHDRAWN, Disposition.EXPIRED, Disposition.DISCARDED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One subtask as the body asked for it. `members` are those of its `subtask.started`."""

    name: str
    call_id: str
    session_id: str
    members: dict[str, Any]
    given_id: bool


class Children:
    """The subtasks of one run."""

    def __init__(self, calls: OpenCalls, history: History, contents: Contents) -> None:
        self._calls = calls
        self._held = calls.held
        self._history = history
        self._contents = contents
        self._ordinals: Counter[str] = Counter()

    async def ask(
        self, name: str, content: Any, *, session_id: str | None, call_id: str | None, timeout_ms: int | None
    ) -> Asked:
        """Judge the form of a call and give it its id. Raises `Invalid` naming the field."""
        check_id(name, "name")
        session_id = check_id(name if session_id is None else session_id, "session_id")
        if timeout_ms is not None and not (type(timeout_ms) is int and 1 <= timeout_ms <= DURATION_MS_MAX):
            raise Invalid(f"timeout_ms: must lie between 1 and {DURATION_MS_MAX}", field="timeout_ms")
        given = call_id is not None
        if call_id is None:
            self._ordinals[name] += 1
            call_id = derived_key(self._held.offer.lineage, name, self._ordinals[name])
        members: dict[str, Any] = {"name": name, "sessionId": session_id}
        members |= await self._content(session_id, content)
        if timeout_ms is not None:
            members["timeoutMs"] = timeout_ms
        return Asked(
            name=name,
            call_id=check_id(call_id, "call_id"),
            session_id=session_id,
            members=members,
            given_id=given,
        )

    async def _content(self, session_id: str, content: Any) -> dict[str, Any]:
        """How the content travels: by value, or as an object of the child's session where it must."""
        if isinstance(content, Pointer):
            return _pointing(content)
        if content is None:
            raise Invalid("content: a subtask needs content", field="content")
        made = to_content(content)
        data = made.data
        assert data is not None
        by_value = made.media_type in (TEXT, JSON)
        if by_value and not self._contents.erasable and len(orjson.dumps(content)) <= VALUE_BYTES_MAX:
            return {"content": content}
        return _pointing(await self._contents.put(session_id, made.media_type, data))

    async def run(self, asked: Asked) -> Any:
        """Start the child, or join it, and wait for its end. Answers its output, or raises what it ended in."""
        call_id = asked.call_id
        while True:
            await self._calls.gate()
            with self._calls.open() as number:
                ticket = self._held.report(ev.SUBTASK_STARTED, {**asked.members, "callId": call_id})
                self._calls.wait(number, True)
                ended: SubtaskView | str | None = await self._held.until(_end_of(ticket, call_id))
                self._calls.wait(number, False)
                assert ended is not None
                if isinstance(ended, str):
                    raise self._refused(asked, call_id, ended)
                again = f"{asked.call_id}:r{self._held.offer.run_no}"
                if ended.status == ABORTED and not asked.given_id and call_id != again:
                    # A retry: the run before took this child down with itself. It is asked for anew, once per run.
                    call_id = check_id(again, "call_id")
                    continue
                return await self._outcome(asked, ended)

    def _refused(self, asked: Asked, call_id: str, reason: str) -> BaseException:
        if self._held.ended is not None or reason == Reason.RUN_CANCELLING:
            return asyncio.CancelledError(reason)
        kind = SubtaskCycle if reason == Reason.CYCLE else SubtaskRefused
        return kind(f"refused ({reason})", name=asked.name, call_id=call_id, session_id=asked.session_id, reason=reason)

    async def _outcome(self, asked: Asked, ended: SubtaskView) -> Any:
        naming: dict[str, Any] = {
            "name": asked.name,
            "call_id": ended.call_id,
            "session_id": ended.session_id,
            "reason": ended.reason,
            "run_id": ended.run_id,
        }
        reason = f" ({ended.reason})" if ended.reason else ""
        if ended.status == RunStatus.COMPLETED:
            return await self._result(ended)
        if ended.status == RunStatus.FAILED:
            raise SubtaskFailed("failed", **naming, result=await self._result(ended))
        if ended.status == RunStatus.TIMED_OUT:
            raise SubtaskTimedOut(f"timed out{reason}", **naming)
        if ended.status == Disposition.REFUSED:
            kind = SubtaskCycle if ended.reason == Reason.CYCLE else SubtaskRefused
            raise kind(f"its input was refused{reason}", **naming)
        if ended.status in _NOT_STARTED:
            raise SubtaskNotStarted(f"its input was {ended.status}{reason}", **naming)
        if ended.status in (RunStatus.CANCELLED, ABORTED):
            raise SubtaskCancelled(f"{ended.status}{reason}", **naming)
        raise SubtaskEnded(f"ended as {ended.status}{reason}", **naming)

    async def _result(self, ended: SubtaskView) -> Any:
        """What the child's run gave; read from its last event where it is too large for a view (or was nothing)."""
        if ended.result is not None:
            return orjson.loads(ended.result)
        if ended.run_id is None:
            return None
        event = await asyncio.to_thread(
            self._history.last, self._held.offer, ended.session_id, ended.run_id, RESULT_TIMEOUT_MS
        )
        payload = orjson.loads(event.payload)
        return payload.get("output", payload.get("error"))


def _pointing(pointer: Pointer) -> dict[str, Any]:
    named = {"uri": pointer.uri, "digest": pointer.digest, "sizeBytes": pointer.size_bytes}
    return {"pointer": named, "mediaType": pointer.media_type}


def _end_of(ticket: Ticket, call_id: str) -> Callable[[Machine, Now], SubtaskView | str | None]:
    """Looks for what the newest view says about a call: None (wait), how it ended, or why it was refused."""

    def look(machine: Machine, _: Now) -> SubtaskView | str | None:
        if ticket.fate is None:
            return None
        if ticket.fate not in (ACCEPTED, Reason.ALREADY_ENDED):
            return ticket.fate
        found = machine.subtasks.get(call_id)
        if found is not None and found.status != OPEN:
            return found
        return machine.ended

    return look
