"""Where a batch is cut, and how many records the next one asks for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchSize", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a batch is cut. A live input may wait for the batch under way, for one that was fetched before it, and for
    its own. A batch takes `work_ms` to decide and half as long again to be written: three have to stay below half a
    second, also where the commit takes its time."""

    records: int = 8_000
    bytes: int = 2 * 1024 * 1024
    work_ms: int = 75


class BatchSize:
    """`records`: how many to ask for, between 1 and the limit."""

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.records
        self.records = limits.records

    def was_cut(self, decided: int) -> None:
        """The time was over. What is handed back is handed out again, so a little more than that is asked for."""
        self.records = min(self._limit, 2 * decided)

    def was_committed(self, decided: int) -> None:
        self.records = min(self._limit, max(self.records, 2 * decided))

    def was_refused(self) -> None:
        """What was too much for the brokers is not tried again at the same size."""
        self.records = max(1, self.records // 2)
