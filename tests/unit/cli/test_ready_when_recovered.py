"""A processor is ready when every partition it was assigned is live, not when a local archive of it was loaded."""

from __future__ import annotations

import logging

import pytest

from onepen.cli.serving import ReadyWhenRecovered
from onepen.streams import readiness


def test_ready_is_said_when_the_last_partition_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(readiness, "say_ready", lambda: said.append(True))
    handler = ReadyWhenRecovered()

    def logs(message: str, *arguments: object) -> None:
        handler.emit(logging.LogRecord("onepen.processor", logging.INFO, "", 0, message, arguments, None))

    logs("assigned: %s", [0, 1])
    for partition in (0, 1):
        logs("partition %d: the local archive has %d sessions", partition, 7)
    assert not said
    logs("partition %d: %d sessions, %d records read in %d ms, next input %d", 0, 7, 1, 2, 3)
    assert not said
    logs("partition %d: %d sessions, %d records read in %d ms, next input %d", 1, 7, 1, 2, 3)
    assert said == [True]
