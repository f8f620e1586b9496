"""Each table of tables/*.txt, written from the protocol, against the core."""

import pytest

from tests.unit.processors import tables
from tests.unit.processors.stage import Stage, run_lines

TABLES = tables.load()


@pytest.mark.parametrize("name", TABLES)
def test_table(name: str) -> None:
    run_lines(Stage(), TABLES[name])


def test_a_wrong_table_is_found_out() -> None:
    wrong = "# t\nprompt p1 -> queued"
    with pytest.raises(AssertionError, match="line 2"):
        run_lines(Stage(), dict(tables.parse(wrong))["t"])
