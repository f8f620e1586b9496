"""Plays whole worlds from seeds.

    python -m tests.simulation.whole SEED [--steps N] [--save NAME]

prints a line of progress and the rate, and the facts that were seen; a violation ends it with the seed. `--save` keeps
the inputs and what they came to as `histories/NAME.jsonl.gz`, which a test decides again from then on.
"""

from __future__ import annotations

import argparse
import sys
import time as real_time
from collections.abc import Callable

from tests.simulation.whole_broker import Violation
from tests.simulation.whole_checks import check_at_rest
from tests.simulation.whole_world import World, quiet

STEPS = 6_000
SLICE_MS = 1_000
REST_WITHIN_MS = 300_000


class Red(AssertionError):
    """A world in which something went wrong: the message names the seed, and how to see it again."""

    def __init__(self, world: World, steps: int, why: BaseException) -> None:
        super().__init__(
            f"seed {world.seed} after {world.time.total_steps} steps: {type(why).__name__}: {why}\n"
            f"again: python -m tests.simulation.whole {world.seed} --steps {steps}"
        )
        self.world = world


def play(
    seed: int, steps: int = STEPS, *, faults: bool = True, progress: Callable[[World], None] | None = None
) -> World:
    """Both phases and all checks. Raises `Red`."""
    with quiet():
        world = World(seed, faults=faults)
        try:
            _play(world, steps, progress)
        except Exception as why:
            raise Red(world, steps, why) from why
    return world


def _play(world: World, steps: int, progress: Callable[[World], None] | None) -> None:
    time = world.time
    while time.total_steps < steps:
        time.run_until(time.now_ms + SLICE_MS, lambda: time.total_steps >= steps)
        if progress is not None:
            progress(world)
    world.heal()
    until_ms = time.now_ms + REST_WITHIN_MS
    while time.now_ms < until_ms:
        time.run_until(time.now_ms + SLICE_MS)
        if world.at_rest:
            check_at_rest(world)
            world.green = True
            return
    raise Violation(f"I27: not at rest after {REST_WITHIN_MS // 1000} s without faults: {world.undecided()[:6]}")


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.simulation.whole", description=__doc__)
    arguments.add_argument("seed", type=int)
    arguments.add_argument("--steps", type=int, default=50_000)
    arguments.add_argument("--save", metavar="NAME")
    options = arguments.parse_args()
    began_s = real_time.perf_counter()

    def progress(world: World) -> None:
        done, passed_s = world.time.total_steps, real_time.perf_counter() - began_s
        print(f"\rseed {world.seed}: {done} steps, {done / passed_s:,.0f} steps/s ", end="", file=sys.stderr)

    try:
        world = play(options.seed, options.steps, progress=progress if sys.stderr.isatty() else None)
    except Red as red:
        print(f"\nRED: {red}", file=sys.stderr)
        _save(red.world, options.save)
        return 1
    passed_s = real_time.perf_counter() - began_s
    total = world.time.total_steps
    print(
        f"\nseed {options.seed}: {total} steps in {passed_s:.1f} s, {total / passed_s:,.0f} steps/s, all checks passed"
    )
    print("steps:", dict(world.time.steps.most_common()))
    print("facts:", dict(sorted(world.facts.items())))
    _save(world, options.save)
    return 0


def _save(world: World, name: str | None) -> None:
    if name is not None:
        from tests.simulation.whole_histories import save

        print(f"{save(world, name)} written", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
