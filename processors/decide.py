"""Decide what a record means for its session: state and command in, decision out.

Pure: no clock, no randomness, no I/O. Time is the record's place in the log; ids are derived. Every refusal is a value;
an exception from here is a bug, and the shell dead-letters the record that provoked it.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec.structs import replace

from onepen.processors import (
    admission,
    cancellation,
    clock,
    remembering,
    subtasks,
    timers,
    view,
    worker_rules,
)
from onepen.processors.rules import Rules
from onepen.processors.session import Session
from onepen.processors.turn import Moment, Turn
from onepen.schemas import codec
from onepen.schemas.events import Event
from onepen.schemas.inputs import Input
from onepen.schemas.notices import Notice
from onepen.schemas.offers import Offer
from onepen.schemas.receipts import Receipt
from onepen.schemas.timers import Timer
from onepen.schemas.views import View
from onepen.schemas.worker_records import Claim, Release, Renew, Report

__all__ = ["Command", "Decision", "Moment", "decide", "judge", "seal"]

Command = Input | Claim | Renew | Report | Release | Timer | Notice


class Decision(msgspec.Struct, frozen=True):
    """The session after the record, and everything that has to be written in the record's transaction.

    `event_bytes` are the framed bytes of `events`, one each, in the order of their sequence. `forwards` are records
    for other sessions: they go to the inputs topic, keyed by the session they name.
    """

    session: Session
    events: tuple[Event, ...]
    event_bytes: tuple[bytes, ...]
    receipts: tuple[Receipt, ...]
    offers: tuple[Offer, ...]
    views: tuple[View, ...]
    forwards: tuple[Input | Notice, ...] = ()


def decide(rules: Rules, session: Session, command: Command, moment: Moment) -> Decision:
    """Judge `command` at `moment` for `session` and chain its events. `session` itself is not changed."""
    return seal(judge(rules, session, command, moment))


def judge(rules: Rules, session: Session, command: Command, moment: Moment) -> Turn:
    """The decision without the codec: what `decide` does before events are encoded and chained."""
    assert command.tenant_id == session.tenant_id, "a record of another tenant"
    assert command.session_id == session.session_id, "a record of another session"
    work = session.fork()
    work.dirty = True
    head = work.head
    if moment.at_ms > head.now_ms:
        head.now_ms = moment.at_ms
    turn = Turn(rules, work, moment, head.now_ms)
    remembering.forget(turn)
    match command:
        case Report() | Renew() | Claim() | Release():
            worker_rules.judge(turn, command)
        case Input():
            admission.admit(turn, command)
        case Timer():
            timers.consume(turn, command)
        case Notice():
            subtasks.heard(turn, command)
            cancellation.finish_if_quiet(turn)
        case _:
            assert_never(command)
    run = head.run
    if run is not None:
        clock.settle(run, turn.now_ms)
        if turn.view_wanted and run.owner:
            turn.views.append(view.build(turn, run, with_contents=turn.contents_wanted))
    return turn


def seal(turn: Turn) -> Decision:
    """Chain the events to the session's last hash, and let offers and views name the hash they follow."""
    offers, views = turn.offers, turn.views
    events: list[Event] = []
    framed: list[bytes] = []
    if turn.drafts:
        head = turn.session.head
        last_hash = head.last_hash
        for draft in turn.drafts:
            event, data = codec.seal(draft, last_hash)
            last_hash = event.hash
            events.append(event)
            framed.append(data)
        head.last_hash = last_hash
        offers = [replace(offer, last_hash=last_hash) for offer in offers]
        views = [replace(view, last_hash=last_hash) if view.reason is None else view for view in views]
    return Decision(
        turn.session,
        tuple(events),
        tuple(framed),
        tuple(turn.receipts),
        tuple(offers),
        tuple(views),
        tuple(turn.forwards),
    )
