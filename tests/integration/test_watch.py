"""Metrics and probes of a real processor and a real sink."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from onepen.streams.feed import run_sink
from onepen.streams.ports import free_port
from onepen.streams.processor import run_processor
from onepen.streams.settings import Settings
from tests.conformance.worlds import wait_for
from tests.event_streams import Generator
from tests.integration import running_sink as sink
from tests.integration.engine_world import PARTITIONS, EngineWorld

pytestmark = pytest.mark.integration

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(port: int, path: str) -> tuple[int, str]:
    """(0, reason) while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError as error:
        return 0, str(error.reason)


def samples(port: int) -> Samples:
    """None of them while nobody listens."""
    status, text = get(port, "/metrics")
    if status == 0:
        return {}
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Samples, name: str) -> float:
    return sum(value for (one, _), value in found.items() if one == name)


@contextmanager
def running(run: object, settings: Settings) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(settings, stop))  # type: ignore[arg-type]
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def test_a_processor_shows_what_it_does(world: EngineWorld) -> None:
    port = free_port()
    settings = world.settings("s0").model_copy(update={"metrics_port": port})
    for n in range(30):
        world.prompt(f"secret-session-{n}", f"secret-input-{n}")
    world.send(b"garbage", b"secret-key")
    world.flush()
    with running(run_processor, settings):
        wait_for(lambda: get(port, "/readyz")[0] == 200, "ready")
        assert get(port, "/readyz")[1] == "partitions 0, 1, 2, 3\n"
        assert get(port, "/healthz")[0] == 200
        wait_for(lambda: len(world.verdicts()) == 30, "all verdicts")
        wait_for(lambda: total(samples(port), "onepen_inputs_decided_total") >= 31, "counted")
        wait_for(lambda: total(samples(port), "onepen_kafka_received_bytes_total") > 0, "statistics of librdkafka")
        wait_for(
            lambda: [v for (name, _), v in samples(port).items() if name == "onepen_lag_records"] == [0.0] * PARTITIONS,
            "no lag",
        )
        found = samples(port)
        assert total(found, "onepen_sessions") == 30
        assert total(found, "onepen_runs_active") == 30
        assert total(found, "onepen_timers_armed") >= 30
        assert found["onepen_dead_letters_total", (("reason", "no_frame"),)] == 1
        assert found["onepen_transactions_total", (("outcome", "committed"),)] >= 1
        assert found["onepen_transaction_seconds_count", ()] == total(found, "onepen_transactions_total")
        assert found["onepen_transaction_inputs_sum", ()] >= 31
        assert found["onepen_recovery_seconds_count", ()] == PARTITIONS
        assert found["onepen_partitions", (("state", "running"),)] == PARTITIONS
        assert "secret" not in get(port, "/metrics")[1], "no ids, neither in labels nor anywhere else"
    assert get(port, "/healthz")[0] == 0
    with running(run_processor, settings):
        wait_for(lambda: get(port, "/readyz")[0] == 200, "ready after the restart")
        assert total(samples(port), "onepen_runs_active") == 30, "read from the state"


def test_a_partition_that_stands_still_is_not_ready(world: EngineWorld) -> None:
    port = free_port()
    producer = Producer({"bootstrap.servers": world.bootstrap})
    producer.produce(world.topics.state, b"?", b"unknown/key", 2)
    assert producer.flush(10) == 0
    with running(run_processor, world.settings("s0").model_copy(update={"metrics_port": port})):
        wait_for(lambda: get(port, "/readyz") == (503, "partitions stand still: 2\n"), "the reason")
        assert samples(port)["onepen_partition_stopped", (("partition", "2"),)] == 1
        assert get(port, "/healthz")[0] == 200, "a restart would not help"


def test_a_sink_shows_what_it_does(kafka_bootstrap: str, topic_prefix: str, fresh_dsn: str, tmp_path: Path) -> None:
    port = free_port()
    settings = sink.settings_on(kafka_bootstrap, topic_prefix, fresh_dsn, tmp_path, metrics_port=port)
    streams = Generator(1, partitions=sink.PARTITIONS, sessions=4).make(6)
    records = sum(len(found) for topic in (streams.events, streams.receipts) for found in topic.values())
    with running(run_sink, settings):
        sink.produce(settings, streams)
        wait_for(lambda: total(samples(port), "onepen_sink_records_total") == records, "all records")
        assert get(port, "/readyz") == (200, f"{2 * sink.PARTITIONS} partitions\n")
        assert get(port, "/healthz")[0] == 200
        wait_for(
            lambda: (
                [v for (name, _), v in samples(port).items() if name == "onepen_sink_lag_records"]
                == [0.0] * 2 * sink.PARTITIONS
            ),
            "no lag",
        )
        found = samples(port)
        assert found["onepen_sink_batch_records_sum", ()] == records
        assert found["onepen_sink_batch_seconds_count", ()] >= 1
        assert found["onepen_sink_fenced_total", ()] == 0
