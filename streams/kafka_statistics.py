"""librdkafka's statistics: kept as text where they arrive, read by whoever shows them; a chosen few of them.

Rule: the client's thread only stores a reference, at most once per interval. Names and units are those of librdkafka;
what is missing in a text is 0 or -1 (an offset that is not known).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

__all__ = ["Statistics", "StatisticsTexts", "read_statistics"]


class _Window(msgspec.Struct):
    avg: int = 0
    p99: int = 0


class _Broker(msgspec.Struct):
    nodeid: int = -1
    tx: int = 0
    txerrs: int = 0
    rxerrs: int = 0
    req_timeouts: int = 0
    disconnects: int = 0
    rtt: _Window = msgspec.field(default_factory=_Window)


class PartitionStatistics(msgspec.Struct):
    """`hi_offset`: the high watermark as last told by the broker; `next_offset`: the next to be fetched."""

    hi_offset: int = -1
    next_offset: int = -1
    fetchq_cnt: int = 0


class _Topic(msgspec.Struct):
    partitions: dict[str, PartitionStatistics] = msgspec.field(default_factory=dict)


class Statistics(msgspec.Struct):
    """Of one client. Times are µs."""

    msg_cnt: int = 0
    replyq: int = 0
    tx_bytes: int = 0
    rx_bytes: int = 0
    brokers: dict[str, _Broker] = msgspec.field(default_factory=dict)
    topics: dict[str, _Topic] = msgspec.field(default_factory=dict)

    def partition(self, topic: str, partition: int) -> PartitionStatistics | None:
        found = self.topics.get(topic)
        return None if found is None else found.partitions.get(str(partition))


class StatisticsTexts:
    """The last text of each client of one process, by the client's name; a client made anew takes its name over."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._texts: dict[str, tuple[float, str]] = {}

    def of(self, client: str) -> dict[str, Any]:
        """Properties of a client with statistics; none when they are off."""
        if not self._interval_ms:
            return {}
        return {"statistics.interval.ms": self._interval_ms, "stats_cb": self._taker(client)}

    def _taker(self, client: str) -> Callable[[str], None]:
        def take(text: str) -> None:
            self._texts[client] = (time.monotonic(), text)

        return take

    def latest(self) -> dict[str, tuple[float, Statistics]]:
        """Client -> (monotonic time, statistics). May be called on any thread."""
        return {client: (at_s, read_statistics(text)) for client, (at_s, text) in list(self._texts.items())}


def read_statistics(text: str) -> Statistics:
    """The chosen few; a text that cannot be read has none (the library is free to change it)."""
    try:
        return msgspec.json.decode(text, type=Statistics)
    except msgspec.DecodeError:
        return Statistics()
