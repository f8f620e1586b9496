"""A drawn seed is said as the setting that draws it again."""

from __future__ import annotations

import pytest

from tests.seeds import VARIABLE, drawn_seed


def test_what_is_printed_draws_the_same_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    seeds = {drawn_seed() for _ in range(20)}
    assert len(seeds) == 20
    name, _, value = capsys.readouterr().out.splitlines()[0].rpartition(" ")[2].partition("=")
    monkeypatch.setenv(name, value)
    assert {drawn_seed() for _ in range(20)} == {int(value)} <= seeds
    assert f"{VARIABLE}={value}" in capsys.readouterr().out
