"""The processor that `infra.bench.takeover` kills: the product's own, whose steps of a start are told with their times.

SIGTERM ends it and gives its partitions away; SIGUSR1 kills it in its next open transaction.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

from onepen.streams import failpoints, kafka_transactions
from onepen.streams.deadline import Deadline
from onepen.streams.kafka_offsets import CommittedOffsets
from onepen.streams.processor import run_processor
from onepen.streams.settings import load_settings

KILLED: Final = "KILLED"
FENCED: Final = "FENCED"
STABLE: Final = "STABLE"

log = logging.getLogger("onepen.takeover")


def die_in_transaction(*_: object) -> None:
    """The next batch is written, not committed."""

    def strike(point: str) -> None:
        if point == failpoints.AFTER_SEND_OFFSETS:
            log.warning(KILLED)
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.strike = strike


def tell_steps() -> None:
    """FENCED when `init_transactions` of both producers is done, STABLE when a committed offset is known."""
    opened, asked = kafka_transactions.Writers.open, CommittedOffsets.ask

    def open_(self: kafka_transactions.Writers, deadline: Deadline) -> None:
        opened(self, deadline)
        log.info(FENCED)

    def ask(self: CommittedOffsets, partitions: Sequence[int], timeout_s: float) -> dict[int, int | None]:
        found = asked(self, partitions, timeout_s)
        for partition in partitions:
            log.info("%s %d", STABLE, partition)
        return found

    kafka_transactions.Writers.open = open_  # type: ignore[method-assign]
    CommittedOffsets.ask = ask  # type: ignore[method-assign]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(name)s %(message)s", stream=sys.stderr)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGUSR1, die_in_transaction)
    tell_steps()
    run_processor(load_settings(), stop, stop)


if __name__ == "__main__":
    main()
