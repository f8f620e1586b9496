"""What a test on real services draws by: a seed that is printed, so that a red run can be had again."""

from __future__ import annotations

import os
import random

VARIABLE = "ONEPEN_TEST_SEED"


def drawn_seed() -> int:
    """That of `ONEPEN_TEST_SEED`, else a new one. Said in the output either way."""
    wish = os.environ.get(VARIABLE)
    seed = int(wish) if wish else random.SystemRandom().randrange(1 << 32)
    print(f"to draw the same again: {VARIABLE}={seed}", flush=True)
    return seed
