"""What an engine shows to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from onepen.streams.recovery import Progress
from onepen.streams.store import PartitionStore

__all__ = ["View"]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class View(Generic[S]):
    """Which partition stands where, copied for another thread; the stores themselves go on changing."""

    running: tuple[PartitionStore[S], ...]
    starting: tuple[PartitionStore[S], ...]
    parked: tuple[PartitionStore[S], ...]
    recovering: tuple[Progress, ...]
    stopped: dict[int, str]
