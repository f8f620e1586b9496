"""A run that nobody holds has no holder without a name: an empty worker id owns nothing (protocol section 6.2)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from onepen.processors import invariants
from onepen.schemas.worker_records import Renew, Report
from tests.unit.processors.stage import Stage, report_event


def never_leased() -> Stage:
    stage = Stage()
    stage.do("prompt i1")
    return stage


def lost() -> Stage:
    stage = never_leased()
    stage.do("claim w1")
    stage.now_ms = stage.session.head.run.lease_expires_ms  # type: ignore[union-attr]
    stage.do("fire lease")
    return stage


@pytest.mark.parametrize("make", [never_leased, lost])
@pytest.mark.parametrize("inbox", ["0", "3"])
def test_nobody_owns_nothing(make: Callable[[], Stage], inbox: str) -> None:
    stage = make()
    before = stage.session.head.run
    head = stage.worker_head("", {"inbox": inbox})
    for record in (
        Renew(**head, no=1 << 62),
        Report(**head, no=1, events=(report_event("msg"),)),
        Report(**head, no=1, events=(report_event("done:completed"),)),
    ):
        decision = stage.decide(record)
        assert [receipt.reason for receipt in decision.receipts] == ["invalid"]
        assert not decision.events
        assert not [check.__name__ for check in invariants.SESSION if not check(stage.session)]
    after = stage.session.head.run
    assert before is not None
    assert after is not None
    assert msgspec.structs.replace(after, refused_records=before.refused_records) == before
