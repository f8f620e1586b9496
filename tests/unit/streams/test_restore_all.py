"""Reading many records at once leaves what reading one after the other leaves, whatever comes in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onepen.processors.state_keys import PARTITION_KEY, head_key, head_of, policy_key, prefix
from onepen.schemas import codec
from onepen.schemas.topics import Topics
from onepen.streams.store import Mark, PartitionStore
from tests.conformance.counting import Counter, CountingCore

SESSIONS = [(1, "a"), (1, "a/b%"), (12, "s")]
KEYS = [
    key for owner in SESSIONS for key in (head_key(*owner), prefix("i", *owner) + b"1", prefix("a", *owner) + b"n/1")
]
VALUES = st.one_of(st.none(), st.builds(codec.encode_state, st.sampled_from([0, 0, 7, 900]), st.just(1), st.just(b"1")))
CHANGES = st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=40)


class Core(CountingCore):
    def active_head(self, value: bytes) -> bool:
        return codec.decode_state(value)[0] == 7


def store() -> PartitionStore[Counter]:
    return PartitionStore(0, Core(Topics("t")))


def seen(target: PartitionStore[Counter]) -> tuple[object, ...]:
    """All that can be told apart; the deadlines by what is asked about when all of them have passed."""
    asked: list[object] = []

    def due_of(key: tuple[int, str], now_ms: int) -> tuple[tuple[()], int]:
        asked.append((key, now_ms))
        return (), 0

    left = len(target.timers)
    for now_ms in (8, 1_000):
        target.timers.clock.seen(now_ms, 0)
        target.timers.take(0, 0, 100, due_of)
    return dict(target.records()), target.sessions, target.active, left, sorted(map(repr, asked))


@given(CHANGES, st.integers(1, 7))
def test_all_at_once_is_one_after_the_other(changes: list[tuple[bytes, bytes | None]], step: int) -> None:
    one, many = store(), store()
    for key, value in changes:
        one.restore(key, value)
    given_ = [(0, key, value) for key, value in changes]
    for place in range(0, len(given_), step):
        many.restore_all(given_[place : place + step])
    assert seen(one) == seen(many)
    last = dict(changes)
    assert dict(one.records()) == {key: value for key, value in last.items() if value is not None}
    for owner in SESSIONS:
        head = last.get(head_key(*owner))
        assert (owner in many.active) == (head is not None and codec.decode_state(head)[0] == 7)


def test_restored_means_decoded_again() -> None:
    target, head = store(), head_key(1, "a")
    target.restore(head, codec.encode_state(0, 1, b"1"))
    assert target.load((1, "a")).session.total == 1
    target.restore_all([(0, head, codec.encode_state(0, 1, b"2")), (0, PARTITION_KEY, mark().encode())])
    assert target.load((1, "a")).session.total == 2
    assert target.mark == mark()


def mark() -> Mark:
    return Mark(1, 3, 0, 4, "s0", ("a", "b"))


@given(st.integers(0, 10**12), st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1))
def test_the_head_of_a_record_is_found_in_its_key(tenant: int, session: str) -> None:
    head = head_key(tenant, session)
    assert head_of(head) == head
    for kind in "iabcrq":
        assert head_of(prefix(kind, tenant, session) + b"x/y") == head
    assert head_of(PARTITION_KEY) is None
    assert head_of(policy_key(tenant, 1)) is None
