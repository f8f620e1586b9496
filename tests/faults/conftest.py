"""Every test in this folder strikes the real processor on the real broker, and is marked so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onepen.streams.ports import free_port
from tests.faults.wire import ProxiedKafka, Wire

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Wire]]:
    """A broker of its own and a wire to it: (the broker's own address, the wire)."""
    port = free_port()
    wire = Wire(port)
    kafka = ProxiedKafka(Path(tmp_path_factory.mktemp("wired")), port, wire.port)
    kafka.start()
    try:
        yield kafka.bootstrap, wire
    finally:
        kafka.stop()
        wire.close()
