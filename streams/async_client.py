"""The client for asyncio: the same calls and handles; only the waits are awaited.

Rule: sending never waits for the broker, so the sending calls are plain functions here too. Cancelling a wait
cancels nothing in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from onepen.schemas.edge import Request
from onepen.schemas.receipts import Receipt
from onepen.streams.client import (
    CLOSE_MS,
    DISPOSITION_TIMEOUT_MS,
    VERDICT_TIMEOUT_MS,
    Client,
    InputResult,
    Sent,
)
from onepen.streams.client_calls import Calls, Handle
from onepen.streams.deadline import Deadline
from onepen.streams.settings import Settings

__all__ = ["AsyncClient", "AsyncSent"]


class AsyncSent(Handle):
    """The handle of one input; see `client.Sent`."""

    def __init__(self, sent: Sent) -> None:
        super().__init__(sent.record)
        self.sent = sent

    @property
    def position(self) -> tuple[int, int] | None:
        return self.sent.position

    async def verdict(self, timeout_ms: int = VERDICT_TIMEOUT_MS) -> InputResult:
        """Wait for the verdict; raises like `Sent.verdict`."""
        return await self._wait(self.sent._verdict, timeout_ms, "verdict")

    async def disposition(self, timeout_ms: int = DISPOSITION_TIMEOUT_MS) -> InputResult:
        """Wait for the final disposition; raises like `Sent.disposition`."""
        return await self._wait(self.sent._disposition, timeout_ms, "disposition")

    async def _wait(
        self, find: Callable[[list[Receipt]], InputResult | None], timeout_ms: int, what: str
    ) -> InputResult:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        deadline = Deadline(timeout_ms)

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        watched = self.sent._watched
        stop = watched.listen(wake)
        try:
            while True:
                found = watched.look(find)
                if found is not None:
                    return found
                if deadline.expired:
                    raise self.sent._unknown(what, timeout_ms)
                try:
                    await asyncio.wait_for(changed.wait(), deadline.remaining_s())
                except TimeoutError:
                    continue
                changed.clear()
        finally:
            stop()

    def __repr__(self) -> str:
        return f"Async{self.sent!r}"


class AsyncClient(Calls[AsyncSent]):
    """Like `Client`; `async with AsyncClient() as client: sent = client.prompt(...); await sent.verdict()`."""

    def __init__(
        self,
        bootstrap: str | None = None,
        *,
        tenant_id: int | None = None,
        user_id: int | None = None,
        prefix: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._client = Client(bootstrap, tenant_id=tenant_id, user_id=user_id, prefix=prefix, settings=settings)

    def send(self, request: Request, *, traceparent: str | None = None) -> AsyncSent:
        return AsyncSent(self._client.send(request, traceparent=traceparent))

    def resend(self, sent: AsyncSent) -> AsyncSent:
        self._client.resend(sent.sent)
        return sent

    async def flush(self, timeout_ms: int = CLOSE_MS) -> bool:
        """Wait until the broker has answered for everything handed over; False if not."""
        return await asyncio.to_thread(self._client.flush, timeout_ms)

    async def close(self, timeout_ms: int = CLOSE_MS) -> None:
        """Flush and stop."""
        await asyncio.to_thread(self._client.close, timeout_ms)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
