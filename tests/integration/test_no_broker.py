"""No broker answers: each process waits for one, and ends in order when it is told to, at its start and in its work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import SecretStr

from onepen.sinks.postgres.migrate import migrate
from onepen.streams import topic_admin
from onepen.streams.embedded_kafka import EmbeddedKafka
from onepen.streams.feed import run_sink
from onepen.streams.ports import free_port
from onepen.streams.processor import run_processor
from onepen.streams.settings import Settings, load_settings
from onepen.streams.views import run_views
from onepen.streams.worker import RunContext, Worker, runtime
from tests.conformance.worlds import wait_for
from tests.services import run_coroutine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROCESSES = ("processor", "sink", "views", "worker")
END_S = 30
TOKEN_KEY = "a token key of these tests, which is long enough"


class Process:
    """`onepen NAME` as a user has it, with what it says."""

    def __init__(self, name: str, environment: dict[str, str], folder: Path) -> None:
        self.name, self.ready, self._log = name, folder / f"{name}.ready", folder / f"{name}.log"
        kept = {n: value for n, value in os.environ.items() if not n.startswith("ONEPEN_")}
        with self._log.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "onepen", name],
                env={**kept, **environment, "ONEPEN_READY_FILE": str(self.ready)},
                stdin=subprocess.DEVNULL,
                stderr=err,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def runs(self) -> bool:
        return self._process.poll() is None

    def waits(self) -> bool:
        assert not self.is_ready(), f"{self.name} is ready without a broker"
        return "waiting for it" in self.said or "cannot start yet" in self.said

    def is_ready(self) -> bool:
        assert self.runs(), f"{self.name} ended: {self.said}"
        return self.ready.exists()

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(END_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def processes(environment: dict[str, str], folder: Path) -> Iterator[list[Process]]:
    started = [Process(name, environment, folder) for name in PROCESSES]
    try:
        yield started
    finally:
        for process in started:
            process.kill()


def freeze(kafka: EmbeddedKafka) -> None:
    pid = kafka.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("strike", [EmbeddedKafka.kill, pytest.param(freeze, marks=pytest.mark.long)])
def test_every_process_waits_for_the_broker_and_ends_in_order_without_it(
    fresh_dsn: str, tmp_path: Path, strike: Callable[[EmbeddedKafka], None]
) -> None:
    kafka = EmbeddedKafka(tmp_path / "kafka")
    kafka.start()
    environment = {
        "ONEPEN_BOOTSTRAP": kafka.bootstrap,
        "ONEPEN_DSN": fresh_dsn,
        "ONEPEN_TOKEN_KEY": TOKEN_KEY,
        "ONEPEN_PARTITIONS": "2",
        "ONEPEN_DATA_DIR": str(tmp_path / "data"),
    }
    topic_admin.apply(load_settings(bootstrap=kafka.bootstrap, partitions=2, data_dir=tmp_path / "data"))
    run_coroutine(lambda: migrate(fresh_dsn))
    kafka.kill()
    with processes(environment, tmp_path) as started:
        try:
            for process in started:
                wait_for(process.waits, f"{process.name} waits", 60)
            kafka.start()
            assert kafka.bootstrap == environment["ONEPEN_BOOTSTRAP"], "the broker came back at another address"
            for process in started:
                wait_for(process.is_ready, f"{process.name} is ready", 60)
            strike(kafka)
            ends = {process.name: process.end() for process in started}
        finally:
            kafka.kill()
        said = {process.name: process.said for process in started}
    assert ends == dict.fromkeys(PROCESSES, 0), said
    assert [name for name, text in said.items() if "Traceback" in text] == [], said


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a place where nothing listens."""
    return load_settings(bootstrap=f"127.0.0.1:{free_port()}", data_dir=tmp_path, token_key=SecretStr(TOKEN_KEY))


def ends_by_stop(run: Callable[[threading.Event], None], asked: threading.Event) -> None:
    """It is asking, for longer than anybody waits here, when it is told to end."""
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(stop,), daemon=True)
    thread.start()
    assert asked.wait(END_S)
    stop.set()
    thread.join(END_S)
    assert not thread.is_alive()


def asking(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> threading.Event:
    """Set once the function of the module is under way; it does not return before the test is long over."""
    asked = threading.Event()

    def ask(*_: Any) -> None:
        asked.set()
        threading.Event().wait(4 * END_S)

    monkeypatch.setattr(module, name, ask)
    return asked


def test_views_end_while_they_wait_for_an_answer_of_a_suspended_broker(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(END_S)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        stop, ready = threading.Event(), threading.Event()
        run = partial(run_views, settings.model_copy(update={"bootstrap": address}), stop, ready=ready.set)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        asking, _ = silent.accept()
        with asking:
            stop.set()
            thread.join(END_S)
    assert not thread.is_alive()
    assert not ready.is_set()


@pytest.mark.parametrize("run", [run_processor, run_sink])
def test_a_question_under_way_does_not_hold_the_end(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, run: Callable[[Settings, threading.Event], None]
) -> None:
    asked = asking(monkeypatch, topic_admin, "check")
    settings = settings.model_copy(update={"dsn": SecretStr("postgresql://nobody@localhost/none")})
    ends_by_stop(lambda stop: run(settings, stop), asked)


def test_a_question_under_way_does_not_hold_the_end_of_a_worker(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asking(monkeypatch, runtime, "partition_counts")
    worker = Worker("w", settings=settings)

    @worker.run
    async def answer(ctx: RunContext) -> None: ...

    ends_by_stop(worker.serve, asked)
