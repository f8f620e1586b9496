"""The live views on a real broker: committed records only, each event once, no trace left on the broker."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from onepen.schemas.codec import seal
from onepen.schemas.events import RUN_FINISHED, RUN_STARTED, Cause, EventDraft
from onepen.schemas.limits import ZERO_HASH
from onepen.streams.deadline import Deadline
from onepen.streams.outside_reader import end_offsets, read_topic
from onepen.streams.settings import Settings
from onepen.streams.views import VIEWS_FILE, Active, Outcome, Views, read_views, run_views
from tests.conformance.worlds import create_topics

TIMEOUT_MS = 30_000
Write = Callable[..., None]
MINUTE = 1_800_000


def event(session: str, run_no: int, seq: int, kind: str, at_ms: int = MINUTE, **payload: object) -> bytes:
    draft = EventDraft(
        tenant_id=7, session_id=session, run_id=f"run-{run_no}", run_no=run_no, seq=seq, type=kind, generation=1,
        at_ms=at_ms, cause=Cause(0, seq, 0), payload=orjson.dumps(payload),
    )  # fmt: skip
    return seal(draft, ZERO_HASH)[1]


@pytest.fixture
def settings(kafka_bootstrap: str, topic_prefix: str, tmp_path: Path) -> Settings:
    made = Settings(bootstrap=kafka_bootstrap, prefix=topic_prefix, partitions=2, data_dir=tmp_path)
    create_topics(kafka_bootstrap, made.topics, made.partitions)
    return made


@pytest.fixture
def write(settings: Settings) -> Write:
    """Write records to a partition of the events topic in one transaction, committed or aborted."""
    producer = Producer(settings.kafka_client({"transactional.id": settings.prefix, "transaction.timeout.ms": 10_000}))
    producer.init_transactions(30)

    def transaction(*values: bytes, partition: int = 0, commit: bool = True) -> None:
        producer.begin_transaction()
        for value in values:
            producer.produce(settings.topics.events, value, partition=partition)
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    return transaction


@pytest.fixture
def running(settings: Settings) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=run_views, args=(settings, stop))
    thread.start()
    yield
    stop.set()
    thread.join(20)
    assert not thread.is_alive()


def seen(settings: Settings, offsets: dict[int, int]) -> Views:
    """The first snapshot that rests on at least these offsets."""
    deadline = Deadline(TIMEOUT_MS)
    pause = threading.Event()
    while not deadline.expired:
        views = read_views(settings.data_dir / VIEWS_FILE)
        if views is not None and all(views.offsets.get(p, 0) >= o for p, o in offsets.items()):
            return views
        pause.wait(0.05)
    raise AssertionError(f"no snapshot at {offsets}: {read_views(settings.data_dir / VIEWS_FILE)}")


@pytest.mark.usefixtures("running")
def test_counts_committed_events_once(settings: Settings, write: Write) -> None:
    write(event("a", 1, 1, RUN_STARTED), event("a", 1, 2, RUN_FINISHED, terminalStatus="completed"))
    write(event("a", 2, 1, RUN_STARTED), commit=False)
    write(event("b", 1, 1, RUN_STARTED), partition=1)
    write(event("b", 1, 1, RUN_STARTED), partition=1)
    write(
        event("b", 1, 2, RUN_FINISHED, MINUTE + 60_000, terminalStatus="timed_out"),
        event("b", 2, 1, RUN_STARTED),
        b"not an event",
        partition=1,
    )
    views = seen(settings, {0: 2, 1: 7})
    assert views.active == (Active(7, 1),), "an aborted run.started was counted, or a repeated one twice"
    assert views.outcomes == (
        Outcome(7, MINUTE, "completed", 1),
        Outcome(7, MINUTE + 60_000, "timed_out", 1),
    )
    assert (views.repeats_dropped, views.undecodable) == (1, 1)
    assert views.isolation == "read_committed"


def test_each_start_reads_everything_and_leaves_no_topic(settings: Settings, write: Callable[..., None]) -> None:
    write(event("a", 1, 1, RUN_STARTED))
    admin = AdminClient(settings.kafka_client())
    before = set(admin.list_topics(timeout=10).topics)
    for _ in range(2):
        (settings.data_dir / VIEWS_FILE).unlink(missing_ok=True)
        stop = threading.Event()
        thread = threading.Thread(target=run_views, args=(settings, stop))
        thread.start()
        try:
            assert seen(settings, {0: 1}).active == (Active(7, 1),)
        finally:
            stop.set()
            thread.join(20)
    assert set(admin.list_topics(timeout=10).topics) - before <= {"__consumer_offsets"}


def test_an_outside_reader_tells_committed_from_aborted(settings: Settings, write: Callable[..., None]) -> None:
    write(event("a", 1, 1, RUN_STARTED))
    write(event("a", 1, 2, RUN_FINISHED), commit=False)
    write(event("c", 1, 1, RUN_STARTED), partition=1)
    topic = settings.topics.events
    committed = [(r.partition, r.offset) for r in read_topic(settings, topic)]
    everything = [(r.partition, r.offset) for r in read_topic(settings, topic, isolation="read_uncommitted")]
    assert committed == [(0, 0), (1, 0)]
    assert everything == [(0, 0), (0, 2), (1, 0)]
    assert read_topic(settings, topic, end_offsets(settings, topic)) == []
    assert [(r.partition, r.offset) for r in read_topic(settings, topic, {0: 2, 1: 0})] == [(1, 0)]
