"""Worker -> processor: the four records claim, renew, report, release (protocol section 6)."""

from __future__ import annotations

import hashlib

import msgspec


class WorkerHead(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What every worker record carries. `inbox` is the partition of the signals topic that the worker reads."""

    tenant_id: int
    session_id: str
    run_id: str
    generation: int
    token: str
    worker_id: str
    inbox: int


class Claim(WorkerHead, frozen=True, gc=False, kw_only=True):
    """Asks for the lease of (run, generation)."""


class Renew(WorkerHead, frozen=True, gc=False, kw_only=True):
    """`no` counts renewals of this (run, generation) from 1; `want_contents` asks for the pending steers' contents."""

    no: int
    suspended: bool = False
    want_contents: bool = False


class ReportEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One event a worker reports; `payload` is the JSON text of an object."""

    type: str
    payload: bytes


class Report(WorkerHead, frozen=True, gc=False, kw_only=True):
    """`no` counts the reports of this (run, generation) from 1; sent again it is unchanged."""

    no: int
    events: tuple[ReportEvent, ...]


class Release(WorkerHead, frozen=True, gc=False, kw_only=True):
    """Gives the right to write back. `reason`: `shutdown` (owner only) or `no_room` (passed on; the token suffices)."""

    reason: str


WorkerRecord = Claim | Renew | Report | Release


def report_digest(report: Report) -> bytes:
    """Digest of what a report says; sent again under the same number it must be the same."""
    digest = hashlib.sha256()
    for event in report.events:
        kind, payload = event.type, event.payload
        digest.update(f"{len(kind)}:{kind}{len(payload)}:".encode())
        digest.update(payload)
    return digest.digest()[:16]
