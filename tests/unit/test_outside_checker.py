"""The checker of the fault tests sees what it is there for: a repeat, a gap, a wrong order, a wrong count."""

from __future__ import annotations

import pytest

from tests.faults.outside import Seen, Wrong, once_each


def events(*values: str) -> dict[int, list[Seen]]:
    return {0: [Seen(n, 0, value.encode(), "s0") for n, value in enumerate(values)]}


def test_what_is_right_passes() -> None:
    once_each(events("a 1 0", "b 1 1", "a 2 2"))
    once_each({0: [], 1: []})


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(("a 1 0", "a 1 0", "a 2 1"), id="decided twice"),
        pytest.param(("a 1 0", "a 2 1", "a 3 1"), id="decided twice and counted on"),
        pytest.param(("a 1 0", "a 3 2"), id="lost"),
        pytest.param(("a 1 0", "a 2 2"), id="lost and counted on"),
        pytest.param(("a 1 1", "a 2 0"), id="out of order"),
        pytest.param(("a 1 0", "a 1 1"), id="an older state went on"),
    ],
)
def test_what_is_wrong_is_found(values: tuple[str, ...]) -> None:
    with pytest.raises(Wrong):
        once_each(events(*values))
