"""What the stack hands to others: a line for psql with its password file, and the environment of its processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from onepen.cli import main, service_commands
from onepen.cli.local_stack import psql_command, write_pgpass


def test_psql_gets_what_the_url_means_and_the_password_stands_in_a_file_only(tmp_path: Path) -> None:
    dsn = "postgresql://u%40team:p%3As%23s@[::1]:7,two/d%2Fb"
    path = write_pgpass(tmp_path, dsn)
    assert path.read_text() == "\\:\\:1:7:d/b:u@team:p\\:s#s\ntwo:5432:d/b:u@team:p\\:s#s\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert psql_command(tmp_path, dsn) == f"PGPASSFILE={path} psql -h ::1 -p 7 -U u@team d/b"


AGENT = """
from onepen import Worker
from onepen.streams.settings import load_settings

worker = Worker("mine")
found = load_settings()
"""


def test_a_worker_of_the_users_finds_all_that_the_local_stack_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = tmp_path / "stack"
    (stack / "objects").mkdir(parents=True)
    addresses = {"bootstrap": "stack:1", "dsn": "postgresql://u:p@stack/db", "prefix": "fromstack"}
    (stack / "stack.json").write_text(json.dumps({"phase": "running", "addresses": addresses}))
    (tmp_path / "agent_of_a_test.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    served: list[object] = []
    monkeypatch.setattr(service_commands, "serve", lambda name, run: served.append(run.__self__))
    named = {name: value for name, value in os.environ.items() if not name.startswith("ONEPEN_")}
    with mock.patch.dict(os.environ, named, clear=True):
        assert main(["worker", "--app", "agent_of_a_test:worker", "--data-dir", str(stack)]) == 0, capsys.readouterr()
        agent = sys.modules.pop("agent_of_a_test")
    assert served == [agent.worker]
    found = agent.found
    assert (found.bootstrap, found.prefix, found.data_dir) == ("stack:1", "fromstack", stack)
    assert found.objects_root == stack / "objects"
    assert found.require_dsn() == addresses["dsn"]
