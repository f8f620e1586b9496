"""What readers of the tables get: a frozen value per kind of row, times in ms of the log, texts instead of row ids."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

__all__ = [
    "ActionView",
    "InputView",
    "Page",
    "RefusedView",
    "RunDetail",
    "RunView",
    "SessionDetail",
    "SessionView",
    "SubtaskView",
]

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Items in order, and the cursor of the next page: None when this is the last."""

    items: tuple[T, ...]
    next_cursor: str | None = None


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """One session; `runs` counts its runs, `status` is that of its last one (None before the first).

    `erased_ms`: when it was erased; then there are no runs."""

    tenant_id: int
    session_id: str
    user_id: int | None
    title: str | None
    created_ms: int
    updated_ms: int
    runs: int
    status: str | None
    active_run_id: str | None
    erased_ms: int | None = None


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `lease_expires_ms` is the value at the grant; renewals are in the log only."""

    tenant_id: int
    session_id: str
    run_id: str
    run_no: int
    status: str
    generation: int
    attempt: int
    lease_owner: str | None
    lease_expires_ms: int | None
    timeout_ms: int | None
    cancel_requested_ms: int | None
    cancel_reason: str | None
    terminal_status: str | None
    terminal_ms: int | None
    terminal_reason: str | None
    retryable: bool | None
    forced: bool | None
    input_id: str | None
    input_mode: str | None
    user_id: int | None
    source: str | None
    recovery: str | None
    lineage: str | None
    retry_of: str | None
    parent_session_id: str | None
    parent_run_id: str | None
    parent_call_id: str | None
    last_seq: int
    last_hash: bytes
    created_ms: int
    updated_ms: int


class ActionView(msgspec.Struct, frozen=True, kw_only=True):
    """One action key and how it stands. `settled_*`: an action in doubt of which an answer (by a user) or a late
    report (of a worker) told after its run how it had ended."""

    session_id: str
    run_id: str
    name: str
    action_key: str
    state: str
    args_digest: str | None
    generation: int
    requested_ms: int | None
    permitted_ms: int | None
    ended_ms: int | None
    reason: str | None
    approval_requested_ms: int | None
    approval_expires_ms: int | None
    approval_decision: str | None
    approval_by: int | None
    result: Any
    settled_ms: int | None
    settled_by: int | None
    settled_input_id: str | None
    settled_worker_id: str | None


class SubtaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A child that a run started, and what the child's input came to (`status` None: the run waits for it)."""

    session_id: str
    run_id: str
    call_id: str
    child_session_id: str | None
    child_input_id: str | None
    child_run_id: str | None
    status: str | None
    reason: str | None
    result: Any
    started_ms: int | None
    ended_ms: int | None


class RefusedView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker record that the log refused, with its position on the inputs topic. `record` `notice`: the end of the
    child's input `input_id`, which came after the run."""

    session_id: str
    run_id: str | None
    partition: int
    offset: int
    generation: int | None
    worker_id: str | None
    record: str | None
    report_no: int | None
    reason: str | None
    detail: Any
    input_id: str | None
    at_ms: int


class InputView(msgspec.Struct, frozen=True, kw_only=True):
    """One input record, by its position on the inputs topic: its verdict and its final disposition, if known yet."""

    tenant_id: int
    session_id: str
    input_id: str | None
    partition: int
    offset: int
    mode: str | None
    user_id: int | None
    source: str | None
    verdict: str | None
    verdict_reason: str | None
    verdict_run_id: str | None
    verdict_detail: Any
    verdict_ms: int | None
    disposition: str | None
    disposition_reason: str | None
    disposition_run_id: str | None
    disposition_detail: Any
    disposition_ms: int | None


class SessionDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A session, its latest runs (newest first) and how many inputs wait for their disposition."""

    session: SessionView
    runs: tuple[RunView, ...]
    open_inputs: int


class RunDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A run with its actions, its children and the worker records that were refused in its name (at most 100 each)."""

    run: RunView
    actions: tuple[ActionView, ...]
    refused: tuple[RefusedView, ...]
    subtasks: tuple[SubtaskView, ...] = ()
