"""The bounded worlds that are searched. Each names what may happen; what must come of it is judged elsewhere.

Records are never on a simulated way here: whatever somebody could have sent may arrive in any state, again and late,
under the current generation and under the one before, from the owner and from others. That is every reordering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.schemas import ids
from onepen.schemas.inputs import Content, Input
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.statuses import RunStatus
from onepen.schemas.worker_records import Claim, Release, Renew, Report
from tests.search.explore import Move, Node, World
from tests.unit.processors.stage import report_event

TENANT = 7
KEYS = Keys("k1", b"a secret of the search")
START_MS = 1_790_000_000_000
SHORT: dict[str, Any] = {
    "offerMs": 150, "offerMaxMs": 150, "leaseMs": 300, "renewMs": 100, "permitMs": 150, "cancelMs": 300,
    "runTimeoutMs": 300, "approvalMs": 150, "compactionMs": 150, "maxAttempts": 2, "noWorkerOffers": 2,
    "progressRenewals": 3,
}  # fmt: skip
ONE_LEASE: dict[str, Any] = {
    "offerMs": 300, "offerMaxMs": 300, "leaseMs": 300, "runTimeoutMs": 300, "maxAttempts": 1, "noWorkerOffers": 1,
}  # fmt: skip
"""One lease and one offer per run, all deadlines after the same time: for worlds that are about something else."""

NAMED: dict[str, Any] = {"action_key": "k1", "action_name": "mail", "args_digest": "d1"}
ABOUT_K1 = (
    "act+k1,approval", "act+k1", "act+k1,digest=d2", "act+k1,resolution=reconciled_not_performed", "act-k1:ok",
)  # fmt: skip


def rules_of(**members: Any) -> Rules:
    body = msgspec.json.encode(SHORT | members)
    rules, _ = admit_policy(Rules.start(KEYS), PolicyRecord(tenant_id=TENANT, version=1, body=body))
    return rules


def world(
    name: str, moves: Callable[[Node], Iterator[Move]], workers: tuple[str, ...], sessions: tuple[str, ...] = ("s",),
    quantum_ms: int = 150, **policy: Any,
) -> World:  # fmt: skip
    start = Node(tuple(Session.load(TENANT, one, {}) for one in sessions), START_MS)
    return World(name, rules_of(**policy), start, moves, workers, quantum_ms)


# -- what somebody may send -------------------------------------------------------------------------------------------


def client(node: Node, mode: str, input_id: str, index: int = 0, **members: Any) -> Iterator[Move]:
    """An input, once; afterwards the same again, which must do nothing."""
    session = node.sessions[index]
    content = None if mode in ("abort", "answer", "erase") or "retry_of" in members else Content(data=b"text")
    record = Input(
        input_id=input_id, issued_at_ms=START_MS, tenant_id=TENANT, user_id=1, session_id=session.session_id, mode=mode,
        source="ui", content=content, **members,
    )  # fmt: skip
    if input_id in node.sent:
        yield Move(f"{input_id} again", record, index, noop=True)
    else:
        yield Move(input_id, record, index, sends=input_id)


def run_id(number: int, session_id: str = "s") -> str:
    return ids.run_id(TENANT, session_id, number)


def _head(session: Session, worker: str, run: str, generation: int) -> dict[str, Any]:
    token = KEYS.token(TENANT, session.session_id, run, generation)
    return {
        "tenant_id": TENANT, "session_id": session.session_id, "run_id": run, "generation": generation, "token": token,
        "worker_id": worker, "inbox": int(worker[1:]),
    }  # fmt: skip


def holder(node: Node, workers: tuple[str, ...], reports: tuple[str, ...], index: int = 0,
           *, renews: bool = True, releases: bool = False, strays: bool = True) -> Iterator[Move]:  # fmt: skip
    """What the workers may send: claims, renewals, reports, a release; and what nobody may send any more."""
    session = node.sessions[index]
    run = session.head.run
    if run is None:
        return
    for worker in workers:
        head = _head(session, worker, run.run_id, run.generation)
        owns = run.owner == worker
        if not run.owner:
            cannot = run.status is not RunStatus.RUNNING
            yield Move(f"{worker} claims", Claim(**head), index, noop=cannot)
        if strays and (run.owner or run.status is RunStatus.CANCELLING) and not owns:
            stray = Report(**head, no=run.report_no + 1, events=(report_event("x.stray:n"),))
            yield Move(f"{worker} reports without right", stray, index, noop=True)
        if strays and run.generation > 1:
            yield from _late(session, worker, run.run_id, run.generation - 1, index)
    if run.owner:
        yield from _owner(node, index, _head(session, run.owner, run.run_id, run.generation), reports, renews, releases)


def _late(session: Session, worker: str, run: str, generation: int, index: int) -> Iterator[Move]:
    head = _head(session, worker, run, generation)
    yield Move(f"{worker} claims late", Claim(**head), index, noop=True)
    yield Move(f"{worker} renews late", Renew(**head, no=9), index, noop=True)
    yield Move(f"{worker} ends late", Report(**head, no=1, events=(report_event("done:completed"),)), index, noop=True)


def _owner(
    node: Node, index: int, head: dict[str, Any], reports: tuple[str, ...], renews: bool, releases: bool
) -> Iterator[Move]:
    run = node.sessions[index].head.run
    assert run is not None
    if renews:
        yield Move("renews", Renew(**head, no=run.renewal_no + 1), index)
    if releases and "released" not in node.sent:
        yield Move("releases", Release(**head, reason="shutdown"), index, sends="released")
    for words in reports:
        events = tuple(report_event(word) for word in words.split())
        yield Move(words, Report(**head, no=run.report_no + 1, events=events), index)
        if run.report_no:
            yield Move(f"{words}, with a gap", Report(**head, no=run.report_no + 2, events=events), index, noop=True)


# -- the worlds -------------------------------------------------------------------------------------------------------


def admission() -> World:
    """Prompts, a steer, an interrupt and an abort with all their repeats, and one worker: at most three runs."""

    reports = ("applied:s1", "done:completed")

    def moves(node: Node) -> Iterator[Move]:
        yield from client(node, "prompt", "p1")
        yield from client(node, "prompt", "p2", on_busy="interrupt")
        yield from client(node, "steer", "s1", if_missed="queue")
        yield from client(node, "abort", "a1", target_kind="run", target_id=run_id(1), scope="run_and_queue")
        yield from holder(node, ("w1",), reports, renews=False, strays=False)

    return world("admission", moves, ("w1",), quantum_ms=300, **ONE_LEASE)


def queue() -> World:
    """Follow-ups with a time of their own, a steer that is missed, and aborts of inputs whatever became of them."""

    reports = ("applied:s1", "done:completed")

    def moves(node: Node) -> Iterator[Move]:
        yield from client(node, "prompt", "p1")
        yield from client(node, "follow_up", "f1", ttl_ms=300)
        yield from client(node, "steer", "s1", if_missed="reject")
        yield from client(node, "abort", "a1", target_kind="input", target_id="f1")
        yield from client(node, "abort", "a2", target_kind="input", target_id="s1")
        yield from holder(node, ("w1",), reports, renews=False, strays=False)

    return world("queue", moves, ("w1",), quantum_ms=300, **ONE_LEASE)


def leases() -> World:
    """Two workers, claims, renewals, reports and releases reordered over generations, timers, an abort."""

    reports = ("tool+c1", "tool-c1:ok", "done:completed")

    def moves(node: Node) -> Iterator[Move]:
        yield from client(node, "prompt", "p1")
        yield from client(node, "abort", "a1", target_kind="active")
        yield from holder(node, ("w1", "w2"), reports, releases=True)

    return world("leases", moves, ("w1", "w2"), quantum_ms=100, offerMs=100, permitMs=100, runTimeoutMs=400)


def actions() -> World:
    """One key asked for with two digests, its approval, takeovers, a resolution, a cancel."""

    def moves(node: Node) -> Iterator[Move]:
        yield from client(node, "prompt", "p1")
        yield from client(node, "answer", "n1", decision="approve", **NAMED)
        yield from client(node, "abort", "a1", target_kind="active")
        yield from holder(node, ("w1",), ABOUT_K1, renews=False)

    return world("actions", moves, ("w1",), noWorkerOffers=1)


def actions_settled() -> World:
    """The same with actions that were not performed, runs that fail, and a person who settles what is in doubt."""

    reports = (*ABOUT_K1, "act-k1:not_performed", "done:failed")

    def moves(node: Node) -> Iterator[Move]:
        yield from client(node, "prompt", "p1")
        yield from client(node, "answer", "n1", decision="approve", **NAMED)
        yield from client(node, "answer", "n2", decision="not_performed", **NAMED)
        yield from client(node, "abort", "a1", target_kind="active")
        yield from holder(node, ("w1",), reports, renews=False)

    return world("actions settled", moves, ("w1",))


def compaction() -> World:
    """Two compactions, a steer that waits for them, late ends, a takeover, a cancel."""

    reports = (
        "compact+z1", "compact-z1:ok", "compact+z2", "compact-z2:failed", "applied:s1", "done:completed", "done:failed",
    )  # fmt: skip

    def moves(node: Node) -> Iterator[Move]:
        yield from client(node, "prompt", "p1")
        yield from client(node, "steer", "s1", if_missed="reject")
        yield from client(node, "abort", "a1", target_kind="active")
        yield from holder(node, ("w1",), reports, renews=False)

    return world("compaction", moves, ("w1",))


def retry_and_erase() -> World:
    """A run that ends badly, its retry, a doubt that outlives it, and an erase at any time."""

    reports = (
        "act+k1", "act+k1,resolution=reconciled_not_performed", "act-k1:ok", "done:completed", "done:failed,retryable",
    )  # fmt: skip

    def moves(node: Node) -> Iterator[Move]:
        yield from client(node, "prompt", "p1")
        yield from client(node, "prompt", "p2", retry_of=run_id(1))
        yield from client(node, "follow_up", "f1")
        yield from client(node, "erase", "e1")
        yield from holder(node, ("w1",), reports, renews=False)

    return world("retry and erase", moves, ("w1",), quantum_ms=300, **ONE_LEASE)


def children() -> World:
    """A parent, one child in another session, and every order of their ends, refusals, aborts and deadlines."""

    of_parent = ("sub+c1", "done:completed", "done:failed")
    of_child = ("done:completed",)

    def moves(node: Node) -> Iterator[Move]:
        yield from client(node, "prompt", "p1")
        yield from client(node, "abort", "a1", target_kind="active")
        yield from client(node, "prompt", "q1", 1)
        yield from holder(node, ("w1",), of_parent, renews=False, strays=False)
        yield from holder(node, ("w1",), of_child, 1, renews=False, strays=False)
        if node.on_the_way:
            record = node.on_the_way[0]
            to = node.of(record.session_id)
            yield Move(f"{type(record).__name__.lower()} arrives at {record.session_id}", record, to, delivers=True,
                       by_time=True)  # fmt: skip

    return world("children", moves, ("w1",), ("s", "child"), quantum_ms=300, **ONE_LEASE)


ALL: dict[str, Callable[[], World]] = {
    "admission": admission,
    "queue": queue,
    "leases": leases,
    "actions": actions,
    "actions settled": actions_settled,
    "compaction": compaction,
    "retry and erase": retry_and_erase,
    "children": children,
}
