"""Processor and sink as real processes, started, killed and started again by pid."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import asyncpg

from onepen.sinks.postgres.migrate import migrate
from onepen.streams.child_process import ChildProcess, launch, tail_lines
from onepen.streams.settings import Settings, ensure_token_key
from onepen.streams.topic_admin import apply
from tests.conformance.worlds import OpenTransactions
from tests.freezing import freeze_when
from tests.services import run_coroutine

STOP_MS = 15_000
FREEZES_MAX = 100


class Pipeline:
    """Topics, tables, one processor and one sink; what it starts it ends."""

    def __init__(self, bootstrap: str, dsn: str, prefix: str, directory: Path) -> None:
        self.directory = directory
        ensure_token_key(directory)
        self.settings = Settings(
            bootstrap=bootstrap,
            dsn=dsn,
            prefix=prefix,
            data_dir=directory,
            token_key_file=directory / "token.key",
        )
        self.kills: Counter[str] = Counter()
        self._children: dict[str, ChildProcess] = {}
        self._launcher = ThreadPoolExecutor(1)
        self._transactions = OpenTransactions(bootstrap, self.settings.topics.receipts, self.settings.partitions)
        apply(self.settings, 60_000)
        asyncio.run(migrate(dsn))

    def __enter__(self) -> Pipeline:
        for name in ("processor", "sink"):
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.end(signal.SIGTERM, STOP_MS)
        self._launcher.shutdown()
        self._transactions.close()
        if kind is not None:
            for name in self._children:
                print(f"--- {name}", *tail_lines(self._log(name), 30), sep="\n")

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def start(self, name: str) -> None:
        dsn = self.settings.require_dsn()
        env = {
            "ONEPEN_BOOTSTRAP": self.settings.bootstrap,
            "ONEPEN_DSN": dsn,
            "ONEPEN_PREFIX": self.settings.prefix,
            "ONEPEN_TOKEN_KEY_FILE": str(self.directory / "token.key"),
            "ONEPEN_DATA_DIR": str(self.directory / "data"),
        }
        argv = [sys.executable, "-P", "-m", "onepen", name]
        # A child ends with the thread that launched it: all are launched by one that lives as long as the pipeline.
        started = self._launcher.submit(launch, argv, log_path=self._log(name), env=env, cwd=self.directory)
        self._children[name] = started.result(STOP_MS / 1000)

    def kill(self, name: str, *, amid_transaction: random.Random | None = None) -> None:
        """SIGKILL, and a new process at once, as the supervisor would start it. `amid_transaction`: by these draws."""
        child = self._children[name]
        assert child.poll() is None, f"the {name} was not running: {tail_lines(self._log(name), 5)}"
        if amid_transaction is not None:
            opened = self._transactions.any if name == "processor" else self._open_in_the_tables
            freeze_when(opened, child.signal, FREEZES_MAX, 0.02, amid_transaction)
        child.signal(signal.SIGKILL)
        child.wait(STOP_MS)
        self.kills[name] += 1
        self.start(name)

    def _open_in_the_tables(self) -> bool:
        async def count() -> int:
            connection = await asyncpg.connect(self.settings.require_dsn())
            try:
                found = await connection.fetchval(
                    "select count(*) from pg_stat_activity"
                    " where datname = current_database() and state = 'idle in transaction'"
                )
                return int(found)
            finally:
                await connection.close()

        return run_coroutine(count) > 0
