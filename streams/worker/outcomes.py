"""How an action, a subtask or a compaction may end for the one who asked for it, and what `perform` may raise.

Rule: a refusal names its reason; nothing here is raised for an effect that took place and was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onepen.schemas.errors import OnepenError


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPermit:
    """Handed to `perform`: pass key, fencing token and deadline on, so that the target can refuse a late call.

    The fencing token is (`run_id`, `generation`); `deadline_ms` is time of the log, `valid_ms` what of the permit
    was left when the action began.
    """

    key: str
    name: str
    args_digest: str
    run_id: str
    generation: int
    deadline_ms: int
    valid_ms: int

    @property
    def fencing(self) -> tuple[str, int]:
        """A target keeps the highest generation it has seen of a run and refuses lower ones."""
        return self.run_id, self.generation


class ActionEnded(OnepenError):
    """Base of what `ctx.action` raises. `name` and `key` say which action."""

    def __init__(self, sentence: str, *, name: str, key: str, reason: str) -> None:
        super().__init__(f"action {name} ({key}): {sentence}")
        self.name = name
        self.key = key
        self.reason = reason


class ActionRefused(ActionEnded):
    """The log refused the request (`reason`: key_conflict, in_flight, permit_expired ...). Nothing was performed."""


class ActionVoided(ActionEnded):
    """The approval was denied or has expired. Nothing was performed."""


class ActionFailed(ActionEnded):
    """It was performed and ended `error`; `result` is what was recorded. Asked again it is not performed again."""

    def __init__(self, sentence: str, *, name: str, key: str, reason: str, result: Any) -> None:
        super().__init__(sentence, name=name, key=key, reason=reason)
        self.result = result


class InDoubt(ActionEnded):
    """Whether an earlier attempt took place is unknown; find out, then ask with a `resolution`, or give up."""


class NotPerformed(OnepenError):
    """Raise it in `perform` when it is certain that nothing took place: the key may be permitted again."""


class OutcomeUnknown(OnepenError):
    """Raise it in `perform` when nobody can say whether it took place: the action stays open and goes in doubt."""


class CompactionFailed(OnepenError):
    """The log did not accept a compaction (`reason`: already_open, not_open after its deadline ...): the checkpoint
    before it stays."""

    def __init__(self, compaction_id: str, reason: str) -> None:
        super().__init__(f"compaction {compaction_id}: refused ({reason})")
        self.compaction_id = compaction_id
        self.reason = reason


class SubtaskEnded(OnepenError):
    """Base of what `ctx.subtask` raises when the child gave no result: `session_id` and `run_id` say which run,
    `call_id` which call, `reason` why."""

    def __init__(
        self,
        sentence: str,
        *,
        name: str,
        call_id: str,
        session_id: str,
        reason: str | None,
        run_id: str | None = None,
        result: Any = None,
    ) -> None:
        super().__init__(f"subtask {name} in session {session_id} ({call_id}): {sentence}")
        self.name = name
        self.call_id = call_id
        self.session_id = session_id
        self.reason = reason
        self.run_id = run_id
        self.result = result


class SubtaskRefused(SubtaskEnded):
    """The log refused the call (too_deep, too_many_branches, key_conflict ...) or the child's input. Nothing ran."""


class SubtaskCycle(SubtaskRefused):
    """The child's session is already in the chain of those that wait: it would wait for itself."""


class SubtaskNotStarted(SubtaskEnded):
    """The child's input was withdrawn, discarded or has expired before it started a run."""


class SubtaskFailed(SubtaskEnded):
    """The child's run failed; `result` is the error it recorded."""


class SubtaskCancelled(SubtaskEnded):
    """The child's run was cancelled (`aborted`: by the end of the run that had asked for it)."""


class SubtaskTimedOut(SubtaskEnded):
    """The child's run timed out."""
