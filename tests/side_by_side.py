"""Runs the tests for a person in several pytest processes at once: `python -m tests.side_by_side`.

What needs the real services mostly waits for them, so its parts run beside each other, each with servers of its own,
and beside what needs nothing but a processor. A line tells how each part stands; what failed is shown whole at the end.
The exit code is 0 only when every part passed. `ONEPEN_TEST_PARTS` says in how many parts the services are tested (3);
1 asks least of the machine, and takes longer.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = ROOT / "tests"
LIMIT_S: Final = 1_400
END_LIMIT_S: Final = 30
WITH_SERVICES: Final = ("acceptance", "conformance", "faults", "integration")
PARTS: Final = "ONEPEN_TEST_PARTS"
PROGRESS: Final = re.compile(r"\[ *(\d+)%\]")


def parts(services: int) -> dict[str, list[str]]:
    """The parts by name, each a list of paths for pytest; together they are all tests. So many need the services."""
    folders = sorted({path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")})
    found = {"without services": [f"tests/{name}" for name in folders if name not in WITH_SERVICES]}
    integration = [f"tests/integration/{path.name}" for path in sorted((TESTS / "integration").glob("test_*.py"))]
    others = [f"tests/{name}" for name in WITH_SERVICES if name != "integration"]
    if services <= 1:
        return found | {"services": [*others, *integration]}
    # Measured: a fifth of them, with everything else that needs services, takes as long as half of the rest.
    rest = [path for number, path in enumerate(integration) if number % 5]
    found["services 1"] = [*others, *integration[0::5]]
    return found | {f"services {n + 2}": rest[n :: services - 1] for n in range(services - 1)}


class Part:
    """One pytest process; what it says goes to a file."""

    def __init__(self, name: str, paths: list[str], log_path: Path) -> None:
        self.name = name
        self._log_path = log_path
        options = ["-m", "not long", f"--session-timeout={LIMIT_S}", "--durations=5"]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *paths],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.code: int | None = None

    def poll(self) -> int | None:
        self.code = self._process.poll()
        return self.code

    def end(self) -> None:
        """End pytest; the servers that it started end with it."""
        if self.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_LIMIT_S)

    def text(self) -> str:
        return self._log_path.read_text("utf-8", errors="replace")

    def percent(self) -> str:
        found = PROGRESS.findall(self.text())
        return f"{found[-1]} %" if found else "collecting"

    def summary(self) -> str:
        return self.text().rstrip().rsplit("\n", 1)[-1].strip("= ")


@contextmanager
def running(given: Mapping[str, list[str]]) -> Iterator[list[Part]]:
    with tempfile.TemporaryDirectory(prefix="onepen-tests-") as folder:
        started: list[Part] = []
        try:
            for number, (name, paths) in enumerate(given.items()):
                started.append(Part(name, paths, Path(folder) / f"{number}.log"))
            yield started
        finally:
            for part in started:
                part.end()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = told = time.monotonic()
    with running(parts(int(os.environ.get(PARTS, "3")))) as all_parts:
        left = list(all_parts)
        while left:
            time.sleep(0.2)
            for part in [part for part in left if part.poll() is not None]:
                left.remove(part)
                say(f"{part.name}: {part.summary()}")
            if left and time.monotonic() - told >= 15:
                told = time.monotonic()
                say(f"{told - began:4.0f} s  " + "   ".join(f"{part.name} {part.percent()}" for part in left))
        for part in all_parts:
            if part.code:
                say(f"\n{' ' + part.name + ' ':=^100}\n{part.text()}")
    failed = [part.name for part in all_parts if part.code]
    say(f"{'failed: ' + ', '.join(failed) if failed else 'all passed'} after {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
