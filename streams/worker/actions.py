"""External actions: asked for, permitted, performed within the permit, ended in the log (protocol section 8).

Rule: `perform` begins only within `valid_ms` of the moment its request was FIRST sent, while the lease is trusted
and no cancel is known; otherwise nothing is performed and the permit is given back. Once begun it is never
interrupted: its end is waited for and reported, also when the run is being stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from onepen.schemas import events as ev
from onepen.schemas.ids import check_id
from onepen.schemas.statuses import ActionState, Reason
from onepen.schemas.strict_json import check
from onepen.schemas.views import ActionView
from onepen.streams.worker.calls import OpenCalls, is_async
from onepen.streams.worker.cancel_token import thread_of, to_its_end
from onepen.streams.worker.history import History
from onepen.streams.worker.machine import ACCEPTED, Machine, Now, Ticket
from onepen.streams.worker.outcomes import (
    ActionFailed,
    ActionPermit,
    ActionRefused,
    ActionVoided,
    InDoubt,
    NotPerformed,
    OutcomeUnknown,
)
from onepen.streams.worker.payloads import args_digest, derived_key, error_of, kept

log = logging.getLogger("onepen.worker")

PERMITS_MAX: Final = 5
"""How often a request is made again after its permit ran out before the action could begin."""

RESULT_TIMEOUT_MS: Final = 30_000

Perform = Callable[[Any, ActionPermit], Any]
Resolution = Literal["reconciled_not_performed", "repeat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One action as the body asked for it."""

    name: str
    key: str
    args: Any
    digest: str
    perform: Perform
    approval: bool
    honours_keys: bool
    resolution: Resolution | None

    def naming(self) -> dict[str, Any]:
        return {"actionKey": self.key, "name": self.name}

    def request(self) -> dict[str, Any]:
        members: dict[str, Any] = {**self.naming(), "argsDigest": self.digest}
        members |= kept("args", self.args)[1]
        if self.approval:
            members["approval"] = True
        if self.honours_keys:
            members["honoursKeys"] = True
        if self.resolution is not None:
            members["resolution"] = self.resolution
        return members


class Actions:
    """The actions of one run. Keys are made of the run's lineage, the name, and the ordinal among calls of it."""

    def __init__(self, calls: OpenCalls, history: History) -> None:
        self._calls = calls
        self._history = history
        self._held = calls.held
        self._ordinals: Counter[str] = Counter()
        self._open: set[tuple[str, str]] = set()
        self._unknown: set[tuple[str, str]] = set()
        """Performed with an unknown outcome: their permits stay open until the lease or the run ends."""

    def ask(
        self,
        name: str,
        args: Any,
        perform: Perform,
        *,
        approval: bool,
        key: str | None,
        honours_keys: bool,
        resolution: Resolution | None,
    ) -> Asked:
        """Judge the form of a request and give it its key. Raises `Invalid`."""
        check_id(name, "action name")
        check(args, "args")
        if key is None:
            self._ordinals[name] += 1
            key = derived_key(self._held.offer.lineage, name, self._ordinals[name])
        return Asked(
            name=name,
            key=check_id(key, "key"),
            args=args,
            digest=args_digest(args),
            perform=perform,
            approval=approval,
            honours_keys=honours_keys,
            resolution=resolution,
        )

    async def act(self, asked: Asked) -> Any:
        """Ask until the action is permitted, perform it, report its end; or the recorded result, or why not.

        One call of a key at a time: a second one could not tell its own permit from that of the first."""
        if (asked.name, asked.key) in self._open:
            raise _refused(asked, Reason.IN_FLIGHT)
        self._open.add((asked.name, asked.key))
        try:
            return await self._act(asked)
        finally:
            if (asked.name, asked.key) not in self._unknown:
                self._open.discard((asked.name, asked.key))

    async def _act(self, asked: Asked) -> Any:
        missed = 0
        while missed < PERMITS_MAX:
            await self._calls.gate()
            with self._calls.open() as number:
                ticket = self._held.report(ev.ACTION_REQUESTED, asked.request())
                answer = await self._decided(asked, ticket, number)
                if answer == Reason.LEASE_EXPIRED:
                    await self._wait_for_renewal()
                elif isinstance(answer, str):
                    raise self._why_not(asked, answer)
                elif answer.state == ActionState.APPROVED:
                    continue  # an answer permits nothing by itself: ask again, and that one is permitted
                elif answer.state == ActionState.IN_DOUBT:
                    raise self._why_not(asked, Reason.IN_DOUBT)  # a repeat that was not approved
                elif answer.state in (ActionState.OK, ActionState.ERROR):
                    return await self._recorded(asked, answer)
                else:
                    begun = self._held.look(lambda m, now, t=ticket: self._begin(m, now, asked, t))  # type: ignore[misc]
                    if begun is not None:
                        return await self._perform(asked, begun)
                    self._not_begun(asked, ticket)
            missed += 1
        raise _refused(asked, "permit_expired")

    async def _recorded(self, asked: Asked, action: ActionView) -> Any:
        """The result as it was recorded, also when it is too large for a view and stands in its event only."""
        value = orjson.loads(action.result) if action.result else None
        if action.result is None and action.result_bytes:
            place = (action.result_run_id, action.result_seq)
            event = await asyncio.to_thread(self._history.event, self._held.offer, *place, RESULT_TIMEOUT_MS)
            value = orjson.loads(event.payload).get("result")
        if action.state == ActionState.OK:
            return value
        sentence = "it was performed before and ended in error"
        raise ActionFailed(sentence, name=asked.name, key=asked.key, reason="error", result=value)

    async def _decided(self, asked: Asked, ticket: Ticket, number: int) -> ActionView | str:
        """Wait for what the log decided. A permit that may have been given and is not used is given back."""

        def decision(machine: Machine, _: Now) -> ActionView | str | None:
            found = _decision(machine, asked, ticket)
            self._calls.wait(number, found is None and _state(machine, asked) == ActionState.WAITING)
            return found

        try:
            found: ActionView | str | None = await self._held.until(decision)
        except asyncio.CancelledError:
            unsent = self._held.look(lambda m, _: m.withdraw(ticket))
            if not unsent and self._held.look(lambda m, _: _may_be_permitted(m, asked, ticket)):
                self._not_begun(asked, ticket)
            raise
        assert found is not None
        return found

    def _not_begun(self, asked: Asked, ticket: Ticket) -> None:
        self._held.report(ev.ACTION_FINISHED, {**asked.naming(), "reportNo": ticket.no, "status": "not_performed"})

    async def _wait_for_renewal(self) -> None:
        # The request reached the log after the lease: ask again when a renewal has been answered.
        renewal_no = self._held.look(lambda m, _: m.renewal_no)
        self._held.renew_now()
        await self._held.until(lambda m, _: True if m.ended or m.answered_renewal_no > renewal_no else None)

    def _why_not(self, asked: Asked, found: str) -> BaseException:
        naming = {"name": asked.name, "key": asked.key, "reason": found}
        if self._held.ended is not None or found == Reason.RUN_CANCELLING:
            return asyncio.CancelledError(found)
        if found == ActionState.VOIDED:
            if self._held.look(lambda m, _: m.cancelling):
                return asyncio.CancelledError("the run is cancelled")
            return ActionVoided("not approved (denied or expired)", **naming)
        if found == Reason.IN_DOUBT:
            return InDoubt("an earlier attempt may have taken place", **naming)
        return _refused(asked, found)

    def _begin(self, machine: Machine, now: Now, asked: Asked, ticket: Ticket) -> ActionPermit | None:
        """The very last look before the effect: permit, lease and cancel, on both clocks."""
        view = machine.permit(ticket, asked.name, asked.key, now)
        if view is None or ticket.sent is None or self._calls.cancelled.is_set():
            return None
        return ActionPermit(
            key=asked.key,
            name=asked.name,
            args_digest=asked.digest,
            run_id=machine.offer.run_id,
            generation=machine.offer.generation,
            deadline_ms=view.deadline_ms,
            valid_ms=ticket.sent.mono_ms + view.valid_ms - now.mono_ms,
        )

    async def _perform(self, asked: Asked, permit: ActionPermit) -> Any:
        if is_async(asked.perform):
            future: asyncio.Future[Any] = asyncio.ensure_future(asked.perform(asked.args, permit))
        else:
            future = thread_of(lambda: asked.perform(asked.args, permit))
        cancelled = await to_its_end(future)
        end = asked.naming()
        try:
            value, members = kept("result", future.result())
            end |= {**members, "status": "ok"}
        except OutcomeUnknown as error:
            self._unknown.add((asked.name, asked.key))
            sentence = f"its outcome is unknown ({error})"
            raise InDoubt(sentence, name=asked.name, key=asked.key, reason="outcome_unknown") from error
        except NotPerformed as error:
            end |= {"status": "not_performed", "error": error_of(error)}
            self._held.report(ev.ACTION_FINISHED, end)
            raise
        except BaseException as error:
            recorded = error_of(error)
            end |= {"status": "error", "result": recorded}
            self._held.report(ev.ACTION_FINISHED, end)
            if cancelled:
                raise asyncio.CancelledError(self._calls.cancelled.reason) from error
            raise ActionFailed(str(error), name=asked.name, key=asked.key, reason="error", result=recorded) from error
        self._held.report(ev.ACTION_FINISHED, end)
        if cancelled:
            raise asyncio.CancelledError(self._calls.cancelled.reason)
        return value


def _decision(machine: Machine, asked: Asked, ticket: Ticket) -> ActionView | str | None:
    """What the newest view says about a request: None (wait), the action, or a reason."""
    if ticket.fate is None:
        return None
    action = machine.actions.get((asked.name, asked.key))
    if ticket.fate == Reason.ALREADY_ENDED and action is not None:
        return action
    if ticket.fate != ACCEPTED:
        return ticket.fate
    if machine.ended is not None:
        return machine.ended
    if action is None or action.state == ActionState.VOIDED:
        return ActionState.VOIDED
    if action.state == ActionState.WAITING:
        return None
    return action


def _state(machine: Machine, asked: Asked) -> str | None:
    action = machine.actions.get((asked.name, asked.key))
    return None if action is None else action.state


def _may_be_permitted(machine: Machine, asked: Asked, ticket: Ticket) -> bool:
    """False when the request is known to have no permit (refused, or waiting for an approval that is voided)."""
    if ticket.fate is None:
        return True
    action = machine.actions.get((asked.name, asked.key))
    return action is not None and action.state == ActionState.PERMITTED and action.report_no == ticket.no


def _refused(asked: Asked, reason: str) -> ActionRefused:
    return ActionRefused(f"refused ({reason})", name=asked.name, key=asked.key, reason=reason)
