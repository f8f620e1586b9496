"""The history a body may look at: every event of the session before its generation, none missing.

Rule: it ends exactly at the event that the offer names by its hash; anything less is an error, never a short list.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from onepen.schemas.errors import Invalid, Retryable
from onepen.schemas.offers import Offer
from onepen.streams.deadline import DeadlineExpired
from onepen.streams.settings import Settings

if TYPE_CHECKING:
    from onepen.schemas.events import Event
    from onepen.streams.subscriber import Subscriber

__all__ = ["History", "LogHistory"]


class History(Protocol):
    """What a body may read of its session. Both calls block, and raise `Retryable` when time is over."""

    def before(self, offer: Offer, timeout_ms: int) -> list[Event]:
        """All events of the session up to the one that the offer names."""

    def event(self, offer: Offer, run_id: str, seq: int, timeout_ms: int) -> Event:
        """One event of a run of the same session."""

    def last(self, offer: Offer, session_id: str, run_id: str, timeout_ms: int) -> Event:
        """The last event of a run of another session of the same tenant, one that has ended."""


class LogHistory:
    """Read from the tables where there are some, and from the log."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def before(self, offer: Offer, timeout_ms: int) -> list[Event]:
        events: list[Event] = []
        try:
            with self._subscriber(offer).session(offer.session_id, timeout_ms=timeout_ms) as subscription:
                for event in subscription:
                    events.append(event)
                    if event.hash == offer.last_hash:
                        return events
        except DeadlineExpired:
            pass
        raise Retryable(f"the history of session {offer.session_id} could not be read within {timeout_ms} ms")

    def event(self, offer: Offer, run_id: str, seq: int, timeout_ms: int) -> Event:
        subscriber = self._subscriber(offer)
        try:
            with subscriber.run(
                run_id, session_id=offer.session_id, after_seq=seq - 1, timeout_ms=timeout_ms
            ) as subscription:
                return next(subscription)
        except (DeadlineExpired, StopIteration):
            raise Retryable(f"event {seq} of run {run_id} could not be read within {timeout_ms} ms") from None

    def last(self, offer: Offer, session_id: str, run_id: str, timeout_ms: int) -> Event:
        last: deque[Event] = deque(maxlen=1)
        try:
            with self._subscriber(offer).run(run_id, session_id=session_id, timeout_ms=timeout_ms) as subscription:
                last.extend(subscription)
        except (DeadlineExpired, Invalid):  # Invalid: no such run in the log, yet
            last.clear()
        if not last:
            raise Retryable(f"the end of run {run_id} could not be read within {timeout_ms} ms")
        return last.pop()

    def _subscriber(self, offer: Offer) -> Subscriber:
        from onepen.streams.subscriber import Subscriber

        return Subscriber(settings=self._settings.model_copy(update={"tenant_id": offer.tenant_id}))
