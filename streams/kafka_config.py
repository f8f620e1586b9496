"""librdkafka's settings for the processor, each with the failure it prevents; what no process lets be set; and the
loggers of clients.

Rule: what exactly-once rests on is set here and cannot be overridden; everything else (security, buffers, compression)
passes through. Checked with the settings of each process, before any connection.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from onepen.schemas.errors import Invalid
from onepen.streams.engine_settings import CLASSIC, EngineSettings

SESSION_TIMEOUT_MS: Final = 6_000
HEARTBEAT_MS: Final = 500
TRANSACTION_TIMEOUT_MS: Final = 5_000
SOCKET_TIMEOUT_MS: Final = 3_000
READ_TIMEOUT_MS: Final = 10_000
"""How long a reader waits for an answer. A broker that is suspended, or whose machine is gone, closes no connection:
with librdkafka's default of 60 s its partitions stood still for a minute although another one led them after 9 s."""
COMMIT_LIMIT_MS: Final = 2_000
RECORD_BYTES_MAX: Final = 2_000_000
CONSUMER_REBALANCE_MS: Final = 45_000

SAFE_WRITES: Final[Mapping[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    "max.in.flight.requests.per.connection": 1,
}
"""Of every producer. With a second request under way a first one can be acknowledged and lost: refused by a broker that
has just been made leader while the second is accepted, librdkafka takes it for written (infra/decisions/0009)."""

assert TRANSACTION_TIMEOUT_MS < SESSION_TIMEOUT_MS, (
    "a dead owner's transaction must end before its successor waits for it"
)
assert COMMIT_LIMIT_MS < SOCKET_TIMEOUT_MS, "a commit must be doubted before librdkafka repeats EndTxn silently"
assert HEARTBEAT_MS * 3 <= SESSION_TIMEOUT_MS

_OURS: Final = "it is what exactly-once rests on"
_BROKERS: Final = "name the brokers with ONEPEN_BOOTSTRAP"
_TO_THE_LOGGER: Final = "what the client library says goes to the logger of the process"
REFUSED: Final[Mapping[str, str]] = {
    "bootstrap.servers": _BROKERS,
    "metadata.broker.list": _BROKERS,
    "group.id": "processors, sinks and workers of a prefix are one group each; readers belong to none",
    "group.instance.id": "the slot is the static member id",
    "group.protocol": "choose it with ONEPEN_GROUP_PROTOCOL",
    "group.remote.assignor": "the brokers' default assignor is the one that was tested",
    "partition.assignment.strategy": "cooperative assignment loses the order of revoke and commit in transactions",
    "isolation.level": "what is not committed would be taken for decided",
    "enable.auto.commit": "offsets are committed, or not, where that is safe",
    "auto.commit.enable": "offsets are committed, or not, where that is safe",
    "enable.auto.offset.store": "offsets are committed, or not, where that is safe",
    "offset.store.method": "offsets are committed, or not, where that is safe",
    "auto.offset.reset": "an automatic reset skips or repeats records; whoever reads stops and says so instead",
    "enable.partition.eof": "it is set where the end has to be known; without it a replay has none",
    "transactional.id": "it belongs to the slot: ids must be stable for ever",
    "enable.idempotence": _OURS,
    "acks": _OURS,
    "request.required.acks": _OURS,
    "max.in.flight": _OURS,
    "max.in.flight.requests.per.connection": _OURS,
    "queuing.strategy": "records are written in their order",
    "partitioner": "every record goes to an explicit partition",
    "log.queue": _TO_THE_LOGGER,
    "logger": _TO_THE_LOGGER,
    "test.mock.num.brokers": "the mock brokers have no isolation",
    **dict.fromkeys(
        ("dr_cb", "dr_msg_cb", "error_cb", "log_cb", "oauth_cb", "on_commit", "on_delivery", "stats_cb", "throttle_cb"),
        "it is a function, and this is text",
    ),
    "default.topic.config": "properties of topics stand beside the others",
}
"""Of every client of every process, with the reason."""

_COMMITTED_WITH: Final = "offsets are committed in the transaction of their decisions"
_DOUBT: Final = "disconnects and time-outs are read from the log; without them a doubt goes unnoticed"
REFUSED_IN_TRANSACTIONS: Final[Mapping[str, str]] = {
    "session.timeout.ms": "it must stay above the transaction time-out",
    "heartbeat.interval.ms": "it belongs to the session time-out",
    "max.poll.interval.ms": "a longer one hides a processor that stands still",
    "auto.commit.interval.ms": _COMMITTED_WITH,
    "transaction.timeout.ms": "an open transaction stops every reader; it must end before the group session does",
    "retries": _OURS,
    "message.send.max.retries": _OURS,
    "message.timeout.ms": "it follows the transaction time-out",
    "delivery.timeout.ms": "it follows the transaction time-out",
    "socket.timeout.ms": "it must stay above the limit of a commit, or hidden repeats go unnoticed",
    "log_level": _DOUBT,
    "log.connection.close": _DOUBT,
}
"""Besides, where transactions are written: by processors and by a redrive. Others may tune these."""

assert not REFUSED.keys() & REFUSED_IN_TRANSACTIONS.keys()

_PRODUCER_ONLY: Final = frozenset(
    {"compression.type", "compression.codec", "compression.level", "linger.ms", "queue.buffering.max.ms",
     "batch.size", "batch.num.messages", "queue.buffering.max.messages", "queue.buffering.max.kbytes",
     "sticky.partitioning.linger.ms"}
)  # fmt: skip
_CONSUMER_ONLY: Final = frozenset(
    {"fetch.wait.max.ms", "fetch.min.bytes", "fetch.max.bytes", "fetch.message.max.bytes", "check.crcs",
     "max.partition.fetch.bytes", "queued.min.messages", "queued.max.messages.kbytes", "client.rack",
     "fetch.queue.backoff.ms", "fetch.error.backoff.ms"}
)  # fmt: skip


def refusal(extra: Mapping[str, str], table: Mapping[str, str] = REFUSED) -> str | None:
    """The first property that would break what is promised, and why, in a sentence."""
    return next((f"{name} cannot be set: {table[name]}" for name in extra if name in table), None)


def check_properties(extra: Mapping[str, str]) -> None:
    """Of what writes transactions: raise `Invalid` naming the first property that would break what is promised."""
    sentence = refusal(extra, {**REFUSED, **REFUSED_IN_TRANSACTIONS})
    if sentence is not None:
        raise Invalid(f"ONEPEN_KAFKA: {sentence}", field=sentence.partition(" ")[0])


def _base(settings: EngineSettings, client: str, *, leave_out: frozenset[str]) -> dict[str, Any]:
    check_properties(settings.kafka)
    return {
        "bootstrap.servers": settings.bootstrap,
        "client.id": f"{settings.prefix}.{settings.slot}.{client}",
        # A broker that comes back is used at once; the default waits up to 10 s.
        "reconnect.backoff.ms": 100,
        "topic.metadata.refresh.fast.interval.ms": 100,
        "reconnect.backoff.max.ms": 500,
        "socket.keepalive.enable": True,
        "log_level": 6,
        **{name: value for name, value in settings.kafka.items() if name not in leave_out},
    }


def input_consumer(settings: EngineSettings) -> dict[str, Any]:
    """The member of the processors' group."""
    properties = _base(settings, "inputs", leave_out=_PRODUCER_ONLY) | {
        "group.id": settings.group,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "socket.timeout.ms": READ_TIMEOUT_MS,
    }
    # Of all partitions together. librdkafka hands records out in order of arrival, so little of a backlog is fetched at
    # once; but what is fetched while a batch is decided is the next batch.
    for name, value in (
        ("queued.min.messages", 2_000),
        ("fetch.queue.backoff.ms", 2),
        ("max.partition.fetch.bytes", 131_072),
        ("fetch.wait.max.ms", 100),
        ("fetch.error.backoff.ms", 50),
    ):
        properties.setdefault(name, value)
    if settings.group_protocol == CLASSIC:
        properties |= {
            "partition.assignment.strategy": "range",
            "group.instance.id": settings.slot,
            "session.timeout.ms": SESSION_TIMEOUT_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
        }
    else:
        # The brokers set session and heartbeat; static ids are not used here (a killed member would be waited for).
        properties["group.protocol"] = settings.group_protocol
        # A heartbeat whose answer was lost is not repeated in full: a member never learns of an assignment that was in
        # it, and the others wait until the brokers put it out of the group, which they do after this time.
        properties["max.poll.interval.ms"] = CONSUMER_REBALANCE_MS
    return properties


def offset_reader(settings: EngineSettings) -> dict[str, Any]:
    """Reads the group's committed offsets without joining it. read_committed makes the answer stable."""
    return _base(settings, "offsets", leave_out=_PRODUCER_ONLY) | {
        "group.id": settings.group,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "socket.timeout.ms": READ_TIMEOUT_MS,
    }


def state_reader(settings: EngineSettings) -> dict[str, Any]:
    """Reads state partitions outside of any group."""
    properties = _base(settings, "state", leave_out=_PRODUCER_ONLY) | {
        "group.id": f"{settings.prefix}.restore",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "socket.timeout.ms": READ_TIMEOUT_MS,
    }
    # The end of a foreign transaction is noticed by the next fetch.
    properties.setdefault("fetch.wait.max.ms", 50)
    properties.setdefault("fetch.error.backoff.ms", 50)
    properties.setdefault("fetch.queue.backoff.ms", 2)
    return properties


def transactional_producer(settings: EngineSettings, transactional_id: str) -> dict[str, Any]:
    properties = _base(settings, transactional_id.rpartition(".")[2], leave_out=_CONSUMER_ONLY) | {
        "transactional.id": transactional_id,
        "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
        **SAFE_WRITES,
        "socket.timeout.ms": SOCKET_TIMEOUT_MS,
        "log.connection.close": True,
    }
    # The first produce of a transaction often meets "concurrent transactions"; the default waits 100 ms.
    properties.setdefault("retry.backoff.ms", 2)
    # All records are handed over before the flush of the commit; waiting for more would only cost time.
    properties.setdefault("linger.ms", 0)
    properties.setdefault("message.max.bytes", RECORD_BYTES_MAX)
    return properties


def plain_producer(settings: EngineSettings) -> dict[str, Any]:
    """Hints: idempotent, outside of transactions."""
    properties = _base(settings, "hints", leave_out=_CONSUMER_ONLY) | {
        **SAFE_WRITES,
        "message.timeout.ms": TRANSACTION_TIMEOUT_MS,
        "socket.timeout.ms": SOCKET_TIMEOUT_MS,
    }
    properties.setdefault("linger.ms", 1)
    return properties


def admin_client(settings: EngineSettings) -> dict[str, Any]:
    return _base(settings, "admin", leave_out=_PRODUCER_ONLY | _CONSUMER_ONLY)


class ForwardingLogger(logging.Logger):
    """Hands librdkafka's log on to `onepen.kafka`. Lost connections are routine there: INFO, whatever librdkafka says;
    what follows from them is reported by who is concerned."""

    CONNECTION = frozenset({"FAIL", "REQTMOUT", "ERROR"})

    def __init__(self, name: str = "client") -> None:
        super().__init__(f"onepen.kafka.{name}")
        self._onward = logging.getLogger("onepen.kafka")

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name is logging's
        return level >= logging.INFO

    def handle(self, record: logging.LogRecord) -> None:
        if facility_of(record) in self.CONNECTION:
            record.levelno, record.levelname = logging.INFO, "INFO"
        if self._onward.isEnabledFor(record.levelno):
            self._onward.handle(record)


def facility_of(record: logging.LogRecord) -> str:
    """librdkafka's word for the kind of a log line."""
    return str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""


class DoubtLogger(ForwardingLogger):
    """The logger given to one producer. `lines` holds what speaks of a lost connection or an unanswered request.

    librdkafka 2.16 repeats EndTxn silently after a disconnect or a time-out, and its return value says nothing of it;
    its log does. Served on the thread that calls `Producer.poll`.
    """

    FACILITIES = ForwardingLogger.CONNECTION

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lines: list[str] = []

    def handle(self, record: logging.LogRecord) -> None:
        if facility_of(record) in self.FACILITIES:
            self.lines.append(record.getMessage())
        super().handle(record)
