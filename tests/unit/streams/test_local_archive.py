"""Local archives: the state they give back, and every way in which one is refused. The log is the one in memory."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onepen.processors.state_keys import head_key, policy_key, prefix
from onepen.schemas import codec
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.schemas.topics import Topics
from onepen.streams.engine import Engine
from onepen.streams.local_archive import KEPT_MS_MAX, LocalArchives, StateTopic
from onepen.streams.state_file import MAGIC, StateFile, StateHeader, Unusable, write_state
from onepen.streams.store import Mark, PartitionStore
from tests.conformance.counting import Counter, CountingCore
from tests.conformance.worlds import PARTITIONS, MemoryWorld

DAY_MS = 24 * 3600 * 1000
SESSIONS = 30
FRAME = struct.Struct(">cI32s")


class Facts:
    """What the brokers of the memory log would tell, could they be asked."""

    def __init__(self, world: MemoryWorld) -> None:
        self.world = world
        self.topic: StateTopic | None = StateTopic("topic-1", DAY_MS)

    def state_topic(self) -> Future[StateTopic | None]:
        found: Future[StateTopic | None] = Future()
        found.set_result(self.topic)
        return found

    def state_ends(self, partitions: Sequence[int]) -> Mapping[int, int]:
        return {partition: self.world.broker.end(self.world.topics.state, partition) for partition in partitions}


class Lives:
    """One processor after the other, on the same directory."""

    def __init__(self, folder: Path) -> None:
        self.world = MemoryWorld()
        self.folder = folder
        self.facts = Facts(self.world)
        self.now_ms = 1_790_000_000_000.0
        self.sent = 0
        self.archives: LocalArchives
        self.archived: Engine[Counter]

    def send(self, count: int = SESSIONS) -> None:
        for number in range(count):
            self.world.append(0, b"x", b"s-%d" % (number % SESSIONS))
            self.sent += 1

    def live(self, *, keep: bool = True) -> Engine[Counter]:
        """A processor that decides what there is and is stopped."""
        settings = self.world.settings("s0")
        archives = self.archives = LocalArchives(self.folder, settings, self.facts, lambda: self.now_ms)
        log_ = self.world.log("s0")
        core = CountingCore(self.world.topics)
        engine: Engine[Counter] = Engine(log_, core, settings, clock=lambda: self.world.mono_s, archives=archives)
        log_.subscribe(engine)
        for _ in range(30):
            self.world.mono_s += 0.01
            engine.turn()
        assert len(engine.view().running) == PARTITIONS
        if keep:
            archives.write(archives.headers(engine.view().running))
        return engine

    @property
    def file(self) -> Path:
        return self.folder / f"{self.world.topics.prefix}-00000.state"

    def change(self, **changes: Any) -> None:
        """The same archive with another header, and right checksums."""
        source = StateFile(self.file)
        store = next(store for store in self.archived.view().running if store.partition == 0)
        write_state(self.file, msgspec.structs.replace(source.header, **changes), store)
        source.close()

    def check_events(self) -> None:
        found = [record.value or b"" for record in self.world.stored(self.world.topics.events, 0)]
        counts: dict[str, int] = {}
        for offset, value in enumerate(found):
            name = f"s-{offset % SESSIONS}"
            counts[name] = counts.get(name, 0) + 1
            assert value == b"%s %d %d" % (name.encode(), counts[name], offset)
        assert len(found) == self.sent


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    found = Lives(tmp_path / "local-archive")
    found.send()
    found.archived = found.live()
    assert found.file.exists()
    return found


def test_the_next_start_reads_the_archive_and_only_the_delta(lives: Lives) -> None:
    assert lives.file.stat().st_mode & 0o077 == 0
    lives.send()
    engine = lives.live()
    assert engine.counters.restored <= 1, "the record at the position itself"
    lives.check_events()
    lives.send()
    lives.live(keep=False)
    assert not lives.file.exists(), "an archive is used once"
    lives.send()
    assert lives.live().counters.restored > SESSIONS
    lives.check_events()


def test_what_others_wrote_since_is_read_as_well(lives: Lives) -> None:
    kept = lives.file.read_bytes()
    lives.send()
    lives.live(keep=False)
    lives.file.write_bytes(kept)
    lives.send()
    engine = lives.live()
    assert SESSIONS < engine.counters.restored <= SESSIONS + 2
    lives.check_events()


def read_all(path: Path, core: CountingCore) -> PartitionStore[Counter]:
    found = StateFile(path)
    try:
        store = PartitionStore(0, core)
        for _ in found.load(store):
            pass
        return store
    finally:
        found.close()


def frames(data: bytes) -> list[bytes]:
    """The parts of a file, each with its frame."""
    found, place = [], len(MAGIC)
    while place < len(data):
        length = FRAME.size + FRAME.unpack_from(data, place)[1]
        found.append(data[place : place + length])
        place += length
    return found


HEADERS: list[tuple[dict[str, Any], str]] = [
    ({"partition": 1}, "is of partition 1"),
    ({"prefix": "other"}, r"is of the topics other"),
    ({"topic_id": "topic-2"}, "another cluster"),
    ({"partitions": PARTITIONS + 1}, f"written for {PARTITIONS + 1} partitions"),
    ({"protocol": PROTOCOL_VERSION + 1}, "speaks"),
    ({"format": 2}, "has format 2"),
    ({"position": 1_000}, "the state topic ends at"),
    ({"next_input_offset": 7}, "that its header does not name"),
    ({"current_ms": 1_790_000_000_000 - DAY_MS // 2 - 1}, "s old"),
    ({"current_ms": 1_790_000_000_001}, "s old"),
]


@pytest.mark.parametrize(("changes", "said"), HEADERS, ids=[next(iter(changes)) for changes, _ in HEADERS])
def test_wrong_and_stale_archives_are_dropped(
    lives: Lives, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str
) -> None:
    lives.change(**changes)
    dropped(lives, caplog, said)


def dropped(lives: Lives, caplog: pytest.LogCaptureFixture, said: str) -> None:
    """It is said, the file is gone, and the state was read from the log."""
    caplog.set_level(logging.INFO)
    lives.send()
    engine = lives.live(keep=False)
    assert engine.counters.restored > SESSIONS
    assert not lives.file.exists()
    lines = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]
    lives.check_events()


def test_torn_archives_are_dropped(lives: Lives, caplog: pytest.LogCaptureFixture) -> None:
    whole = lives.file.read_bytes()
    for length in (0, 5, 40, len(whole) // 2, len(whole) - 1):
        lives.file.write_bytes(whole[:length])
        caplog.clear()
        dropped(lives, caplog, "local archive")


def test_every_changed_byte_is_noticed(lives: Lives) -> None:
    """Read alone: whatever byte is another, something is said before the end is reached."""
    whole = lives.file.read_bytes()
    core = CountingCore(lives.world.topics)
    for place in {*range(200), *range(200, len(whole), 7), *range(len(whole) - 100, len(whole))}:
        changed = bytearray(whole)
        changed[place] ^= 0x41
        lives.file.write_bytes(changed)
        with pytest.raises(Unusable):
            read_all(lives.file, core)
    lives.file.write_bytes(whole + b"x")
    with pytest.raises(Unusable, match="behind its end"):
        read_all(lives.file, core)


def test_all_that_a_store_knows_comes_back(tmp_path: Path) -> None:
    """Sessions of one and of many records, policies, deadlines, and who is active."""
    core = CountingCore(Topics("t"))
    store = PartitionStore(0, core)
    for number in range(3_000):
        owner = (1, f"s/{number}")
        if number % 3:
            store.restore(prefix("i", *owner) + b"in-1", codec.encode_state(0, 1, b"i"))
        store.restore(head_key(*owner), codec.encode_state(7 if number % 2 else 0, 1, b"%d" % number))
        if not number % 5:
            store.active.add(owner)
    store.restore(policy_key(1, 2), b"policy")
    store.mark = Mark(1, 9, 0, PARTITIONS, "s0", ("a", "b"))
    header = StateHeader(
        format=1, prefix="t", topic_id="x", partition=0, partitions=PARTITIONS, protocol=0, position=11,
        next_input_offset=9, current_ms=1,
    )  # fmt: skip
    write_state(tmp_path / "x.state", header, store)
    found = read_all(tmp_path / "x.state", core)
    assert dict(found.records()) == dict(store.records())
    assert (found.position, found.sessions, found.policies) == (11, 3_000, {policy_key(1, 2): b"policy"})
    assert found.active == store.active
    assert len(found.timers) == len(store.timers) == 1_500
    assert found.load((1, "s/7")).session.total == 7


def test_parts_of_two_archives_do_not_mix(lives: Lives) -> None:
    """The same header, one part of another archive: each part is right by itself."""
    first = frames(lives.file.read_bytes())
    lives.send()
    lives.archived = lives.live()
    second = frames(lives.file.read_bytes())
    assert len(first) == len(second) >= 4
    for place in range(1, len(first)):
        lives.file.write_bytes(MAGIC + b"".join([*first[:place], second[place], *first[place + 1 :]]))
        with pytest.raises(Unusable, match="checksum"):
            read_all(lives.file, CountingCore(lives.world.topics))


def test_another_past_of_the_topic_is_noticed(lives: Lives, caplog: pytest.LogCaptureFixture) -> None:
    """The archive knows more inputs than the partition record that stands at its position."""
    store = next(store for store in lives.archived.view().running if store.partition == 0)
    assert store.mark is not None
    store.mark = msgspec.structs.replace(store.mark, next_input_offset=SESSIONS + 5)
    lives.change(next_input_offset=SESSIONS + 5)
    dropped(lives, caplog, "behind it the state topic says")


def test_an_archive_that_disagrees_with_the_offset_is_dropped(lives: Lives, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing stands behind its position that could say so."""
    store = next(store for store in lives.archived.view().running if store.partition == 0)
    assert store.mark is not None
    store.mark = msgspec.structs.replace(store.mark, next_input_offset=SESSIONS + 5)
    end = lives.world.broker.end(lives.world.topics.state, 0)
    lives.change(next_input_offset=SESSIONS + 5, position=end)
    dropped(lives, caplog, "does not agree")


def test_a_topic_that_begins_behind_it_is_read_instead(lives: Lives, caplog: pytest.LogCaptureFixture) -> None:
    kept = lives.file.read_bytes()
    lives.send()
    lives.live(keep=False)
    lives.file.write_bytes(kept)
    source = StateFile(lives.file)
    source.close()
    lives.world.broker.delete_before(lives.world.topics.state, 0, source.header.position)
    dropped(lives, caplog, "begins at")


def test_deletions_behind_it_are_read(lives: Lives) -> None:
    lives.world.broker.append(lives.world.topics.state, 0, head_key(1, "s-3"), None)
    engine = lives.live(keep=False)
    assert sum(store.sessions for store in engine.view().running) == SESSIONS - 1


def test_it_is_not_used_when_the_brokers_do_not_tell(lives: Lives, caplog: pytest.LogCaptureFixture) -> None:
    lives.facts.topic = None
    dropped(lives, caplog, "do not tell")
    lives.live()
    assert not lives.file.exists(), "and none is written then"


def test_nothing_is_kept_of_a_partition_to_which_somebody_else_has_written(lives: Lives) -> None:
    lives.file.unlink()
    running = lives.archived.view().running
    assert [header.partition for header, _ in lives.archives.headers(running)] == [0]
    lives.world.broker.append(lives.world.topics.state, 0, head_key(1, "s-3"), None)
    assert lives.archives.headers(running) == []


def test_a_disk_that_takes_nothing_costs_no_more_than_the_archive(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = lives.archives.headers(lives.archived.view().running)
    lives.file.unlink()
    lives.file.mkdir()
    lives.archives.write(wanted)
    assert "no local archive" in caplog.text
    assert [path.name for path in lives.folder.iterdir()] == [lives.file.name], "no draft is left"


def test_old_files_are_swept(lives: Lives) -> None:
    draft = lives.folder / f".{lives.file.name}.1.ab"
    draft.write_bytes(b"half")
    lives.now_ms = lives.file.stat().st_mtime * 1000 + KEPT_MS_MAX + 1_000
    LocalArchives(lives.folder, lives.world.settings("s0"), lives.facts, lambda: lives.now_ms).sweep()
    assert list(lives.folder.iterdir()) == []
