"""The view: the one message to workers, level-triggered. The highest (generation, no) wins; a lost one is harmless."""

from __future__ import annotations

import msgspec

from onepen.schemas.inputs import Content


class PendingSteer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A steer pending for this run. `content` is None when this view only names it (`with_content` false)."""

    input_id: str
    user_id: int
    source: str
    with_content: bool
    content: Content | None = None


class ActionView(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """State of one action key, open or lately asked for.

    `state` as in `statuses.ActionState`. When `permitted`: `report_no` is the report whose request was permitted,
    the action may begin within `valid_ms` of the moment that report was FIRST sent, and `deadline_ms` (log time) with
    (`run_id`, `generation`) of the view is the fencing token for the target. `result` is JSON text (`ok`, `error`);
    None with `result_bytes` > 0: it is too large for a view and stands in event `result_seq` of `result_run_id`.
    """

    action_key: str
    name: str
    args_digest: str
    state: str
    report_no: int = 0
    deadline_ms: int = 0
    valid_ms: int = 0
    result: bytes | None = None
    result_bytes: int = 0
    result_run_id: str = ""
    result_seq: int = 0


class SubtaskView(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One child run, open or lately asked for. `status` `open`, or as in `subtask.finished`; `result` is JSON text."""

    call_id: str
    session_id: str
    status: str
    run_id: str | None = None
    reason: str | None = None
    result: bytes | None = None


class Checkpoint(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Pointer to a compacted context: everything through event `through_seq` of run `run_no` is in it.

    `digest` is the SHA-256 (hex) of the object; one that does not match is refused at load.
    """

    uri: str
    digest: str
    size_bytes: int
    run_id: str
    run_no: int
    through_seq: int


class RefusedEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Event `index` (from 0) of report `no` was refused; index -1: the report as a whole."""

    no: int
    index: int
    reason: str


class View(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The state of a run as its worker has to know it.

    `status` is the run's status. `reason` set: this is no view but the refusal of a record (`record`, `report_no` or
    `renewal_no` say which); it names nothing else. `last_seq`: last event of the run. `report_no`: highest report
    decided (for a gap in a refusal: the number awaited minus 1). `renewal_no`: highest renewal answered, 0 = the claim.
    `contents_complete`: every pending steer of `pending` carries its content.
    """

    tenant_id: int
    session_id: str
    run_id: str
    generation: int
    no: int
    status: str
    worker_id: str
    inbox: int
    reason: str | None = None
    record: str | None = None
    last_seq: int = 0
    last_hash: bytes = b""
    report_no: int = 0
    renewal_no: int = 0
    timeout_at_ms: int | None = None
    cancel_reason: str | None = None
    pending: tuple[PendingSteer, ...] = ()
    contents_complete: bool = True
    actions: tuple[ActionView, ...] = ()
    refused: tuple[RefusedEvent, ...] = ()
    subtasks: tuple[SubtaskView, ...] = ()
    checkpoint: Checkpoint | None = None
    notices: tuple[str, ...] = ()
