"""A process brought to a stand at a moment that lasts only milliseconds."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable


def freeze_when(
    there: Callable[[], bool],
    send: Callable[[signal.Signals], None],
    tries: int,
    pause_s: float,
    rng: random.Random,
) -> bool:
    """Freeze it again and again, at random up to `pause_s` apart, until it stands where it is wanted; after so many
    tries it goes on, and the answer is False. `send` is given SIGSTOP and SIGCONT."""
    for _ in range(tries):
        send(signal.SIGSTOP)
        if there():
            return True
        send(signal.SIGCONT)
        time.sleep(rng.uniform(0.0, pause_s))
    return False
