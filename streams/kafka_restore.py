"""Reads state partitions of Kafka outside of any group, and asks the brokers what recovery must know, without waiting.

The order is the point. First the group's committed offset, read stable (so no transaction that counts in it is still
undecided); only then the high watermark of the state partition, not the last stable offset: a committed transaction
whose markers are still being written lies above the latter. Everything is read with read_committed up to there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from onepen.schemas.errors import Fatal
from onepen.streams import kafka_clients
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka_config import (
    state_reader,
    transactional_producer,
)
from onepen.streams.kafka_errors import PASSING
from onepen.streams.kafka_offsets import CommittedOffsets
from onepen.streams.log import Survey
from onepen.streams.topic_offsets import EARLIEST, LATEST, NEWEST, TopicOffsets

log = logging.getLogger("onepen.processor.restore")

_NO_POSITION: Final = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
ASK_S: Final = 2.0
FIRST_ASK_S: Final = 0.3
"""An offset that is not stable is waited for in turns, each twice as long as the one before, up to ASK_S: however many
partitions wait for a dead processor's transaction, the others get their turn soon."""
ASK_AGAIN_S: Final = 0.1
END_LIMIT_S: Final = 15.0


class KafkaRestorer:
    """See `log.Restorer`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._topic = settings.topics.state
        self._consumer = kafka_clients.consumer(state_reader(settings))
        self._brokers = _Brokers(settings)
        self._positions: dict[int, int] = {}
        self._began: dict[int, int] = {}
        self._surveys: dict[int, Survey | Future[Survey | None] | float] = {}
        self._patience_s: dict[int, float] = {}

    def open(self, partition: int, position: int) -> None:
        self.close(partition)
        # An absolute position, also at the beginning: a logical one is looked up, which takes half a second.
        self._consumer.incremental_assign([TopicPartition(self._topic, partition, position)])
        self._positions[partition] = self._began[partition] = position
        self._patience_s[partition] = FIRST_ASK_S
        self._surveys[partition] = self._brokers.survey(partition, FIRST_ASK_S)

    def close(self, partition: int) -> None:
        if self._positions.pop(partition, None) is not None:
            self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])
        self._surveys.pop(partition, None)
        self._patience_s.pop(partition, None)

    def read(self, records_max: int) -> Sequence[tuple[int, bytes, bytes | None]]:
        found: list[tuple[int, bytes, bytes | None]] = []
        positions = self._positions
        for message in self._consumer.consume(records_max, 0.0):
            partition, offset, error = message.partition(), message.offset(), message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                self._on_error(error, partition)
            elif partition is None or offset is None or partition not in positions:
                continue
            elif error is not None:
                # The end as read_committed sees it: also behind markers and aborted records, which are not handed out.
                positions[partition] = max(positions[partition], offset)
            else:
                positions[partition] = offset + 1
                found.append((partition, message.key() or b"", message.value()))
        return found

    def _on_error(self, error: KafkaError, partition: int | None) -> None:
        if error.code() in _NO_POSITION and self._began.get(partition or 0):
            # The survey says the same, and recovery begins anew.
            log.warning("%s-%s: %s", self._topic, partition, error.str())
        elif error.code() in _NO_POSITION and self._positions.get(partition or 0) == 0:
            # The log does not begin at 0 any more (compaction keeps offsets, but old segments may be dropped).
            beginning = TopicPartition(self._topic, partition or 0, OFFSET_BEGINNING)
            self._consumer.incremental_unassign([beginning])
            self._consumer.incremental_assign([beginning])
        elif error.code() not in PASSING:
            raise Fatal(f"{self._topic}-{partition}: the state cannot be read: {error.str()}")

    def position(self, partition: int) -> int:
        return self._positions[partition]

    def survey(self, partition: int) -> Survey | None:
        state = self._surveys[partition]
        if isinstance(state, float):
            if time.monotonic() >= state:
                patience_s = self._patience_s[partition] = min(ASK_S, 2 * self._patience_s[partition])
                self._surveys[partition] = self._brokers.survey(partition, patience_s)
            return None
        if isinstance(state, Survey):
            return state
        if not state.done():
            return None
        found = state.result()
        self._surveys[partition] = time.monotonic() + ASK_AGAIN_S if found is None else found
        return found

    def input_ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """The ends of input partitions, in one request; the one answer that is waited for, for some seconds at most."""
        return self._brokers.input_ends(partitions) if partitions else {}

    def end_transactions_of(self, transactional_ids: Sequence[str]) -> None:
        for tid in transactional_ids:
            threading.Thread(target=self._end, args=(tid,), name=f"end-{tid}", daemon=True).start()

    def _end(self, transactional_id: str) -> None:
        log.warning("ending what %s left open", transactional_id)
        try:
            properties = transactional_producer(self._settings, transactional_id)
            kafka_clients.producer(properties).init_transactions(END_LIMIT_S)
        except KafkaException as error:
            log.warning("%s: not ended: %s", transactional_id, error.args[0].str())

    def close_all(self) -> None:
        self._consumer.close()
        self._brokers.close()


class _Brokers:
    """Questions to the brokers, each asked on a thread of its own so that the engine never waits for an answer."""

    def __init__(self, settings: EngineSettings) -> None:
        self._inputs, self._state = settings.topics.inputs, settings.topics.state
        self._topics = TopicOffsets(settings, (self._inputs, self._state))
        self._ends = TopicOffsets(settings, (self._inputs,))  # its own: the other one may be waiting for its answer
        self._offsets = CommittedOffsets(settings)
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="survey")

    def survey(self, partition: int, patience_s: float) -> Future[Survey | None]:
        """None as answer: not known yet (not stable for so long, or no answer in time); ask again."""
        return self._pool.submit(self._survey, partition, patience_s)

    def _survey(self, partition: int, patience_s: float) -> Survey | None:
        inputs, state = TopicPartition(self._inputs, partition), TopicPartition(self._state, partition)
        try:
            committed = self._offsets.ask([partition], patience_s)[partition]
            latest = self._topics.ask({state: LATEST, inputs: LATEST}, ASK_S)
            earliest = self._topics.ask({state: EARLIEST, inputs: EARLIEST}, ASK_S)
            newest = self._topics.ask({inputs: NEWEST}, ASK_S)
        except (KafkaException, TimeoutError) as error:
            log.info("the brokers do not tell about partition %d: %s", partition, error)
            return None
        return Survey(
            committed=committed,
            state_end=latest[state].offset,
            inputs_start=earliest[inputs].offset,
            inputs_end=latest[inputs].offset,
            newest_ms=max(0, newest[inputs].timestamp),
            state_start=earliest[state].offset,
        )

    def input_ends(self, partitions: Sequence[int]) -> dict[int, int]:
        places = [TopicPartition(self._inputs, partition) for partition in partitions]
        for _ in range(2):
            try:
                ends = self._ends.ask(dict.fromkeys(places, LATEST), ASK_S)
                return {place.partition: ends[place].offset for place in places}
            except (KafkaException, TimeoutError) as error:
                log.warning("%s: the ends are not known: %s", self._inputs, error)
        # May be out of range: then the start fails for good, which is said, and nothing is skipped.
        return dict.fromkeys(partitions, 0)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(KafkaException):
            self._offsets.close()
