"""What has to hold when a world has come to rest, read from the topics, the tables and the target's own book.

Each check is a function of the world that raises `Violation`. None of them asks the engine or the sink what it did.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson

from onepen.schemas import codec
from onepen.schemas import events as ev
from onepen.schemas.events import Event
from onepen.schemas.inputs import Input
from onepen.schemas.receipts import Receipt
from onepen.schemas.worker_records import Report
from onepen.sinks.postgres.fold import fold
from onepen.sinks.postgres.rows import Placed, Stored
from onepen.sinks.postgres.sessions import session_rows
from onepen.sinks.postgres.stored_rows import at
from onepen.streams.dead_letters import REASON
from onepen.streams.outside_reader import RawRecord
from onepen.streams.reexecution import Reexecution, Undecidable
from onepen.streams.verifying import dead_offset
from tests.simulation.whole_broker import Violation
from tests.simulation.whole_clients import BUG

if TYPE_CHECKING:
    from tests.simulation.whole_world import World


def raw(world: World, topic: str, partition: int) -> list[RawRecord]:
    return [
        RawRecord(partition, offset, entry.timestamp_ms, entry.key, entry.value, tuple(entry.headers))
        for offset, entry in world.broker.visible(topic, partition, 0)
    ]


def dead(world: World, partition: int) -> set[int]:
    topics = world.topics
    letters = raw(world, topics.deadletters, partition)
    found = [dead_offset(letter, topics.inputs, partition) for letter in letters]
    offsets = [offset for offset in found if offset is not None]
    if len(set(offsets)) != len(offsets):
        raise Violation(f"a second dead letter for one input of partition {partition}")
    return set(offsets)


def check_dead_letters(world: World, partition: int) -> None:
    """Only the input that was made to meet a bug is an `internal_error`: any other would be a bug of the product."""
    for letter in raw(world, world.topics.deadletters, partition):
        reason = (dict(letter.headers).get(REASON) or b"").decode()
        world.facts[f"dead letter: {reason}"] += 1
        if reason == "internal_error" and BUG not in (letter.value or b""):
            raise Violation(f"a bug was met: dead letter {partition}-{letter.offset}: {dict(letter.headers)}")


def check_at_rest(world: World) -> None:
    """Everything."""
    world.watch.look_at_sessions(1_000)
    world.watch.chains_verify()
    for partition in range(world.partitions):
        check_partition(world, partition)
        check_dead_letters(world, partition)
    check_effects(world)
    check_tables(world)


def check_partition(world: World, partition: int) -> None:
    """The inputs, decided again by another driver, give the same bytes; each input has one verdict and one end."""
    topics, gone = world.topics, dead(world, partition)
    again = Reexecution(partition, world.partitions, world.keys)
    events: list[bytes] = []
    receipts: list[bytes] = []
    commands: dict[int, Any] = {}
    for record in raw(world, topics.inputs, partition):
        if record.offset in gone:
            continue
        try:
            decided = again.decide(record)
        except Undecidable as error:
            raise Violation(f"I9: input {partition}-{record.offset}: {error}") from error
        if decided is not None:
            commands[record.offset] = decided.command
            events += decided.decision.event_bytes
            receipts += [codec.encode(receipt) for receipt in decided.decision.receipts]
    for topic, expected in ((topics.events, events), (topics.receipts, receipts)):
        if [record.value for record in raw(world, topic, partition)] != expected:
            raise Violation(f"I9: {topic}-{partition} is not what its inputs come to")
    _check_conservation(world, partition, commands)
    _check_writers(world, partition, commands)


def _check_conservation(world: World, partition: int, commands: dict[int, Any]) -> None:
    inputs = {(partition, offset) for offset, command in commands.items() if isinstance(command, Input)}
    for word, told in (("verdict", world.watch.verdicts), ("disposition", world.watch.dispositions)):
        mine = {place for place in told if place[0] == partition}
        if mine != inputs:
            raise Violation(f"I5: inputs without {word}: {sorted(inputs - mine)}; {word} for: {sorted(mine - inputs)}")


def _check_writers(world: World, partition: int, commands: dict[int, Any]) -> None:
    """Whatever a report wrote was written by the owner of its generation, and once."""
    written: Counter[tuple[str, int, str, bytes]] = Counter()
    once = {ev.MODEL_STARTED, ev.TOOL_STARTED, ev.INPUT_APPLIED, ev.MODEL_FINISHED, ev.TOOL_FINISHED}
    for one in world.watch.sessions.values():
        for event in one.events:
            command = commands.get(event.cause.offset) if event.cause.partition == partition else None
            if not isinstance(command, Report) or command.run_id != event.run_id:
                continue
            if event.type not in (ev.RUN_FINISHED, ev.RUN_STARTED) and command.generation != event.generation:
                raise Violation(f"I6: a report of generation {command.generation} wrote under {event.generation}")
            if command.worker_id != world.watch.owners.get((event.run_id, command.generation)):
                raise Violation(f"I6: {command.worker_id} wrote into {event.run_id} and does not own it")
            if event.type in once:
                written[event.run_id, event.generation, event.type, event.payload] += 1
    twice = [what for what, count in written.items() if count > 1]
    if twice:
        raise Violation(f"a report was decided twice: {twice[0]}")


def check_effects(world: World) -> None:
    """I15, I16: at most one effect per key, each behind its committed permit; one that has no recorded end, or comes
    behind the end of its run (its worker gave the run back), is named there as in doubt."""
    keys = Counter((session, key) for _, _, session, key in world.target.effects)
    twice = [key for key, count in keys.items() if count > 1]
    if twice:
        raise Violation(f"I15: an effect took place twice: {twice}")
    runs: dict[str, list[tuple[Event, dict[str, Any]]]] = {}
    for one in world.watch.sessions.values():
        for event in one.events:
            if event.type.startswith("action.") or event.type == ev.RUN_FINISHED:
                runs.setdefault(event.run_id, []).append((event, orjson.loads(event.payload)))
    for at_ms, run_id, _, key in world.target.effects:
        _check_effect(at_ms, key, runs.get(run_id, []))


def _check_effect(at_ms: int, key: str, mine: list[tuple[Event, dict[str, Any]]]) -> None:
    permits = [e for e, p in mine if e.type == ev.ACTION_PERMITTED and p["actionKey"] == key and e.at_ms <= at_ms]
    if not permits:
        raise Violation(f"I15: an effect of {key} without a committed permit")
    for event, payload in mine:
        if event.type != ev.RUN_FINISHED:
            continue
        named = any(doubt["actionKey"] == key for doubt in payload.get("inDoubt", []))
        if at_ms > event.at_ms and not named:
            raise Violation(f"I16: an effect of {key} behind the end of its run, which does not name it")
        ended = any(e.type == ev.ACTION_FINISHED and p["actionKey"] == key and p["status"] == "ok" for e, p in mine)
        if not ended and not named:
            raise Violation(f"an effect of {key} that nobody names")


# -- the tables ------------------------------------------------------------------------------------------------------


def placed(world: World, topic: str) -> list[Placed]:
    return [
        Placed(partition, offset, world.watch.decoded.get((topic, partition, offset)) or codec.decode(entry.value))
        for partition in range(world.partitions)
        for offset, entry in world.broker.visible(topic, partition, 0)
    ]


def check_tables(world: World) -> None:
    """I18: rows equal what the whole log comes to at once, and what the events say when read by nobody's fold."""
    events, receipts = placed(world, world.topics.events), placed(world, world.topics.receipts)
    records = [*events, *receipts]
    sessions = session_rows(records)
    erased = frozenset(key for key, row in sessions.items() if row.erased_ms is not None)
    if erased != frozenset(world.watch.erased):
        raise Violation(f"erased by the fold: {erased}, by the receipts: {world.watch.erased}")
    _check_runs(world, erased)
    _check_events(world, [one for one in events if _key(one.record) not in erased])
    _check_inputs(world, erased)
    changes = fold(Stored(erased=erased), records)
    ids = {key: row["id"] for key, row in world.database.tables["sessions"].items()}
    if set(ids) != set(sessions):
        raise Violation(f"I18: sessions: {sorted(set(ids) ^ set(sessions))}")
    _equal("actions", world, {(ids[key[:2]], key[2], key[3]): (str(row.state), row.run_key, row.settled_state,
           at(row.permitted_ms)) for key, row in changes.actions.items()},
           ("state", "run_key", "settled_state", "permitted_at"))  # fmt: skip
    _equal("subtasks", world, {(ids[key[:2]], key[2], key[3]): (row.status, row.child_input_id, row.child_run_key)
           for key, row in changes.subtasks.items()}, ("status", "child_input_id", "child_run_key"))  # fmt: skip
    _equal("checkpoints", world, {(ids[row.tenant_id, row.session_key], row.run_key, row.seq): (row.uri,)
           for row in changes.checkpoints}, ("uri",))  # fmt: skip
    _equal("refused", world, {place: (row.reason, row.worker_id) for place, row in changes.refused.items()},
           ("reason", "worker_id"))  # fmt: skip


def check_prefix(world: World) -> None:
    """I18, I19 at any moment between two database transactions: what the tables hold is exactly what stands below the
    stored positions, of every session that they do not have as erased."""
    database, topic = world.database, world.topics.events
    if database.holder is not None:
        return
    erased = {key for key, row in database.tables["sessions"].items() if row["erased_at"] is not None}
    below = {p: database.tables["partitions"].get((topic, p), {"next_offset": 0})["next_offset"]
             for p in range(world.partitions)}  # fmt: skip
    expected: dict[Any, tuple[Any, ...]] = {}
    for (name, partition, offset), event in world.watch.decoded.items():
        if name == topic and offset < below[partition] and _key(event) not in erased:
            assert isinstance(event, Event)
            expected[(event.run_id,)] = (event.seq, event.hash)
    _equal("runs", world, expected, ("last_seq", "last_hash"))


def _equal(table: str, world: World, expected: dict[Any, tuple[Any, ...]], columns: tuple[str, ...]) -> None:
    found = {key: tuple(row[column] for column in columns) for key, row in world.database.tables[table].items()}
    if found != expected:
        wrong = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
        detail = "; ".join(f"{key}: {found.get(key)} for {expected.get(key)}" for key in wrong[:3])
        raise Violation(f"I18: {table}: {len(wrong)} rows differ: {detail}")


def _key(record: Event | Receipt) -> tuple[int, str]:
    return record.tenant_id, record.session_id


def _check_runs(world: World, erased: frozenset[tuple[int, str]]) -> None:
    """By the last event of each run."""
    expected = {}
    for key, one in world.watch.sessions.items():
        for event in one.events if key not in erased else ():
            status = orjson.loads(event.payload)["terminalStatus"] if event.type == ev.RUN_FINISHED else "active"
            expected[(event.run_id,)] = (status, event.seq, event.hash, event.run_no)
    _equal("runs", world, expected, ("status", "last_seq", "last_hash", "run_no"))


def _check_events(world: World, events: list[Placed]) -> None:
    runs = {row["run_key"]: (row["session_id"], row["id"]) for row in world.database.rows("runs")}
    expected = {}
    for one in events:
        event = one.record
        assert isinstance(event, Event)
        if event.run_id in runs:
            expected[(*runs[event.run_id], event.seq)] = (event.type, event.hash, one.partition, one.offset)
    _equal("events", world, expected, ("event_type", "hash", "log_partition", "log_offset"))


def _check_inputs(world: World, erased: frozenset[tuple[int, str]]) -> None:
    expected = {}
    for place, receipt in world.watch.verdicts.items():
        if _key(receipt) in erased and receipt.mode != "erase":
            continue
        end = world.watch.dispositions[place]
        expected[place] = (receipt.input_id, receipt.verdict, end.disposition, end.reason)
    _equal("inputs", world, expected, ("input_id", "verdict", "disposition", "disposition_reason"))
