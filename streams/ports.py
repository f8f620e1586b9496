"""Free TCP ports on the loopback interface, outside the range from which systems take ports by themselves.

Rule: a port is taken from 20000-32000, so that an outgoing connection of any program cannot get it between
the look and the use. Nothing here reserves a port; whoever uses it must cope with losing the race.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

__all__ = ["NoFreePort", "free_port", "port_is_free"]

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 20_000, 32_000
TRIES = 500


class NoFreePort(RuntimeError):
    """No port of the range was free."""


def port_is_free(port: int) -> bool:
    """Whether a server could listen on the port of the loopback interface right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do it: connections that linger after a restart do not make a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(avoid: Collection[int] = ()) -> int:
    """A port that is free now and not among `avoid`."""
    chooser = random.SystemRandom()
    for _ in range(TRIES):
        port = chooser.randint(FIRST_PORT, LAST_PORT)
        if port not in avoid and port_is_free(port):
            return port
    raise NoFreePort(f"no free TCP port between {FIRST_PORT} and {LAST_PORT} on {LOOPBACK}")
