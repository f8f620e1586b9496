"""The real processor on real Kafka for the tests of the engine: topics, inputs, processes that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Producer
from pydantic import SecretStr

from onepen.schemas import codec
from onepen.schemas.inputs import Content, Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.receipts import Receipt
from onepen.streams import topic_admin
from onepen.streams.processor import run_processor
from onepen.streams.settings import Settings, load_settings
from tests.conformance.worlds import OpenTransactions, OutsideReader, Stored, delete_topics, stored

PARTITIONS = 4
TOKEN_KEY = "a token key of the engine tests, long enough"

CHILD = """
import signal, threading
from onepen.streams.processor import run_processor
from onepen.streams.settings import load_settings
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
run_processor(load_settings(), stop)
"""


class EngineWorld:
    """One prefix on the broker, and everything a test does to it."""

    def __init__(self, bootstrap: str, prefix: str, data_dir: Path, protocol: str = "classic") -> None:
        self.bootstrap, self.prefix, self.data_dir, self.protocol = bootstrap, prefix, data_dir, protocol
        self.topics = self.settings("s0").topics
        topic_admin.apply(self.settings("s0"))
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
        self._reader = OutsideReader(bootstrap, [self.topics.receipts], PARTITIONS)
        self._open = OpenTransactions(bootstrap, self.topics.receipts, PARTITIONS)
        self._verdicts: dict[str, list[str]] = {}

    def settings(self, slot: str) -> Settings:
        return load_settings(
            bootstrap=self.bootstrap,
            prefix=self.prefix,
            partitions=PARTITIONS,
            slot=slot,
            group_protocol=self.protocol,
            data_dir=self.data_dir,
            token_key=SecretStr(TOKEN_KEY),
        )

    def environment(self) -> dict[str, str]:
        """What the command line needs to reach it."""
        return {
            "ONEPEN_BOOTSTRAP": self.bootstrap,
            "ONEPEN_PREFIX": self.prefix,
            "ONEPEN_PARTITIONS": str(PARTITIONS),
            "ONEPEN_DATA_DIR": str(self.data_dir),
            "ONEPEN_TOKEN_KEY": TOKEN_KEY,
        }

    def close(self) -> None:
        self._reader.close()
        self._open.close()
        delete_topics(self.bootstrap, self.topics)

    # -- inputs ----------------------------------------------------------------------------------------------------

    def prompt(self, session_id: str, input_id: str, *, tenant_id: int = 1, issued_at_ms: int = 0) -> None:
        """Handed to the producer; `flush` waits for it."""
        record = Input(
            input_id=input_id,
            issued_at_ms=issued_at_ms or time.time_ns() // 1_000_000,
            tenant_id=tenant_id,
            user_id=1,
            session_id=session_id,
            mode="prompt",
            source="ui",
            content=Content(data=b"hello"),
        )
        self.send(codec.encode(record), session_id.encode())

    def send(self, value: bytes | None, key: bytes | None, partition: int | None = None) -> None:
        where = partition_of(key or b"", PARTITIONS) if partition is None else partition
        self._producer.produce(self.topics.inputs, value, key, where)
        self._producer.poll(0)

    def send_large(self, value: bytes, key: bytes) -> None:
        """Past the producer's own limit, up to the broker's."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "message.max.bytes": 2_000_000})
        producer.produce(self.topics.inputs, value, key, partition_of(key, PARTITIONS))
        assert producer.flush(20) == 0

    def flush(self) -> None:
        assert self._producer.flush(20) == 0

    # -- what came of them -----------------------------------------------------------------------------------------

    def stored(self, topic: str, *, committed: bool = True) -> list[tuple[int, Stored]]:
        """(partition, record) of a whole topic."""
        found = stored(self.bootstrap, topic, PARTITIONS, committed=committed)
        return [(p, r) for p in range(PARTITIONS) for r in found[p]]

    def verdicts(self) -> dict[str, list[str]]:
        """Input id -> its verdicts, in the order of the log; reads on where the last call ended."""
        for _, _, stored_ in self._reader.read():
            receipt = codec.decode_as(Receipt, stored_.value)
            if receipt.kind == "input" and receipt.verdict and receipt.input_id:
                self._verdicts.setdefault(receipt.input_id, []).append(receipt.verdict)
        return self._verdicts

    def transaction_is_open(self) -> bool:
        """Whether receipts have been written that are neither committed nor aborted yet."""
        return self._open.any()

    def aborted_records(self) -> int:
        """Records that read_uncommitted sees and read_committed does not."""
        topics = (self.topics.events, self.topics.receipts, self.topics.state)
        return sum(len(self.stored(t, committed=False)) - len(self.stored(t)) for t in topics)

    # -- processors ------------------------------------------------------------------------------------------------

    @contextmanager
    def process(self, slot: str) -> Iterator[subprocess.Popen[bytes]]:
        """A processor in a process of its own; killed at the end if it still runs."""
        own = {"ONEPEN_SLOT": slot, "ONEPEN_GROUP_PROTOCOL": self.protocol}
        environment = {**os.environ, **self.environment(), **own}
        process = subprocess.Popen([sys.executable, "-c", CHILD], env=environment, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)

    @contextmanager
    def thread(self, slot: str, *, drain: bool = True) -> Iterator[None]:
        """A processor on a thread; stopped at the end, and what it raised is raised."""
        stop, leave, failed = threading.Event(), threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                run_processor(self.settings(slot), stop, leave)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name=f"processor-{slot}")
        thread.start()
        try:
            yield
        finally:
            if drain:
                leave.set()
            stop.set()
            thread.join(30)
            assert not thread.is_alive()
        if failed:
            raise failed[0]
