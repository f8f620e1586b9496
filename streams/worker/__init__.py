"""Workers: processes that execute runs. Public: `Worker`, `RunContext`, and what actions and subtasks may end in."""

from onepen.schemas.edge import Pointer
from onepen.schemas.views import Checkpoint
from onepen.streams.objects import ObjectRefused
from onepen.streams.worker.cancel_token import CancelToken, cancellation
from onepen.streams.worker.compacting import Compaction
from onepen.streams.worker.context import Reported, RunContext
from onepen.streams.worker.outcomes import (
    ActionEnded,
    ActionFailed,
    ActionPermit,
    ActionRefused,
    ActionVoided,
    CompactionFailed,
    InDoubt,
    NotPerformed,
    OutcomeUnknown,
    SubtaskCancelled,
    SubtaskCycle,
    SubtaskEnded,
    SubtaskFailed,
    SubtaskNotStarted,
    SubtaskRefused,
    SubtaskTimedOut,
)
from onepen.streams.worker.steering import Steer
from onepen.streams.worker.worker import Worker

__all__ = [
    "ActionEnded",
    "ActionFailed",
    "ActionPermit",
    "ActionRefused",
    "ActionVoided",
    "CancelToken",
    "Checkpoint",
    "Compaction",
    "CompactionFailed",
    "InDoubt",
    "NotPerformed",
    "ObjectRefused",
    "OutcomeUnknown",
    "Pointer",
    "Reported",
    "RunContext",
    "Steer",
    "SubtaskCancelled",
    "SubtaskCycle",
    "SubtaskEnded",
    "SubtaskFailed",
    "SubtaskNotStarted",
    "SubtaskRefused",
    "SubtaskTimedOut",
    "Worker",
    "cancellation",
]
