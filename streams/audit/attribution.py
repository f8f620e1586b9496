"""Who a record of the inputs topic is for, judged a second time: key, partition, body and headers agree."""

from __future__ import annotations

from collections.abc import Sequence

from onepen.schemas.codec import InputsRecord
from onepen.schemas.ids import id_ok
from onepen.schemas.inputs import Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.policies import PolicyRecord


def unattributable(
    record: InputsRecord,
    key: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
    partition: int,
    partitions: int,
) -> str | None:
    """Why a record belongs to no session of this partition; None when it does, and for a policy."""
    if isinstance(record, PolicyRecord):
        return None
    if record.tenant_id < 1 or not id_ok(record.session_id):
        return "names no session"
    if key != record.session_id.encode():
        return "its key is not its session"
    if partition_of(key, partitions) != partition:
        return "on the wrong partition"
    if isinstance(record, Input) and any(n == "ce_id" and v != record.input_id.encode() for n, v in headers):
        return "its header names another input"
    return None
