"""Every test in this folder needs the real services, and is marked so.

The fixtures are in tests/services.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onepen.streams.settings import Settings
from tests.integration.engine_world import EngineWorld
from tests.integration.played_pipeline import Command, Played, command_on, playing
from tests.integration.running_sink import settings_on
from tests.services import fresh_database

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def played(kafka_bootstrap: str, postgres_dsn: str) -> Iterator[Played]:
    """Some sessions that have lived on the real services; processor and sink still run."""
    with fresh_database(postgres_dsn) as dsn, playing(kafka_bootstrap, dsn) as found:
        yield found


@pytest.fixture
def command(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """`onepen` against `played`."""
    return command_on(played, tmp_path / "data", monkeypatch, capsys)


@pytest.fixture
def own(kafka_bootstrap: str, postgres_dsn: str) -> Iterator[Played]:
    """A pipeline of its own: quiet after its one session, and free to be damaged."""
    with fresh_database(postgres_dsn) as dsn, playing(kafka_bootstrap, dsn, brief=True) as found:
        yield found


@pytest.fixture
def command_on_own(
    own: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """`onepen` against `own`."""
    return command_on(own, tmp_path / "data", monkeypatch, capsys)


@pytest.fixture
def world(
    request: pytest.FixtureRequest, kafka_bootstrap: str, topic_prefix: str, tmp_path: Path
) -> Iterator[EngineWorld]:
    """A prefix of its own for the real processor; a parameter names the group protocol."""
    world = EngineWorld(kafka_bootstrap, topic_prefix, tmp_path / "data", getattr(request, "param", "classic"))
    yield world
    world.close()


@pytest.fixture
def settings(kafka_bootstrap: str, topic_prefix: str, fresh_dsn: str, tmp_path: Path) -> Settings:
    """Those of a sink on topics and tables of its own, which are there."""
    return settings_on(kafka_bootstrap, topic_prefix, fresh_dsn, tmp_path)
