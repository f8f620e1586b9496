"""Three real brokers on the loopback interface, each a controller as well, that can be killed and suspended one by one.

Rule: what three brokers decide among themselves has Kafka's own settings (sessions, elections); every topic has three
replicas, two of which must be in sync. Which broker has which office is asked of the brokers.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import struct
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from onepen.streams.child_process import ChildProcess, launch, tail_lines
from onepen.streams.embedded_kafka import BROKER_SETTINGS, EmbeddedKafka, Ports, find_java, kafka_answers
from onepen.streams.kafka_jars import provide_jars

COUNT: Final = 3
TRANSACTIONS_TOPIC: Final = "__transaction_state"
OFFSETS_TOPIC: Final = "__consumer_offsets"
START_S: Final = 90.0
LOOK_S: Final = 0.2
DESCRIBE_QUORUM: Final = 55
_ONE_BROKER: Final = ("broker.heartbeat.interval.ms", "broker.session.timeout.ms")
_REPLICATED: Final = {
    name: "3" if name.endswith("factor") else "2"
    for name in BROKER_SETTINGS
    if name.endswith(("replication.factor", "min.isr", "min.insync.replicas"))
}


class Node(EmbeddedKafka):
    """One of the three; `prepare` and `start` of a single broker are not used."""

    def __init__(self, data_dir: Path, number: int) -> None:
        super().__init__(data_dir, heap_mb=256)
        self.number, self._voters = number, ""

    def choose_ports(self) -> str:
        """Its ports are known from now on; the address of its controller."""
        self.data_dir.mkdir(parents=True)
        self._jars, self._java = provide_jars(lambda _: None), find_java()
        self._ports = self._choose_ports()
        return f"127.0.0.1:{self._ports.controller}"

    def settle(self, voters: dict[int, str]) -> None:
        """Write the settings of a broker among others."""
        assert self._ports is not None
        self._voters = ",".join(f"{number}@{address}" for number, address in voters.items())
        self._write_settings(self._ports)

    def _settings(self, ports: Ports) -> dict[str, str]:
        settings = super()._settings(ports) | _REPLICATED
        settings |= {"node.id": str(self.number), "controller.quorum.voters": self._voters}
        return {name: value for name, value in settings.items() if name not in _ONE_BROKER}

    def format_first(self) -> None:
        self._format()

    def format_like(self, other: Node) -> None:
        """A formatted directory of the same cluster."""
        shutil.copytree(other.data_dir / "log", self.data_dir / "log")
        path = self.data_dir / "log" / "meta.properties"
        own_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        text = re.sub(r"node\.id=.*", f"node.id={self.number}", path.read_text("utf-8"))
        path.write_text(re.sub(r"directory\.id=.*", f"directory.id={own_id}", text), "utf-8")

    def run(self) -> None:
        """Start it as it stands. As in a real cluster nobody declares its former self dead: the others do."""
        command = [*self._java_command("kafka.Kafka"), str(self._settings_path)]
        self._process = launch(command, log_path=self.log_path)

    def suspend(self) -> None:
        self._child().signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self._child().signal_group(signal.SIGCONT)

    def _child(self) -> ChildProcess:
        assert self._process is not None
        assert self._process.poll() is None, f"broker {self.number} ended: {tail_lines(self.log_path, 10)}"
        return self._process


class ThreeBrokers:
    """`start`, then `bootstrap` is the address of all three. Used by the thread that started it only."""

    def __init__(self, folder: Path) -> None:
        self.nodes = {number: Node(folder / f"broker-{number}", number) for number in range(1, COUNT + 1)}

    @property
    def bootstrap(self) -> str:
        return ",".join(node.bootstrap for node in self.nodes.values())

    def start(self) -> None:
        nodes = list(self.nodes.values())
        voters = {node.number: node.choose_ports() for node in nodes}
        for node in nodes:
            node.settle(voters)
        nodes[0].format_first()
        for node in nodes[1:]:
            node.format_like(nodes[0])
        for node in nodes:
            node.run()
        self._wait(lambda: all(kafka_answers(node.bootstrap, 1_000) for node in nodes), "three brokers answer")
        self._wait(lambda: len(self._admin().list_topics(timeout=5).brokers) == COUNT, "three brokers in service")

    def stop(self) -> None:
        """End all of them at once; their data is not needed any more."""
        for node in self.nodes.values():
            node.kill()

    def wait_in_sync(self, timeout_s: float = START_S) -> None:
        """Every partition has a leader and all its replicas in sync."""
        self._wait(lambda: not self.behind(), "all replicas in sync", timeout_s)

    def behind(self) -> list[str]:
        """Partitions that lack a replica or a leader."""
        topics = self._admin().list_topics(timeout=5).topics
        return [
            f"{name}-{p.id}"
            for name, topic in topics.items()
            for p in topic.partitions.values()
            if p.leader < 0 or len(p.isrs) < COUNT
        ]

    # -- offices ---------------------------------------------------------------------------------------------------

    def transaction_coordinator(self, transactional_id: str) -> int:
        return self.leader_of(TRANSACTIONS_TOPIC, transactional_id)

    def group_coordinator(self, group: str) -> int:
        """What the brokers tell has to agree with where the group is kept: where transactional ids are kept no client
        tells, and it is computed alike. A broker that was away may tell what was true before, for a moment."""

        def agreed() -> bool:
            admin = self._admin()  # its answers die with it
            described = admin.describe_consumer_groups([group], request_timeout=10)[group].result(15)
            return described.coordinator is not None and described.coordinator.id == self.leader_of(
                OFFSETS_TOPIC, group
            )

        self._wait(agreed, f"the coordinator of {group} is where it is kept")
        return self.leader_of(OFFSETS_TOPIC, group)

    def leader_of(self, topic: str, name: str) -> int:
        """The broker that leads the partition of an internal topic in which `name` is kept."""
        leaders = self.leaders(topic)
        return leaders[kept_in(name, len(leaders))]

    def leaders(self, topic: str) -> dict[int, int]:
        """The broker that leads, by partition."""
        partitions = self._admin().list_topics(topic, timeout=5).topics[topic].partitions
        return {partition: int(one.leader) for partition, one in partitions.items()}

    def controller(self) -> int:
        """The active one. Clients are told any broker; the quorum knows."""
        for node in self.nodes.values():
            try:
                return quorum_leader(node.bootstrap)
            except OSError:
                continue
        raise AssertionError("no broker tells who leads the quorum")

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        end, refused = time.monotonic() + timeout_s, ""
        while True:
            try:
                if condition():
                    return
                refused = ""
            except KafkaException as error:
                refused = str(error)
            if time.monotonic() > end:
                tails = {n: tail_lines(node.log_path, 8) for n, node in self.nodes.items()}
                raise AssertionError(f"not within {timeout_s} s: {what}; last error: {refused or 'none'}; {tails}")
            time.sleep(LOOK_S)


def kept_in(name: str, partitions: int) -> int:
    """The partition of an internal topic in which a group or a transactional id is kept: the brokers take the absolute
    value of `String.hashCode`, where producers clear the sign bit of a key's hash."""
    value = 0
    for character in name:
        value = (31 * value + ord(character)) & 0xFFFFFFFF
    signed = value - (1 << 32) if value >> 31 else value
    return 0 if signed == -(1 << 31) else abs(signed) % partitions


def quorum_leader(address: str, timeout_s: float = 5.0) -> int:
    """The node that leads the metadata quorum, asked with a DescribeQuorum request. Raises `OSError`."""
    host, _, port = address.partition(":")
    topic = b"__cluster_metadata"
    body = b"\x02" + bytes([len(topic) + 1]) + topic + b"\x02" + struct.pack(">i", 0) + b"\x00\x00\x00"
    frame = struct.pack(">hhih", DESCRIBE_QUORUM, 0, 1, -1) + b"\x00" + body
    with socket.create_connection((host, int(port)), timeout=timeout_s) as stream:
        stream.sendall(struct.pack(">i", len(frame)) + frame)
        reader = stream.makefile("rb")
        (length,) = struct.unpack(">i", reader.read(4) or b"\x00" * 4)
        answer = reader.read(length)
    # correlation, tags; error; one topic with its name; one partition: index, error, leader
    at = 4 + 1 + 2 + 1 + 1 + len(topic) + 1
    if len(answer) < at + 10 or answer[5:7] != b"\x00\x00":
        raise OSError(f"{address} does not tell who leads the quorum: {answer[:16]!r}")
    _, error, leader = struct.unpack(">ihi", answer[at : at + 10])
    if error or leader < 0:
        raise OSError(f"{address}: the quorum has no leader (error {error})")
    return int(leader)
