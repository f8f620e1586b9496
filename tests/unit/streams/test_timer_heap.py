"""When a timer is appended: never early, offers and leases later by a length, repeated until consumed."""

from __future__ import annotations

from onepen.streams.core import DueTimer, SessionKey
from onepen.streams.timer_heap import REPEAT_MS, BrokerClock, TimerHeap

BASE_MS = 1_700_000_000_000
S: SessionKey = (1, "s")


class Heap:
    """A heap whose sessions have at most one deadline; times are relative to BASE_MS."""

    def __init__(self) -> None:
        self.heap = TimerHeap()
        self.armed: dict[SessionKey, tuple[int, int, bool]] = {}

    def arm(self, key: SessionKey, deadline_ms: int, length_ms: int = 0, *, offer: bool = False) -> None:
        self.armed[key] = (deadline_ms, length_ms, offer)
        self.heap.arm(key, BASE_MS + deadline_ms)

    def disarm(self, key: SessionKey) -> None:
        del self.armed[key]
        self.heap.arm(key, 0)

    def due(self, key: SessionKey, now_ms: int) -> tuple[list[DueTimer], int]:
        if key not in self.armed:
            return [], 0
        deadline_ms, length_ms, offer = self.armed[key]
        passed = BASE_MS + deadline_ms <= now_ms
        timer = DueTimer(b"%s@%d" % (key[1].encode(), deadline_ms), length_ms, offer)
        return [timer] if passed else [], BASE_MS + deadline_ms

    def take(self, mono_ms: float, *, unreachable_ms: float = 0.0, most: int = 500) -> list[bytes]:
        return [value for _, value in self.heap.take(mono_ms, unreachable_ms, most, self.due)]


def test_b28_broker_time_is_the_largest_record_time_plus_own_time_since() -> None:
    clock = BrokerClock()
    assert clock.now_ms(1_000) == 0, "nothing is known before the first record"
    clock.seen(BASE_MS, 1_000)
    assert clock.now_ms(1_500) == BASE_MS + 500
    clock.seen(BASE_MS + 100, 2_000)  # an older record, read late: says less
    assert clock.now_ms(2_000) == BASE_MS + 1_000
    clock.seen(BASE_MS + 5_000, 2_000)
    assert clock.now_ms(2_000) == BASE_MS + 5_000


def test_nothing_fires_before_a_record_was_seen() -> None:
    heap = Heap()
    heap.arm(S, 0)
    assert heap.take(1e9) == []
    assert heap.heap.next_wake_in_ms(1e9) is None


def test_a_plain_deadline_fires_when_it_has_passed_and_again_until_consumed() -> None:
    heap = Heap()
    heap.heap.clock.seen(BASE_MS, 0)
    heap.arm(S, 1_000)
    assert heap.take(999) == []
    assert heap.heap.next_wake_in_ms(999) == 1
    assert heap.take(1_000) == [b"s@1000"]
    assert heap.take(1_000 + REPEAT_MS - 1) == []
    assert heap.take(1_000 + REPEAT_MS) == [b"s@1000"]
    heap.disarm(S)
    assert heap.take(1_000 + 2 * REPEAT_MS) == []
    assert len(heap.heap) == 0


def test_a_session_that_changes_does_not_repeat_its_timer_early() -> None:
    heap = Heap()
    heap.heap.clock.seen(BASE_MS, 0)
    heap.arm(S, 1_000)
    assert heap.take(1_000) == [b"s@1000"]
    heap.arm(S, 1_000)  # another record of the session was decided; the deadline is still the same
    assert heap.take(1_100) == []
    heap.arm(S, 1_050)  # a new deadline is a new timer
    assert heap.take(1_200) == [b"s@1050"]


def test_an_offer_waits_its_full_length_from_publication() -> None:
    heap = Heap()
    heap.heap.clock.seen(BASE_MS, 0)
    heap.heap.taken_over(0)
    heap.arm(S, 100, 5_000, offer=True)  # decided from a backlog: its deadline has passed when it is published
    heap.heap.published(S, 3_000)
    assert heap.take(7_999) == []
    assert heap.take(8_001) == [b"s@100"]


def test_offers_and_leases_wait_one_length_after_a_takeover_and_after_an_outage() -> None:
    for offer in (True, False):
        heap = Heap()
        heap.heap.clock.seen(BASE_MS, 0)
        heap.heap.taken_over(2_000)
        heap.arm(S, 100, 5_000, offer=offer)
        assert heap.take(6_999) == []
        assert heap.take(7_001) == [b"s@100"]
        heap = Heap()
        heap.heap.clock.seen(BASE_MS, 0)
        heap.arm(S, 100, 5_000, offer=offer)
        assert heap.take(6_000, unreachable_ms=4_000) == []
        assert heap.take(9_001, unreachable_ms=4_000) == [b"s@100"]


def test_a_renewed_lease_does_not_fire() -> None:
    heap = Heap()
    heap.heap.clock.seen(BASE_MS, 0)
    for renewal in range(10):
        heap.arm(S, 3_000 + 1_000 * renewal, 3_000)
        assert heap.take(1_000 * renewal) == []
    assert heap.take(12_000 - 1) == []
    assert heap.take(12_000) == [b"s@12000"]


def test_b29_a_turn_is_bounded_and_the_rest_comes_next() -> None:
    heap = Heap()
    heap.heap.clock.seen(BASE_MS, 0)
    for n in range(1_200):
        heap.arm((1, f"s{n}"), n % 7)
    turns = [len(heap.take(10, most=500)) for _ in range(4)]
    assert turns == [500, 500, 200, 0]


def test_replaced_deadlines_do_not_pile_up() -> None:
    heap = Heap()
    for n in range(20_000):
        heap.arm(S, 1_000 + n)
    assert len(heap.heap._heap) < 2_000


def test_a_timer_that_waits_in_a_backlog_is_not_repeated() -> None:
    heap = Heap()
    heap.heap.clock.seen(BASE_MS, 0)
    heap.arm(S, 1_000)
    assert heap.take(1_000) == [b"s@1000"]
    for mono_ms in range(2_000, 60_000, 1_000):
        heap.heap.consumed(BASE_MS + mono_ms // 100, mono_ms)  # a hundred times slower than the records come
        assert heap.take(mono_ms) == []
    heap.heap.consumed(BASE_MS + 10_000, 60_000)  # it was passed, and the state still wants it
    assert heap.take(62_000) == [b"s@1000"]


def test_what_is_on_its_way_is_known_until_it_was_consumed_or_must_be_lost() -> None:
    heap = Heap()
    heap.heap.clock.seen(BASE_MS, 0)
    keys: list[SessionKey] = [(1, f"s{n}") for n in range(10)]
    for key in keys:
        heap.arm(key, 1_000)
    assert heap.heap.awaited(1_000) == 0
    assert len(heap.take(1_000, most=8)) == 8
    assert heap.heap.awaited(1_000) == 8
    for key in keys[:3]:
        heap.disarm(key)  # its timer was decided
    assert heap.heap.awaited(1_001) == 5
    heap.heap.consumed(BASE_MS + 500, 1_000 + REPEAT_MS - 1)
    assert heap.heap.awaited(1_000 + REPEAT_MS) == 5, "still behind what is being decided"
    assert heap.heap.awaited(1_000 + 2 * REPEAT_MS) == 0, "nothing is consumed any more: they are lost"
    assert sorted(heap.take(1_000 + 2 * REPEAT_MS)) == sorted(b"s%d@1000" % n for n in range(3, 10))


def test_who_has_to_wait_counts_for_the_bound_of_a_turn() -> None:
    """After a takeover all leases wait one length more: looking at them is shared out among turns as well."""
    heap = Heap()
    heap.heap.taken_over(0)
    heap.heap.clock.seen(BASE_MS + 5_000, 0)
    looked: list[SessionKey] = []
    for n in range(100):
        heap.arm((1, f"s{n}"), 1_000, 30_000)

    def due(key: SessionKey, now_ms: int) -> tuple[list[DueTimer], int]:
        looked.append(key)
        return heap.due(key, now_ms)

    for turn in range(1, 6):
        assert heap.heap.take(turn, 0.0, 20, due) == []
        assert len(looked) == 20 * turn
    assert len(set(looked)) == 100
