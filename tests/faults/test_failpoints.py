"""The processor killed, frozen and broken at every step of its loop, while another one takes over and inputs go on.

After each strike a reader from outside finds one decision per input, counted without gap or repeat, and a state that
says what the events say. The freezes outlast the group session and the transaction; another member owns every partition
before the frozen one is woken, and nothing of what it had under way is committed afterwards.
"""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onepen.streams import failpoints
from tests.faults.process import ACTIONS, EXCEPTION, KILL, STOP
from tests.faults.trial import SESSION, Combination, Trial, tails
from tests.faults.wire import Wire

AT_ONCE = 5
POINTS = [point for point in failpoints.POINTS if point != failpoints.IN_DOUBT]
"""A doubt needs a wire that fails."""


def run_all(bootstrap: str, combinations: list[Combination], folder: Path, wire: Wire | None = None) -> None:
    """All of them, some at a time; each failure with the ends of its logs."""

    def one(combination: Combination) -> str:
        trial = Trial(bootstrap, combination, folder / str(combination), wire)
        began_s = time.monotonic()
        try:
            trial.run()
        except Exception:
            return f"{combination}: {traceback.format_exc()}\n{tails(trial)}"
        print(f"{combination}: green after {time.monotonic() - began_s:.1f} s. {trial.note}", flush=True)
        return ""

    with ThreadPoolExecutor(AT_ONCE) as pool:
        failures = [failure for failure in pool.map(one, combinations) if failure]
    assert not failures, "\n".join(failures)


@pytest.mark.timeout(120)
def test_some_of_all(kafka_bootstrap: str, tmp_path: Path) -> None:
    chosen = [
        Combination(failpoints.AFTER_PRODUCE, KILL, "classic"),
        Combination(failpoints.AFTER_SEND_OFFSETS, STOP, "classic"),
        Combination(failpoints.BEFORE_PUBLISH, KILL, "consumer"),
        Combination(failpoints.IN_REVOKED, EXCEPTION, "classic"),
        Combination(failpoints.AFTER_COMMIT, EXCEPTION, "classic", SESSION),
    ]
    run_all(kafka_bootstrap, chosen, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("action", ACTIONS)
def test_every_point(kafka_bootstrap: str, tmp_path: Path, action: str, protocol: str) -> None:
    run_all(kafka_bootstrap, [Combination(point, action, protocol) for point in POINTS], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_in_doubt(wired: tuple[str, Wire], tmp_path: Path) -> None:
    chosen = [
        Combination(failpoints.IN_DOUBT, action, protocol) for action in ACTIONS for protocol in ("classic", "consumer")
    ]
    run_all(wired[0], chosen, tmp_path, wired[1])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_real_core(kafka_bootstrap: str, tmp_path: Path) -> None:
    chosen = [
        Combination(failpoints.AFTER_PRODUCE, KILL, "classic", SESSION),
        Combination(failpoints.AFTER_SEND_OFFSETS, STOP, "classic", SESSION),
        Combination(failpoints.AFTER_SEND_OFFSETS, KILL, "consumer", SESSION),
        Combination(failpoints.AFTER_COMMIT, STOP, "consumer", SESSION),
        Combination(failpoints.BEFORE_PUBLISH, EXCEPTION, "classic", SESSION),
        Combination(failpoints.IN_RECOVERY, KILL, "classic", SESSION),
    ]
    run_all(kafka_bootstrap, chosen, tmp_path)
