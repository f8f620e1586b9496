"""Tables of cases: text that reads like the specification, and the dozen lines that parse it.

`# name` opens a table; `command -> words` expects exactly these words, `command ~> words` at least these; a command
alone is only carried out; `>` continues the line before; anything behind `;;` is a remark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

Line = tuple[int, str, list[str], bool]
FOLDER = Path(__file__).parent / "tables"


def parse(text: str) -> Iterator[tuple[str, list[Line]]]:
    name, lines = "", list[Line]()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition(";;")[0].strip()
        if line.startswith("# "):
            if lines:
                yield name, lines
            name, lines = line[2:], []
        elif line.startswith("> "):
            number, command, expected, _ = lines[-1]
            lines[-1] = (number, command, expected + line[2:].split(), True)
        elif line:
            arrow = "->" if " -> " in line else "~>"
            command, found, expected = (part.strip() for part in line.partition(f" {arrow} "))
            lines.append((number, command, expected.split(), bool(found) and arrow == "->"))
    if lines:
        yield name, lines


def load() -> dict[str, list[Line]]:
    """Every table of the folder by `file: name`."""
    found: dict[str, list[Line]] = {}
    for path in sorted(FOLDER.glob("*.txt")):
        for name, lines in parse(path.read_text()):
            key = f"{path.stem}: {name}"
            assert key not in found, f"two tables are called {key}"
            found[key] = lines
    return found
