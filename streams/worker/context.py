"""What a run's body works with: its input, its history, steers, tools, model requests, messages, actions, subtasks.

Rule: calls are calls. The SDK decides when something may begin, reports starts and ends, and stops the body when
the run is cancelled or lost; the body only says what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Final

from onepen.schemas import events as ev
from onepen.schemas.edge import Pointer, to_content
from onepen.schemas.errors import Invalid
from onepen.schemas.ids import check_id
from onepen.schemas.views import Checkpoint
from onepen.streams.worker.actions import Actions, Perform, Resolution
from onepen.streams.worker.calls import ModelRequest, OpenCalls, call_tool, run_call
from onepen.streams.worker.cancel_token import CancelToken
from onepen.streams.worker.children import Children
from onepen.streams.worker.compacting import Compaction, checkpoint_of
from onepen.streams.worker.contents import Contents
from onepen.streams.worker.history import History
from onepen.streams.worker.machine import Ticket
from onepen.streams.worker.session import HeldRun
from onepen.streams.worker.steering import Steer, Steering

if TYPE_CHECKING:
    from onepen.schemas.events import Event

__all__ = ["Reported", "RunContext"]

HISTORY_TIMEOUT_MS: Final = 30_000


class Reported(Awaitable[str]):
    """An event on its way. Awaiting it gives what became of it: `accepted`, or the reason of the refusal."""

    def __init__(self, held: HeldRun, ticket: Ticket) -> None:
        self._held = held
        self._ticket = ticket

    def __await__(self) -> Generator[Any, None, str]:
        return self._held.fate(self._ticket).__await__()


class RunContext:
    """One run under one generation. Use it in the event loop only; `cancelled` may be read from any thread."""

    def __init__(
        self, held: HeldRun, cancelled: CancelToken, history: History, contents: Contents | None = None
    ) -> None:
        self._held = held
        self._contents = contents = contents or Contents(held.offer.tenant_id, None)
        self._calls = OpenCalls(held, cancelled)
        self._actions = Actions(self._calls, history)
        self._children = Children(self._calls, history, contents)
        self._steering = Steering(self._calls, history, contents)
        self._history = history
        self._input: Any = None
        self.cancelled = cancelled
        """Set when the run has to stop: a cancel, a lost lease, a shutdown."""

    # -- what the run is ---------------------------------------------------------------------------------------

    @property
    def input(self) -> Any:
        """What the run was asked: text, a JSON value or bytes, loaded and compared with its digest before the body
        began; a `Pointer` for content that lies in no object store of this worker."""
        return self._input

    async def open_input(self) -> None:
        """Called by the worker before the body begins. Raises `ObjectRefused`, or `Retryable`."""
        self._input = await self._contents.value(self._held.offer.content)

    @property
    def input_id(self) -> str:
        return self._held.offer.input_id

    @property
    def mode(self) -> str:
        """The mode of the input that started the run."""
        return self._held.offer.mode

    @property
    def source(self) -> str:
        return self._held.offer.source

    @property
    def user_id(self) -> int:
        return self._held.offer.user_id

    @property
    def tenant_id(self) -> int:
        return self._held.offer.tenant_id

    @property
    def session_id(self) -> str:
        return self._held.offer.session_id

    @property
    def run_id(self) -> str:
        return self._held.offer.run_id

    @property
    def run_no(self) -> int:
        return self._held.offer.run_no

    @property
    def lineage(self) -> str:
        """The run id of the first run of a chain of retries; what actions and subtasks have done counts for all."""
        return self._held.offer.lineage

    @property
    def recovery(self) -> str:
        """What a takeover does: `resume` (go on from the history), `rerun` (begin again: the prompt is `input`, and
        `steers` hands out the steers applied before), `fail`."""
        return self._held.offer.recovery

    @property
    def generation(self) -> int:
        """Counts the holders of this run; with `run_id` it is the fencing token."""
        return self._held.offer.generation

    @property
    def attempt(self) -> int:
        """1, and one more for each lease that was lost: above 1 the run was begun before by somebody else."""
        return self._held.offer.attempt

    @property
    def had_owner(self) -> bool:
        """True when another worker held this run before: look at `history` before redoing work."""
        return self._held.offer.had_owner

    async def history(self, timeout_ms: int = HISTORY_TIMEOUT_MS) -> list[Event]:
        """All events of the session before this generation, oldest first, none missing: the last one is the one
        that the offer names by its hash. Raises `Retryable` when they cannot be read in time."""
        return await asyncio.to_thread(self._history.before, self._held.offer, timeout_ms)

    # -- what it does ------------------------------------------------------------------------------------------

    async def steers(self) -> list[Steer]:
        """Take what users have added to this run. Each one is reported applied first and only those whose
        application was accepted are returned: no other worker will use them again. None comes during a compaction;
        after a takeover with `recovery` `rerun` those that were applied before come first."""
        return await self._steering.take()

    async def tool(self, name: str, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Run a tool: `tool.started`, the call, `tool.finished`. Plain functions run in a thread.

        Answers the output as strict JSON where it is JSON, and as it came where it is not. On a cancel an async
        tool is cancelled; one in a thread sees `cancellation().is_set()` and is waited for.
        """
        return await call_tool(self._calls, name, function, arguments)

    async def tool_call(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        *,
        call_id: str | None = None,
        progress_renewals: int | None = None,
    ) -> Any:
        """Like `tool`, with the arguments as one object and a call id of your own (unique among open calls).

        `progress_renewals`: how many renewals in a row may pass without a report while this tool is open, when the
        policy's number is too small for it.
        """
        return await call_tool(
            self._calls, name, function, arguments, call_id=call_id, progress_renewals=progress_renewals
        )

    def model_request(self, *, turn_id: str | None = None, **members: Any) -> ModelRequest:
        """`async with ctx.model_request(model="…") as turn:` reports start and end of a request to a model."""
        return ModelRequest(self._calls, turn_id, members)

    async def message(self, content: Any, *, role: str = "assistant", **members: Any) -> None:
        """Report `message.completed {role, content, …}`."""
        self._held.report(ev.MESSAGE_COMPLETED, {**members, "role": role, "content": content})
        await self._held.pace()

    def emit(self, event_type: str, members: dict[str, Any] | None = None) -> Reported:
        """Report an event of your own; its type begins with `x.`. Awaiting the answer tells what became of it."""
        check_id(event_type, "event type")
        if not event_type.startswith(ev.WORKER_PREFIX):
            raise Invalid(f"event type: must begin with {ev.WORKER_PREFIX}", field="event_type")
        return Reported(self._held, self._held.report(event_type, members or {}))

    async def action(
        self,
        name: str,
        args: Any,
        *,
        perform: Perform,
        approval: bool = False,
        key: str | None = None,
        honours_keys: bool = False,
        resolution: Resolution | None = None,
    ) -> Any:
        """Perform an external action behind the gate: request, permit (after an approval where one is asked for),
        `perform(args, permit)`, end. Answers its result; the recorded one when it was performed before.

        The key is made of the lineage, the name and the ordinal of the call; give your own for concurrent calls of
        one name. `honours_keys`: the target drops a repeat of the same key. `resolution` is for an action in
        doubt: `reconciled_not_performed` when you have found that nothing took place, `repeat` when it honours
        keys. Raises `ActionRefused`, `ActionVoided`, `ActionFailed`, `InDoubt`, or `NotPerformed` from `perform`.
        """
        asked = self._actions.ask(
            name,
            args,
            perform,
            approval=approval,
            key=key,
            honours_keys=honours_keys,
            resolution=resolution,
        )
        return await self._actions.act(asked)

    async def subtask(
        self,
        name: str,
        content: Any,
        *,
        session_id: str | None = None,
        call_id: str | None = None,
        timeout_ms: int | None = None,
    ) -> Any:
        """Ask another session of the tenant for a run and wait for its end; answers its output.

        Without `session_id` the name is the session's id. `content` is text, a JSON value, bytes or a `Pointer`;
        `timeout_ms` is the child's deadline. The call id is made of the lineage, the name and the ordinal of the
        call, so whoever comes to the same call again joins the child or gets its recorded end; give your own for
        concurrent calls of one name, and a new one to ask again after a failure. Cancelling this run cancels the
        child; a run that completes without waiting leaves it running.

        Raises `SubtaskRefused` (`SubtaskCycle`), `SubtaskNotStarted`, `SubtaskFailed`, `SubtaskCancelled`,
        `SubtaskTimedOut`, all of them `SubtaskEnded`.
        """
        asked = await self._children.ask(name, content, session_id=session_id, call_id=call_id, timeout_ms=timeout_ms)
        return await self._children.run(asked)

    def compaction(self, **members: Any) -> Compaction:
        """`async with ctx.compaction() as c:` announce that the context is being compacted, store the new one, then
        `c.finish(uri, digest, size_bytes)`. Steers wait meanwhile. Raises `CompactionFailed`."""
        return Compaction(self._calls, self._steering, members)

    async def compact(self, make_checkpoint: Callable[[Compaction], Any], **members: Any) -> Checkpoint:
        """Compact the context: `make_checkpoint(compaction)` answers the new one as text, JSON value or bytes, which
        is stored as an object of the session, or a `Pointer` to where it lies already. Plain functions run in a
        thread. Answers the checkpoint. Raises `CompactionFailed`, or what `make_checkpoint` raised."""
        async with self.compaction(**members) as compaction:
            made, cancelled = await run_call(make_checkpoint, compaction)
            if cancelled:
                raise asyncio.CancelledError(self.cancelled.reason)
            if not isinstance(made, Pointer):
                content = to_content(made, field="checkpoint")
                assert content.data is not None
                made = await self._contents.put(self.session_id, content.media_type, content.data)
            compaction.finish(made.uri, made.digest, made.size_bytes)
        found = await self.checkpoint()
        assert found is not None
        return found

    async def checkpoint(self) -> Checkpoint | None:
        """Pointer to the session's last compacted context; None when there is none. Waits for the lease."""
        found = await self._held.until(checkpoint_of)
        assert found is not None
        return found[0]

    async def load_checkpoint(self) -> bytes | None:
        """The session's last compacted context, None when there is none. Raises `ObjectRefused` when it is not what
        the log names."""
        found = await self.checkpoint()
        return None if found is None else await self._contents.load(found.uri, found.digest)

    async def load(self, pointer: Pointer) -> bytes:
        """The bytes a pointer names. Raises `ObjectRefused` when they are not what it names."""
        return await self._contents.load(pointer.uri, pointer.digest)
