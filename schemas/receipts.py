"""Receipts: the answer to one input record (verdict first, final disposition later) or to a refused worker record."""

from __future__ import annotations

import msgspec


class Receipt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`kind` `input`: about the input record at (`partition`, `offset`); `verdict` and `disposition` stand in one
    receipt when both are known. `kind` `action`: an action in doubt was settled after its run. `kind` `worker`: a
    refused worker record, with `record` (claim, renew, report, release) and its evidence in `detail` (JSON text)."""

    kind: str
    tenant_id: int
    session_id: str
    partition: int
    offset: int
    at_ms: int
    input_id: str | None = None
    mode: str | None = None
    user_id: int | None = None
    source: str | None = None
    verdict: str | None = None
    disposition: str | None = None
    reason: str | None = None
    run_id: str | None = None
    run_no: int | None = None
    generation: int | None = None
    worker_id: str | None = None
    record: str | None = None
    report_no: int | None = None
    detail: bytes | None = None
