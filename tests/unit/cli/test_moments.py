"""Ages and times as arguments."""

import time

import pytest

from onepen.cli.moments import moment_ms, moment_text
from onepen.schemas.errors import Invalid


def test_an_age_is_counted_from_now() -> None:
    before_ms = time.time_ns() // 1_000_000
    found = moment_ms("15m", "since")
    assert before_ms - 900_000 <= found <= time.time_ns() // 1_000_000 - 900_000
    assert moment_ms("999999d", "since") == 0


def test_a_time_without_a_zone_is_utc() -> None:
    assert moment_ms("1970-01-01T00:00:01", "since") == 1_000
    assert moment_ms("1970-01-01T01:00:01+01:00", "since") == 1_000
    assert moment_ms("1970-01-02", "since") == 86_400_000
    assert moment_text(1_000) == "1970-01-01 00:00:01Z"
    assert moment_text(None) is None


@pytest.mark.parametrize("text", ["", "soon", "15", "-1h", "1.5h", "2026-13-01"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(Invalid, match="since: "):
        moment_ms(text, "since")
