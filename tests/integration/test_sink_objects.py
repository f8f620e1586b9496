"""The running sink: an erase on the real topics takes rows and objects, and a rebuild from the log finds the same."""

from __future__ import annotations

from pathlib import Path

from onepen.streams.settings import Settings
from tests.event_streams import Generator, Streams
from tests.integration.running_sink import (
    PARTITIONS,
    RunningSink,
    caught_up,
    count,
    produce,
    wait_until,
)
from tests.services import execute, run_coroutine
from tests.sink_tables import dump


def pointed_to(streams: Streams, root: Path) -> tuple[list[Path], list[Path]]:
    """Files that erased sessions point to, and those of the others; made on the disk."""
    files: dict[bool, list[Path]] = {True: [], False: []}
    for event in streams.all_events():
        if event.type not in ("run.started", "input.applied", "run.compaction_finished"):
            continue
        for word in event.payload.decode().split('"'):
            if word.startswith("file://"):
                path = Path(word.removeprefix("file://"))
                assert path.is_relative_to(root)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("content")
                files[(event.tenant_id, event.session_id) in streams.erased].append(path)
    return files[True], files[False]


def test_an_erase_takes_rows_and_objects(settings: Settings, tmp_path: Path) -> None:
    root = tmp_path / "objects"
    streams = Generator(6, partitions=PARTITIONS, sessions=8, erase=0.25, objects_root=str(root)).make(40)
    gone, kept = pointed_to(streams, root)
    assert gone
    assert kept
    dsn = settings.require_dsn()
    given = settings.model_copy(update={"objects_root": root})
    with RunningSink(given):
        produce(settings, streams)
        wait_until(lambda: caught_up(settings), "all rows")
        wait_until(lambda: not any(path.exists() for path in gone), "objects deleted")
        wait_until(lambda: count(dsn, "agent_objects_to_delete") == 0, "nothing left to delete")
    assert all(path.exists() for path in kept)
    once = run_coroutine(lambda: dump(dsn))
    tables = ("agent_run_events", "agent_runs", "agent_inputs", "agent_actions", "agent_subtasks", "agent_checkpoints",
              "agent_refused_reports", "agent_objects_to_delete", "agent_sessions")  # fmt: skip
    execute(dsn, *(f"delete from {table}" for table in tables), "update sink_partitions set next_offset = 0")
    with RunningSink(given):
        wait_until(lambda: caught_up(settings), "all rows again")
        wait_until(lambda: count(dsn, "agent_objects_to_delete") == 0, "nothing left to delete")
    assert run_coroutine(lambda: dump(dsn)) == once
