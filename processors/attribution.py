"""Who a record is for: key, partition, body and headers must agree; what cannot be attributed is a dead letter."""

from __future__ import annotations

from collections.abc import Sequence

from onepen.schemas.codec import InputsRecord
from onepen.schemas.errors import Poison
from onepen.schemas.ids import id_ok
from onepen.schemas.inputs import Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.policies import PolicyRecord


def attribute(
    record: InputsRecord,
    key: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
    partition: int,
    partitions: int,
) -> None:
    """Return when the record belongs to its session here; raise `Poison` naming what disagrees.

    A policy record is exempt from the key check: one stands on every partition.
    """
    if isinstance(record, PolicyRecord):
        return
    if record.tenant_id < 1:
        raise Poison("bad_tenant", "tenant_id must be 1 or higher")
    if not id_ok(record.session_id):
        raise Poison("bad_session_id")
    if key is None or key != record.session_id.encode():
        raise Poison("wrong_key", "the record key must be the session id")
    if partition_of(key, partitions) != partition:
        raise Poison("wrong_partition", f"belongs to {partition_of(key, partitions)}")
    if isinstance(record, Input):
        for name, value in headers:
            if name == "ce_id" and value != record.input_id.encode():
                raise Poison("header_mismatch", "ce_id differs from input_id")
            if name == "ce_type" and value != b"onepen.input":
                raise Poison("header_mismatch", "ce_type is not onepen.input")
