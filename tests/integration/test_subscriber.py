"""Subscriptions on the real log and the real tables: order, ends, cursors, and the seam between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pydantic import SecretStr

from onepen.schemas.events import Event
from onepen.schemas.partitioning import partition_of
from onepen.sinks.postgres.history import next_offset, open_pool
from onepen.sinks.postgres.migrate import migrate
from onepen.streams.client import Client
from onepen.streams.deadline import DeadlineExpired
from onepen.streams.settings import Settings
from onepen.streams.subscriber import CursorAhead, CursorTooOld, Subscriber, UnknownRun
from onepen.streams.worker import RunContext
from tests.integration.running_pipeline import PARTITIONS, UNHURRIED, Pipeline, eventually, running, serving, types
from tests.integration.running_sink import RunningSink
from tests.services import fresh_topic_prefix, run_coroutine

TIMEOUT_MS = 30_000


def applied(settings: Settings, partition: int) -> int:
    async def read() -> int:
        pool = await open_pool(settings.require_dsn())
        try:
            return await next_offset(pool, settings.topics.events, partition)
        finally:
            await pool.close()

    return run_coroutine(read)


@pytest.fixture(scope="module")
def pipeline(kafka_bootstrap: str, module_dsn: str) -> Iterator[Pipeline]:
    with running(kafka_bootstrap, fresh_topic_prefix(), UNHURRIED) as found:
        run_coroutine(lambda: migrate(module_dsn))
        worker = found.worker()

        @worker.run
        async def answer(ctx: RunContext) -> str:
            if ctx.input == "wait":
                await ctx.cancelled.wait()
            await ctx.message(f"you said {ctx.input}")
            return str(ctx.input)

        with serving(worker):
            yield found


@pytest.fixture(scope="module")
def client(pipeline: Pipeline) -> Iterator[Client]:
    with pipeline.client() as found:
        yield found


def done(client: Client, session_id: str, count: int = 1) -> list[str]:
    """`count` finished runs of a session."""
    runs = []
    for n in range(count):
        ended = client.prompt(session_id, f"n{n}").disposition(30_000)
        assert (ended.disposition, ended.run_id is None) == ("consumed", False)
        runs.append(ended.run_id or "")
    return runs


def everything(pipeline: Pipeline, session_id: str, runs: int) -> list[Event]:
    """All events of a session once `runs` of its runs have ended, read without the tables."""
    events: list[Event] = []
    for event in pipeline.subscriber().session(session_id, timeout_ms=TIMEOUT_MS):
        events.append(event)
        if event.type == "run.finished" and event.run_no == runs:
            return events
    raise AssertionError("a following subscription does not end")


def places(events: list[Event]) -> list[tuple[int, int]]:
    return [(event.run_no, event.seq) for event in events]


def test_a_run_ends_by_itself_and_is_the_same_again(pipeline: Pipeline, client: Client) -> None:
    (run_id,) = done(client, "sub-run")
    live = pipeline.run_of(run_id)
    assert types(live) == ["run.started", "run.leased", "message.completed", "run.finished"]
    assert [event.seq for event in live] == [1, 2, 3, 4]
    assert pipeline.run_of(run_id, session_id="sub-run") == live
    assert list(pipeline.subscriber().run(run_id, after_seq=2, timeout_ms=TIMEOUT_MS)) == live[2:]
    assert list(pipeline.subscriber().run(run_id, after_seq=4, timeout_ms=TIMEOUT_MS)) == []
    with pytest.raises(CursorAhead):
        list(pipeline.subscriber().run(run_id, after_seq=5, timeout_ms=TIMEOUT_MS))


def test_b51_a_run_that_nobody_knows(pipeline: Pipeline) -> None:
    with pytest.raises(UnknownRun):
        list(pipeline.subscriber().run("run-nobody", unknown_after_ms=200, timeout_ms=TIMEOUT_MS))


def test_b51_every_cursor_of_a_session(pipeline: Pipeline, client: Client) -> None:
    done(client, "sub-cursor", 3)
    events = everything(pipeline, "sub-cursor", 3)
    assert len(events) == 12

    def after(*cursor: int) -> list[Event]:
        found = pipeline.subscriber().session(
            "sub-cursor", after=(cursor[0], cursor[1]), follow=False, timeout_ms=TIMEOUT_MS
        )
        return list(found)

    for index, event in enumerate(events):
        assert after(event.run_no, event.seq) == events[index + 1 :]
    assert after(0, 0) == events
    assert after(2, 0) == events[4:]
    for run_no, seq in ((3, 5), (4, 1), (1, 99), (2, 5), (9, 9)):
        with pytest.raises(CursorAhead):
            after(run_no, seq)


def test_b50_a_drop_and_a_drop_again_lose_and_repeat_nothing(pipeline: Pipeline, client: Client) -> None:
    done(client, "sub-drop", 1)
    got: list[Event] = []
    subscription = pipeline.subscriber().session("sub-drop", timeout_ms=TIMEOUT_MS)
    for event in subscription:
        got.append(event)
        if len(got) == 2:
            break
    cursor = subscription.cursor
    subscription.close()
    assert cursor == (1, 2)
    # a connection that brought nothing keeps the cursor
    nothing = pipeline.subscriber().session("sub-drop", after=cursor, timeout_ms=TIMEOUT_MS)
    nothing.close()
    assert nothing.cursor is None
    done(client, "sub-drop", 1)
    for event in pipeline.subscriber().session("sub-drop", after=cursor, timeout_ms=TIMEOUT_MS):
        got.append(event)
        if event.type == "run.finished" and event.run_no == 2:
            break
    assert got == everything(pipeline, "sub-drop", 2)


def test_b53_a_disconnect_is_no_cancel_and_the_stop_comes_from_anybody(pipeline: Pipeline, client: Client) -> None:
    run_id = client.prompt("sub-stop", "wait").verdict(30_000).run_id
    assert run_id is not None
    first = pipeline.subscriber().run(run_id, timeout_ms=TIMEOUT_MS)
    assert next(first).type == "run.started"
    first.close()
    with pytest.raises(DeadlineExpired):
        list(pipeline.subscriber().run(run_id, timeout_ms=500))
    with pipeline.client(user_id=7) as other:
        assert other.abort("sub-stop", run_id=run_id).verdict(30_000).verdict == "cancelling"
    assert pipeline.run_of(run_id)[-1].type == "run.finished"


def test_by_input(pipeline: Pipeline, client: Client) -> None:
    first = client.prompt("sub-input", "wait")
    run_id = first.verdict(30_000).run_id
    queued = client.follow_up("sub-input", "later")
    steer = client.steer("sub-input", "on", if_missed="reject")
    gone = client.follow_up("sub-input", "never")
    assert client.abort("sub-input", target_input_id=gone.input_id).verdict(30_000).verdict == "withdrawn"
    client.abort("sub-input", run_id=run_id)

    def of(input_id: str) -> list[str]:
        return types(list(pipeline.subscriber().input(input_id, timeout_ms=TIMEOUT_MS)))

    assert of(first.input_id)[:1] + of(first.input_id)[-1:] == ["run.started", "run.finished"]
    assert of(queued.input_id) == ["run.started", "run.leased", "message.completed", "run.finished"]
    assert of(gone.input_id) == []
    assert of(steer.input_id)[0] == "input.steered"
    assert of(steer.input_id)[-1] == "run.finished"


def test_all_and_tenant_go_on_from_their_offsets(pipeline: Pipeline, client: Client) -> None:
    done(client, "sub-all-1")
    everything(pipeline, "sub-all-1", 1)
    first = pipeline.subscriber().tenant(follow=False, timeout_ms=TIMEOUT_MS)
    seen = list(first)
    assert {event.session_id for event in seen} >= {"sub-all-1"}
    assert set(first.offsets) == set(range(PARTITIONS))
    with pipeline.client(tenant_id=2) as other:
        assert other.prompt("sub-other", "x").verdict(30_000).verdict == "started"
    mine = Subscriber(settings=pipeline.settings).tenant(offsets=first.offsets, follow=False, timeout_ms=TIMEOUT_MS)
    assert list(mine) == []
    every = list(pipeline.subscriber().all(offsets=first.offsets, follow=False, timeout_ms=TIMEOUT_MS))
    assert {event.tenant_id for event in every} == {2}
    with pytest.raises(CursorAhead):
        pipeline.subscriber().all(offsets={0: 10**9})


def test_b51_offsets_and_cursors_that_are_not_kept_any_more(kafka_bootstrap: str) -> None:
    with running(kafka_bootstrap, fresh_topic_prefix()) as pipeline, pipeline.client() as client:
        sent = [client.prompt("old", f"n{n}") for n in range(3)]
        assert sent[-1].verdict(30_000).verdict == "queued"
        client.abort("old", active=True).disposition(30_000)
        events = list(pipeline.subscriber().session("old", follow=False, timeout_ms=TIMEOUT_MS))
        partition = partition_of(b"old", PARTITIONS)
        admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
        topic = pipeline.settings.topics.events
        for future in admin.delete_records([TopicPartition(topic, partition, 2)]).values():
            future.result(10)

        def after(cursor: tuple[int, int] | Event) -> list[Event]:
            return list(pipeline.subscriber().session("old", after=cursor, follow=False, timeout_ms=TIMEOUT_MS))

        with pytest.raises(CursorTooOld) as caught:
            pipeline.subscriber().all(offsets={partition: 0})
        assert caught.value.earliest == 2
        kept = list(pipeline.subscriber().session("old", follow=False, timeout_ms=TIMEOUT_MS))
        assert kept == events[-len(kept) :]
        assert len(kept) < len(events)
        edge = events[len(events) - len(kept) - 1]
        assert after(edge) == kept, "the boundary just before the first kept event is good"
        with pytest.raises(CursorTooOld) as old:
            after(events[0] if edge is not events[0] else (0, 1))
        assert old.value.earliest == (kept[0].run_no, kept[0].seq)


def with_tables(pipeline: Pipeline, dsn: str) -> Settings:
    return pipeline.settings.model_copy(update={"dsn": SecretStr(dsn)})


@pytest.fixture
def seam_session(pipeline: Pipeline, client: Client, module_dsn: str) -> Callable[[str], list[Event]]:
    """A session of which the tables have the first two runs and the log alone has the third."""

    def make(session_id: str) -> list[Event]:
        settings = with_tables(pipeline, module_dsn)
        partition = partition_of(session_id.encode(), PARTITIONS)
        done(client, session_id, 2)
        everything(pipeline, session_id, 2)
        end = pipeline.subscriber().all(follow=False, timeout_ms=TIMEOUT_MS)
        list(end)
        with RunningSink(settings):
            eventually(lambda: applied(settings, partition) >= end.offsets[partition], what="the sink")
        done(client, session_id, 1)
        return everything(pipeline, session_id, 3)

    return make


def test_b50_the_seam_between_tables_and_log(
    pipeline: Pipeline, module_dsn: str, seam_session: Callable[[str], list[Event]]
) -> None:
    events = seam_session("sub-seam")
    subscriber = Subscriber(settings=with_tables(pipeline, module_dsn))
    for index in range(len(events) + 1):
        cursor = (0, 0) if index == 0 else places(events)[index - 1]
        got = list(subscriber.session("sub-seam", after=cursor, follow=False, timeout_ms=TIMEOUT_MS))
        assert got == events[index:], cursor
    for cursor in ((1, 9), (3, 9), (7, 1)):
        with pytest.raises(CursorAhead):
            list(subscriber.session("sub-seam", after=cursor, follow=False, timeout_ms=TIMEOUT_MS))
    for run_no in (1, 3):
        mine = [event for event in events if event.run_no == run_no]
        run = subscriber.run(mine[0].run_id, timeout_ms=TIMEOUT_MS)
        assert list(run) == mine
    assert not subscriber.run(events[0].run_id)._tail.kept, "a run that the tables have whole needs no log"
    with pytest.raises(UnknownRun):
        list(subscriber.run("run-nobody", unknown_after_ms=200, timeout_ms=TIMEOUT_MS))


def test_without_the_database_everything_comes_from_the_log(pipeline: Pipeline, client: Client) -> None:
    (run_id,) = done(client, "sub-no-db")
    settings = with_tables(pipeline, "postgresql://nobody@127.0.0.1:1/none")
    assert list(Subscriber(settings=settings).run(run_id, timeout_ms=TIMEOUT_MS)) == pipeline.run_of(run_id)
