"""Acceptance tests: the whole pipeline as processes, on the real services of tests/services.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.pipeline import Pipeline

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integration)


@pytest.fixture
def pipeline_at_rest(kafka_bootstrap: str, fresh_dsn: str, topic_prefix: str, tmp_path: Path) -> Pipeline:
    """Topics and tables of their own; neither processor nor sink runs."""
    return Pipeline(kafka_bootstrap, fresh_dsn, topic_prefix, tmp_path)


@pytest.fixture
def pipeline(pipeline_at_rest: Pipeline) -> Iterator[Pipeline]:
    """Processor and sink, running, on topics and tables of their own."""
    with pipeline_at_rest as running:
        yield running
