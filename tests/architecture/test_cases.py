"""Every known failure of other systems has a test named after it, and tests/CASES.md says where.

Rule: `test_b04_...` (or `test_b04a_...` for one variant of it) belongs to case B04. The ids are listed here; the table
has one row for each: what went wrong elsewhere, and the files, from tests/, that hold its tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT

TESTS = ROOT / "tests"
IDS = [
    "B01", "B02", "B04", "B05", "B07", "B08", "B09", "B10", "B11", "B13", "B14", "B15", "B17", "B18",
    "B19", "B20", "B22", "B23", "B26", "B27", "B28", "B29", "B31", "B32", "B33", "B34", "B36", "B37",
    "B38", "B39", "B40", "B41", "B42", "B44", "B46", "B48", "B50", "B51", "B53", "B54", "B56",
]  # fmt: skip
_NAME = re.compile(r"test_(b\d\d)[a-z]?_")
_ROW = re.compile(r"\| (\S+) \| (.*?) \| (.*?) \|")


def _tests_of(path: Path) -> Iterator[tuple[str, set[str]]]:
    """(name, words of its decorators) of every test function of a file that pytest would collect."""
    tree = ast.parse(path.read_text("utf-8"))
    whole_file = {
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
        for name in _words(node.value)
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            plain = [one for one in node.decorator_list if not _is_parametrize(one)]
            yield node.name, whole_file.union(*(_words(one) for one in plain))


def _is_parametrize(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parametrize"


def _words(node: ast.AST) -> set[str]:
    return {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


@cache
def named_after() -> dict[str, dict[str, bool]]:
    """Case -> file (from tests/) -> whether a test of it runs in `make test` (not long, never skipped)."""
    found: dict[str, dict[str, bool]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, marks in _tests_of(path):
            match = _NAME.match(name)
            if match is None:
                continue
            files = found.setdefault(match.group(1).upper(), {})
            where = path.relative_to(TESTS).as_posix()
            files[where] = files.get(where, False) or not marks & {"long", "skip", "skipif", "xfail"}
    return found


def rows() -> dict[str, tuple[str, list[str]]]:
    """Case -> (what went wrong elsewhere, files) of tests/CASES.md."""
    lines = (TESTS / "CASES.md").read_text("utf-8").splitlines()
    found: dict[str, tuple[str, list[str]]] = {}
    for line in lines:
        match = _ROW.fullmatch(line)
        if match is not None and re.fullmatch(r"[A-Z]\d\d", match.group(1)):
            assert match.group(1) not in found, f"two rows: {match.group(1)}"
            found[match.group(1)] = match.group(2), re.findall(r"`([^`]+)`", match.group(3))
    return found


@pytest.mark.parametrize("case", IDS)
def test_each_case_has_a_test_named_after_it(case: str) -> None:
    assert any(named_after().get(case, {}).values()), f"no test_{case.lower()}_... that `make test` runs"


def test_no_test_is_named_after_a_case_that_is_not_listed() -> None:
    assert not named_after().keys() - set(IDS)
    assert len(set(IDS)) == len(IDS) == 41


def test_the_table_has_every_case_in_order_and_tells_what_went_wrong() -> None:
    assert list(rows()) == IDS
    titles = [title for title, _ in rows().values()]
    assert len(set(titles)) == len(titles)
    assert all(20 <= len(title) <= 120 for title in titles), [t for t in titles if not 20 <= len(t) <= 120]


@pytest.mark.parametrize("case", IDS)
def test_the_table_names_the_files_that_hold_the_tests(case: str) -> None:
    expected = sorted(named_after().get(case, {}))
    row = ", ".join(f"`{name}`" for name in expected)
    assert rows()[case][1] == expected, f"the last column of {case} has to be: {row}"
