"""The README's code is run as it stands: its worker as a process of its own, its producer and consumer as a script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onepen import Client
from onepen.streams.child_process import launch
from tests.acceptance.pipeline import Pipeline

pytestmark = pytest.mark.integration
README = Path(__file__).parents[2] / "README.md"
STOP_MS = 15_000
SCRIPT_S = 90


def block(beginning: str) -> str:
    """The one Python block of the README whose first line begins so."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    found = [code for code in blocks if code.startswith(beginning)]
    assert len(found) == 1, f"{len(found)} blocks begin with {beginning!r}"
    return str(found[0])


def test_the_producer_has_ten_lines_and_the_worker_thirty() -> None:
    def lines(code: str) -> int:
        return len([line for line in code.splitlines() if line.strip()])

    assert lines(block("from onepen import Client")) <= 10
    assert lines(block("from onepen import RunContext")) <= 30


def test_worker_producer_and_consumer_of_the_readme(
    kafka_bootstrap: str, fresh_dsn: str, topic_prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(block("from onepen import RunContext"))
    (tmp_path / "producer.py").write_text(block("from onepen import Client"))
    with Pipeline(kafka_bootstrap, fresh_dsn, topic_prefix, tmp_path) as pipeline:
        env = {
            "ONEPEN_BOOTSTRAP": kafka_bootstrap,
            "ONEPEN_DSN": fresh_dsn,
            "ONEPEN_PREFIX": topic_prefix,
            "ONEPEN_DATA_DIR": str(tmp_path / "data"),
        }
        with Client(settings=pipeline.settings) as client:
            # Answered as soon as the processor runs: the producer's own patience is not for starts.
            client.abort("probe", active=True).verdict(timeout_ms=60_000)
        worker = launch([sys.executable, "worker.py"], log_path=tmp_path / "worker.log", env=env, cwd=tmp_path)
        try:
            shown = run_to_its_end([sys.executable, "producer.py"], env, tmp_path)
        finally:
            worker.end(signal.SIGTERM, STOP_MS)
        assert pipeline.kills.total() == 0
    first, *events = shown.splitlines()
    assert first.startswith("started run-")
    assert [int(line.split()[0]) for line in events] == list(range(1, len(events) + 1))
    types = [line.split()[1] for line in events]
    assert types[0] == "run.started"
    assert types[-1] == "run.finished"
    assert {"tool.finished", "model.request.finished", "message.completed", "action.finished"} <= set(types)


def run_to_its_end(argv: list[str], env: dict[str, str], folder: Path) -> str:
    """What the script prints; it has to end by itself."""
    done = subprocess.run(
        argv, env={**os.environ, **env}, cwd=folder, capture_output=True, text=True, timeout=SCRIPT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
