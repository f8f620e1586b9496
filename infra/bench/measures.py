"""One measure, one JSON line, with what is needed to compare it: the load of the machine and a calibration.

The calibration is the median time of a fixed loop of plain Python, in µs. Two runs, or two machines, are compared by
`ratio` (value / baseline); where a measure has no other baseline, the calibration is it.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, Final

ROUNDS: Final = 41


class _Place:
    __slots__ = ("next", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.next: _Place | None = None


def _fixed_loop_ns() -> int:
    """500 small objects made, linked, put into a dictionary and read again."""
    start_ns = time.perf_counter_ns()
    places: dict[str, _Place] = {}
    last: _Place | None = None
    for number in range(500):
        place = _Place(number)
        place.next = last
        places[f"place-{number}"] = last = place
    sum(place.value for place in places.values() if place.next is not None)
    return time.perf_counter_ns() - start_ns


def memory_kib(pid: int, field: str = "VmRSS") -> int:
    """Of a process, from the kernel: its resident size, or `VmHWM` for the largest so far. Raises `OSError`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


class Measures:
    """Prints each measure as it is known, and appends it to a file when one is named."""

    def __init__(self, out: Path | None = None) -> None:
        self._out = out
        self._rounds_ns = [_fixed_loop_ns() for _ in range(ROUNDS)]

    def calibrate(self) -> None:
        """One more round of the fixed loop. Call it between what is measured: a busy machine changes all the time."""
        self._rounds_ns.append(_fixed_loop_ns())

    @property
    def calibration(self) -> float:
        return round(statistics.median(self._rounds_ns) / 1000, 2)

    def say(self, name: str, value: float, unit: str, baseline: float | None = None, **more: Any) -> None:
        """`baseline` in the unit of the value; none: the calibration."""
        against = self.calibration if baseline is None else baseline
        line = {
            "name": name,
            "value": round(value, 2),
            "unit": unit,
            "baseline": round(against, 2),
            "ratio": round(value / against, 4) if against else None,
            "load": round(os.getloadavg()[0], 2),
            "calibration": self.calibration,
            **more,
        }
        text = json.dumps(line)
        print(text, flush=True)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with self._out.open("a") as file:
                file.write(text + "\n")
