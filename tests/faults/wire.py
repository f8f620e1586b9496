"""A wire between clients and a broker that knows the requests of the Kafka protocol and does what a plan says to each.

Rule: only what a network does, and in one case a broker. A request may come late, be lost with its connection, or be
carried out while its answer is lost; a copy whose client has given up the connection may still arrive afterwards,
because the wire keeps its own connection to the broker. Plans belong to a prefix of topics: it is in the client id of
every request.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from onepen.streams.embedded_kafka import EmbeddedKafka, Ports

PRODUCE, OFFSET_FETCH, JOIN_GROUP, HEARTBEAT, SYNC_GROUP = 0, 9, 11, 12, 14
INIT_PRODUCER_ID, ADD_PARTITIONS, ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT = 22, 24, 25, 26, 28
CONSUMER_GROUP_HEARTBEAT: Final = 68
NAMES: Final = {
    PRODUCE: "Produce",
    OFFSET_FETCH: "OffsetFetch",
    JOIN_GROUP: "JoinGroup",
    HEARTBEAT: "Heartbeat",
    SYNC_GROUP: "SyncGroup",
    INIT_PRODUCER_ID: "InitProducerId",
    ADD_PARTITIONS: "AddPartitionsToTxn",
    ADD_OFFSETS: "AddOffsetsToTxn",
    END_TXN: "EndTxn",
    TXN_OFFSET_COMMIT: "TxnOffsetCommit",
    CONSUMER_GROUP_HEARTBEAT: "ConsumerGroupHeartbeat",
}


class Fault(Enum):
    """What happens to one request."""

    DELAY = "arrives later; so does all that its connection carries behind it"
    HOLD = "held, its connection stays open; delivered by `Held.release`"
    HOLD_AND_CUT = "held, and its client's connection is cut at once; delivered by `Held.release`"
    LOSE = "lost, with its connection"
    SILENCE = "lost; its connection stays open"
    LOSE_ANSWER = "carried out; its answer is lost, the connection stays open"
    CUT_ANSWER = "carried out; its answer is lost with the connection"
    TWICE = "arrives twice in a row; the second answer goes nowhere"
    NOT_LEADER = "a Produce, answered as by a broker that has not yet heard that it leads: not carried out"


class Request(NamedTuple):
    api: int
    correlation: int
    client_id: str


class Verdict(NamedTuple):
    """`after_s`: of a DELAY; of a held request the time after which it is delivered by itself (0: never)."""

    fault: Fault
    after_s: float = 0.0


Plan = Callable[[Request], Verdict | None]


def parsed(frame: bytes) -> Request:
    """The start of every request header."""
    api, _, correlation, length = struct.unpack(">hhih", frame[4:14])
    return Request(api, correlation, frame[14 : 14 + length].decode() if length > 0 else "")


class Held:
    """A request whose client does not wait for it any more, or will not for long."""

    def __init__(self, upstream: socket.socket, frame: bytes) -> None:
        self._upstream, self._frames = upstream, [frame]
        self.request = parsed(frame)
        self.delivered = False
        self._once = threading.Lock()
        self._answered = threading.Event()
        self._answer = b""

    def behind(self, frame: bytes) -> None:
        """What its connection carries behind it cannot overtake it."""
        self._frames.append(frame)

    def release(self) -> int:
        """Deliver it, and wait for the broker's answer: the error code, as it stands in the answer to an EndTxn."""
        self.deliver()
        assert self._answered.wait(20), "the broker did not answer"
        return int(struct.unpack(">h", self._answer[12:14])[0])

    def deliver(self) -> None:
        """Once, whoever asks for it."""
        with self._once:
            if self.delivered:
                return
            self.delivered = True
        with contextlib.suppress(OSError):
            self._upstream.sendall(b"".join(self._frames))

    def answered(self, answer: bytes) -> None:
        self._answer = self._answer or answer
        self._answered.set()


class _Link:
    """One connection of a client and the wire's own to the broker."""

    def __init__(self, wire: Wire, client: socket.socket, upstream: socket.socket) -> None:
        self._wire, self._client, self._upstream = wire, client, upstream
        self._held: Held | None = None
        self._swallow: Counter[int] = Counter()
        self._spare: dict[int, int] = {}
        self._cut_at: set[int] = set()
        for work in (self._requests, self._answers):
            threading.Thread(target=work, daemon=True).start()

    def _requests(self) -> None:
        with contextlib.suppress(OSError):
            while self._request(_frame(self._client)):
                pass
        if self._held is None:
            _shut(self._upstream)

    def _request(self, frame: bytes) -> bool:
        """False: this connection carries nothing more."""
        request = parsed(frame)
        if self._held is not None:
            self._held.behind(frame)
            return True
        verdict = self._wire.verdict(request)
        fault = verdict.fault if verdict else None
        if fault in (Fault.HOLD, Fault.HOLD_AND_CUT):
            assert verdict is not None
            self._held = Held(self._upstream, frame)
            self._wire.hold(self._held, verdict.after_s)
            if fault is Fault.HOLD_AND_CUT:
                _shut(self._client)
            return fault is Fault.HOLD
        if fault is Fault.LOSE:
            _shut(self._client)
            return False
        if fault is Fault.SILENCE:
            return True
        if fault is Fault.NOT_LEADER:
            self._client.sendall(_not_leader(frame))
            return True
        if fault is Fault.LOSE_ANSWER:
            self._swallow[request.correlation] += 1
        elif fault is Fault.CUT_ANSWER:
            self._cut_at.add(request.correlation)
        elif fault is Fault.DELAY and verdict is not None:
            time.sleep(verdict.after_s)
        elif fault is Fault.TWICE:
            self._spare[request.correlation] = 1
            self._upstream.sendall(frame)
        self._upstream.sendall(frame)
        return True

    def _answers(self) -> None:
        with contextlib.suppress(OSError):
            while self._answer(_frame(self._upstream)):
                pass
        _shut(self._client)

    def _answer(self, frame: bytes) -> bool:
        (correlation,) = struct.unpack(">i", frame[4:8])
        if self._held is not None and correlation == self._held.request.correlation:
            self._held.answered(frame)
            return True
        if correlation in self._cut_at:
            return False
        if self._swallow[correlation]:
            self._swallow[correlation] -= 1
            return True
        if self._spare.pop(correlation, 0):
            self._swallow[correlation] += 1
        with contextlib.suppress(OSError) if self._held is not None else contextlib.nullcontext():
            self._client.sendall(frame)
        return True


class Wire:
    """Listens on a port of its own; every connection goes to `target_port` of this machine."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._server.getsockname()[1]
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._plans: dict[str, Plan] = {}
        self._lock = threading.Lock()
        self.held: list[Held] = []
        self.done: Counter[tuple[str, str]] = Counter()
        """(request, fault) -> how often."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def plan(self, prefix: str, plan: Plan | None) -> None:
        """What happens to the requests of this prefix from now on; None: nothing."""
        with self._lock:
            if plan is None:
                self._plans.pop(prefix, None)
            else:
                self._plans[prefix] = plan

    def verdict(self, request: Request) -> Verdict | None:
        with self._lock:
            plan = self._plans.get(request.client_id.partition(".")[0])
            verdict = plan(request) if plan is not None else None
            if verdict is not None:
                self.done[NAMES.get(request.api, str(request.api)), verdict.fault.name] += 1
            return verdict

    def hold(self, held: Held, after_s: float) -> None:
        self.held.append(held)
        if after_s:
            self.deliver_after(held, after_s)

    def deliver_after(self, held: Held, after_s: float) -> None:
        timer = threading.Timer(after_s, held.deliver)
        timer.daemon = True
        timer.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self._open.append(client)
            try:
                upstream = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()  # the broker is not up yet, or not any more
                continue
            self._open.append(upstream)
            for stream in (client, upstream):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Link(self, client, upstream)

    def close(self) -> None:
        for stream in [self._server, *self._open]:
            _shut(stream)
            stream.close()


def once(api: int, verdict: Verdict, slot: str = "s0") -> Plan:
    """The next request of this kind from this slot, and no other."""
    left = [verdict]
    return lambda request: (
        left.pop() if left and request.api == api and request.client_id.split(".")[1:2] == [slot] else None
    )


def _not_leader(frame: bytes) -> bytes:
    """The answer to a Produce (version 9 to 12, one partition) that says NOT_LEADER_OR_FOLLOWER."""
    _, version, correlation, length = struct.unpack(">hhih", frame[4:14])
    assert 9 <= version <= 12, f"Produce version {version} names its topics otherwise"
    at = 14 + max(length, 0) + 1  # behind the header and its empty tags
    at += max(frame[at], 1) + 6 + 1  # transactional id, acks, time-out, count of topics
    topic = frame[at : at + frame[at]]  # with its length
    at += len(topic) + 1  # count of partitions
    (partition,) = struct.unpack(">i", frame[at : at + 4])
    answer = struct.pack(">ihqqq", partition, 6, -1, -1, -1) + b"\x01\x00\x00"
    body = struct.pack(">i", correlation) + b"\x00\x02" + topic + b"\x02" + answer + b"\x00" + struct.pack(">ib", 0, 0)
    return struct.pack(">i", len(body)) + body


def _frame(stream: socket.socket) -> bytes:
    head = _exactly(stream, 4)
    return head + _exactly(stream, struct.unpack(">i", head)[0])


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = stream.recv(count - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def _shut(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


class ProxiedKafka(EmbeddedKafka):
    """A broker with a second listener that is advertised at the wire: clients that come through it stay there."""

    def __init__(self, data_dir: Path, proxied_port: int, advertised_port: int) -> None:
        super().__init__(data_dir)
        self._proxied_port, self._advertised_port = proxied_port, advertised_port

    def _settings(self, ports: Ports) -> dict[str, str]:
        settings = super()._settings(ports)
        settings["listeners"] += f",PROXIED://127.0.0.1:{self._proxied_port}"
        settings["advertised.listeners"] += f",PROXIED://127.0.0.1:{self._advertised_port}"
        settings["listener.security.protocol.map"] += ",PROXIED:PLAINTEXT"
        return settings
