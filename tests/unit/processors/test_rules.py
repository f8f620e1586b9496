"""Policies and partition settings through the log; who a record is attributed to; keys of the state topic."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepen.processors import state_keys
from onepen.processors.attribution import attribute
from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Poison
from onepen.schemas.inputs import Content, Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.policies import DEFAULT_POLICY, PolicyRecord, parse_policy, policy_body
from onepen.schemas.timers import Timer
from onepen.schemas.worker_records import Renew
from tests.unit.processors.stage import KEYS, Stage


def policy(version: int, tenant_id: int = 7, **members: Any) -> PolicyRecord:
    return PolicyRecord(tenant_id=tenant_id, version=version, body=msgspec.json.encode(members))


def refused(rules: Rules, record: PolicyRecord) -> str:
    with pytest.raises(Poison) as caught:
        admit_policy(rules, record)
    return caught.value.reason


# -- policies -------------------------------------------------------------------------------------------------------


def test_a_policy_is_in_force_from_its_position_on() -> None:
    rules = Rules.start(KEYS)
    assert rules.policy(7) == DEFAULT_POLICY
    changed, records = admit_policy(rules, policy(3, leaseMs=3_000, renewMs=1_000))
    assert (changed.policy(7).version, changed.policy(7).lease_ms, changed.policy(7).permit_ms) == (3, 3_000, 10_000)
    assert changed.policy(8) == DEFAULT_POLICY, "another tenant's rules stay"
    assert rules.policy(7) == DEFAULT_POLICY, "rules are a value"
    assert list(records) == [b"p/7/3"]


def test_rules_are_restored_from_their_state_records() -> None:
    rules, first = admit_policy(Rules.start(KEYS), policy(3, leaseMs=3_000, renewMs=1_000))
    rules, second = admit_policy(rules, policy(2, tenant_id=0, signalsPartitions=5))
    restored = Rules.start(KEYS).restored(second | first | {b"s/7/x": b"", b"partition": b""})
    assert restored == rules
    assert restored.settings.signals_partitions == 5


def test_a_policy_not_newer_than_the_one_in_force_changes_nothing() -> None:
    rules, _ = admit_policy(Rules.start(KEYS), policy(3))
    for version in (3, 2, 0, -1):
        assert refused(rules, policy(version, leaseMs=3_000, renewMs=1_000)) == "policy_not_newer"
    assert refused(Rules.start(KEYS), policy(0)) == "policy_not_newer"


def test_a_later_policy_takes_over_and_the_earlier_stays_for_its_runs() -> None:
    rules, _ = admit_policy(Rules.start(KEYS), policy(3, maxAttempts=2))
    rules, records = admit_policy(rules, policy(5, maxAttempts=7))
    assert (rules.policy(7).version, rules.policy(7).max_attempts) == (5, 7)
    assert rules.policy_at(7, 3).max_attempts == 2
    assert rules.policy_at(7, 0) == DEFAULT_POLICY
    assert list(records) == [b"p/7/5"]
    assert refused(rules, policy(4)) == "policy_not_newer"


@pytest.mark.parametrize(
    "members",
    [
        {"permitMs": 30_000},
        {"permitMs": 4_000, "cancelMs": 4_000},
        {"renewMs": 10_001},
        {"leaseMs": 29_999},
        {"leaseMs": 10**9},
        {"cancelMs": 10**9},
        {"runTimeoutMs": 10**12},
        {"runTimeoutMs": 0},
        {"offerMs": 5_000, "offerMaxMs": 4_000},
        {"maxAttempts": 0},
        {"pendingMax": 21},
        {"pendingMax": -1},
        {"queuedTtlMs": 0},
        {"onBusy": "perhaps"},
        {"recovery": "hope"},
        {"compactionMs": 0},
        {"noWorkerOffers": 0},
        {"progressRenewals": 2},
        {"autoSteers": "ui"},
        {"erasableContent": 1},
        {"onBusy": 1},
        {"ifMissed": "perhaps"},
        {"approvalActions": "mail"},
        {"leaseMs": "30000"},
        {"leaseMs": 30_000.5},
        {"unknown": 1},
    ],
)
def test_a_policy_that_contradicts_itself_leaves_the_old_one(members: dict[str, Any]) -> None:
    rules = Rules.start(KEYS)
    assert refused(rules, policy(1, **members)) == "policy_invalid"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"\xff", b'{"leaseMs": NaN}', b"[" * 10_000])
@pytest.mark.parametrize("tenant_id", [7, 0])
def test_a_policy_that_is_no_document(body: bytes, tenant_id: int) -> None:
    record = PolicyRecord(tenant_id=tenant_id, version=1, body=body)
    assert refused(Rules.start(KEYS), record) == "policy_invalid"


def test_a_policy_of_a_tenant_that_cannot_be() -> None:
    assert refused(Rules.start(KEYS), policy(1, tenant_id=-1)) == "policy_invalid"


def test_the_bounds_of_a_policy_are_inclusive() -> None:
    rules, _ = admit_policy(
        Rules.start(KEYS), policy(1, leaseMs=30_000, renewMs=10_000, permitMs=9_999, cancelMs=10_000)
    )
    assert rules.policy(7).cancel_ms == 10_000


def test_the_story_s_policy_is_accepted() -> None:
    members = {"leaseMs": 3_000, "renewMs": 1_000, "permitMs": 1_500, "cancelMs": 4_000}
    rules, _ = admit_policy(Rules.start(KEYS), policy(1, **members))
    assert rules.policy(7).cancel_ms == 4_000


def test_a_policy_document_reads_back() -> None:
    found = parse_policy(policy_body(DEFAULT_POLICY), 5)
    assert msgspec.structs.replace(found, version=0) == DEFAULT_POLICY
    assert found.version == 5


def test_a_run_keeps_the_policy_it_was_started_under() -> None:
    stage = Stage()
    stage.do("prompt p1")
    stage.policy(1, leaseMs=3_000, renewMs=1_000)
    stage.do("claim w1")
    assert stage.do("wait 3000") == ["."], "the run has the lease of the defaults"
    stage.do("report w1 1 done:completed")
    stage.do("prompt p2")
    stage.do("claim w1")
    assert stage.do("wait 3000") == ["due:lease"]


# -- partition settings ---------------------------------------------------------------------------------------------


def test_partition_settings_bound_the_inboxes() -> None:
    stage = Stage()
    stage.rules, _ = admit_policy(stage.rules, policy(1, tenant_id=0, signalsPartitions=2))
    stage.do("prompt p1")
    assert stage.do("claim w1 inbox=2") == ["worker:no_inbox"]
    assert stage.do("claim w1 inbox=1") == ["+run.leased", "view:running"]


def test_settings_may_change_and_only_forwards() -> None:
    rules, _ = admit_policy(Rules.start(KEYS), policy(1, tenant_id=0, signalsPartitions=2))
    rules, _ = admit_policy(rules, policy(2, tenant_id=0, signalsPartitions=4))
    assert rules.settings.signals_partitions == 4
    assert refused(rules, policy(2, tenant_id=0, signalsPartitions=8)) == "policy_not_newer"


@pytest.mark.parametrize(
    "members", [{"protocol": -1}, {"signalsPartitions": 0}, {"signalsPartitions": 10**6}, {"leaseMs": 3_000}]
)
def test_settings_that_cannot_hold(members: dict[str, Any]) -> None:
    assert refused(Rules.start(KEYS), policy(1, tenant_id=0, **members)) == "policy_invalid"


def test_a_protocol_version_that_is_not_known_stops_the_partition() -> None:
    record = policy(1, tenant_id=0, protocol=1)
    with pytest.raises(Fatal, match="protocol version 1"):
        admit_policy(Rules.start(KEYS), record)
    with pytest.raises(Fatal, match="protocol version 1"):
        Rules.start(KEYS).restored({b"p/0/1": codec.encode_state(0, 1, record.body)})


def test_state_records_that_are_not_known_stop_the_partition() -> None:
    with pytest.raises(Fatal, match="state version 2"):
        Rules.start(KEYS).restored({b"p/7/1": codec.encode_state(0, 2, b"{}")})
    with pytest.raises(Fatal, match="version 9"):
        Session.load(7, "s", {b"s/7/s": codec.encode_state(0, 9, b"")})
    with pytest.raises(Fatal):
        Session.load(7, "s", {b"s/7/s": b"\0\0\0\0\xff"})


# -- attribution ----------------------------------------------------------------------------------------------------

INPUT = Input(
    input_id="i1", issued_at_ms=1, tenant_id=7, user_id=1, session_id="session-42", mode="prompt", source="ui",
    content=Content(data=b"x"),
)  # fmt: skip
KEY = b"session-42"
HERE = partition_of(KEY, 12)
HEADERS = [("ce_id", b"i1"), ("ce_type", b"onepen.input"), ("traceparent", b"00-x")]


def unattributed(record: Any, key: bytes | None, headers: Any = (), partition: int = HERE) -> str:
    with pytest.raises(Poison) as caught:
        attribute(record, key, headers, partition, 12)
    return caught.value.reason


def test_key_partition_body_and_headers_agree() -> None:
    attribute(INPUT, KEY, HEADERS, HERE, 12)
    attribute(INPUT, KEY, [], HERE, 12)


@pytest.mark.parametrize("key", [None, b"", b" ", b"session-43", b"Session-42", b"7/session-42", b"session-42\0"])
def test_a_record_under_another_key(key: bytes | None) -> None:
    assert unattributed(INPUT, key) == "wrong_key"


def test_a_record_on_another_partition() -> None:
    for partition in range(12):
        if partition != HERE:
            assert unattributed(INPUT, KEY, partition=partition) == "wrong_partition"


@pytest.mark.parametrize("value", [b"i2", b"", None, b"i1 "])
def test_a_header_that_names_another_input(value: bytes | None) -> None:
    assert unattributed(INPUT, KEY, [("ce_id", value)]) == "header_mismatch"
    assert unattributed(INPUT, KEY, [("ce_id", b"i1"), ("ce_id", value)]) == "header_mismatch"


def test_a_header_that_names_another_kind_of_record() -> None:
    assert unattributed(INPUT, KEY, [("ce_type", b"onepen.policy")]) == "header_mismatch"


@pytest.mark.parametrize("tenant_id", [0, -1, -(2**63)])
def test_a_tenant_that_cannot_be(tenant_id: int) -> None:
    assert unattributed(msgspec.structs.replace(INPUT, tenant_id=tenant_id), KEY) == "bad_tenant"


@pytest.mark.parametrize("session_id", ["", " ", "a b", "é", "x" * 129, "a\0"])
def test_a_session_id_that_is_none(session_id: str) -> None:
    record = msgspec.structs.replace(INPUT, session_id=session_id)
    assert unattributed(record, session_id.encode()) == "bad_session_id"


def test_worker_records_and_timers_are_attributed_alike() -> None:
    renew = Renew(**Stage().worker_head("w", {"run": "r1", "g": "1"}), no=1)
    timer = Timer(tenant_id=7, session_id="session-42", kind="run", run_id="", generation=0, subject="", deadline_ms=0)
    for record in (renew, timer):
        attribute(record, KEY, [], HERE, 12)
        assert unattributed(record, b"other") == "wrong_key"
        assert unattributed(record, KEY, partition=(HERE + 1) % 12) == "wrong_partition"


def test_a_policy_record_is_exempt_from_the_key_check() -> None:
    for partition in range(12):
        attribute(policy(1), b"policy", [], partition, 12)


def test_a_record_of_another_session_is_never_decided() -> None:
    stage = Stage()
    for members in ({"tenant_id": 8}, {"session_id": "session-43"}):
        with pytest.raises(AssertionError, match="another"):
            stage.decide(msgspec.structs.replace(stage.input("prompt", "p1"), **members))


# -- keys of the state topic ----------------------------------------------------------------------------------------

IDS = st.text(
    alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=12
) | st.sampled_from(["%", "/", "%2F", "%25", "a/b", "%252F", "//", "s/1/x"])


@settings(max_examples=200)
@given(tenant_id=st.integers(1, 2**63 - 1), session_id=IDS, name=IDS)
def test_a_key_names_its_session_whatever_the_ids(tenant_id: int, session_id: str, name: str) -> None:
    keys = [state_keys.head_key(tenant_id, session_id)]
    keys += [state_keys.prefix(kind, tenant_id, session_id) + name.encode() for kind in ("i", "a", "b")]
    for key in keys:
        assert state_keys.session_of(key) == (tenant_id, session_id)
        assert state_keys.policy_of(key) is None
    assert state_keys.unescaped(state_keys.escaped(session_id)) == session_id


@settings(max_examples=200)
@given(one=st.tuples(IDS, IDS), other=st.tuples(IDS, IDS))
def test_no_two_pairs_make_the_same_name(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (state_keys.pair(*one) == state_keys.pair(*other)) == (one == other)


def test_other_keys_are_nobodys() -> None:
    assert state_keys.session_of(b"p/7/1") is None
    assert state_keys.session_of(state_keys.PARTITION_KEY) is None
    assert state_keys.policy_of(b"p/7/1") == (7, 1)


# -- token keys -----------------------------------------------------------------------------------------------------


def test_tokens_name_their_key_and_differ_by_it() -> None:
    one, two = Keys("k1", b"a"), Keys("k1", b"b")
    assert one.token(1, "s", "r", 1).startswith("k1.")
    assert one.token(1, "s", "r", 1) != two.token(1, "s", "r", 1)
    assert one.valid(one.token(1, "s", "r", 1), 1, "s", "r", 1)
    assert not one.valid(two.token(1, "s", "r", 1), 1, "s", "r", 1)
