"""The real Kafka and PostgreSQL for every test that wants them, as a pytest plugin (see tests/conftest.py).

Rule: one server of each kind per pytest session, in a directory of its own, started when the first test asks
and ended by pid when the session is over; should pytest itself be killed, the kernel ends them. External
servers serve instead when `ONEPEN_TEST_BOOTSTRAP` or `ONEPEN_TEST_DSN` name them. Tests share the servers,
never their content: `topic_prefix` and `fresh_dsn` are new each time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from onepen.sinks.embedded_postgres import EmbeddedPostgres
from onepen.streams.deadline import Deadline
from onepen.streams.embedded_kafka import EmbeddedKafka
from onepen.streams.embedded_stack import kafka_child, postgres_child
from onepen.streams.process_identity import is_running
from onepen.streams.stack_state import read_record
from onepen.streams.supervisor import Supervisor

START_TIMEOUT_MS = 90_000
# Longer than a test needs a dead processor's transaction for; processors ask for less.
PATIENT_KAFKA = {"transaction.max.timeout.ms": "120000"}
# Tests kill servers, never machines: what the server wrote is in the page cache and survives that.
FAST_POSTGRES = {"fsync": "off", "max_connections": "200"}

T = TypeVar("T")


class TestServices:
    """The embedded servers of one pytest session, each started on demand. A server that dies stays dead."""

    __test__ = False

    def __init__(self) -> None:
        self.data_dir = Path(tempfile.mkdtemp(prefix="onepen-test-"))
        self._supervisor: Supervisor | None = None
        self._bootstrap: str | None = None
        self._dsn: str | None = None

    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            self._supervisor = Supervisor(self.data_dir, progress=_say)
        return self._supervisor

    def bootstrap(self) -> str:
        """The address of the broker, which runs from now on."""
        if self._bootstrap is None:
            kafka = EmbeddedKafka(self.data_dir / "kafka", settings=PATIENT_KAFKA, progress=_say)
            supervisor = self.supervisor()
            kafka.prepare()
            child = dataclasses.replace(kafka_child(kafka), restart=False)
            supervisor.start(child, deadline=Deadline(START_TIMEOUT_MS))
            self._bootstrap = kafka.bootstrap
        return self._bootstrap

    def dsn(self) -> str:
        """The address of the database server, which runs from now on."""
        if self._dsn is None:
            postgres = EmbeddedPostgres(self.data_dir / "postgres", settings=FAST_POSTGRES, progress=_say)
            supervisor = self.supervisor()
            postgres.prepare()
            child = dataclasses.replace(postgres_child(postgres), restart=False)
            supervisor.start(child, deadline=Deadline(START_TIMEOUT_MS))
            self._dsn = postgres.dsn()
        return self._dsn

    def close(self) -> None:
        """End what was started, and check that it is gone."""
        if self._supervisor is not None:
            before = read_record(self.data_dir)
            self._supervisor.stop()
            started = [c.identity for c in before.children if c.identity] if before else []
            left = [identity.pid for identity in started if is_running(identity)]
            if left:
                raise RuntimeError(f"these servers of the tests still run: {left} ({self.data_dir})")
        shutil.rmtree(self.data_dir)


def _say(sentence: str) -> None:
    sys.stderr.write(f"[services] {sentence}\n")


def run_coroutine(make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float = 30) -> T:
    """Run a coroutine to its end in a thread of its own, so that a running loop does not matter."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(asyncio.wait_for(make(), timeout_s)))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def execute(dsn: str, *statements: str) -> None:
    """Run statements, each in a transaction of its own."""

    async def run() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    run_coroutine(run)


@contextmanager
def fresh_database(dsn: str) -> Iterator[str]:
    """A new, empty database on the server of `dsn`; it is dropped afterwards, whoever is still connected."""
    name = f"test_{secrets.token_hex(6)}"
    execute(dsn, f'create database "{name}"')
    try:
        yield urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))
    finally:
        execute(dsn, f'drop database if exists "{name}" with (force)')


def fresh_topic_prefix() -> str:
    """A prefix for the names of topics, groups and transactional ids that nobody else uses."""
    return f"t{secrets.token_hex(5)}"


@pytest.fixture(scope="session")
def test_services() -> Iterator[TestServices]:
    """The embedded servers of this session; none runs before it is asked for."""
    services = TestServices()
    try:
        yield services
    finally:
        services.close()


@pytest.fixture(scope="session")
def kafka_bootstrap(request: pytest.FixtureRequest) -> str:
    """The bootstrap address of a real broker."""
    if external := os.environ.get("ONEPEN_TEST_BOOTSTRAP"):
        return external
    services: TestServices = request.getfixturevalue("test_services")
    return services.bootstrap()


@pytest.fixture(scope="session")
def postgres_dsn(request: pytest.FixtureRequest) -> str:
    """The DSN of a real PostgreSQL whose user may create databases. Take `fresh_dsn` to write."""
    if external := os.environ.get("ONEPEN_TEST_DSN"):
        return external
    services: TestServices = request.getfixturevalue("test_services")
    return services.dsn()


@pytest.fixture
def fresh_dsn(postgres_dsn: str) -> Iterator[str]:
    """An empty database for this test only."""
    with fresh_database(postgres_dsn) as dsn:
        yield dsn


@pytest.fixture(scope="module")
def module_dsn(postgres_dsn: str) -> Iterator[str]:
    """An empty database for the tests of one module."""
    with fresh_database(postgres_dsn) as dsn:
        yield dsn


@pytest.fixture
def topic_prefix() -> str:
    """A prefix of names for this test only."""
    return fresh_topic_prefix()
