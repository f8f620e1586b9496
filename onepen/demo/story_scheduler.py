"""The scheduler of the founding story: another process that sends one prompt at a moment given to it.

`python -m onepen.demo.story_scheduler SESSION AT_MS CONTENT`: waits until the wall clock shows AT_MS, sends, prints the
verdict as one JSON line. Addresses and tenant come from the environment.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import orjson

from onepen.streams.client import Client

VERDICT_TIMEOUT_MS = 10_000
NAP_S = 0.002


def main(session: str, moment_path: str, content: str) -> None:
    """Say that we are ready, wait for the file that names the moment, send then."""
    path = Path(moment_path)
    pause = threading.Event()
    with Client() as client:
        path.with_suffix(".ready").touch()
        while not path.exists():
            pause.wait(NAP_S)
        at_ms = int(path.read_text())
        while time.time_ns() // 1_000_000 < at_ms:
            pause.wait(NAP_S)
        sent = client.prompt(session, orjson.loads(content), source="scheduler")
        verdict = sent.verdict(VERDICT_TIMEOUT_MS)
        line = {"inputId": sent.input_id, "verdict": verdict.verdict, "position": [verdict.partition, verdict.offset]}
        sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
