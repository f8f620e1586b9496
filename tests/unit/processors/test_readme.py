"""The documentation of the core says what the core does: the diagram, the table of keys, the list of modules."""

import re
from pathlib import Path

import pytest

from onepen.processors import modes, transitions
from onepen.schemas.statuses import ACTIVE, TERMINAL, RunStatus
from tests.unit.processors.stage import Stage

FOLDER = Path(__file__).parents[3] / "processors"
README = (FOLDER / "README.md").read_text()


def fenced(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)\n```$", README, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def table(title: str) -> list[list[str]]:
    body = README.partition(f"| {title} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]


def test_the_diagram_is_current() -> None:
    assert fenced("mermaid") == transitions.mermaid()


def test_the_table_of_inputs_is_current() -> None:
    assert f"\n\n{modes.markdown()}\n\n" in README


def test_the_moves_are_those_of_the_protocol() -> None:
    """Protocol section 3, by hand."""
    may_become = {
        "running": "compacting cancelling completed failed timed_out",
        "compacting": "running cancelling failed timed_out",
        "cancelling": "cancelled",
        "completed": "",
        "failed": "",
        "cancelled": "",
        "timed_out": "",
    }
    for before in RunStatus:
        for after in RunStatus:
            assert transitions.legal(before, after) == (after in may_become[before].split()), (before, after)
    assert set(RunStatus) == ACTIVE | TERMINAL


def test_every_module_has_its_line() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    first_table = README.partition("## States")[0]
    assert modules <= set(re.findall(r"`(\w+)`", first_table))


KEYS_TABLE = table("state of the key | same digest | other digest")
INTO = {
    "unknown": [],
    "voided": ["report w1 1 act+k1,approval", "answer n1 k1 deny"],
    "not_performed": ["report w1 1 act+k1 act-k1:not_performed"],
    "waiting": ["report w1 1 act+k1,approval"],
    "approved": ["report w1 1 act+k1,approval", "answer n1 k1 approve"],
    "permitted": ["report w1 1 act+k1"],
    "in_doubt": ["report w1 1 act+k1", "release w1 shutdown", "claim w1"],
    "ok": ["report w1 1 act+k1 act-k1:ok"],
    "error": ["report w1 1 act+k1 act-k1:error"],
}


def test_the_table_of_keys_is_whole() -> None:
    assert [row[0] for row in KEYS_TABLE] == list(INTO)


@pytest.mark.parametrize("row", KEYS_TABLE, ids=lambda row: row[0])
@pytest.mark.parametrize("other_digest", [False, True])
def test_every_cell_of_the_table_of_keys(row: list[str], other_digest: bool) -> None:
    state, *cells = row
    stage = Stage()
    for line in ("prompt p1", "claim w1", *INTO[state]):
        stage.do(line)
    if state != "unknown":
        assert stage.do("keys") == [f"mail/k1:{state}"]
    run = stage.session.head.run
    assert run is not None
    words = stage.do(f"report w1 {run.report_no + 1} act+k1{',digest=d2' if other_digest else ''}")
    match cells[other_digest]:
        case "permit":
            assert "+action.permitted(k1)" in words
        case "joined":
            assert words == ["view:running"]
        case reason:
            assert words == [f"worker:{reason}", "view:running"]
