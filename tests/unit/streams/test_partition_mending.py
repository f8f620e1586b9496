"""What is the matter with a partition, and whether offsets mend it."""

from __future__ import annotations

import pytest

from onepen.streams.partition_mending import Findings
from onepen.streams.store import MARK_FORMAT, Mark


def findings(
    marked: int | None, committed: int | None, *, start: int = 0, end: int = 20, unknown: int = 0, count: int = 4
) -> Findings:
    mark = None if marked is None else Mark(MARK_FORMAT, marked, 0, 4, "s0", ("a", "b"))
    return Findings(3, mark, committed, start, end, unknown, count)


@pytest.mark.parametrize(
    ("found", "verdict", "target", "said"),
    [
        (findings(7, 7), "agree", None, "nothing to mend"),
        (findings(None, None), "fresh", None, "nothing to mend"),
        (findings(7, None), "offset_missing", None, "nothing to mend"),
        (findings(7, 9), "torn", 7, "inputs 7 to 8 will be decided; to mend: onepen partition mend 3 --yes"),
        (findings(9, 7), "torn", 9, "inputs 7 to 8 are decided already"),
        (findings(7, 9, unknown=2), "torn", None, "the log holds 2 decisions from input 7 on"),
        (findings(7, 9, start=8), "inputs_lost", None, "inputs 7 to 7 are gone"),
        (findings(7, 7, start=8), "inputs_lost", None, "onepen partition mend 3 --skip-lost --yes"),
        (findings(None, 7), "state_lost", None, "the state topic was emptied"),
        (findings(21, 21), "other_topic", None, "made anew"),
        (findings(7, 7, count=5), "other_count", None, "set ONEPEN_PARTITIONS=4"),
    ],
)
def test_a_verdict_names_what_mends_it(found: Findings, verdict: str, target: int | None, said: str) -> None:
    assert (found.verdict, found.target) == (verdict, target)
    assert said in found.sentence()
