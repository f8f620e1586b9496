"""How long a processor takes over a state of a million sessions, and how much memory that is.

The state is put on the topic by a producer: sessions as the real core leaves them, most of them long at rest (one head
record), some with a run of today (what is remembered besides, and a deadline). The clock runs from the first line of a
new process's engine until all its partitions are live, group and transactional ids included. Beside it, in a process of
its own as well, a plain consumer that reads the same records and keeps nothing. Then the same from the local archives
that a processor leaves behind when it is stopped.

    python -m infra.bench.recovery [--sessions N] [--recent SHARE] [--partitions N] [--rounds N] [--profile] [--out F]
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import multiprocessing
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from infra.bench.core import KEYS, TENANT, inputs_of
from infra.bench.engine import broker, prepared
from infra.bench.measures import Measures, memory_kib
from infra.bench.writing import Written, write_all
from onepen.processors import state_keys, timers
from onepen.processors.decide import Moment, decide
from onepen.processors.rules import Rules
from onepen.processors.session import Session
from onepen.schemas import codec
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.schemas.partitioning import partition_of
from onepen.streams.core import SessionCore
from onepen.streams.engine import Engine
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.kafka import KafkaLog
from onepen.streams.log import TX_HEADER
from onepen.streams.processor import local_archives, patient_collector
from onepen.streams.store import MARK_FORMAT, Mark

AIM_BROKER_S: Final = 20.0
AIM_ARCHIVE_S: Final = 3.0
LIMIT_S: Final = 600.0
MODEL: Final = "session-0000000"
LONG_AGO_MS: Final = 30 * 24 * 3_600_000
BATCH_RECORDS: Final = 100
"""Of a batch in the log: what a transaction writes to a partition."""

T = TypeVar("T")
Records = Sequence[tuple[bytes, bytes]]


class Took(NamedTuple):
    """What a child of this process measured."""

    seconds: float
    cpu_s: float
    records: int
    sessions: int
    memory_before_mb: float
    memory_mb: float
    peak_mb: float
    write_s: float = 0.0
    restore_s: float = 0.0


# -- the state ---------------------------------------------------------------------------------------------------------


def model_sessions() -> tuple[Records, Records]:
    """The state records of the model session right behind a run of now, and behind one of long ago: everything that is
    remembered for a while was forgotten."""
    now_ms = time.time_ns() // 1_000_000
    recent = _ran(now_ms)
    records = _ran(now_ms - LONG_AGO_MS)
    # Its timers come, one after the other.
    while deadline_ms := timers.next_deadline_ms(session := Session.load(TENANT, MODEL, records)):
        assert deadline_ms < now_ms, "long ago is too short"
        for due in timers.due(session, deadline_ms):
            _decide(records, due.timer, Moment(5, 100, deadline_ms + 1))
    assert len(records) == 1, "a session at rest is one record"
    return list(recent.items()), list(records.items())


def _ran(now_ms: int) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    for offset, (_, data) in enumerate(inputs_of(MODEL, now_ms)):
        _decide(records, codec.decode_inputs(data), Moment(5, offset, now_ms + offset))
    return records


def _decide(records: dict[bytes, bytes], command: Any, moment: Moment) -> None:
    session = Session.load(TENANT, MODEL, records)
    session = decide(Rules.start(KEYS), session, command, moment).session
    for key, value in session.changes(timers.next_deadline_ms(session)).items():
        if value is None:
            records.pop(key, None)
        else:
            records[key] = value


def state_records(sessions: int, recent_share: float, partitions: int) -> Iterator[tuple[int, bytes, bytes]]:
    """(partition, key, value) of so many sessions. Only the ids differ; they have the model's length."""
    recent, rest = model_sessions()
    every = round(1 / recent_share) if recent_share else sessions + 1
    model = MODEL.encode()
    for number in range(sessions):
        name = b"session-%07d" % number
        partition = partition_of(name, partitions)
        for key, value in recent if number % every == every - 1 else rest:
            yield partition, key.replace(model, name), value.replace(model, name)


def fill(settings: EngineSettings, sessions: int, recent_share: float) -> int:
    """Put the state on the broker, and offsets that agree: all inputs are decided. How many records it has."""
    ends = _input_ends(settings)
    headers: list[tuple[str, str | bytes | None]] = [(TX_HEADER, b"bench.s0.a:17:123456:25/100")]
    records = itertools.chain(state_records(sessions, recent_share, settings.partitions), _marks(settings, ends))
    written = (Written(settings.topics.state, key, value, partition, headers) for partition, key, value in records)
    count = write_all(settings.bootstrap, written, {"batch.num.messages": BATCH_RECORDS})
    places = [TopicPartition(settings.topics.inputs, partition, end) for partition, end in enumerate(ends)]
    wanted = ConsumerGroupTopicPartitions(settings.group, places)
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    admin.alter_consumer_group_offsets([wanted])[settings.group].result(30)
    return count


def _input_ends(settings: EngineSettings) -> list[int]:
    consumer = Consumer({"bootstrap.servers": settings.bootstrap, "group.id": f"{settings.prefix}.ends"})
    try:
        places = [TopicPartition(settings.topics.inputs, partition) for partition in range(settings.partitions)]
        return [consumer.get_watermark_offsets(place, timeout=30)[1] for place in places]
    finally:
        consumer.close()


def _marks(settings: EngineSettings, ends: Sequence[int]) -> Iterator[tuple[int, bytes, bytes]]:
    for partition, end in enumerate(ends):
        mark = Mark(MARK_FORMAT, end, PROTOCOL_VERSION, settings.partitions, settings.slot, settings.transactional_ids)
        yield partition, state_keys.PARTITION_KEY, mark.encode()


# -- what is measured, each in a process of its own --------------------------------------------------------------------


def in_child(target: Callable[..., T], *arguments: Any) -> T:
    """What `target` answers in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(there, target, arguments), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(LIMIT_S):
            raise TimeoutError(f"{target.__name__} took more than {LIMIT_S:.0f} s")
        took: T = here.recv()
        return took
    finally:
        process.join(20)
        if process.is_alive():
            process.kill()


def _tell(there: Connection, target: Callable[..., Any], arguments: Sequence[Any]) -> None:
    there.send(target(*arguments))


def _memory_mb(field: str = "VmRSS") -> float:
    return memory_kib(os.getpid(), field) / 1024


def plain(settings: EngineSettings, records: int) -> Took:
    """Every record read, its key and its value taken into the hand and let go."""
    memory = _memory_mb()
    began, cpu_s, count = time.perf_counter(), time.process_time(), 0
    consumer = Consumer(
        {
            "bootstrap.servers": settings.bootstrap,
            "group.id": f"{settings.prefix}.plain",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(settings.topics.state, p, 0) for p in range(settings.partitions)])
    ended: set[int | None] = set()
    while len(ended) < settings.partitions:
        for message in consumer.consume(10_000, 0.1):
            error = message.error()
            if error is None:
                message.key(), message.value()
                count += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    took = time.perf_counter() - began
    assert count >= records, f"{count} of {records} records"
    found = Took(took, time.process_time() - cpu_s, count, 0, memory, _memory_mb(), _memory_mb("VmHWM"))
    consumer.close()
    return found


@patient_collector()
def processor(settings: EngineSettings, sessions: int, profiled: bool) -> Took:
    """The engine of a processor, from its first line until all partitions are live; then stopped like a processor."""
    memory = _memory_mb()
    began, cpu_s = time.perf_counter(), time.process_time()
    log = KafkaLog(settings)
    archives = local_archives(settings)
    engine = Engine(log, SessionCore(KEYS, settings.topics, settings.partitions), settings, archives=archives)
    profile = cProfile.Profile()
    if profiled:
        profile.enable()
    try:
        log.subscribe(engine)
        assigned = 0.0
        while len(engine.view().running) < settings.partitions:
            engine.turn()
            assigned = assigned or (time.perf_counter() if engine.counters.assignments else 0.0)
            if stopped := engine.view().stopped:
                raise RuntimeError(str(stopped))
            if time.perf_counter() - began > LIMIT_S:
                raise TimeoutError("the partitions did not become live")
        took, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        restore_s = time.perf_counter() - assigned
        profile.disable()
        memory_mb, peak_mb = _memory_mb(), _memory_mb("VmHWM")
        found = sum(store.sessions for store in engine.view().running)
        assert found == sessions, f"{found} of {sessions} sessions"
        if profiled:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        began = time.perf_counter()
        if archives is not None:
            kept = archives.headers(engine.view().running)
            assert len(kept) == settings.partitions, "the brokers do not say enough for archives of all partitions"
            archives.write(kept)
        write_s = time.perf_counter() - began
        return Took(took, cpu_s, engine.counters.restored, found, memory, memory_mb, peak_mb, write_s, restore_s)
    finally:
        log.close(leave=True)


# -- the lines ---------------------------------------------------------------------------------------------------------


def say(
    measures: Measures, name: str, took: Sequence[Took], baseline: Sequence[Took], aim_s: float, **more: Any
) -> None:
    last = took[-1]
    measures.say(
        name,
        statistics.median(one.seconds for one in took),
        "s",
        baseline=statistics.median(one.seconds for one in baseline),
        aim=aim_s,
        rounds=[round(one.seconds, 2) for one in took],
        from_assignment_s=round(statistics.median(one.restore_s for one in took), 2),
        cpu_s=round(statistics.median(one.cpu_s for one in took), 2),
        baseline_cpu_s=round(statistics.median(one.cpu_s for one in baseline), 2),
        sessions=last.sessions,
        records=last.records,
        memory_mb=round(last.memory_mb - last.memory_before_mb),
        bytes_per_session=round((last.memory_mb - last.memory_before_mb) * 1024 * 1024 / last.sessions),
        peak_mb=round(last.peak_mb),
        **more,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a processor takes over the state of many sessions.")
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--recent", type=float, default=0.1, help="share of the sessions with a run of today")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    parser.add_argument("--profile", action="store_true", help="say where the time goes as well")
    options = parser.parse_args()
    measures = Measures(options.out)
    read: list[Took] = []
    recovered: list[Took] = []
    loaded: list[Took] = []
    with broker() as bootstrap, tempfile.TemporaryDirectory(prefix="onepen-bench-") as folder:
        settings = prepared(bootstrap, "bench", options.partitions)
        records = fill(settings, options.sessions, options.recent)
        keeping = replace(settings, archive_dir=Path(folder))
        for number in range(options.rounds):
            read.append(in_child(plain, settings, records))
            measures.calibrate()
            # The first one finds no archive and leaves one behind, each of the others uses that of the one before.
            recovered.append(
                in_child(processor, keeping if number == 0 else settings, options.sessions, options.profile)
            )
            measures.calibrate()
            loaded.append(in_child(processor, keeping, options.sessions, options.profile))
            measures.calibrate()
            assert loaded[-1].records <= options.partitions, "the archive was not used"
        archive_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    say(measures, "recovery.broker_s", recovered, read, AIM_BROKER_S)
    say(
        measures,
        "recovery.archive_s",
        loaded,
        read,
        AIM_ARCHIVE_S,
        archive_mb=round(archive_bytes / 1e6),
        write_s=round(statistics.median(one.write_s for one in loaded), 2),
    )


if __name__ == "__main__":
    main()
