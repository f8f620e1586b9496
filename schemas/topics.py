"""The topic plan as data: names, counts, keys and settings. Start-up refuses topics that differ from it."""

from __future__ import annotations

from dataclasses import dataclass, field

PARTITIONS_DEVELOPMENT = 12
PARTITIONS_PRODUCTION = 64
DEFAULT_PREFIX = "onepen"

_HOUR_MS = 3600 * 1000


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """One topic: its full name, partition count and the broker settings that must hold."""

    name: str
    partitions: int
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topics:
    """Names of the topics under one prefix."""

    prefix: str = DEFAULT_PREFIX

    @property
    def inputs(self) -> str:
        return f"{self.prefix}.inputs"

    @property
    def events(self) -> str:
        return f"{self.prefix}.events"

    @property
    def receipts(self) -> str:
        return f"{self.prefix}.receipts"

    @property
    def state(self) -> str:
        return f"{self.prefix}.state"

    @property
    def offers(self) -> str:
        return f"{self.prefix}.offers"

    @property
    def signals(self) -> str:
        return f"{self.prefix}.signals"

    @property
    def deadletters(self) -> str:
        return f"{self.prefix}.deadletters"


def plan(
    topics: Topics,
    partitions: int = PARTITIONS_DEVELOPMENT,
    *,
    replication: int = 1,
    production: bool = False,
) -> list[TopicPlan]:
    """The declared plan. inputs, events, receipts and state share one count, fixed at creation."""
    forever = {"retention.ms": "-1", "retention.bytes": "-1"}
    common = {"min.insync.replicas": "2"} if replication >= 3 else {}
    inputs_kept = {"retention.ms": str(7 * 24 * _HOUR_MS)} if production else forever
    # A re-execution takes the dead letters as given: none may go before the input that it is about.
    letters_kept = {"retention.ms": str(90 * 24 * _HOUR_MS)} if production else forever
    delete = {"cleanup.policy": "delete", "max.message.bytes": "1048576"} | common
    compacted = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.3",
        "segment.bytes": str(64 * 1024 * 1024),
        "max.message.bytes": "2097152",
    } | common
    hours = {"retention.ms": str(6 * _HOUR_MS), "segment.ms": str(_HOUR_MS)}
    return [
        TopicPlan(topics.inputs, partitions, delete | inputs_kept | {"message.timestamp.type": "LogAppendTime"}),
        TopicPlan(topics.events, partitions, delete | forever),
        TopicPlan(topics.receipts, partitions, delete | forever),
        TopicPlan(topics.state, partitions, compacted),
        TopicPlan(topics.offers, partitions, delete | hours),
        TopicPlan(topics.signals, partitions, delete | hours),
        # The largest record of the inputs must fit with the headers that say where it stood and why.
        TopicPlan(
            topics.deadletters,
            partitions,
            delete | letters_kept | {"max.message.bytes": str(1280 * 1024)},
        ),
    ]
