"""An offer: a lease without an owner, published to the workers."""

from __future__ import annotations

import msgspec

from onepen.schemas.inputs import Content


class Offer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Everything a worker needs to claim and begin. `at_ms`, `expires_at_ms`: time of the log; lengths are durations.

    `last_seq` / `last_hash` name the last event before the offer; `had_owner` forbids an optimistic start.
    `ordinal` counts the offers of the run and spreads them over the partitions; `hops` counts passings-on.
    """

    tenant_id: int
    session_id: str
    run_id: str
    run_no: int
    generation: int
    token: str
    input_id: str
    user_id: int
    source: str
    mode: str
    content: Content | None
    last_seq: int
    last_hash: bytes
    had_owner: bool
    attempt: int
    ordinal: int
    hops: int
    recovery: str
    lineage: str
    at_ms: int
    expires_at_ms: int
    lease_ms: int
    renew_ms: int
    permit_ms: int
