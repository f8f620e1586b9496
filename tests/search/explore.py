"""Breadth-first search over the real `decide` and `evolve`: every state a bounded world can reach, by every order.

A world offers moves; each move hands one record to the core or lets time pass. Every transition is judged (`Monitor`
and the step checks), every new state by all invariants of a session; the graph, once its frontier is exhausted, shows
that every run can still end, by timers alone. What is violated comes with its shortest trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import orjson

from onepen.processors import event_invariants, invariants, timers
from onepen.processors.decide import Command, Decision, Moment, decide
from onepen.processors.evolve import evolve
from onepen.processors.rules import Rules
from onepen.processors.session import Session
from onepen.schemas import events as ev
from onepen.schemas.inputs import Input
from onepen.schemas.statuses import RunStatus, TimerKind
from tests.property.world import of_the_log
from tests.search.canonical import canonical


class Violation(AssertionError):
    """What does not hold, and the shortest way to it."""

    def __init__(self, what: str, trace: Sequence[str]) -> None:
        super().__init__(f"{what}, after {len(trace)} steps: " + " / ".join(trace))
        self.what = what
        self.trace = list(trace)


@dataclass(frozen=True)
class Node:
    """One state of a world: its sessions, the time, what was sent, what is on its way, and what a monitor remembers."""

    sessions: tuple[Session, ...]
    now_ms: int
    sent: tuple[str, ...] = ()
    on_the_way: tuple[Command, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    def of(self, session_id: str) -> int:
        return next(i for i, session in enumerate(self.sessions) if session.session_id == session_id)


@dataclass(frozen=True)
class Move:
    """One step: a record for session `index`, or (no record) a quantum of time. `noop`: it must not do anything."""

    label: str
    command: Command | None = None
    index: int = 0
    sends: str = ""
    delivers: bool = False
    noop: bool = False
    by_time: bool = False


@dataclass(frozen=True)
class World:
    """A named, bounded world. `moves` lists what may happen in a node, without time and timers."""

    name: str
    rules: Rules
    start: Node
    moves: Callable[[Node], Iterator[Move]]
    workers: tuple[str, ...]
    quantum_ms: int
    """How much time passes at once: it divides every length of the world's policy."""


@dataclass
class Found:
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seen: set[str] = field(default_factory=set)


Check = Callable[[Node, Move, Decision | None, Node], str | None]
_SESSION = [check for check in invariants.SESSION if check is not invariants.head_size_bounded]


def explore(world: World, checks: Sequence[Check] = (), limit: int = 200_000) -> Found:
    """Exhaust the frontier; raises `Violation`. `checks` judge each transition in addition."""
    found = Found()
    numbers: dict[str, int] = {}
    parents: list[tuple[int, str]] = []
    at_rest: list[int] = []
    back_in_time: list[list[int]] = []

    def trace(number: int, last: str) -> list[str]:
        labels = [last]
        while number > 0:
            number, label = parents[number]
            labels.append(label)
        return labels[::-1]

    def enter(node: Node, name: str, parent: int, label: str) -> int:
        number = numbers[name] = len(numbers)
        parents.append((parent, label))
        back_in_time.append([])
        if all(session.head.run is None for session in node.sessions) and not node.on_the_way:
            at_rest.append(number)
        for session in node.sessions:
            for check in _SESSION:
                if not check(session):
                    raise Violation(check.__name__, trace(parent, label) if number else [])
        return number

    first = _name(world, world.start)
    frontier = deque([(world.start, enter(world.start, first, -1, ""), 0)])
    names = [first]
    while frontier:
        node, number, depth = frontier.popleft()
        found.depth = max(found.depth, depth)
        for move in (*world.moves(node), *time_and_timers(node)):
            try:
                after, decision = take(world, node, move)
                wrong = next((w for check in (_step, *checks) if (w := check(node, move, decision, after))), None)
            except Violation:
                raise
            except Exception as error:
                raise Violation(f"{type(error).__name__}: {error}", trace(number, move.label)) from error
            if wrong:
                raise Violation(wrong, trace(number, move.label))
            found.transitions += 1
            if decision is not None:
                found.seen.update(one.type for one in decision.events)
                found.seen.update(f"{r.verdict or r.disposition or ''}:{r.reason or ''}" for r in decision.receipts)
            name = _name(world, after)
            known = numbers.get(name)
            if move.noop and name != names[number]:
                raise Violation("a record that must do nothing did something", trace(number, move.label))
            if known is None:
                known = enter(after, name, number, move.label)
                names.append(name)
                if len(numbers) > limit:
                    raise AssertionError(f"{world.name}: more than {limit} states")
                frontier.append((after, known, depth + 1))
            if move.by_time and known != number:
                back_in_time[known].append(number)
    found.states = len(numbers)
    _all_can_end(at_rest, back_in_time, trace)
    print(f"{world.name}: {found.states} states, {found.transitions} transitions, depth {found.depth}")
    return found


def _all_can_end(at_rest: list[int], back_in_time: list[list[int]], trace: Callable[[int, str], list[str]]) -> None:
    """From every state time alone (timers, and what is on its way) leads to a state without an active run."""
    good = set(at_rest)
    queue = deque(at_rest)
    while queue:
        for before in back_in_time[queue.popleft()]:
            if before not in good:
                good.add(before)
                queue.append(before)
    stuck = [number for number in range(len(back_in_time)) if number not in good]
    if stuck:
        raise Violation("a run that cannot end by timers alone", trace(stuck[0], "(stuck)"))


def _name(world: World, node: Node) -> str:
    beside = (node.sent, [_short(record) for record in node.on_the_way], node.facts)
    return canonical(node.sessions, node.now_ms, world.workers, beside)


def _short(record: Any) -> tuple[str, ...]:
    if isinstance(record, Input):
        left = record.parent.cancel_deadline_ms if record.parent is not None else 0
        return ("input", record.session_id, record.mode, record.input_id, str(bool(left)))
    return ("notice", record.session_id, record.call_id, record.status)


def take(world: World, node: Node, move: Move) -> tuple[Node, Decision | None]:
    """Carry out one move."""
    if move.command is None:
        return replace(node, now_ms=node.now_ms + world.quantum_ms), None
    session = node.sessions[move.index]
    decision = decide(world.rules, session, move.command, Moment(1, 1_000, node.now_ms))
    sessions = tuple(decision.session if i == move.index else one for i, one in enumerate(node.sessions))
    on_the_way = node.on_the_way[1:] if move.delivers else node.on_the_way
    own = {session.session_id for session in node.sessions}
    on_the_way += tuple(record for record in decision.forwards if record.session_id in own)
    return (
        Node(
            sessions=sessions,
            now_ms=node.now_ms,
            sent=tuple(sorted((*node.sent, move.sends))) if move.sends else node.sent,
            on_the_way=on_the_way,
            facts=_facts(node, move, decision),
        ),
        decision,
    )


def time_and_timers(node: Node) -> Iterator[Move]:
    """Time passes, due timers are consumed in any order, and foreign ones come whenever they like."""
    yield Move("time passes", by_time=True)
    for index, session in enumerate(node.sessions):
        for due in timers.armed(session):
            timer = due.timer
            if timer.kind == TimerKind.FORGET:
                continue
            who = f"{timer.kind} timer of {session.session_id}"
            if timer.deadline_ms <= node.now_ms:
                yield Move(who, timer, index, by_time=True)
            else:
                yield Move(f"early {who}", timer, index, noop=True)
        if session.head.run is not None:
            yield from _foreign_timers(index, session, node.now_ms)


def _foreign_timers(index: int, session: Session, now_ms: int) -> Iterator[Move]:
    for due in list(timers.armed(session)):
        timer = due.timer
        if not timer.run_id or timer.deadline_ms > now_ms:
            continue
        yield Move("older timer", msgspec.structs.replace(timer, generation=timer.generation - 1), index, noop=True)
        yield Move("timer of another run", msgspec.structs.replace(timer, run_id="run-other"), index, noop=True)


# -- what is judged in every transition -------------------------------------------------------------------------------

_BANNED = {
    ev.MODEL_STARTED, ev.TOOL_STARTED, ev.ACTION_REQUESTED, ev.ACTION_PERMITTED, ev.INPUT_APPLIED, ev.RUN_LEASED,
    ev.INPUT_STEERED, ev.APPROVAL_REQUESTED, ev.APPROVAL_ANSWERED, ev.SUBTASK_STARTED, ev.COMPACTION_STARTED,
}  # fmt: skip


def _step(node: Node, move: Move, decision: Decision | None, after: Node) -> str | None:
    if decision is None or move.command is None:
        return None
    before = node.sessions[move.index]
    if move.noop and (decision.events or decision.offers or decision.forwards):
        return "a record that must do nothing did something"
    if isinstance(move.command, Input):
        verdicts = [r for r in decision.receipts if r.verdict is not None]
        if len(verdicts) != 1:
            return f"{len(verdicts)} verdicts for one input"
    if move.noop:
        return None  # the whole state is compared
    return _fold_law(before, decision) or _barrier(before, decision) or _steers(before, decision)


def _fold_law(before: Session, decision: Decision) -> str | None:
    """The state before, with the events applied, is the state after, as far as the log tells it."""
    folded = before.fork()
    for event in decision.events:
        evolve(folded, event, orjson.loads(event.payload))
    now = decision.session
    if (folded.head.run is None) != (now.head.run is None):
        return "the events do not tell whether a run is active"
    if now.head.run is not None and of_the_log(folded) != of_the_log(now):
        return f"folding the events gives another run: {of_the_log(folded)} / {of_the_log(now)}"
    return None


def _barrier(before: Session, decision: Decision) -> str | None:
    run = before.head.run
    if run is not None and run.status is RunStatus.CANCELLING:
        late = [e.type for e in decision.events if e.run_id == run.run_id and e.type in _BANNED]
        if late:
            return f"{late[0]} behind a cancel"
    if not event_invariants.permits_are_short(decision.events):
        return "a permit that is not for its holder, or is over"
    return None


def _steers(before: Session, decision: Decision) -> str | None:
    """A steer starts a run only when it may, and only after it was carried over."""
    steers = {entry.input_id: entry.if_missed for entry in before.head.pending if entry.for_run}
    told = {orjson.loads(e.payload)["inputId"] for e in decision.events if e.type == ev.INPUT_CARRIED_OVER}
    for event in decision.events:
        if event.type == ev.RUN_STARTED:
            input_id = orjson.loads(event.payload)["inputId"]
            if steers.get(input_id) == "reject" or (input_id in steers and input_id not in told):
                return "a run that its sender forbade"
    return None


def _facts(node: Node, move: Move, decision: Decision) -> tuple[tuple[str, str], ...]:
    """Remember of each action key whether its effect may have happened, by events and receipts alone."""
    facts = dict(node.facts)
    for event in decision.events:
        if event.type not in (ev.ACTION_PERMITTED, ev.ACTION_FINISHED, ev.ACTION_REQUESTED):
            continue
        payload = orjson.loads(event.payload)
        key = payload["actionKey"]
        if event.type == ev.ACTION_REQUESTED and payload.get("resolution"):
            facts.pop(key, None)
        elif event.type == ev.ACTION_FINISHED:
            if payload["status"] == "not_performed":
                facts.pop(key, None)
            else:
                facts[key] = "done"
        elif event.type == ev.ACTION_PERMITTED:
            assert key not in facts, f"a second permit for {key}, whose effect is {facts[key]}"
            facts[key] = "possible"
    for receipt in decision.receipts:
        if receipt.kind == "action":
            detail = orjson.loads(receipt.detail or b"{}")
            if detail["status"] == "not_performed":
                facts.pop(detail["actionKey"], None)
            else:
                facts[detail["actionKey"]] = "done"
    return tuple(sorted(facts.items()))
