"""What 1, 2 and 4 processors make of the same backlog: inputs per second, CPU per input, and whether all is right.

Each number of processes gets topics of its own with the mix of `infra.bench.engine`. The processes share the partitions
first and then wait; the backlog is put in place; the clock runs from the word to begin until the last input is decided.
CPU counts from that word to the last decision of each process, background threads of librdkafka included. Afterwards
every input is decided again from the topics (`onepen verify`), and what is there has to be the same, byte for byte.

    python -m infra.bench.scale_out [--processes 1,2,4] [--sessions N] [--out FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from infra.bench.core import KEYS
from infra.bench.engine import broker, engine_of, fill, prepared
from infra.bench.measures import Measures
from onepen.streams.comparing import Findings
from onepen.streams.engine import Engine
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.settings import Settings
from onepen.streams.verifying import Target, Topics, verify_topics

PARTITIONS: Final = 4
LIMIT_S: Final = 300.0
END_S: Final = 20.0
LOOK_S: Final = 0.02
WAIT, GO, END = "wait", "go", "end"


class Standing(NamedTuple):
    """Of one process: partitions it decides in, inputs since the word to begin, when it decided the last one
    (monotonic clock of the machine), and its CPU seconds from the word to then."""

    running: int = 0
    decided: int = 0
    last_s: float = 0.0
    cpu_s: float = 0.0


def deciding(settings: EngineSettings, there: Connection) -> None:
    """A processor that does what it is told, and tells where it stands. Runs in a process of its own."""
    with engine_of(settings) as engine:
        _decide(engine, there)


def _decide(engine: Engine[Any], there: Connection) -> None:
    running = 0
    while not there.poll():
        engine.turn()
        if running != len(engine.view().running):
            running = len(engine.view().running)
            there.send(Standing(running))
    assert there.recv() == WAIT
    there.send(WAIT)
    assert there.recv() == GO
    before, cpu_s, told = engine.decided, time.process_time(), Standing(running)
    while not there.poll():
        engine.turn()
        decided = engine.decided - before
        if decided != told.decided:
            told = Standing(running, decided, time.monotonic(), time.process_time() - cpu_s)
            there.send(told)


class Processes:
    """So many slots of one prefix."""

    def __init__(self, settings: EngineSettings, count: int, stack: ExitStack) -> None:
        slots = [replace(settings, slot=f"s{number}") for number in range(count)]
        self._pipes = [stack.enter_context(_started(slot)) for slot in slots]
        self.standing = [Standing() for _ in slots]

    def share(self) -> None:
        """Wait until each has its part of the partitions, then let them rest."""
        share = PARTITIONS // len(self._pipes)
        self._until(lambda: all(one.running == share for one in self.standing), "the partitions are shared")
        for pipe in self._pipes:
            pipe.send(WAIT)
        for pipe in self._pipes:
            while pipe.recv() != WAIT:
                pass
        self.standing = [Standing() for _ in self.standing]

    def decide(self, total: int) -> float:
        """Seconds from the word to begin to the last decision."""
        began = time.monotonic()
        for pipe in self._pipes:
            pipe.send(GO)
        self._until(lambda: sum(one.decided for one in self.standing) >= total, f"{total} inputs are decided")
        return max(one.last_s for one in self.standing) - began

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {LIMIT_S:.0f} s: {what}; {self.standing}")
            for number, pipe in enumerate(self._pipes):
                while pipe.poll():
                    self.standing[number] = pipe.recv()
            time.sleep(LOOK_S)


@contextmanager
def _started(settings: EngineSettings) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=deciding, args=(settings, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        if process.is_alive():
            here.send(END)
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join(END_S)


def judged(settings: EngineSettings) -> Findings:
    """What `onepen verify --all` finds."""
    outside = Settings(bootstrap=settings.bootstrap, prefix=settings.prefix, partitions=settings.partitions)
    with ExitStack() as stack:
        topics = Topics(outside, stack)
        return verify_topics(topics, outside, KEYS, Target(), {}, lambda *_: None)[0]


def measure(bootstrap: str, counts: Sequence[int], sessions: int, measures: Measures) -> None:
    alone: float | None = None
    for count in counts:
        settings = prepared(bootstrap, f"scale{count}", PARTITIONS)
        with ExitStack() as stack:
            processes = Processes(settings, count, stack)
            processes.share()
            total = fill(bootstrap, settings.topics.inputs, PARTITIONS, sessions)
            measures.calibrate()
            took_s = processes.decide(total)
            measures.calibrate()
        found = judged(settings)
        if not found.clean or found.inputs != total + PARTITIONS:  # with the policy of each partition
            raise RuntimeError(f"{count} processes: {found.inputs} of {total} inputs; {found.mismatches[:3]}")
        alone = alone or total / took_s
        measures.say(
            f"engine.scale_out.{count}",
            total / took_s,
            "inputs/s",
            baseline=alone,
            cpu_us_per_input=round(sum(one.cpu_s for one in processes.standing) / total * 1e6, 1),
            by_process=[one.decided for one in processes.standing],
            inputs=total,
            events=found.events,
            mismatches=found.mismatch_count + found.chain_error_count,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="The same backlog for 1, 2 and 4 processors.")
    parser.add_argument("--processes", default="1,2,4", help=f"how many, each a divisor of {PARTITIONS}")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    options = parser.parse_args()
    measures = Measures(options.out)
    with broker() as bootstrap:
        measure(bootstrap, [int(count) for count in options.processes.split(",")], options.sessions, measures)


if __name__ == "__main__":
    main()
