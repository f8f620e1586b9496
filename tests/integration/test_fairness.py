"""Live inputs beside a backlog on another partition of the process, and a session that floods its own partition."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infra.bench.backlog import Backlog, names_of
from infra.bench.fairness import DECIDED
from infra.bench.live import Resident, living, metrics, ready
from infra.bench.timers import NOT_COMMITTED
from onepen.schemas import codec
from onepen.schemas.limits import PENDING_MAX, REMEMBERED_MAX
from onepen.schemas.receipts import Receipt
from onepen.streams.ports import free_port
from tests.faults.outside import watch
from tests.integration.engine_world import PARTITIONS, EngineWorld

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

BUSY, QUIET = 0, 1
LIVE_PER_S = 10
GOAL = 80
AHEAD = 120_000
WAIT_S = 1.0
TURNS = 12
"""99 of 100 live inputs wait WAIT_S at most (at rest: half of it), or for so many transactions on a machine that others
use as well; half of them a third of it. Behind what librdkafka fetches ahead they would wait for 30 and more."""
GROWTH_KIB = 48 * 1024


class Watched:
    """A processor with a backlog, and what was seen of it."""

    def __init__(self, port: int, pid: int) -> None:
        self._port = port
        self._resident = Resident(pid)
        self._decided: list[float] = []

    def decided(self) -> float:
        self._resident.look()
        self._decided.append(metrics(self._port).get(DECIDED, 0.0))
        return self._decided[-1]

    def growth_kib(self, from_decided: float) -> int:
        """By how much it has grown since so many inputs were decided."""
        later = [kib for kib, done in zip(self._resident.kib, self._decided, strict=True) if done >= from_decided]
        return max(later) - later[0]

    def committed(self) -> float:
        """Transactions so far, all of them committed."""
        seen = metrics(self._port)
        assert not any(seen[name] for name in NOT_COMMITTED)
        return seen["onepen_transactions_total.committed"]


@contextmanager
def working(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    port = free_port()
    monkeypatch.setenv("ONEPEN_METRICS_PORT", str(port))
    with world.process("s0") as process:
        watch(lambda: ready(port), "a processor", 60)
        yield Watched(port, process.pid)


def waits_beside(world: EngineWorld, seen: Watched, backlog: Backlog) -> int:
    """GOAL live inputs on the quiet partition while the backlog is continued, however fast it is worked off.

    How many inputs they were in all, with the aborts behind them.
    """
    began, before = time.monotonic(), seen.committed()
    with living(world.bootstrap, world.topics, PARTITIONS, 2, [QUIET], LIVE_PER_S) as live:
        watch(lambda: continued(backlog, seen) and live.seen >= GOAL, f"{GOAL} live inputs", 150)
        turn_s = (time.monotonic() - began) / (seen.committed() - before)
        waits = live.end()
    print(waits, f"a transaction in {turn_s:.3f} s", f"a backlog of {backlog.total}")
    limit_s = max(WAIT_S, TURNS * turn_s)
    assert waits.sent == waits.seen >= GOAL
    assert waits.p99 <= limit_s
    assert waits.p50 <= limit_s / 3
    return 2 * (waits.sent + 1)


def continued(backlog: Backlog, seen: Watched) -> bool:
    """AHEAD inputs at least lie before the processor: the backlog does not end before the live ones."""
    left = backlog.total - seen.decided()
    assert left > 0, "the backlog was worked off faster than it is written"
    if left < AHEAD:
        backlog.put(AHEAD)
    return True


def test_b54_a_backlog_of_many_sessions(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of(BUSY, PARTITIONS, 500)
    backlog = Backlog(world.bootstrap, world.topics.inputs, 1, BUSY, names, 10)
    backlog.put(AHEAD)
    with working(world, monkeypatch) as seen:
        waits_beside(world, seen, backlog)
        # Each session has sent its ten ids once by then: what comes are repeats, and only work.
        known = len(names) * 10
        watch(lambda: seen.decided() >= 3 * known, "a part of the repeats", 120)
        assert seen.growth_kib(known) < GROWTH_KIB
        assert seen.committed()


def test_b54_a_session_that_floods_its_partition(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its partition wait for what lies before them in the log, which is refused cheaply; nobody else."""
    noisy, neighbour = names_of(BUSY, PARTITIONS, 2)
    backlog = Backlog(world.bootstrap, world.topics.inputs, 1, BUSY, [noisy], 999_999)
    backlog.put(AHEAD)
    world.prompt(neighbour.decode(), "behind-the-flood", tenant_id=1)
    world.flush()
    with working(world, monkeypatch) as seen:
        beside = waits_beside(world, seen, backlog)
        flood = backlog.total
        watch(lambda: seen.decided() >= flood + 1 + beside, "the whole flood", 150)
        assert seen.growth_kib(REMEMBERED_MAX) < GROWTH_KIB
        assert seen.committed()
    receipts = [codec.decode_as(Receipt, r.value) for p, r in world.stored(world.topics.receipts) if p == BUSY]
    of = {name: Counter() for name in (noisy.decode(), neighbour.decode())}  # type: dict[str, Counter[str]]
    for receipt in receipts:
        if receipt.kind == "input" and receipt.verdict:
            of[receipt.session_id][receipt.reason or receipt.verdict] += 1
    assert sum(of[neighbour.decode()].values()) == 1
    noise = of[noisy.decode()]
    print(noise)
    assert sum(noise.values()) == flood
    accepted = flood - noise["queue_full"] - noise["too_many_inputs"]
    assert accepted == 1 + PENDING_MAX
    assert noise["queue_full"] == REMEMBERED_MAX - accepted
