"""Re-execution and comparison on a log in memory: a good one is clean, and each damage is found where it was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr

from onepen.processors.rules import Keys
from onepen.processors.timers import next_deadline_ms
from onepen.schemas import codec
from onepen.schemas.events import EventDraft
from onepen.schemas.receipts import Receipt
from onepen.streams.archive import FORMAT, ArchiveHeader, write_archive
from onepen.streams.comparing import AHEAD, Alignment, Expected, Findings, Mismatch
from onepen.streams.outside_reader import RawRecord
from onepen.streams.reexecution import Reexecution
from onepen.streams.settings import Settings
from onepen.streams.verifying import NotVerifiable, Target, verify_topics
from tests.recorded_log import GARBAGE_AT, KEYS, PREFIX, TOPICS, RecordedLog, recorded, recorded_story
from tests.unit.demo.world import TENANT, founding_story

STORY = recorded_story()
EVERYTHING = Target()
SETTINGS = Settings(prefix=PREFIX, partitions=1, token_key=SecretStr("s" * 32), token_key_name="k")


def copy_of(log: RecordedLog) -> RecordedLog:
    return RecordedLog(*(list(getattr(log, name)) for name in ("inputs", "events", "receipts", "dead_letters")),
                       decided=log.decided)  # fmt: skip


def verified(
    log: RecordedLog, target: Target = EVERYTHING, archives: dict[int, Path] | None = None, keys: Keys = KEYS
) -> Findings:
    findings, met = verify_topics(log.topics(), SETTINGS, keys, target, archives or {}, lambda *_: None)
    assert met
    return findings


def test_a_good_log_is_clean_and_everything_on_it_was_looked_at() -> None:
    found = verified(STORY)
    assert (found.mismatches, found.chain_errors, found.clean) == ([], [], True)
    assert found.inputs == len(STORY.inputs) - 1, "all but the dead letter"
    assert (found.events, found.receipts) == (len(STORY.events), len(STORY.receipts))
    assert (found.tokens_valid, found.tokens_invalid, found.wrong_key) == (1, 0, False)


def test_few_decoded_sessions_lead_to_the_same() -> None:
    """Sessions are read back from their bytes over and over."""
    again = Reexecution(0, 1, KEYS, decoded_max=1)
    made = [
        data
        for record in STORY.inputs
        if record.offset != GARBAGE_AT and (decided := again.decide(record)) is not None
        for data in decided.decision.event_bytes
    ]
    assert made == [record.value for record in STORY.events]


Damage = Callable[[RecordedLog], None]
DAMAGES: dict[str, Damage] = {}


def damage(function: Damage) -> Damage:
    DAMAGES[function.__name__] = function
    return function


def changed(record: RawRecord, **fields: Any) -> RawRecord:
    return record._replace(**fields)


def with_byte_flipped(record: RawRecord, at: int) -> RawRecord:
    assert record.value is not None
    value = bytearray(record.value)
    value[at] ^= 1
    return changed(record, value=bytes(value))


@damage
def one_byte_of_an_event(log: RecordedLog) -> None:
    log.events[5] = with_byte_flipped(log.events[5], 60)


@damage
def one_byte_of_a_hash(log: RecordedLog) -> None:
    log.events[5] = with_byte_flipped(log.events[5], -1)


@damage
def one_byte_of_the_last_receipt(log: RecordedLog) -> None:
    log.receipts[-1] = with_byte_flipped(log.receipts[-1], -1)


@damage
def an_event_dropped(log: RecordedLog) -> None:
    del log.events[7]


@damage
def the_last_event_dropped(log: RecordedLog) -> None:
    del log.events[-1]


@damage
def an_event_doubled(log: RecordedLog) -> None:
    log.events.insert(8, log.events[7])


@damage
def two_events_swapped(log: RecordedLog) -> None:
    log.events[7], log.events[8] = log.events[8], log.events[7]


@damage
def all_events_gone(log: RecordedLog) -> None:
    log.events.clear()


@damage
def a_receipt_missing(log: RecordedLog) -> None:
    del log.receipts[2]


@damage
def the_last_receipt_missing(log: RecordedLog) -> None:
    del log.receipts[-1]


@damage
def a_receipt_doubled(log: RecordedLog) -> None:
    log.receipts.insert(3, log.receipts[2])


@damage
def a_receipt_added_at_the_end(log: RecordedLog) -> None:
    last = log.receipts[-1]
    receipt = msgspec.structs.replace(codec.decode_as(Receipt, last.value), offset=log.decided - 1)
    log.receipts.append(changed(last, offset=last.offset + 2, value=codec.encode(receipt)))


@damage
def an_event_under_another_key(log: RecordedLog) -> None:
    log.events[5] = changed(log.events[5], key=b"7/other")


@damage
def an_input_changed_afterwards(log: RecordedLog) -> None:
    at = next(n for n, r in enumerate(log.inputs) if r.value and b"do it" in r.value)
    value = log.inputs[at].value
    assert value is not None
    log.inputs[at] = changed(log.inputs[at], value=value.replace(b"do it", b"do IT"))


@damage
def an_input_removed(log: RecordedLog) -> None:
    del log.inputs[5]


@damage
def an_input_at_another_time(log: RecordedLog) -> None:
    log.inputs[5] = changed(log.inputs[5], at_ms=log.inputs[5].at_ms - 3)


@damage
def a_dead_letter_for_a_good_input(log: RecordedLog) -> None:
    letter = log.dead_letters[0]
    headers = [(n, str(log.inputs[5].offset).encode() if n == "onepen-offset" else v) for n, v in letter.headers]
    log.dead_letters.append(changed(letter, offset=10_000, headers=tuple(headers)))


@damage
def a_dead_letter_missing(log: RecordedLog) -> None:
    log.dead_letters.clear()


@damage
def a_forged_event_at_the_end(log: RecordedLog) -> None:
    """Well chained and well formed; only that no input leads to it gives it away."""
    last = codec.decode(log.events[-1].value)
    draft = EventDraft(
        **{n: getattr(last, n) for n in EventDraft.__struct_fields__} | {"seq": last.seq + 1, "type": "x.forged"}
    )
    _, data = codec.seal(draft, last.hash)
    log.events.append(changed(log.events[-1], offset=log.events[-1].offset + 1, value=data))


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_found(name: str) -> None:
    log = copy_of(STORY)
    DAMAGES[name](log)
    found = verified(log)
    assert not found.clean, f"{name} went unnoticed"
    assert not found.wrong_key


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("one_byte_of_an_event", (TOPICS.events, 5)),
        ("an_event_dropped", (TOPICS.events, None)),
        ("an_event_doubled", (TOPICS.events, 7)),
        ("a_receipt_missing", (TOPICS.receipts, None)),
        ("a_receipt_doubled", (TOPICS.receipts, 2)),
        ("a_receipt_added_at_the_end", (TOPICS.receipts, len(STORY.receipts))),
        ("a_forged_event_at_the_end", (TOPICS.events, None)),
        ("an_event_under_another_key", (TOPICS.events, 5)),
    ],
)
def test_one_damage_is_one_finding_at_its_place(name: str, where: tuple[str, int | None]) -> None:
    log = copy_of(STORY)
    DAMAGES[name](log)
    (mismatch,) = verified(log).mismatches
    assert mismatch.topic == where[0]
    if where[1] is not None:
        assert mismatch.offset == 2 * where[1]
    elif "dropped" in name or "missing" in name:
        assert mismatch.offset is None
        assert mismatch.input_offset is not None


def test_a_broken_chain_is_told_apart_from_other_bytes() -> None:
    for name in ("one_byte_of_a_hash", "an_event_dropped", "two_events_swapped"):
        log = copy_of(STORY)
        DAMAGES[name](log)
        assert verified(log).chain_errors, name
    log = copy_of(STORY)
    DAMAGES["a_receipt_missing"](log)
    assert not verified(log).chain_errors


def test_a_forger_who_mends_the_chain_is_found_by_the_inputs() -> None:
    log = copy_of(STORY)
    last: dict[object, bytes] = {}
    for n, record in enumerate(log.events):
        event = codec.decode(record.value)
        fields = {name: getattr(event, name) for name in EventDraft.__struct_fields__}
        if n == 5:
            fields["payload"] = b'{"forged":true}'
        sealed, data = codec.seal(EventDraft(**fields), last.get(event.session_id, bytes(32)))
        last[event.session_id] = sealed.hash
        log.events[n] = changed(record, value=data)
    found = verified(log)
    assert found.chain_errors == []
    assert found.mismatches[0].offset == 2 * 5


def test_a_wrong_token_key_is_named_as_such() -> None:
    found = verified(STORY, keys=Keys("k", b"t" * 32))
    assert found.mismatch_count
    assert found.wrong_key


def test_what_was_not_decided_yet_is_not_judged() -> None:
    """A live system: events and receipts of inputs that came after the partition record was read."""
    for cut in range(6, len(STORY.inputs)):
        log = copy_of(STORY)
        log.decided, log.decided_later = log.inputs[cut].offset, STORY.decided
        found = verified(log)
        assert (found.mismatches, found.chain_errors) == ([], []), f"cut at {cut}"
        assert found.inputs == cut - 1


def test_nothing_decided_yet_is_clean() -> None:
    log = copy_of(STORY)
    log.decided = 0
    log.events.clear()
    log.receipts.clear()
    assert verified(log).inputs == 0


def test_one_session_alone() -> None:
    whole = verified(STORY)
    total = 0
    for session in ("desk", "errand", "slow"):
        found = verified(STORY, Target((TENANT, session)))
        assert found.clean
        assert 0 < found.events < whole.events
        total += found.events
    assert total == whole.events
    log = copy_of(STORY)
    at = next(n for n, r in enumerate(log.events) if r.key == b"7/errand")
    del log.events[at]
    assert verified(log, Target((TENANT, "desk"))).clean
    assert not verified(log, Target((TENANT, "errand"))).clean


def test_one_run_up_to_its_end() -> None:
    runs = [codec.decode(r.value).run_id for r in STORY.events if r.key == b"7/desk"]
    first = verified(STORY, Target((TENANT, "desk"), runs[0]))
    assert first.clean
    assert first.events < verified(STORY, Target((TENANT, "desk"))).events
    _, met = verify_topics(STORY.topics(), SETTINGS, KEYS, Target((TENANT, "desk"), "run-unknown"), {}, lambda *_: None)
    assert not met


def test_inputs_that_are_gone_need_an_archive() -> None:
    log = copy_of(STORY)
    log.inputs_first = log.inputs[8].offset
    with pytest.raises(NotVerifiable, match="--from ARCHIVE"):
        verified(log)


@pytest.mark.parametrize("cut", [6, 14, 22, 30])
def test_from_an_archived_state(cut: int, tmp_path: Path) -> None:
    """The inputs before the archive may be gone; damage behind it is found all the same."""
    again = Reexecution(0, 1, KEYS)
    offset = STORY.inputs[cut].offset
    for record in STORY.inputs:
        if record.offset < offset and record.offset != GARBAGE_AT:
            again.decide(record)
    header = ArchiveHeader(
        format=FORMAT, prefix=PREFIX, partition=0, partitions=1, protocol=0, next_input_offset=offset,
        events_from=0, receipts_from=0, receipts_until=2 * len(STORY.receipts),
    )  # fmt: skip
    path = write_archive(tmp_path, header, dict(again.records()))
    log = copy_of(STORY)
    log.inputs = [r for r in log.inputs if r.offset >= offset]
    log.inputs_first = offset
    found = verified(log, archives={0: path})
    assert (found.mismatches, found.chain_errors) == ([], [])
    assert found.inputs == len(STORY.inputs) - cut
    log.events[-1] = with_byte_flipped(log.events[-1], -1)
    assert not verified(log, archives={0: path}).clean
    log = copy_of(STORY)
    del log.receipts[-1]
    assert not verified(log, archives={0: path}).clean


# -- the alignment alone --------------------------------------------------------------------------------------------


def aligned(found: str, expected: str, **options: Any) -> list[tuple[int | None, int | None]]:
    """Letters as records: (input offset, offset) of each mismatch."""
    differences: list[Mismatch] = []
    source = iter([RawRecord(0, n, 1, b"k", letter.encode(), ()) for n, letter in enumerate(found)])
    alignment = Alignment("t", 0, source, differences.append, lambda _: None, **options)
    for n, letter in enumerate(expected):
        alignment.expect(Expected(n, b"k", letter.encode()))
    alignment.finish()
    for record in alignment.rest():
        alignment.surplus(record)
    return [(one.input_offset, one.offset) for one in differences]


@pytest.mark.parametrize(
    ("found", "expected", "differences"),
    [
        ("abc", "abc", []),
        ("ac", "abc", [(1, None)]),
        ("c", "abc", [(0, None), (1, None)]),
        ("abxc", "abc", [(None, 2)]),
        ("axc", "abc", [(1, 1)]),
        ("abcx", "abc", [(None, 3)]),
        ("ab", "abc", [(2, None)]),
        ("", "ab", [(0, None), (1, None)]),
        ("ab", "", [(None, 0), (None, 1)]),
        ("xabc" + "d" * AHEAD, "abc" + "d" * AHEAD, [(None, 0)]),
    ],
)
def test_alignment(found: str, expected: str, differences: list[tuple[int | None, int | None]]) -> None:
    assert aligned(found, expected) == differences


def test_what_stands_before_an_archive_is_passed_over_until_something_agrees() -> None:
    assert aligned("xyab", "ab", lenient_below=2) == []
    assert aligned("xyab", "ab", lenient_below=1) == [(None, 1)]
    assert aligned("xaybz", "abz", lenient_below=4) == [(None, 2)]
    assert aligned("xy", "", lenient_below=2) == []


def test_findings_are_counted_beyond_what_is_listed() -> None:
    findings = Findings()
    for offset in range(1_500):
        findings.differs(Mismatch("t", 0, offset, None, "x"))
    assert (len(findings.mismatches), findings.mismatch_count) == (1_000, 1_500)


def test_the_state_at_the_end_is_that_of_the_story() -> None:
    world = founding_story()
    again = Reexecution(0, 1, KEYS)
    for record in recorded(world).inputs:
        if record.offset != GARBAGE_AT:
            again.decide(record)
    for name, session in world.sessions.items():
        assert again.session((TENANT, name)).head == session.head
        assert next_deadline_ms(again.session((TENANT, name))) == next_deadline_ms(session)
