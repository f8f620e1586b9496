"""Child -> parent: the final disposition of the input that a parent sent, exactly once (protocol section 10)."""

from __future__ import annotations

import msgspec


class Notice(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`tenant_id`, `session_id`, `run_id` and `call_id` name the parent's branch. `status` is the terminal status of
    the child's run, or the disposition of its input when no run was started; `result` is JSON text or None."""

    tenant_id: int
    session_id: str
    run_id: str
    call_id: str
    child_session_id: str
    child_input_id: str
    child_run_id: str | None
    status: str
    reason: str | None
    result: bytes | None
