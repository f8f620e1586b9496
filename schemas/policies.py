"""The tenant's rules, and the record that carries them to each partition.

A policy document that contradicts itself is refused as a whole; the one in force stays (protocol section 11).
"""

from __future__ import annotations

from typing import Any

import msgspec

from onepen.schemas.errors import Invalid
from onepen.schemas.ids import check_int64
from onepen.schemas.limits import DAY_MS, DURATION_MS_MAX, PENDING_MAX
from onepen.schemas.statuses import OnBusy, Recovery


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One per partition, exempt from the key check. `body` is the JSON text of a policy document (tenant > 0) or of
    partition settings (tenant 0: `protocol`, `signalsPartitions`)."""

    tenant_id: int
    version: int
    body: bytes


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Durations in ms. Defaults are those of protocol section 11."""

    version: int = 0
    on_busy: str = "queue"
    if_missed: str = "queue"
    offer_ms: int = 5_000
    offer_max_ms: int = 30_000
    lease_ms: int = 30_000
    renew_ms: int = 10_000
    permit_ms: int = 10_000
    run_timeout_ms: int = 3_600_000
    cancel_ms: int = 30_000
    approval_ms: int = DAY_MS
    queued_ttl_ms: int | None = None
    max_attempts: int = 3
    pending_max: int = PENDING_MAX
    approval_actions: tuple[str, ...] = ()
    compaction_ms: int = 300_000
    no_worker_offers: int = 20
    """Offers unclaimed in a row after which the run ends `timed_out {no_worker}`."""
    progress_renewals: int = 60
    """Renewals in a row without a report after which the run ends `timed_out {stalled}`."""
    recovery: str = "resume"
    auto_steers: tuple[str, ...] = ("ui", "remote")
    """Sources whose `auto` steers a running run; any other source's `auto` is a follow-up."""
    erasable_content: bool = False
    """Content of this tenant must travel as pointer and digest, so that erasing the object erases it everywhere."""


DEFAULT_POLICY = Policy()

_BOUNDS: dict[str, tuple[int, int]] = {
    "offer_ms": (100, 60_000),
    "offer_max_ms": (100, 600_000),
    "lease_ms": (300, 600_000),
    "renew_ms": (100, 200_000),
    "permit_ms": (100, 600_000),
    "run_timeout_ms": (100, DURATION_MS_MAX),
    "cancel_ms": (200, 600_000),
    "approval_ms": (100, DURATION_MS_MAX),
    "max_attempts": (1, 100),
    "pending_max": (0, PENDING_MAX),
    "compaction_ms": (100, DAY_MS),
    "no_worker_offers": (1, 1_000),
    "progress_renewals": (3, 10_000),
}


def parse_policy(body: bytes, version: int) -> Policy:
    """Read a policy document. Raises `Invalid` with the rule that is broken; unknown members are refused."""
    try:
        policy = msgspec.json.decode(body, type=Policy)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"policy: {error}", field="policy") from None
    policy = msgspec.structs.replace(policy, version=check_int64(version, "version"))
    for name, (low, high) in _BOUNDS.items():
        if not low <= getattr(policy, name) <= high:
            raise Invalid(f"policy: {name} must lie between {low} and {high}", field=name)
    if policy.queued_ttl_ms is not None and not 1 <= policy.queued_ttl_ms <= DURATION_MS_MAX:
        raise Invalid("policy: queued_ttl_ms must lie between 1 and 30 days", field="queued_ttl_ms")
    _check_relations(policy)
    return policy


def _check_relations(policy: Policy) -> None:
    if policy.version < 1:
        raise Invalid("policy: version must be 1 or higher", field="version")
    if 3 * policy.renew_ms > policy.lease_ms:
        raise Invalid("policy: three renewals must fit the lease (3 x renew_ms <= lease_ms)", field="renew_ms")
    if policy.permit_ms >= policy.cancel_ms:
        raise Invalid("policy: a permit must end before the cancel deadline (permit_ms < cancel_ms)", field="permit_ms")
    if policy.offer_ms > policy.offer_max_ms:
        raise Invalid("policy: offer_ms must not exceed offer_max_ms", field="offer_ms")
    if policy.on_busy not in set(OnBusy):
        raise Invalid("policy: on_busy must be queue, reject, steer or interrupt", field="on_busy")
    if policy.recovery not in set(Recovery):
        raise Invalid("policy: recovery must be resume, rerun or fail", field="recovery")
    if policy.if_missed not in ("queue", "reject"):
        raise Invalid("policy: if_missed must be queue or reject", field="if_missed")


def policy_body(policy: Policy | dict[str, Any]) -> bytes:
    """The JSON text of a policy document (without its version, which the record carries)."""
    document = msgspec.to_builtins(policy) if isinstance(policy, Policy) else dict(policy)
    document.pop("version", None)
    return msgspec.json.encode(document, order="deterministic")


class PartitionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What holds for a whole partition (policy record of tenant 0). The protocol version never falls."""

    version: int = 0
    protocol: int = 0
    signals_partitions: int = 12


DEFAULT_SETTINGS = PartitionSettings()


def parse_settings(body: bytes, version: int) -> PartitionSettings:
    """Read partition settings. Raises `Invalid`."""
    try:
        settings = msgspec.json.decode(body, type=PartitionSettings)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"settings: {error}", field="settings") from None
    settings = msgspec.structs.replace(settings, version=check_int64(version, "version"))
    if settings.version < 1 or settings.protocol < 0 or not 1 <= settings.signals_partitions <= 10_000:
        raise Invalid("settings: version >= 1, protocol >= 0, 1 <= signals_partitions <= 10000", field="settings")
    return settings
