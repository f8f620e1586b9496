"""A re-enactment that fails says why, in the words of the first that failed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from onepen.cli import failures
from onepen.cli.exit_codes import ExitCode
from onepen.demo import recording
from onepen.demo.recorded import read_recordings
from onepen.demo.recording import SHIPPED
from onepen.schemas.errors import Fatal, OnepenError, UnknownOutcome
from onepen.streams.settings import Settings


class Answers:
    """A client whose prompts are answered with what the test says, an error or a verdict."""

    def __init__(self, answer: OnepenError | SimpleNamespace) -> None:
        self._answer = answer

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        """There is nothing to close."""

    def prompt(self, *_: Any, **__: Any) -> Answers:
        return self

    async def verdict(self, _: int) -> SimpleNamespace:
        if isinstance(self._answer, OnepenError):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (UnknownOutcome("no verdict"), UnknownOutcome, ExitCode.NO_ANSWER),
        (SimpleNamespace(accepted=False, verdict="refused", reason="queue_full"), Fatal, ExitCode.FINDING),
        (SimpleNamespace(accepted=True), UnknownOutcome, ExitCode.NO_ANSWER),
    ],
    ids=["no verdict", "refused", "no end"],
)
def test_the_first_failure_is_told(
    answer: OnepenError | SimpleNamespace,
    kind: type[OnepenError],
    code: ExitCode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recording, "AsyncClient", lambda **_: Answers(answer))
    monkeypatch.setattr(recording, "RUN_MS", 1)
    recordings = read_recordings(SHIPPED, sessions=2)
    enactment = recording._Enactment(Settings(), recordings, 0.0, lambda done, total: None)
    with pytest.raises(kind) as raised:
        asyncio.run(enactment._play_all(2))
    assert failures.report(raised.value) == code
    assert "internal error" not in capsys.readouterr().err
