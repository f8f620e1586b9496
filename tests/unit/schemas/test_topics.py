"""The topic plan: what one topic needs of another is kept as long."""

from __future__ import annotations

import pytest

from onepen.schemas.topics import Topics, plan

FOR_EVER = float("inf")


def kept(production: bool, name: str, setting: str) -> float:
    (topic,) = [topic for topic in plan(Topics(), production=production) if topic.name == name]
    value = int(topic.settings.get(setting, -1))
    return FOR_EVER if value == -1 else value


@pytest.mark.parametrize("production", [False, True])
@pytest.mark.parametrize("setting", ["retention.ms", "retention.bytes"])
def test_no_dead_letter_goes_before_its_input(production: bool, setting: str) -> None:
    """A re-execution that does not find it takes its input for one that was decided."""
    topics = Topics()
    assert kept(production, topics.deadletters, setting) >= kept(production, topics.inputs, setting)
