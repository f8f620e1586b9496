"""Erased sessions on a real PostgreSQL: nothing comes back in any order, and the objects go. Migration 0003."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from onepen.schemas.ids import object_folder
from onepen.sinks.objects import FileObjects
from onepen.sinks.postgres import history, migrate, readers
from onepen.sinks.postgres.object_sweep import Swept, sweep_objects
from onepen.sinks.postgres.rows import Placed
from onepen.sinks.postgres.writer import Claimed, Slice, Writer
from tests.event_streams import Generator, Streams
from tests.integration.test_sink_writer import event, finished, forget, lock_waiters, login
from tests.services import fresh_database, run_coroutine
from tests.sink_tables import dump, fetchval, on_tables, placed, writing

ROWS = ("runs", "events", "inputs", "actions", "checkpoints", "refused", "subtasks")


def sources_of(streams: Streams) -> dict[tuple[str, int], list[Placed]]:
    found = {("events", p): placed(p, list(records)) for p, records in streams.events.items()}
    return found | {("receipts", p): placed(p, list(records)) for p, records in streams.receipts.items()}


async def write_in(writer: Writer, streams: Streams, order: list[tuple[str, int]]) -> None:
    """Each turn writes the next 1-60 records of one partition; what is left comes at the end in one batch."""
    sources = sources_of(streams)
    claims: dict[tuple[str, int], Claimed] = {place: await writer.claim(place) for place in sources}
    positions = {place: claim.next_offset for place, claim in claims.items()}
    sizes = random.Random(len(order))

    def part(place: tuple[str, int], size: int) -> Slice:
        begin, end = positions[place], min(positions[place] + size, len(sources[place]))
        positions[place] = end
        return Slice(place, claims[place].epoch, begin, end, sources[place][begin:end])

    for place in order:
        written = await writer.write([part(place, sizes.randrange(1, 60))])
        assert written.done == {place}
    written = await writer.write([part(place, 10**6) for place in sources])
    assert written.done == set(sources)


@pytest.mark.parametrize("seed", [1, 7])
def test_b56_erased_in_every_order_of_the_topics(fresh_dsn: str, postgres_dsn: str, seed: int) -> None:
    streams = Generator(seed, sessions=5, erase=0.25).make(30)
    events = [place for place in sources_of(streams) if place[0] == "events"]
    receipts = [place for place in sources_of(streams) if place[0] == "receipts"]
    draw = random.Random(seed)
    orders = [events * 30, receipts * 30, [draw.choice(events + receipts) for _ in range(40)]]

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            await write_in(writer, streams, [])
            once = await dump(dsn)
            connection = await asyncpg.connect(dsn)
            await connection.execute("update sink_partitions set next_offset = 0")
            await connection.close()
            await write_in(writer, streams, orders[2])
            assert await dump(dsn) == once, "a replay onto filled tables"
        for order in orders:
            with fresh_database(postgres_dsn) as other:
                await migrate.migrate(other)
                async with writing(other) as writer:
                    await write_in(writer, streams, order)
                assert await dump(other) == once
        assert streams.erased
        assert once["objects"]
        assert any('"settled_offset": null' not in row for row in once["actions"]), "some were settled"
        await nothing_left(dsn, streams)

    on_tables(test, fresh_dsn)


async def nothing_left(dsn: str, streams: Streams) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for tenant_id, session_key in streams.erased:
            row = await connection.fetchrow(
                "select * from agent_sessions where tenant_id = $1 and session_key = $2", tenant_id, session_key
            )
            assert row is not None
            assert row["erased_at"] is not None
            assert (row["user_id"], row["title"]) == (None, None)
            for table in ("agent_runs", "agent_run_events", "agent_actions", "agent_subtasks", "agent_checkpoints",
                          "agent_refused_reports"):  # fmt: skip
                assert await connection.fetchval(f"select count(*) from {table} where session_id = $1", row["id"]) == 0
            modes = await connection.fetch("select distinct mode from agent_inputs where session_id = $1", row["id"])
            assert [mode["mode"] for mode in modes] == ["erase"]
    finally:
        await connection.close()


def erase_receipt(streams: Streams) -> tuple[tuple[int, str], Placed]:
    for partition, records in streams.receipts.items():
        for one in placed(partition, list(records)):
            if getattr(one.record, "mode", None) == "erase" and getattr(one.record, "disposition", None) == "done":
                return (one.record.tenant_id, one.record.session_id), one
    raise AssertionError("the streams erase nothing")


def test_two_writers_at_the_same_moment(fresh_dsn: str) -> None:
    """One sink holds the events of a session in an open transaction while another one erases it."""
    (_, session), erase = erase_receipt(Generator(3, sessions=1, tenants=(1,), erase=0.5).make(6))

    async def test(dsn: str) -> None:
        blocker = await asyncpg.connect(dsn)
        async with writing(dsn) as one, writing(dsn) as other:
            events, receipts = await one.claim(("events", 0)), await other.claim(("receipts", 0))
            hold = blocker.transaction()
            await hold.start()
            await blocker.execute("lock table agent_run_events in share row exclusive mode")
            records = [Placed(0, 0, event(session, 1, 1, "run.started")), Placed(0, 1, finished(session, 1))]
            first = asyncio.create_task(one.write([Slice(events.place, events.epoch, 0, 2, records)]))
            await lock_waiters(dsn, 1)
            second = asyncio.create_task(other.write([Slice(receipts.place, receipts.epoch, 0, 1, [erase])]))
            await lock_waiters(dsn, 2)
            await hold.rollback()
            assert (await first).done
            assert (await second).done
        assert await fetchval(dsn, "select count(*) from agent_runs") == 0
        assert await fetchval(dsn, "select count(*) from agent_run_events") == 0
        assert await fetchval(dsn, "select count(*) from agent_inputs where mode = 'erase'") == 1
        await blocker.close()

    on_tables(test, fresh_dsn)


def test_the_sink_may_delete_erased_rows_only(fresh_dsn: str) -> None:
    streams = Generator(6, sessions=5, erase=0.25).make(30)

    async def test(dsn: str) -> None:
        sink = await login(dsn, "onepen_sink")
        try:
            async with writing(sink) as writer:
                await write_in(writer, streams, [])
            before = await dump(dsn)
            await nothing_left(dsn, streams)
            connection = await asyncpg.connect(sink)
            for table in ("agent_runs", "agent_run_events", "agent_inputs", "agent_actions", "agent_checkpoints",
                          "agent_refused_reports", "agent_subtasks"):  # fmt: skip
                await connection.execute(f"delete from {table}")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute("delete from agent_sessions")
            await connection.close()
            after = await dump(dsn)
            assert [r for r in before["inputs"] if "erase" not in r] == [r for r in after["inputs"] if "erase" not in r]
            assert {n: after[n] for n in ROWS if n != "inputs"} == {n: before[n] for n in ROWS if n != "inputs"}
            assert all(before[name] for name in ROWS)
        finally:
            await forget(dsn, sink)

    on_tables(test, fresh_dsn)


def test_readers_show_what_is_left(fresh_dsn: str) -> None:
    streams = Generator(6, sessions=5, erase=0.25).make(30)

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            await write_in(writer, streams, [])
        pool = await history.open_pool(dsn)
        for tenant_id, session_key in streams.erased:
            detail = await readers.get_session(pool, tenant_id, session_key)
            assert detail is not None
            assert detail.session.erased_ms is not None
            assert (detail.runs, detail.session.title, detail.open_inputs) == ((), None, 0)
            assert await history.session_events(pool, tenant_id, session_key) == []
        kept = {(e.tenant_id, e.session_id) for e in streams.all_events()} - streams.erased
        children = []
        for tenant_id, session_key in kept:
            for one in (await readers.list_runs(pool, tenant_id, session_key)).items:
                shown = await readers.get_run(pool, tenant_id, one.run_id)
                assert shown is not None
                assert shown.run.lineage == one.run_id
                children += shown.subtasks
        assert {child.status for child in children} <= {"completed", "detached", None}
        assert children
        await pool.close()

    on_tables(test, fresh_dsn)


class Failing(FileObjects):
    """A store that is away for a while."""

    away = True

    def delete(self, tenant_id: int, session_id: str, uri: str) -> None:
        if self.away:
            raise PermissionError(13, "not now")
        super().delete(tenant_id, session_id, uri)

    def delete_all(self, tenant_id: int, session_id: str) -> None:
        if self.away:
            raise PermissionError(13, "not now")
        super().delete_all(tenant_id, session_id)


def test_objects_go_after_the_commit(fresh_dsn: str, tmp_path: Path) -> None:
    _, erase = erase_receipt(Generator(3, sessions=1, tenants=(1,), erase=0.5).make(6))
    session = erase.record.session_id
    root = tmp_path / "objects"
    mine, others = root / "1" / object_folder(session), root / "1" / object_folder("another")
    for folder in (mine, others):
        folder.mkdir(parents=True)
    pointed = [mine / name for name in ("first", "applied", "checkpoint")]
    unused = mine / "of a refused input"
    kept = [tmp_path / "outside", others / "of another session"]
    for path in (*pointed, unused, *kept):
        path.write_text("content")
    uris = [path.as_uri().encode() for path in (*pointed, *kept)]
    events = [
        event(session, 1, 1, "run.started", b'{"pointer":{"uri":"%s"}}' % uris[0]),
        event(session, 1, 2, "input.applied", b'{"pointer":{"uri":"%s"}}' % uris[1]),
        event(session, 1, 3, "run.compaction_finished", b'{"checkpoint":{"uri":"%s"}}' % uris[2]),
        event(session, 1, 4, "input.applied", b'{"pointer":{"uri":"%s"}}' % uris[3]),
        event(session, 1, 5, "input.applied", b'{"pointer":{"uri":"%s"}}' % uris[4]),
        finished(session, 1, 6),
    ]

    async def test(dsn: str) -> None:
        async with writing(dsn) as writer:
            claim = await writer.claim(("events", 0))
            receipts = await writer.claim(("receipts", 0))
            some = [Placed(0, n, record) for n, record in enumerate(events[:3])]
            rest = [Placed(0, n + 3, record) for n, record in enumerate(events[3:])]
            assert (await writer.write([Slice(claim.place, claim.epoch, 0, 3, some)])).objects == 0
            assert (await writer.write([Slice(receipts.place, receipts.epoch, 0, 1, [erase])])).objects == 4
            assert (await writer.write([Slice(claim.place, claim.epoch, 3, 6, rest)])).objects == 3
        objects = Failing(root)
        assert await sweep_objects(dsn, objects) == Swept(left=6)
        assert all(path.exists() for path in (*pointed, unused))
        objects.away = False
        assert await sweep_objects(dsn, objects) == Swept(gone=4, refused=2)
        assert not mine.exists()
        assert [path.read_text() for path in kept] == ["content"] * 2
        assert await sweep_objects(dsn, objects) == Swept()
        reasons = await fetchval(dsn, "select string_agg(refused, ' ') from agent_objects_to_delete")
        assert "root" in reasons
        assert "outside of the session's folder" in reasons

    on_tables(test, fresh_dsn)


def test_objects_of_stragglers_go_too(fresh_dsn: str, tmp_path: Path) -> None:
    """Stored after the first sweep, by one that knows nothing of the erase: swept again while that is young, and after
    every later input of the session."""
    _, erase = erase_receipt(Generator(3, sessions=1, tenants=(1,), erase=0.5).make(6))
    young = msgspec.structs.replace(erase.record, at_ms=int(time.time() * 1_000))
    refused = msgspec.structs.replace(young, mode="prompt", verdict="refused", disposition="refused", offset=7)
    late = tmp_path / "1" / object_folder(young.session_id) / "late"

    async def test(dsn: str) -> None:
        async def swept_late() -> Swept:
            late.parent.mkdir(parents=True)
            late.write_text("content")
            swept = await sweep_objects(dsn, FileObjects(tmp_path))
            assert not late.parent.exists()
            return swept

        async with writing(dsn) as writer:
            claim = await writer.claim(("receipts", 0))
            await writer.write([Slice(claim.place, claim.epoch, 0, 1, [Placed(0, 0, young)])])
            assert await swept_late() == Swept(left=1)
            assert await swept_late() == Swept(left=1)
            connection = await asyncpg.connect(dsn)
            await connection.execute("update agent_sessions set erased_at = erased_at - interval '2 hours'")
            await connection.close()
            assert await swept_late() == Swept(gone=1)
            assert await sweep_objects(dsn, FileObjects(tmp_path)) == Swept()
            await writer.write([Slice(claim.place, claim.epoch, 1, 2, [Placed(0, 1, refused)])])
            assert await swept_late() == Swept(gone=1)

    on_tables(test, fresh_dsn)


# -- migration 0003 on a database that is in use


OLD_ROWS = """
insert into agent_sessions (id, session_key, tenant_id, created_at, updated_at) values (5, 's', 1, now(), now());
insert into agent_runs (id, run_key, run_no, session_id, tenant_id, status, generation, last_seq, last_hash, created_at,
    updated_at) values (8, 'run-a', 1, 5, 1, 'running', 1, 2, 'x', now(), now());
insert into agent_run_events (session_id, run_id, tenant_id, seq, event_type, payload, generation, cause_partition,
    cause_offset, cause_index, prev_hash, hash, log_partition, log_offset, created_at) values
    (5, 8, 1, 1, 'run.started', '{"lineage": "run-a", "recovery": "resume"}', 1, 0, 40, 0, 'x', 'x', 0, 0, now()),
    (5, 8, 1, 2, 'action.requested', '{}', 1, 0, 44, 0, 'x', 'x', 0, 1, now());
insert into agent_actions (session_id, tenant_id, action_name, action_key, run_key, state, generation, last_run_no,
    last_seq) values (5, 1, 'mail', 'k', 'run-a', 'waiting', 1, 1, 2);
insert into agent_checkpoints (session_id, tenant_id, run_key, seq, created_at) values (5, 1, 'run-a', 2, now());
"""


def test_rows_of_an_older_database_are_completed_from_their_events(fresh_dsn: str) -> None:
    async def filled() -> dict[str, Any]:
        await migrate.migrate(fresh_dsn, steps=migrate.migrations()[:2])
        connection = await asyncpg.connect(fresh_dsn)
        await connection.execute(OLD_ROWS)
        await migrate.migrate(fresh_dsn)
        row = await connection.fetchrow(
            "select r.lineage, r.recovery, r.retry_of, a.last_offset, a.settled_offset, c.run_no from agent_runs r"
            " join agent_actions a using (run_key) join agent_checkpoints c using (run_key)"
        )
        await connection.close()
        return dict(row or {})

    assert run_coroutine(filled, 60) == {
        "lineage": "run-a",
        "recovery": "resume",
        "retry_of": None,
        "last_offset": 44,
        "settled_offset": None,
        "run_no": 1,
    }
