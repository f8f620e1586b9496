"""The command line in this process, under an environment that holds nothing of ours but what a test gives it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from onepen.cli import main


def only(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    """Of the variables that onepen reads, these and no others are set from here on."""
    for name in [name for name in os.environ if name.startswith("ONEPEN_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command line; never a traceback."""
    capsys.readouterr()
    code = main(list(arguments))
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err
