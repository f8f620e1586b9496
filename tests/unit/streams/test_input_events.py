"""What a subscriber of one input is given: receipts and events are topics of their own, so either may come first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import cast

import orjson
import pytest

from onepen.schemas import events as ev
from onepen.schemas.events import Cause, Event
from onepen.schemas.receipts import Receipt
from onepen.streams.log_tail import LogTail
from onepen.streams.subscriber import input_events

NONE = bytes(32)


def event(run_no: int, seq: int, kind: str, input_id: str | None = None) -> Event:
    payload = {} if input_id is None else {"inputId": input_id}
    return Event(
        tenant_id=1,
        session_id="s",
        run_id=f"run-{run_no}",
        run_no=run_no,
        seq=seq,
        type=kind,
        generation=1,
        at_ms=1,
        cause=Cause(0, 0, 0),
        payload=orjson.dumps(payload),
        prev_hash=NONE,
        hash=NONE,
    )


def receipt(
    verdict: str | None,
    disposition: str | None,
    run_no: int | None = None,
    *,
    offset: int = 1,
    reason: str | None = None,
) -> Receipt:
    return Receipt(
        kind="input",
        tenant_id=1,
        session_id="s",
        partition=0,
        offset=offset,
        at_ms=1,
        input_id="i",
        verdict=verdict,
        disposition=disposition,
        reason=reason,
        run_id=None if run_no is None else f"run-{run_no}",
        run_no=run_no,
    )


class CaughtUp:
    """What is read beside the records: every wait in them is one at the end of the topics."""

    caught_up = True


def given(records: Iterable[Event | Receipt]) -> list[str]:
    """As far as it goes; nothing more comes, so an end that is missed shows as a wait."""
    waits = itertools.repeat(None, 3)
    read = itertools.chain(records, waits, [event(9, 1, "too.late", "i")])
    found = list(input_events(read, cast(LogTail, CaughtUp()), "i"))
    return [one.type for one in found]


EVENTS = [
    event(1, 1, ev.RUN_STARTED, "p"),
    event(1, 2, ev.INPUT_STEERED, "i"),
    event(1, 3, ev.RUN_FINISHED),
]
RECEIPTS = [receipt("steered", None, 1), receipt(None, "discarded", 1)]


def test_a_steer_whose_run_ended_first_is_told_in_every_order() -> None:
    """The two topics are read as they come, each in its own order."""
    for places in itertools.combinations(range(5), 2):
        events, receipts = iter(EVENTS), iter(RECEIPTS)
        records = [next(receipts) if place in places else next(events) for place in range(5)]
        assert given(records) == [ev.INPUT_STEERED, ev.RUN_FINISHED], places


def test_what_never_had_a_run_ends_without_an_event() -> None:
    for records in (
        [receipt("refused", "discarded", 1)],
        [receipt("queued", None), receipt(None, "withdrawn")],
        [*EVENTS[:1], receipt("refused", "discarded", 1), *EVENTS[2:]],
    ):
        assert given(records) == []


def test_a_repeat_says_nothing_about_the_input() -> None:
    records = [
        receipt("duplicate", "discarded"),
        event(2, 1, ev.RUN_STARTED, "i"),
        event(2, 2, ev.RUN_FINISHED),
    ]
    assert given(records) == [ev.RUN_STARTED, ev.RUN_FINISHED]


OTHERS = ("input_id_reused", "too_old", "from_the_future", "too_many_inputs")


def in_both_orders(receipts: list[Receipt], events: list[Event]) -> list[list[Event | Receipt]]:
    return [[*receipts, *events], [*events, *receipts]]


@pytest.mark.parametrize("reason", OTHERS)
def test_another_record_with_the_id_says_nothing_about_the_input(reason: str) -> None:
    """It did not take the id: what the first record with it led to is told, however the topics are read."""
    started = [event(1, 1, ev.RUN_STARTED, "i"), event(1, 2, ev.RUN_FINISHED)]
    other = receipt("refused", "refused", offset=7, reason=reason)
    for first in (receipt("started", None, 1), receipt("queued", None)):
        for records in in_both_orders([first, other], started):
            assert given(records) == [ev.RUN_STARTED, ev.RUN_FINISHED]
    # One that was turned away may be sent again, and be taken then.
    again = receipt("started", None, 1, offset=9)
    if reason != "input_id_reused":
        assert given([other, again, *started]) == [ev.RUN_STARTED, ev.RUN_FINISHED]


@pytest.mark.parametrize("reason", OTHERS)
def test_what_no_record_was_taken_for_ends_when_all_is_read(reason: str) -> None:
    assert given([receipt("refused", "refused", reason=reason)]) == []


def test_an_end_of_another_record_is_not_the_end_of_the_input() -> None:
    records = [
        receipt("queued", None),
        receipt("refused", "refused", offset=7, reason="busy"),
        event(2, 1, ev.RUN_STARTED, "i"),
        event(2, 2, ev.RUN_FINISHED),
    ]
    assert given(records) == [ev.RUN_STARTED, ev.RUN_FINISHED]
