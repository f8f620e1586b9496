"""What every client of librdkafka has in common: a logger, and an answer for a property that is not taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from onepen.schemas.errors import Invalid
from onepen.streams import kafka_clients
from onepen.streams.deadline import Deadline

NOWHERE = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}
MAKERS = [kafka_clients.consumer, kafka_clients.producer, kafka_clients.admin]
Make = Callable[..., Any]


@pytest.mark.parametrize("make", MAKERS)
def test_what_librdkafka_says_goes_to_the_logger_and_not_to_stderr(
    make: Make, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onepen.kafka")
    client, deadline = make(NOWHERE), Deadline(10_000)
    while not any("FAIL" in record.getMessage() for record in caplog.records):
        assert not deadline.expired, "librdkafka said nothing about a broker that is not there"
        client.poll(0.05)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("name", "value"), [("foo.bar", "1"), ("socket.timeout.ms", "soon"), ("queued.min.messages", "-1")]
)
def test_a_property_that_is_not_taken_is_named(make: Make, name: str, value: str) -> None:
    with pytest.raises(Invalid, match=rf'^ONEPEN_KAFKA: .*"{name}"') as refused:
        make({**NOWHERE, name: value})
    assert "\n" not in str(refused.value)
