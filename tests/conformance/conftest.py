"""One suite, two logs: in memory, and real Kafka (where membership matters, under both group protocols)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.worlds import KafkaWorld, MemoryWorld, World


@pytest.fixture
def settled_world(request: pytest.FixtureRequest, topic_prefix: str) -> Iterator[World]:
    """Indirect: parametrised with "memory", "classic" or "consumer"."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    kafka = KafkaWorld(request.getfixturevalue("kafka_bootstrap"), topic_prefix, request.param)
    try:
        yield kafka
    finally:
        kafka.close()


_CLASSIC = pytest.param("classic", marks=pytest.mark.integration)
_CONSUMER = pytest.param("consumer", marks=pytest.mark.integration)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`world`: memory and Kafka; `group_world`: Kafka under both group protocols, for what depends on them."""
    if "group_world" in metafunc.fixturenames:
        metafunc.parametrize("settled_world", ["memory", _CLASSIC, _CONSUMER], indirect=True)
    elif "settled_world" in metafunc.fixturenames:
        metafunc.parametrize("settled_world", ["memory", _CLASSIC], indirect=True)


@pytest.fixture
def world(settled_world: World) -> World:
    return settled_world


@pytest.fixture
def group_world(settled_world: World) -> World:
    return settled_world
