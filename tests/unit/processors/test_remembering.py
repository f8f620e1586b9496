"""10,000 remembered ids: the bound, what lies beyond it, and that the work of a record does not grow with them."""

from typing import Any

import pytest

from onepen.processors import invariants
from onepen.processors import session as session_module
from onepen.processors.session import Remembered, Session, encode_body
from onepen.schemas.limits import DAY_MS, REMEMBERED_MAX
from tests.unit.processors.stage import Stage


def crowded(count: int, *, issued_at_ms: int | None = None) -> Stage:
    """A session with an active run that remembers `count` further ids."""
    stage = Stage()
    stage.do("prompt p0")
    stage.do("claim w1")
    copy = stage.session.fork()
    copy.dirty = True
    issued = stage.now_ms if issued_at_ms is None else issued_at_ms
    for number in range(count):
        copy.ids.put(
            f"old{number}",
            Remembered(
                digest="d", issued_at_ms=issued, partition=5, offset=number, mode="prompt", user_id=1, source="ui",
                verdict="refused", reason="busy", run_id=None, disposition="refused",
            ),
        )  # fmt: skip
    copy.head.remembered += count
    copy.head.next_forget_ms = issued + DAY_MS + 1
    stage.records = {key: value for key, value in copy.changes().items() if value is not None} | stage.records
    stage.records |= {key: value for key, value in copy.changes().items() if value is not None and key[:2] == b"s/"}
    stage.session = Session.load(stage.tenant_id, stage.session_id, stage.records)
    assert stage.session.head.remembered == count + 1
    return stage


def test_beyond_ten_thousand_ids_inputs_are_refused_and_take_no_id() -> None:
    stage = crowded(REMEMBERED_MAX - 2)
    assert stage.do("prompt last on_busy=reject") == ["refused:busy"]
    assert stage.do("prompt beyond") == ["refused:too_many_inputs"]
    assert stage.do("steer beyond2") == ["refused:too_many_inputs"]
    assert stage.do("again last") == ["duplicate"], "nothing was evicted for it"
    assert stage.session.head.remembered == REMEMBERED_MAX


def test_aborts_and_answers_have_a_thousand_places_beyond() -> None:
    stage = crowded(REMEMBERED_MAX - 1 + 998)
    assert stage.do("prompt beyond") == ["refused:too_many_inputs"]
    assert stage.do("answer n1 k1 approve") == ["refused:unknown_approval"]
    assert stage.do("abort a1 active")[0] == "cancelling"
    assert stage.do("abort a2 active") == ["refused:too_many_inputs"]
    assert stage.do("answer n2 k1 approve") == ["refused:too_many_inputs"]


def test_a_full_session_takes_inputs_again_as_soon_as_an_id_may_be_forgotten() -> None:
    stage = crowded(REMEMBERED_MAX - 1)
    stage.do(f"wait {DAY_MS}")
    assert stage.do("prompt beyond") == ["refused:too_many_inputs"], "remembered until then, inclusive"
    stage.do("wait 1")
    assert stage.do("prompt beyond") == ["queued"]
    assert stage.session.head.remembered == 2, "the id of the active run stays"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the state records that are decoded."""
    count = [0]
    whole = session_module.decode_body

    def counting(kind: Any, raw: bytes) -> Any:
        count[0] += 1
        return whole(kind, raw)

    monkeypatch.setattr(session_module, "decode_body", counting)
    return count


@pytest.mark.parametrize(
    "line",
    [
        "renew w1 1",
        "report w1 2 msg",
        "report w1 2 tool+c2 act+k2,name=post",
        "report w1 2 done:failed",
        "steer s1",
        "prompt p1 on_busy=reject",
        "prompt old7 content=x",
        "abort a1 active",
        "abort a1 input=old7",
        "answer n1 k1 approve action_name=none",
        "fire lease",
        "release w1 shutdown",
    ],
)
def test_the_work_of_a_record_does_not_grow_with_what_is_remembered(line: str, decoded: list[int]) -> None:
    stage = crowded(3_000)
    stage.do("report w1 1 tool+c1 act+k1,approval")
    decoded[0] = 0
    stage.do(line)
    assert decoded[0] < 40, f"{decoded[0]} records decoded"
    changed = stage.decisions[-1].session.changes()
    assert len(changed) < 20, f"{len(changed)} records written"


def test_the_head_stays_bounded_with_the_longest_ids() -> None:
    stage = Stage()
    long = "/" * 120  # escaped in keys, so three times as long there
    stage.do("prompt p0")
    stage.do("claim w1")
    no = 0
    for generation in range(3):
        for number in range(45):
            no += 1
            key = f"{generation}{number:03d}{long}"
            stage.do(f"report w1 {no} act+{key},name=n{generation}{number:03d}{long}")
        stage.do("release w1 shutdown")
        stage.do("claim w1")
        no = 0
    for number in range(40):
        stage.do(f"report w1 {number + 1} act+0{number:03d}{long},name=n0{number:03d}{long}")
    for number in range(20):
        stage.do(f"steer s{number:03d}{long}")
    for number in range(40):
        no = 41 + number
        stage.do(f"report w1 {no} tool+c{number:03d}{long} tool-c{number:03d}:wrong")
    stage.do("abort a1 active")
    for number in range(40):
        stage.do(f"report w1 {81 + number} tool-c{number:03d}{long}:ok")
        stage.do(f"abort b{number:03d}{long} active")
    run = stage.session.head.run
    assert run is not None
    assert len(run.doubts) == 135, "with a hundred in doubt nothing more is permitted"
    assert len(stage.session.head.pending) == 20
    assert invariants.broken(stage.session) == []
    assert len(encode_body(stage.session.head)) > 40_000, "the test comes near what is possible"


def test_what_an_invalid_input_says_is_remembered_in_short() -> None:
    stage = Stage()
    stage.decide(stage.input("prompt", "i1", source="x" * 200_000))
    stage.decide(stage.input("m" * 200_000, "i2"))
    for input_id in ("i1", "i2"):
        remembered = stage.session.ids.get(input_id)
        assert remembered is not None
        assert remembered.verdict == "refused"
        assert len(encode_body(remembered)) < 500
