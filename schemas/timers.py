"""A timer is a record: appended by the owner to the tail of the same partition, judged by the state when consumed."""

from __future__ import annotations

import msgspec


class Timer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`kind` as in `statuses.TimerKind`; `run_id` and `generation` are those of the armed deadline (empty / 0 without a
    run); `subject` is the input id of a queued entry or `name` and key of an approval; `deadline_ms` is log time."""

    tenant_id: int
    session_id: str
    kind: str
    run_id: str
    generation: int
    subject: str
    deadline_ms: int
