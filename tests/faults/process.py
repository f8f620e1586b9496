"""The real processor in a process of its own, struck at one failpoint.

SIGUSR1 arms the point (or `armed` does from the start); SIGTERM stops, SIGHUP gives the partitions away first. The log
goes to a file, each line with its time; what the strike is about to do is a line of it, written before it is done.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import TopicPartition

from onepen.processors.rules import Keys
from onepen.streams import failpoints, kafka_transactions, processor
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka import KafkaLog
from onepen.streams.kafka_config import DoubtLogger
from tests.conformance.counting import CountingCore

KILL, STOP, EXCEPTION = "kill", "stop", "exception"
ACTIONS = (KILL, STOP, EXCEPTION)
KEY = b"a token key of the tests of faults, 32+"

log = logging.getLogger("onepen.strike")


class Spec(msgspec.Struct):
    """What runs, and where it is struck. `hit`: the how-manieth pass of the point after it was armed."""

    bootstrap: str
    prefix: str
    partitions: int
    slot: str
    protocol: str
    core: str = "counting"
    point: str = ""
    action: str = KILL
    hit: int = 1
    armed: bool = False
    guard: bool = True


class Struck(RuntimeError):
    """The exception of the third action."""


class Strike:
    """Put into `failpoints.strike`: one strike at the wanted pass, then never again."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._passes = 0
        self.armed = spec.armed

    def __call__(self, point: str) -> None:
        if not self.armed:
            return
        if point == failpoints.AFTER_DECIDE and self._spec.point == failpoints.AFTER_PRODUCE:
            self._passes = 0  # the k-th record of one transaction is meant
        if point != self._spec.point:
            return
        self._passes += 1
        if self._passes < self._spec.hit:
            return
        self.armed = False
        log.warning("STRUCK %s %s", self._spec.action, point)
        self._act(point)

    def _act(self, point: str) -> None:
        if self._spec.action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._spec.action == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
            log.warning("RESUMED")
        else:
            raise Struck(point)


def believe_return_values() -> None:
    """The mutant without a guard: a commit is waited for until it has a return value, and that counts."""
    DoubtLogger.FACILITIES = frozenset()
    kafka_transactions._COMMIT_S = 10.0  # type: ignore[misc]


def tell_on_request() -> None:
    """SIGUSR2: the stack of every thread into the log, and where the log of the engine stands if its loop turns."""
    logs: list[KafkaLog] = []

    class Told(KafkaLog):
        def __init__(self, settings: EngineSettings) -> None:
            super().__init__(settings)
            logs.append(self)

    def tell(*_: object) -> None:
        for one in logs:
            places = [TopicPartition(one._inputs, p) for p in one._assigned]
            positions = [(tp.partition, tp.offset) for tp in one._consumer.position(places)]
            log.warning("live %s first %s held %d positions %s", one._live, one._first, one.held, positions)

    processor.KafkaLog = Told  # type: ignore[misc]
    signal.signal(signal.SIGUSR2, tell)
    faulthandler.register(signal.SIGUSR2, chain=True)


def end_with_the_test() -> None:
    """Also when the test run is killed, and while frozen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run(spec: Spec, log_path: Path) -> None:
    """The target of a process: `processor.run_engine`, with `spec.core` for a core."""
    end_with_the_test()
    os.dup2(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(name)s %(message)s", stream=sys.stderr)
    strike = Strike(spec)
    if spec.point:
        failpoints.strike = strike
    stop, drain = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, lambda *_: (drain.set(), stop.set()))
    signal.signal(signal.SIGUSR1, lambda *_: setattr(strike, "armed", True))
    tell_on_request()
    settings = EngineSettings(spec.bootstrap, spec.prefix, spec.partitions, spec.slot, spec.protocol)
    if not spec.guard:
        believe_return_values()
    if spec.core == "counting":
        counting: Any = lambda _keys, topics, _partitions: CountingCore(topics)  # noqa: E731
        processor.SessionCore = counting
    processor.run_engine(settings, Keys("k", KEY), stop, drain)
