"""Rows of the tables as the fold makes them and the writer stores them. Plain values, mutable only inside the fold.

Moments are milliseconds of the log; the writer turns them into timestamps. Sessions and runs are named by the
callers' texts here; the surrogate ids belong to the writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onepen.schemas.events import Event
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import ACTIVE

__all__ = [
    "ActionKey",
    "ActionRow",
    "Changes",
    "CheckpointRow",
    "EventRow",
    "InputRow",
    "Placed",
    "RefusedRow",
    "RunRow",
    "SessionKey",
    "SessionRow",
    "Stored",
    "SubtaskKey",
    "SubtaskRow",
]

SessionKey = tuple[int, str]
"""(tenant_id, session_key)"""

ActionKey = tuple[int, str, str, str]
"""(tenant_id, session_key, action name, action key)"""

SubtaskKey = tuple[int, str, str, str]
"""(tenant_id, session_key, run_key, call id)"""


@dataclass(frozen=True, slots=True)
class Placed:
    """A decoded record with its place on its topic."""

    partition: int
    offset: int
    record: Event | Receipt


@dataclass(slots=True)
class SessionRow:
    """What a batch says of a session; the writer keeps the earliest `created_ms` and the latest `updated_ms`.

    `erased_ms`: the batch erases the session; then it has neither user nor title any more."""

    created_ms: int
    updated_ms: int
    user_id: int | None = None
    title: str | None = None
    erased_ms: int | None = None


@dataclass(slots=True)
class RunRow:
    """A run after its last event so far. `last_seq` is the guard: a row only moves forward."""

    tenant_id: int
    session_key: str
    run_key: str
    run_no: int
    status: str
    generation: int
    created_ms: int
    updated_ms: int
    attempt: int = 0
    lease_owner: str | None = None
    lease_expires_ms: int | None = None
    timeout_ms: int | None = None
    cancel_requested_ms: int | None = None
    cancel_reason: str | None = None
    terminal_status: str | None = None
    terminal_ms: int | None = None
    terminal_reason: str | None = None
    retryable: bool | None = None
    forced: bool | None = None
    input_id: str | None = None
    input_mode: str | None = None
    input_partition: int | None = None
    input_offset: int | None = None
    user_id: int | None = None
    source: str | None = None
    recovery: str | None = None
    lineage: str | None = None
    retry_of: str | None = None
    parent_session_key: str | None = None
    parent_run_key: str | None = None
    parent_call_id: str | None = None
    last_seq: int = 0
    last_hash: bytes = b""
    id: int | None = None

    @property
    def active(self) -> bool:
        """Whether the run holds its session's one place."""
        return self.status in ACTIVE


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event with its payload in the two stored forms."""

    event: Event
    partition: int
    offset: int
    payload: str
    raw: bytes | None


@dataclass(slots=True)
class InputRow:
    """What receipts say of one input record: what stands first of a kind stays."""

    tenant_id: int
    session_key: str
    input_id: str | None = None
    mode: str | None = None
    user_id: int | None = None
    source: str | None = None
    verdict: str | None = None
    verdict_reason: str | None = None
    verdict_run_key: str | None = None
    verdict_detail: str | None = None
    verdict_ms: int | None = None
    disposition: str | None = None
    disposition_reason: str | None = None
    disposition_run_key: str | None = None
    disposition_detail: str | None = None
    disposition_ms: int | None = None


@dataclass(slots=True)
class ActionRow:
    """An action key after the last event about it and, if that came later, its settlement after the run.

    (`last_run_no`, `last_seq`) is the guard against events, `last_offset` (on the inputs topic) that against
    settlements; `settled_offset` compares with it.
    """

    run_key: str
    state: str
    generation: int
    args_digest: str | None = None
    requested_ms: int | None = None
    permitted_ms: int | None = None
    deadline_ms: int | None = None
    ended_ms: int | None = None
    reason: str | None = None
    approval_requested_ms: int | None = None
    approval_expires_ms: int | None = None
    approval_decision: str | None = None
    approval_by: int | None = None
    approval_input_id: str | None = None
    result: str | None = None
    last_run_no: int = 0
    last_seq: int = 0
    last_offset: int = -1
    settled_state: str | None = None
    settled_ms: int | None = None
    settled_offset: int | None = None
    settled_by: int | None = None
    settled_input_id: str | None = None
    settled_worker_id: str | None = None


@dataclass(slots=True)
class SubtaskRow:
    """A child that a run started. Columns of its end are None while it is open."""

    child_session_key: str | None = None
    child_input_id: str | None = None
    child_run_key: str | None = None
    status: str | None = None
    reason: str | None = None
    result: str | None = None
    started_ms: int | None = None
    ended_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """The pointer that a finished compaction reported."""

    tenant_id: int
    session_key: str
    run_key: str
    run_no: int
    seq: int
    uri: str | None
    digest: str | None
    size_bytes: int | None
    through_seq: int | None
    created_ms: int


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A refused worker record, or a notice that came after its run: evidence."""

    tenant_id: int
    session_key: str
    run_key: str | None
    generation: int | None
    worker_id: str | None
    record: str | None
    report_no: int | None
    reason: str | None
    detail: str | None
    input_id: str | None
    created_ms: int


@dataclass(slots=True)
class Stored:
    """The rows as they are stored, of those that a batch touches, and which of its sessions are erased by now."""

    runs: dict[str, RunRow] = field(default_factory=dict)
    actions: dict[ActionKey, ActionRow] = field(default_factory=dict)
    erased: frozenset[SessionKey] = frozenset()


@dataclass(slots=True)
class Changes:
    """What a batch changes besides its sessions, each row once, in its last state.

    `objects`: (tenant_id, session_key, uri or `ALL_OBJECTS`) of erased sessions.
    """

    events: list[EventRow] = field(default_factory=list)
    runs: dict[str, RunRow] = field(default_factory=dict)
    inputs: dict[tuple[int, int], InputRow] = field(default_factory=dict)
    actions: dict[ActionKey, ActionRow] = field(default_factory=dict)
    subtasks: dict[SubtaskKey, SubtaskRow] = field(default_factory=dict)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    refused: dict[tuple[int, int], RefusedRow] = field(default_factory=dict)
    objects: set[tuple[int, str, str]] = field(default_factory=set)
