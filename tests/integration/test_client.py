"""Clients on the real broker with the real processor: verdicts, repeats, unknown outcomes."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from onepen.schemas.errors import Invalid, Retryable, UnknownOutcome
from onepen.streams.async_client import AsyncClient
from onepen.streams.client import Client
from onepen.streams.ports import free_port
from onepen.streams.receipts_reader import ReceiptsReader
from tests.integration.running_pipeline import Pipeline, eventually, running
from tests.services import fresh_topic_prefix

PATIENCE_MS = 30_000
"""The machine may be busy with other things; a test waits for the answer, not for the time."""


@pytest.fixture(scope="module")
def pipeline(kafka_bootstrap: str) -> Iterator[Pipeline]:
    with running(kafka_bootstrap, fresh_topic_prefix()) as found:
        yield found


def test_verdicts_of_a_busy_session_and_the_stop(pipeline: Pipeline) -> None:
    with pipeline.client() as client:
        first = client.prompt("busy", "one", source="ui")
        queued = client.follow_up("busy", {"n": 2}, source="scheduler")
        steer = client.steer("busy", "left")
        refused = client.prompt("busy", "no", on_busy="reject")
        assert [s.verdict(PATIENCE_MS).verdict for s in (first, queued, steer, refused)] == [
            "started", "queued", "steered", "refused",
        ]  # fmt: skip
        assert refused.verdict(PATIENCE_MS).reason == "busy"
        assert refused.disposition(PATIENCE_MS).disposition == "refused"
        assert not refused.verdict(PATIENCE_MS).accepted
        run_id = first.verdict(PATIENCE_MS).run_id
        stop = client.abort("busy", active=True, scope="run_and_queue", reason="enough")
        assert stop.disposition(PATIENCE_MS).run_id == run_id
        assert first.disposition(PATIENCE_MS).disposition == "consumed"
        assert (queued.disposition(PATIENCE_MS).disposition, queued.disposition(PATIENCE_MS).reason) == (
            "discarded",
            "aborted",
        )
        late = client.abort("busy", run_id=run_id)
        assert (late.verdict(PATIENCE_MS).verdict, late.verdict(PATIENCE_MS).reason) == ("refused", "no_active_run")


def test_a_repeat_is_a_duplicate_and_the_handle_keeps_the_first_answer(pipeline: Pipeline) -> None:
    with pipeline.client() as client:
        sent = client.prompt("repeat", "x")
        first = sent.verdict(PATIENCE_MS)
        client.resend(sent)
        again = client.prompt("repeat", "x", input_id=sent.input_id, issued_at_ms=sent.issued_at_ms)
        assert again.record == sent.record
        assert client.flush()
        assert sent.verdict(PATIENCE_MS) == first
        other = client.prompt("repeat", "y", input_id=sent.input_id, issued_at_ms=sent.issued_at_ms)
        assert (other.verdict(PATIENCE_MS).verdict, other.verdict(PATIENCE_MS).reason) == ("refused", "input_id_reused")
        assert again.verdict(PATIENCE_MS).verdict == "duplicate"
        assert sent.verdict(PATIENCE_MS) == first
    # who comes later knows nothing of the first record: for them it is a duplicate, naming run and verdict
    with pipeline.client() as later:
        duplicate = later.prompt("repeat", "x", input_id=sent.input_id, issued_at_ms=sent.issued_at_ms).verdict(
            PATIENCE_MS
        )
    assert (duplicate.verdict, duplicate.run_id) == ("duplicate", first.run_id)
    assert not duplicate.accepted


def test_two_clients_of_one_process_share_one_reader(pipeline: Pipeline) -> None:
    def readers() -> int:
        return sum(t.name == "onepen-receipts" for t in threading.enumerate())

    eventually(lambda: readers() == 0)
    with pipeline.client() as one, pipeline.client(user_id=9) as two:
        assert one.prompt("share-1", "x").verdict(PATIENCE_MS).verdict == "started"
        assert two.prompt("share-2", "x").verdict(PATIENCE_MS).verdict == "started"
        assert readers() == 1
    eventually(lambda: readers() == 0)


def test_dropped_handles_are_not_kept(pipeline: Pipeline) -> None:
    with pipeline.client() as client:
        sent = client.prompt("dropped", "x")
        sent.verdict(PATIENCE_MS)
        kept = weakref.ref(sent._watched)
        del sent
        client.flush()

        def gone() -> bool:
            gc.collect()
            return kept() is None

        eventually(gone)


def test_the_handle_exists_before_any_io_and_an_unknown_outcome_says_so() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    client = Client(nobody, prefix="nobody")
    try:
        sent = client.prompt("s", "x")
        assert sent.input_id.startswith("in-")
        with pytest.raises(UnknownOutcome, match=r"not acknowledged.*sending it again is safe"):
            sent.verdict(timeout_ms=300)
        assert client.resend(sent) is sent
    finally:
        client.close(timeout_ms=200)
    with pytest.raises(Retryable, match="closed"):
        client.prompt("s", "x")


def test_topics_that_are_missing_are_named_with_what_mends_it(kafka_bootstrap: str) -> None:
    with Client(kafka_bootstrap, prefix=fresh_topic_prefix()) as client:
        sent = client.prompt("s", "x")
        sent._deadline = type(sent._deadline)(0)
        with pytest.raises(Retryable, match="onepen topics apply"):
            sent.verdict(timeout_ms=10_000)


def test_an_outage_of_the_processor_is_an_unknown_outcome_that_resolves(kafka_bootstrap: str) -> None:
    with running(kafka_bootstrap, fresh_topic_prefix()) as pipeline, pipeline.client() as client:
        assert client.prompt("up", "x").verdict(PATIENCE_MS).verdict == "started"
        pipeline.halt()
        sent = client.prompt("down", "x")
        with pytest.raises(UnknownOutcome, match="written at"):
            sent.verdict(timeout_ms=500)
        client.resend(sent)
        pipeline.start()
        assert sent.verdict(timeout_ms=30_000).verdict == "started"
        assert client.prompt("down", "y").verdict(PATIENCE_MS).verdict == "queued", "the repeat started nothing"


def test_form_is_judged_before_anything_is_sent(pipeline: Pipeline) -> None:
    with pipeline.client() as client:
        with pytest.raises(Invalid, match="session_id"):
            client.prompt("a b", "x")
        with pytest.raises(Invalid, match="bytes encoded"):
            client.prompt("s", "x" * 300_000)
        with pytest.raises(Invalid, match="exactly one of"):
            client.abort("s", run_id="r", active=True)


def test_asyncio_waits_without_blocking_the_loop(pipeline: Pipeline) -> None:
    async def go() -> list[str]:
        async with AsyncClient(settings=pipeline.settings) as client:
            sent = [client.prompt(f"async-{n}", "x") for n in range(20)]
            results = await asyncio.gather(*(s.verdict(PATIENCE_MS) for s in sent))
            stop = client.abort("async-0", active=True)
            assert (await stop.disposition(PATIENCE_MS)).disposition == "done"
            queued = client.follow_up("async-1", "x")
            assert (await queued.verdict(PATIENCE_MS)).verdict == "queued"
            with pytest.raises(UnknownOutcome, match="no disposition"):
                await queued.disposition(50)
            return [r.verdict for r in results]

    assert asyncio.run(go()) == ["started"] * 20


def test_the_reader_stands_at_the_end_before_the_first_record(pipeline: Pipeline) -> None:
    """Receipts written between the start of the reader and its first fetch are not missed."""
    for n in range(5):
        reader = ReceiptsReader.shared(pipeline.settings)
        try:
            with pipeline.client() as client:
                assert client.prompt(f"first-{n}", "x").verdict(PATIENCE_MS).verdict == "started"
        finally:
            reader.release()
