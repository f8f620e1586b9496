"""Errors of the client library that come in another's clothes."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from onepen.streams.kafka_errors import kafka_exception


def test_a_fatal_error_is_found_beneath_the_system_error_of_a_callback() -> None:
    fatal = KafkaException(KafkaError(KafkaError._FENCED, "fenced", fatal=True))
    error = SystemError("returned a result with an exception set")
    error.__cause__ = fatal
    assert kafka_exception(error) is fatal
    assert kafka_exception(fatal) is fatal


def test_what_is_not_kafkas_is_raised_as_it_is() -> None:
    with pytest.raises(SystemError, match="another"):
        kafka_exception(SystemError("another"))
