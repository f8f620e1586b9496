"""Errors of confluent-kafka that take a second look."""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError, KafkaException

from onepen.schemas.errors import Retryable

__all__ = ["PASSING", "UNREACHABLE", "kafka_exception", "no_answer"]

UNREACHABLE: Final = frozenset(
    {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._RESOLVE}
)
"""Codes of a client that does not get through to a broker."""
PASSING: Final = UNREACHABLE | {
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
}
"""Codes of a consumer's errors that pass by themselves. `KafkaError.retriable` is set by calls of transactions only."""


def no_answer(bootstrap: str, error: KafkaException | str) -> Retryable:
    """What to raise when the brokers do not answer: it names their address, which is the first thing to look at."""
    why = error.args[0].str() if isinstance(error, KafkaException) else error
    return Retryable(f"Kafka at {bootstrap} does not answer: {why}", retry_after_ms=1_000)


def kafka_exception(error: Exception) -> KafkaException:
    """The binding raises a fatal error of its client from whatever callback it serves, as a SystemError's cause. Raises
    `error` itself when it is anything else."""
    found = error.__cause__ if isinstance(error, SystemError) else error
    if isinstance(found, KafkaException):
        return found
    raise error
