"""The one place where clients of librdkafka are made.

Rule: every client has a logger. One without writes to the process's stderr by itself, past every format and level, and
a command whose broker is down would say it in a dozen lines of librdkafka's instead of one of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from onepen.schemas.errors import Invalid
from onepen.streams.kafka_config import ForwardingLogger

__all__ = ["admin", "consumer", "producer"]

T = TypeVar("T")


def consumer(properties: Mapping[str, Any], logger: logging.Logger | None = None) -> Consumer:
    """A consumer whose log goes to `logger`, or to `onepen.kafka`. Raises `Invalid` naming the property that librdkafka
    does not take."""
    return _made(Consumer, properties, logger)


def producer(properties: Mapping[str, Any], logger: logging.Logger | None = None) -> Producer:
    """A producer, as `consumer` makes a consumer."""
    return _made(Producer, properties, logger)


def admin(properties: Mapping[str, Any], logger: logging.Logger | None = None) -> AdminClient:
    """A client for questions and changes, as `consumer` makes a consumer."""
    return _made(AdminClient, properties, logger)


def _made(kind: Callable[..., T], properties: Mapping[str, Any], logger: logging.Logger | None) -> T:
    try:
        return kind(dict(properties), logger=logger or ForwardingLogger())
    except KafkaException as error:
        cause = error.args[0]
        if cause.code() != KafkaError._INVALID_ARG:
            raise
        # Ours are known to be taken, so it is one of the user's.
        raise Invalid(f"ONEPEN_KAFKA: {' '.join(cause.str().split())}", field="kafka") from None
