"""A producer that is given up is never waited for."""

from __future__ import annotations

import threading

from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_statistics import StatisticsTexts
from onepen.streams.kafka_transactions import Writer

END_S = 30


class Hung:
    """As librdkafka may be when its broker was killed: what waits for its threads never returns."""

    def __init__(self) -> None:
        self.purged = threading.Event()

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        if blocking:
            threading.Event().wait(4 * END_S)
        self.purged.set()


def test_a_hung_producer_does_not_hold_who_drops_it() -> None:
    writer = Writer(EngineSettings("127.0.0.1:1", "p", 4, "s0"), "p.s0.a", "1", StatisticsTexts(0))
    hung = Hung()
    writer.producer = hung  # type: ignore[assignment]
    dropping = threading.Thread(target=writer.drop, daemon=True)
    dropping.start()
    dropping.join(END_S)
    assert not dropping.is_alive()
    assert hung.purged.is_set(), "what it held is thrown away"
