"""Cases that others have met in public, at the edges: the client's and the worker's SDK, the readers of records.

Nothing here needs a broker: what is refused at an edge never comes to one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from onepen.cli import main
from onepen.cli.output import Format
from onepen.cli.rendering import show_event
from onepen.processors.rules import Keys
from onepen.schemas import codec
from onepen.schemas.edge import encode_input, parse_request, request_from_json
from onepen.schemas.errors import Invalid, Poison
from onepen.schemas.events import Cause, Event, EventDraft
from onepen.schemas.inputs import Content, Input
from onepen.schemas.limits import EVENT_BYTES_MAX, RECORD_BYTES_MAX
from onepen.schemas.partitioning import partition_of
from onepen.schemas.receipts import Receipt
from onepen.schemas.topics import Topics
from onepen.sinks.postgres.fold import AT_MS_MAX, check_record, fold
from onepen.sinks.postgres.rows import Placed, Stored
from onepen.streams.core import SessionCore
from onepen.streams.log import Record
from onepen.streams.objects import FileStore
from onepen.streams.worker import RunContext
from onepen.streams.worker.payloads import VALUE_BYTES_MAX
from tests.unit.worker.bench import Bench, played

PARTITIONS = 4
KEYS = Keys("k1", b"a secret of the tests")


def input_record(session_id: str = "s", **fields: Any) -> Input:
    made = parse_request({"mode": "prompt", "session_id": session_id, "content": "hello", **fields})
    return made.to_input(tenant_id=1, user_id=2)


# -- B10, B17: what an abort has to name


@pytest.mark.parametrize("target", [{}, {"target_kind": "run"}, {"target_kind": "run", "target_id": ""}], ids=str)
def test_b10_a_stop_names_what_was_seen_at_the_click(target: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        parse_request({"mode": "abort", "session_id": "s", **target})
    assert caught.value.field in ("target_kind", "target_id")


@pytest.mark.parametrize(
    "arguments", [[], ["--run", "run-1", "--active"], ["--run", ""], ["--run", "a b"]], ids=" ".join
)
def test_b10_the_command_line_sends_no_stop_without_one_target(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEPEN_BOOTSTRAP", "127.0.0.1:1")  # nobody there: it has to be refused before it is sent
    assert main(["abort", "session-42", *arguments]) == 2
    assert capsys.readouterr().out == ""


# -- B36: sizes at the worker's edge


@pytest.mark.parametrize("share", [0.9, 1.0, 1.1, 20])
def test_b36_a_large_tool_result_is_carried_or_named_and_the_run_goes_on(share: float) -> None:
    text = "x" * (int(share * VALUE_BYTES_MAX) - 2)  # as encoded: two quotes more

    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            found = await ctx.tool("fetch", lambda: text)
            assert found == text, "the body has it whole, whatever the event holds"
            return "done"

        bench.ask(content="go")
        await bench.take(body).over()
        bench.ask(content="and on", session_id="other")
        await bench.take(body, session_id="other").over()

    bench = played(scene)
    (ended,) = bench.named("tool.finished")
    assert ended["status"] == "ok"
    if share <= 1:
        assert ended["result"] == text
    else:
        assert (ended["resultOmitted"], ended["resultBytes"]) == ("too_large", len(text) + 2)
        assert len(ended["resultDigest"]) == 64
    assert bench.end()["terminalStatus"] == bench.end("other")["terminalStatus"] == "completed"
    assert max(len(codec.encode(record)) for record in bench.sent) <= RECORD_BYTES_MAX
    assert max(len(event.payload) for event in bench.events) <= EVENT_BYTES_MAX


def test_b36_a_large_message_is_refused_to_the_body_with_both_sizes() -> None:
    async def scene(bench: Bench) -> None:
        async def body(ctx: RunContext) -> str:
            with pytest.raises(Invalid, match=r"bytes encoded, \d+ are allowed; store it and report a pointer"):
                await ctx.message("x" * 20 * RECORD_BYTES_MAX)
            await ctx.message("short")
            return "done"

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    assert [message["content"] for message in bench.named("message.completed")] == ["short"]
    assert bench.end()["terminalStatus"] == "completed"


def test_b36_a_large_checkpoint_lies_in_the_store_and_the_log_has_its_pointer(tmp_path: Path) -> None:
    context = b"c" * (20 * RECORD_BYTES_MAX)

    async def scene(bench: Bench) -> None:
        bench.store = FileStore(tmp_path)

        async def body(ctx: RunContext) -> bool:
            await ctx.compact(lambda _: context)
            return await ctx.load_checkpoint() == context

        bench.ask(content="go")
        await bench.take(body).over()

    bench = played(scene)
    (finished,) = bench.named("run.compaction_finished")
    assert finished["checkpoint"]["bytes"] == len(context)
    assert bench.end()["output"] is True
    assert max(len(codec.encode(record)) for record in bench.sent) < 2_000, "nothing of it travels"


def test_b36_an_oversized_prompt_is_refused_before_it_is_sent() -> None:
    with pytest.raises(Invalid, match=r"bytes encoded.*pointer"):
        encode_input(input_record(content="x" * (20 * RECORD_BYTES_MAX)))
    # What counts is the encoded size: characters of four bytes, and the id beside them.
    with pytest.raises(Invalid, match="bytes encoded"):
        encode_input(input_record(content="\U0001f600" * (RECORD_BYTES_MAX // 4)))


# -- B37: readers of records that are newer than they are


def test_b37_a_reader_of_outputs_keeps_kinds_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    payload = b'{"until":1.50,"a":[null]}'
    draft = EventDraft(
        tenant_id=1,
        session_id="s",
        run_id="run-1",
        run_no=1,
        seq=2,
        type="run.paused",
        generation=1,
        at_ms=1_790_000_000_000,
        cause=Cause(0, 1, 0),
        payload=payload,
    )
    sealed, data = codec.seal(draft, bytes(32))
    read_again = codec.decode_as(Event, data)
    assert (read_again.type, read_again.payload, read_again.hash) == ("run.paused", payload, sealed.hash)
    start = codec.seal(msgspec.structs.replace(draft, seq=1, type="run.started", payload=b"{}"), bytes(32))[0]
    _, row = fold(Stored(), [Placed(0, 0, start), Placed(0, 1, read_again)]).events
    assert (row.event.type, row.event.payload) == ("run.paused", payload), "and the sink stores it as it is"
    show_event(read_again, Format.JSONL)
    shown = orjson.loads(capsys.readouterr().out)
    assert (shown["type"], shown["payload"]) == ("run.paused", {"until": 1.5, "a": [None]})


# -- B40: poison


def read(value: bytes | None, key: bytes | None = b"s", headers: Any = ()) -> Any:
    core = SessionCore(KEYS, Topics("t"), PARTITIONS)
    partition = partition_of(b"s", PARTITIONS)
    return core.read(Record(partition, 0, key, value, headers, 1_790_000_000_000, True, 1))


GOOD = codec.encode(input_record(input_id="in-1", issued_at_ms=1_790_000_000_000))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "null_value"),
        (b"", "no_frame"),
        (b"\xff\xfe not utf-8", "no_frame"),
        (b'{"input_id":"in-1"', "no_frame"),
        (b"[1,2]", "no_frame"),
        (b"\x00\x00\x00\xff\xff" + GOOD[5:], "unknown_schema"),
        (GOOD[:-3], "undecodable"),
        (GOOD + b"\x00", "trailing_bytes"),
    ],
    ids=["null", "empty", "bad utf-8", "bad json", "array", "unknown schema", "cut", "longer"],
)
def test_b40_poison_is_told_apart_and_named(value: bytes | None, reason: str) -> None:
    with pytest.raises(Poison) as caught:
        read(value)
    assert caught.value.reason == reason
    assert read(GOOD).input_id == "in-1", "and the next record is read as ever"


@pytest.mark.parametrize(
    ("headers", "good"),
    [
        ([("ce_id", b"in-1"), ("retries", b"NaN"), ("traceparent", b"\xff"), ("x", None)], True),
        ([("ce_id", b"other")], False),
        ([("ce_id", None)], False),
        ([("ce_type", b"1e999")], False),
    ],
)
def test_b40_headers_are_compared_and_never_reckoned_with(headers: Any, good: bool) -> None:
    if good:
        assert read(GOOD, headers=headers).input_id == "in-1"
    else:
        with pytest.raises(Poison, match="header_mismatch"):
            read(GOOD, headers=headers)


# -- B42: what JSON cannot say, at the client's edge and the worker's

STRANGE: list[tuple[Any, str]] = [
    ("high \ud83d", "lone surrogate"),
    ("\ude00 low", "lone surrogate"),
    ({"a": ["\udfff"]}, "lone surrogate"),
    ({"\ud800": 1}, "lone surrogate"),
    ({"n": float("nan")}, "NaN"),
    ([float("inf")], "Infinity"),
    ([float("-inf")], "Infinity"),
]


@pytest.mark.parametrize(("content", "sentence"), STRANGE, ids=ascii)
def test_b42_a_client_is_told_where_its_content_is_no_json(content: Any, sentence: str) -> None:
    with pytest.raises(Invalid, match=sentence) as caught:
        input_record(content=content)
    assert str(caught.value).startswith("content")


@pytest.mark.parametrize(
    "literal", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', '"\\udc00x"', '{"\\ud800":1}']
)
def test_b42_a_line_of_json_is_read_strictly(literal: str) -> None:
    line = f'{{"mode":"prompt","session_id":"s","content":[{literal}]}}'
    with pytest.raises(Invalid):
        request_from_json(line)
    whole = request_from_json('{"mode":"prompt","session_id":"s","content":"\\ud83d\\ude00"}')
    assert whole.content == "\U0001f600", "a pair written as two escapes is one character"


def test_b42_strange_tool_results_are_flagged_and_compaction_and_the_next_prompt_work(tmp_path: Path) -> None:
    strange = {"a": "high \ud83d", "b": "low \ude00", "c": [float("nan"), float("inf"), float("-inf")], "\ud800": 1}

    async def scene(bench: Bench) -> None:
        bench.store = FileStore(tmp_path)

        async def body(ctx: RunContext) -> str:
            await ctx.tool("fetch", lambda: strange)
            await ctx.message("half a pair: \ud83d")
            await ctx.compact(lambda _: "shorter")
            return "done \udc00"

        bench.ask(content="go")
        await bench.take(body).over()
        bench.ask(content="and on")
        await bench.take(body).over()

    bench = played(scene)
    assert [end["terminalStatus"] for end in bench.ends()] == ["completed", "completed"]
    first = bench.named("tool.finished")[0]
    assert first["flattened"], "the places are named"
    assert len(bench.named("run.compaction_finished")) == 2
    for event in bench.events:
        orjson.loads(event.payload.decode())
    for record in bench.sent:
        assert codec.decode(codec.encode(record)) == record


# -- B44: times


@pytest.mark.parametrize("given", ["2026-01-01T00:00:00", "2026-01-01T00:00:00Z", 1_790_000_000.5, True, -1, 2**63])
def test_b44_a_time_is_whole_milliseconds_of_utc_or_refused(given: Any) -> None:
    with pytest.raises(Invalid) as caught:
        input_record(issued_at_ms=given)
    assert caught.value.field == "issued_at_ms"


@pytest.mark.parametrize("issued_at_ms", [0, 1_790_000_000, 4_102_444_800_000, 253_402_300_800_000, 2**63 - 1])
def test_b44_an_odd_time_comes_back_as_it_was(issued_at_ms: int) -> None:
    record = input_record(issued_at_ms=issued_at_ms)
    assert codec.decode(codec.encode(record)) == record


def test_b44_receipts_and_events_carry_the_time_of_the_log() -> None:
    assert {"at_ms"} == {name for name in Receipt.__struct_fields__ if name.endswith("_ms")}
    assert {"at_ms"} == {name for name in Event.__struct_fields__ if name.endswith("_ms")}


@pytest.mark.parametrize("at_ms", [-1, AT_MS_MAX + 1, 2**62])
def test_b44_a_time_that_the_database_cannot_hold_is_a_dead_letter(at_ms: int) -> None:
    receipt = Receipt(kind="input", tenant_id=1, session_id="s", partition=0, offset=1, at_ms=1)
    check_record(receipt)
    with pytest.raises(Poison) as caught:
        check_record(msgspec.structs.replace(receipt, at_ms=at_ms))
    assert caught.value.reason == "invalid_time"


def test_b41_nul_passes_the_edge_and_comes_back() -> None:
    record = input_record(content={"a\0": "b\0", "said": "\\u0000"})
    assert isinstance(record.content, Content)
    again = codec.decode(encode_input(record))
    assert orjson.loads(again.content.data) == {"a\0": "b\0", "said": "\\u0000"}
