"""What the engine must know, as one frozen value: made from the settings at the entry point, or by a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from onepen.schemas.topics import Topics

if TYPE_CHECKING:
    from onepen.streams.settings import Settings

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
STATISTICS_MS: Final = 2_000
LOCAL_ARCHIVE_FOLDER: Final = "local-archive"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`slot` names this process for ever: its transactional ids and its static membership hang on it."""

    bootstrap: str
    prefix: str
    partitions: int
    slot: str
    group_protocol: str = CLASSIC
    kafka: Mapping[str, str] = field(default_factory=dict)
    statistics_ms: int = 0
    """How often librdkafka hands out its statistics; 0: never."""
    archive_dir: Path | None = None
    """Where the state is kept for the next start when the processor is stopped; None: nowhere."""

    @classmethod
    def from_settings(cls, settings: Settings) -> EngineSettings:
        return cls(
            bootstrap=settings.bootstrap,
            prefix=settings.prefix,
            partitions=settings.partitions,
            slot=settings.slot,
            group_protocol=settings.group_protocol,
            kafka=dict(settings.kafka),
            statistics_ms=STATISTICS_MS if settings.metrics_port is not None else 0,
            archive_dir=settings.data_dir / LOCAL_ARCHIVE_FOLDER if settings.local_archive else None,
        )

    @property
    def topics(self) -> Topics:
        return Topics(self.prefix)

    @property
    def group(self) -> str:
        """The consumer group of all processors of this prefix."""
        return f"{self.prefix}.processor"

    @property
    def transactional_ids(self) -> tuple[str, str]:
        """Stable for ever: whoever starts under this slot ends what its predecessor left."""
        return f"{self.prefix}.{self.slot}.a", f"{self.prefix}.{self.slot}.b"
