"""What a session costs: the bytes of a renewal, and of a session at rest, whatever its past."""

import pytest

from onepen.processors import timers
from onepen.processors.session import Session
from onepen.schemas import codec
from onepen.schemas.limits import DAY_MS, REMEMBERED_MAX
from onepen.schemas.worker_records import Renew, Report
from tests.unit.processors.stage import Stage, event_of
from tests.unit.processors.test_remembering import crowded


def renewal_bytes(stage: Stage, no: int) -> tuple[int, int]:
    """Bytes of the state records, and of the view, that one renewal writes."""
    decision = stage.decide(Renew(**stage.worker_head("w1", {}), no=no))
    changes = decision.session.changes(timers.next_deadline_ms(decision.session))
    state = sum(len(key) + len(value or b"") for key, value in changes.items())
    return state, sum(len(codec.encode(view)) for view in decision.views)


def test_a_renewal_costs_the_same_with_ten_thousand_ids_and_a_full_queue() -> None:
    empty, full = crowded(0), crowded(REMEMBERED_MAX - 22)
    for number in range(20):
        assert full.do(f"follow_up f{number}") == ["queued"]
    assert full.do("follow_up f20") == ["refused:queue_full"]
    for no in (1, 2):
        small, large = renewal_bytes(empty, no), renewal_bytes(full, no)
        assert 0.8 <= sum(large) / sum(small) <= 1.2, (small, large)


def test_a_full_list_of_steers_costs_only_their_names_in_the_view() -> None:
    empty, full = crowded(0), crowded(0)
    for number in range(20):
        full.do(f"steer s{number} bytes=10000")
    small, large = renewal_bytes(empty, 1), renewal_bytes(full, 1)
    assert 0.8 <= large[0] / small[0] <= 1.2, "the state"
    assert large[1] < small[1] + 20 * 64, "the view names them, without their contents"


def test_the_pending_list_is_written_when_it_changes_and_gone_when_it_is_empty() -> None:
    stage = Stage()
    for line in ("prompt p1", "claim w1", "follow_up f1"):
        stage.do(line)
    key = b"q/7/session-42/list"
    assert key in stage.records
    assert key not in stage.decide(Renew(**stage.worker_head("w1", {}), no=1)).session.changes()
    stage.do("abort a1 input=f1")
    assert key not in stage.records
    assert Session.load(7, "session-42", stage.records).head.pending == ()


PASTS = {
    "nothing": (),
    "an end": ("prompt p1", "claim w1", "report w1 1 done:completed"),
    "a retryable end": ("prompt p1", "claim w1", "report w1 1 done:failed,retryable"),
    "actions, doubts and children": (
        "prompt p1",
        "claim w1",
        "report w1 1 act+k1 act+k2,name=post sub+c1 sub+c2 tool+t1",
        "abort a1 active",
        "wait 30000",
        "fire cancel",
    ),
    "a checkpoint": ("prompt p1", "claim w1", "report w1 1 compact+z1 compact-z1:ok done:completed"),
    "a queue that was worked off": (
        *("prompt p1", "claim w1", "follow_up f1", "steer s1", "report w1 1 applied:s1 done:completed"),
        *("claim w1", "report w1 1 done:failed"),
    ),
    "an erase": ("prompt p1", "claim w1", "report w1 1 act+k1", "erase e1", "report w1 2 done:failed"),
    "forty runs": tuple(
        line
        for n in range(40)
        for line in (f"prompt p{n}", "claim w1", f"report w1 1 act+k{n} act-k{n}:ok compact+z compact-z:ok done:failed")
    ),
}


@pytest.mark.parametrize("past", PASTS)
def test_a_session_at_rest_is_small_and_keeps_one_record(past: str) -> None:
    """At rest its head is at most 1 KiB; a day later, when ids and keys have expired, the head is all there is."""
    stage = Stage()
    for line in PASTS[past]:
        stage.do(line)
    assert stage.session.head.run is None
    head = stage.records.get(b"s/7/session-42", b"")
    assert len(head) <= 1024
    assert {key[:2] for key in stage.records} <= {b"s/", b"i/", b"a/", b"c/", b"r/"}
    stage.now_ms += DAY_MS + 3_600_000
    stage.do("fire forget")
    assert set(stage.records) == {b"s/7/session-42"}
    assert len(stage.records[b"s/7/session-42"]) <= 1024


def test_a_head_at_rest_is_small_with_the_longest_names() -> None:
    stage = Stage(session_id="s" * 128)
    worker = "w" * 128
    uri = "s3://bucket/" + "x" * 500
    stage.do("prompt p1")
    stage.do(f"claim {worker}")
    pointer = {"uri": uri, "digest": "ab" * 32, "bytes": 2**62, "throughSeq": 1}
    events = (
        event_of("run.compaction_started", compactionId="z" * 128),
        event_of("run.compaction_finished", compactionId="z" * 128, checkpoint=pointer),
        event_of("run.compaction_started", compactionId="y"),
        event_of("run.compaction_finished", compactionId="y", checkpoint=pointer | {"uri": uri + "x"}),
        event_of("run.compaction_failed", compactionId="y"),
        event_of("run.finished", terminalStatus="completed"),
    )
    stage.decide(Report(**stage.worker_head(worker, {}), no=1, events=events))
    assert stage.session.head.run is None
    assert stage.session.head.checkpoint is not None
    (head,) = [value for key, value in stage.records.items() if key[:2] == b"s/"]
    assert 700 < len(head) <= 1024
