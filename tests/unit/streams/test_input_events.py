"""What a subscriber of one input is given: receipts and events are topics of their own, so either may come first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import orjson

from onepen.schemas import events as ev
from onepen.schemas.events import Cause, Event
from onepen.schemas.receipts import Receipt
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


def receipt(verdict: str | None, disposition: str | None, run_no: int | None = None, input_id: str = "i") -> Receipt:
    return Receipt(
        kind="input",
        tenant_id=1,
        session_id="s",
        partition=0,
        offset=1,
        at_ms=1,
        input_id=input_id,
        verdict=verdict,
        disposition=disposition,
        run_id=None if run_no is None else f"run-{run_no}",
        run_no=run_no,
    )


def given(records: Iterable[Event | Receipt]) -> list[str]:
    """As far as it goes; nothing more comes, so an end that is missed shows as a wait."""
    waits = itertools.repeat(None, 3)
    found = list(input_events(itertools.chain(records, waits, [event(9, 1, "too.late", "i")]), "i"))
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
