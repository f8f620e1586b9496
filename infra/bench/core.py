"""What one input costs in the pure core, and in the codec beside it.

The mix, per run: one prompt, one claim, one renewal and eight reports of one event each, of which one asks for an
action, one ends it and one is the final. The sessions are interleaved in batches, as an engine meets them; each phase
of a batch is timed call by call (median, p99) and as a whole in CPU time (what other processes took does not count):

    codec.decode  bytes of the inputs topic -> command
    core.judge    decide + evolve: command -> what follows, and the session afterwards
    core.seal     events encoded and chained
    codec.encode  receipts, offers and views -> bytes
    core.changes  next deadline and changed state records
    core.settled  the session with nothing left to write

    python -m infra.bench.core [--sessions N] [--active N] [--out FILE] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from infra.bench.measures import Measures
from onepen.processors import timers
from onepen.processors.decide import Decision, Moment, judge, seal
from onepen.processors.rules import Keys, Rules
from onepen.processors.session import Session
from onepen.processors.turn import Turn
from onepen.schemas import codec
from onepen.schemas.events import (
    ACTION_FINISHED,
    ACTION_REQUESTED,
    MESSAGE_COMPLETED,
    MODEL_FINISHED,
    MODEL_STARTED,
    RUN_FINISHED,
    TOOL_FINISHED,
    TOOL_STARTED,
)
from onepen.schemas.ids import run_id
from onepen.schemas.inputs import Content, Input
from onepen.schemas.offers import Offer
from onepen.schemas.receipts import Receipt
from onepen.schemas.views import View
from onepen.schemas.worker_records import Claim, Renew, Report, ReportEvent

A = TypeVar("A")
B = TypeVar("B")

TENANT: Final = 7
START_MS: Final = 1_790_000_000_000
BATCH: Final = 100
AIM_US: Final = 15.0
KEYS: Final = Keys("k1", b"the key of a benchmark")
TEXT: Final = ("The quick brown fox jumps over the lazy dog. " * 5)[:200]
ACTION: Final = {"actionKey": "payment-1", "name": "pay"}
REPORTED: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("report", MODEL_STARTED, {"turnId": "turn-1", "model": "m"}),
    ("report", MESSAGE_COMPLETED, {"messageId": "message-1", "text": TEXT}),
    ("report", MODEL_FINISHED, {"turnId": "turn-1", "status": "ok", "usage": {"inputTokens": 900, "outputTokens": 80}}),
    ("report", TOOL_STARTED, {"toolCallId": "call-1", "toolName": "search", "arguments": {"query": "lazy dog"}}),
    ("report", TOOL_FINISHED, {"toolCallId": "call-1", "toolName": "search", "status": "ok", "result": TEXT}),
    ("request", ACTION_REQUESTED, {**ACTION, "argsDigest": "ab" * 32, "arguments": {"amount": 12, "to": "someone"}}),
    ("end", ACTION_FINISHED, {**ACTION, "status": "ok", "result": {"receipt": "r-1"}}),
    ("final", RUN_FINISHED, {"terminalStatus": "completed", "output": TEXT}),
)
"""(kind, type, payload) of the eight reports."""


def inputs_of(session_id: str, issued_at_ms: int = START_MS, ordinal: int = 1) -> list[tuple[str, bytes]]:
    """(kind, framed bytes) of the eleven inputs of the session's run with that ordinal."""
    run = run_id(TENANT, session_id, ordinal)
    head: dict[str, Any] = {
        "tenant_id": TENANT,
        "session_id": session_id,
        "run_id": run,
        "generation": 1,
        "token": KEYS.token(TENANT, session_id, run, 1),
        "worker_id": "worker-1",
        "inbox": 3,
    }
    prompt = prompt_of(session_id, issued_at_ms, ordinal)
    found = [("prompt", prompt), ("claim", codec.encode(Claim(**head)))]
    for no, (kind, event_type, payload) in enumerate(REPORTED, 1):
        report = Report(**head, no=no, events=(ReportEvent(type=event_type, payload=orjson.dumps(payload)),))
        found.append((kind, codec.encode(report)))
        if no == 3:
            found.append(("renewal", codec.encode(Renew(**head, no=1))))
    return found


def prompt_of(session_id: str, issued_at_ms: int, ordinal: int = 1) -> bytes:
    """The first of them."""
    input_id, content = f"input-{session_id}-{ordinal}", Content(data=TEXT.encode())
    return codec.encode(input_of(TENANT, session_id, input_id, issued_at_ms, mode="prompt", content=content))


def abort_of(tenant_id: int, session_id: str, issued_at_ms: int) -> bytes:
    """Ends the run of a session that nobody will claim, before its offer is repeated again and again."""
    given = input_of(tenant_id, session_id, f"abort-{session_id}", issued_at_ms, mode="abort", target_kind="active")
    return codec.encode(given)


def input_of(tenant_id: int, session_id: str, input_id: str, issued_at_ms: int, **fields: Any) -> Input:
    """What a person sends from the user interface."""
    return Input(
        input_id=input_id,
        issued_at_ms=issued_at_ms,
        tenant_id=tenant_id,
        user_id=11,
        session_id=session_id,
        source="ui",
        **fields,
    )


class Stopwatch:
    """Times of calls by (phase, kind), in ns, and the CPU time of each phase as a whole."""

    def __init__(self) -> None:
        self.calls_ns: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.cpu_ns: dict[str, int] = defaultdict(int)

    def each(self, phase: str, kind: str, call: Callable[[A], B], given: Iterable[A]) -> list[B]:
        """`call` of everything given, each call timed."""
        clock, times, found = time.perf_counter_ns, self.calls_ns[phase, kind], []
        cpu_ns = time.process_time_ns()
        for one in given:
            before = clock()
            answer = call(one)
            times.append(clock() - before)
            found.append(answer)
        self.cpu_ns[phase] += time.process_time_ns() - cpu_ns
        return found

    def of(self, phase: str, kind: str | None = None) -> list[int]:
        found = (times for (p, k), times in self.calls_ns.items() if p == phase and kind in (None, k))
        return [ns for times in found for ns in times]


class Batch:
    """Some sessions that go through their runs side by side."""

    def __init__(self, names: list[str], rules: Rules, watch: Stopwatch) -> None:
        self._rules, self._watch = rules, watch
        self._records: list[dict[bytes, bytes]] = [{} for _ in names]
        self._sessions = [Session.load(TENANT, name, base) for name, base in zip(names, self._records, strict=True)]
        self._inputs = [inputs_of(name) for name in names]
        self._now_ms, self._offset = START_MS, 0

    def play(self) -> Iterator[str]:
        """One step of every session after the other; says its kind."""
        for step, (kind, _) in enumerate(self._inputs[0]):
            self._step(kind, [inputs[step][1] for inputs in self._inputs])
            yield kind

    def _step(self, kind: str, raw: list[bytes]) -> None:
        each = self._watch.each
        self._now_ms += 20
        self._offset += 1
        moment = Moment(5, self._offset, self._now_ms)

        def judged(given: tuple[Session, Any]) -> Turn:
            return judge(self._rules, given[0], given[1], moment)

        def encoded(decision: Decision) -> list[bytes]:
            beside: list[Receipt | Offer | View] = [*decision.receipts, *decision.offers, *decision.views]
            return [codec.encode(one) for one in beside]

        def changed(session: Session) -> dict[bytes, bytes | None]:
            return session.changes(timers.next_deadline_ms(session))

        commands = each("codec.decode", kind, codec.decode_inputs, raw)
        turns = each("core.judge", kind, judged, list(zip(self._sessions, commands, strict=True)))
        decisions = each("core.seal", kind, seal, turns)
        each("codec.encode", kind, encoded, decisions)
        after = [decision.session for decision in decisions]
        for base, changes in zip(self._records, each("core.changes", kind, changed, after), strict=True):
            for key, value in changes.items():
                if value is None:
                    base.pop(key, None)
                else:
                    base[key] = value
        self._sessions = each("core.settled", kind, Session.settled, after)

    def check(self) -> None:
        """Every run must have completed: a benchmark of refusals says nothing."""
        for session in self._sessions:
            assert session.head.run is None
            assert session.head.last is not None
            assert (session.head.last.status, session.head.last.report_no) == ("completed", len(REPORTED))


def play(sessions: int, active: int, watch: Stopwatch, calibrate: Callable[[], None]) -> None:
    """All sessions, so many `active` at once: between two inputs of one lie those of all others."""
    rules = Rules.start(KEYS)
    for begin in range(0, sessions, active):
        names = [f"session-{number}" for number in range(begin, min(begin + active, sessions))]
        batches = [Batch(names[first : first + BATCH], rules, watch) for first in range(0, len(names), BATCH)]
        for _ in zip(*(batch.play() for batch in batches), strict=True):
            calibrate()
        for batch in batches:
            batch.check()


def say(watch: Stopwatch, measures: Measures) -> None:
    kinds = list(dict.fromkeys(kind for _, kind in watch.calls_ns))
    for phase in ("core.judge", "core.seal", "core.changes", "core.settled", "codec.decode", "codec.encode"):
        times = sorted(watch.of(phase))
        aim = {"aim": AIM_US} if phase == "core.judge" else {}
        measures.say(
            f"{phase}_us",
            statistics.median(times) / 1000,
            "us",
            p10=round(times[len(times) // 10] / 1000, 2),
            p99=round(times[int(len(times) * 0.99)] / 1000, 2),
            mean=round(statistics.fmean(times) / 1000, 2),
            cpu_mean=round(watch.cpu_ns[phase] / len(times) / 1000, 2),
            inputs=len(times),
            **aim,
        )
        for kind in kinds:
            times = sorted(watch.of(phase, kind))
            beside = {"p10": round(times[len(times) // 10] / 1000, 2), "least": round(times[0] / 1000, 2)}
            measures.say(f"{phase}_us.{kind}", statistics.median(times) / 1000, "us", **beside)


def main() -> None:
    parser = argparse.ArgumentParser(description="What one input costs in the pure core, and in the codec beside it.")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--active", type=int, default=1_000, help="sessions that run side by side (default 1000)")
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    parser.add_argument("--profile", action="store_true", help="say where the time goes instead of how much it is")
    options = parser.parse_args()
    watch = Stopwatch()
    if options.profile:
        with cProfile.Profile() as profile:
            play(options.sessions, options.active, watch, lambda: None)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    measures = Measures(options.out)
    play(BATCH, BATCH, Stopwatch(), measures.calibrate)  # what is filled on first use is not measured
    play(options.sessions, options.active, watch, measures.calibrate)
    say(watch, measures)


if __name__ == "__main__":
    main()
