"""The loop alone, beside the two best known of its kind: count the inputs of each session, one event for each input.

The same backlog of JSON inputs on four partitions for each of them, one thread, exactly once: onepen's engine with a
core that counts, Kafka Streams (`kafka_streams/`, built by Maven when `mvn` and a JDK are there) and Faust, which is
given fewer inputs. Judged from outside: the time is taken from the last stable offsets of the events, from three
to nine tenths of them, so that neither starting up nor a cold JVM counts; then all events are read. The first two in
turns, three times each; told is the median. An event that is missing, repeated or miscounted ends the benchmark.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import orjson
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from infra.bench.counting import counter
from infra.bench.engine import broker, prepared
from infra.bench.measures import Measures
from infra.bench.serving import child
from infra.bench.writing import Written, write_all

PARTITIONS: Final = 4
SESSIONS: Final = 10_000
LIMIT_S: Final = 120.0
FAUST_ONCE_S: Final = 40.0
ROUNDS: Final = 3
LOOK_S: Final = 0.05
SILENT_S: Final = 3.0
STREAMS: Final = Path(__file__).parent / "kafka_streams"
FAUST: Final = Path(__file__).parent / "topology_faust.py"


def fill(bootstrap: str, topic: str, total: int) -> None:
    def records() -> Iterator[Written]:
        for number in range(total):
            session = f"session-{number % SESSIONS}"
            value = orjson.dumps({"session": session, "number": number, "content": "x" * 200})
            yield Written(topic, session, value, number % SESSIONS % PARTITIONS)

    write_all(bootstrap, records())


def measured(bootstrap: str, topic: str, total: int, limit_s: float = LIMIT_S) -> tuple[float, int]:
    """(events per second from three to nine tenths of them, events). Raises `TimeoutError` when they are not all there
    at the limit, `AssertionError` when one is repeated or miscounted."""
    reader = {"bootstrap.servers": bootstrap, "group.id": "outside", "isolation.level": "read_committed",
              "enable.auto.commit": False}  # fmt: skip
    with closing(Consumer(reader)) as consumer:
        marks = progress(consumer, topic, total, limit_s)
        events = judged(consumer, topic)
    if events < total:
        raise TimeoutError(f"{topic}: {events} of {total} events in {limit_s:.0f} s")
    if events > total:
        raise AssertionError(f"{topic}: {events} events of {total} inputs")
    reached = marks[-1][1]
    within = [mark for mark in marks if reached * 0.3 <= mark[1] <= reached * 0.9]
    if len(within) < 2 or within[-1][0] == within[0][0]:
        raise TimeoutError(f"{topic}: {total} events are too few to be measured")
    offsets_per_s = (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])
    return offsets_per_s * events / reached, events


def progress(consumer: Consumer, topic: str, total: int, limit_s: float) -> list[tuple[float, int]]:
    """(time, offsets up to which all is decided), until there are so many: events, and the markers of transactions."""
    places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    marks: list[tuple[float, int]] = []
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        marks.append((time.perf_counter(), sum(consumer.get_watermark_offsets(place, 10)[1] for place in places)))
        if marks[-1][1] >= total:
            break
        time.sleep(LOOK_S)
    return marks


def judged(consumer: Consumer, topic: str) -> int:
    """How many events there are. Read when the time was taken: to do it beside would take a core from what is measured.
    Raises `AssertionError` when one is repeated or miscounted."""
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    counts: dict[str, int] = {}
    while messages := consumer.consume(2_000, SILENT_S):
        for message in messages:
            if message.error() is not None:
                continue
            event = orjson.loads(message.value() or b"")
            counts[event["session"]] = due = counts.get(event["session"], 0) + 1
            if event["count"] != due:
                raise AssertionError(f"{topic}: {event} where count {due} was due")
    return sum(counts.values())


@contextmanager
def command(*words: str) -> Iterator[None]:
    """A program, until the block is left; its output is shown only when it ends by itself."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            yield
            ended = process.poll()
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        if ended is not None:
            log.seek(0)
            raise RuntimeError(f"{words[0]} ended with {ended}: {log.read()[-2_000:].decode(errors='replace')}")


def of_onepen(bootstrap: str, name: str, total: int) -> tuple[float, int]:
    settings = prepared(bootstrap, f"counting-{name}", PARTITIONS)
    fill(bootstrap, settings.topics.inputs, total)
    with child(counter, bootstrap, settings.prefix, PARTITIONS):
        return measured(bootstrap, settings.topics.events, total)


def topics(bootstrap: str, name: str) -> tuple[str, str]:
    inputs, events = f"{name}.inputs", f"{name}.events"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    made = admin.create_topics([NewTopic(topic, PARTITIONS, 1) for topic in (inputs, events)], operation_timeout=30)
    for future in made.values():
        future.result(60)
    return inputs, events


def built() -> bool:
    """Kafka Streams' part is built; False: no Maven or no JDK here."""
    if not (shutil.which("mvn") and shutil.which("javac")):
        return False
    subprocess.run(
        ["mvn", "-q", "-B", "-f", str(STREAMS), "package"], check=True, timeout=600, stdout=subprocess.DEVNULL
    )
    return True


def of_kafka_streams(bootstrap: str, name: str, total: int) -> tuple[float, int]:
    inputs, events = topics(bootstrap, f"streams-{name}")
    fill(bootstrap, inputs, total)
    path = f"{STREAMS}/target/classes:{STREAMS}/target/dependency/*"
    with (
        tempfile.TemporaryDirectory() as folder,
        command("java", "-cp", path, "Counting", bootstrap, f"counting-streams-{name}", inputs, events, folder),
    ):
        return measured(bootstrap, events, total)


def of_faust(bootstrap: str, total: int) -> tuple[float, int, str]:
    """Exactly once where that runs, else what it does at least once, which is more: no transactions."""
    try:
        return *_of_faust(bootstrap, total, "exactly_once", FAUST_ONCE_S), "exactly_once"
    except (RuntimeError, TimeoutError) as error:
        print(f"Faust, exactly once: {str(error).strip().splitlines()[-1][:200]}", file=sys.stderr)
    return *_of_faust(bootstrap, total, "at_least_once"), "at_least_once"


def _of_faust(bootstrap: str, total: int, guarantee: str, limit_s: float = LIMIT_S) -> tuple[float, int]:
    name = f"faust-{guarantee.replace('_', '-')}"
    inputs, events = topics(bootstrap, name)
    fill(bootstrap, inputs, total)
    with (
        tempfile.TemporaryDirectory() as folder,
        command(sys.executable, str(FAUST), bootstrap, name, inputs, events, folder, guarantee),
    ):
        return measured(bootstrap, events, total, limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine's loop beside Kafka Streams and Faust.")
    parser.add_argument("--inputs", type=int, default=600_000)
    parser.add_argument("--faust-inputs", type=int, default=20_000)
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    given = parser.parse_args()
    measures = Measures(given.out)
    rounds: list[float] = []
    streams: list[float] = []
    with_streams = built()
    with broker() as bootstrap:
        for number in range(ROUNDS):
            rate, events = of_onepen(bootstrap, str(number), given.inputs)
            rounds.append(rate)
            measures.calibrate()
            if with_streams:
                streams.append(of_kafka_streams(bootstrap, str(number), given.inputs)[0])
                measures.calibrate()
        faust, faust_events, guarantee = of_faust(bootstrap, given.faust_inputs)
    ours = statistics.median(rounds)
    if with_streams:
        measures.say(
            "topology.vs_kafka_streams",
            ours,
            "inputs/s",
            statistics.median(streams),
            aim_ratio=1.0,
            events=events,
            rounds=[round(rate) for rate in rounds],
            baseline_rounds=[round(rate) for rate in streams],
        )
    else:
        print("Kafka Streams: not measured, there is no mvn or no javac", file=sys.stderr)
    measures.say(
        "topology.vs_faust", ours, "inputs/s", faust, aim_ratio=15.0, faust_events=faust_events, guarantee=guarantee
    )


if __name__ == "__main__":
    main()
