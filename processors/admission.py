"""Inputs: one verdict each, by the order of the log and the table in `modes`. A refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from onepen.processors import (
    approvals,
    cancellation,
    erasing,
    input_rules,
    modes,
    pending,
    remembering,
    settling,
    starting,
)
from onepen.processors.modes import Situation, Treatment
from onepen.processors.session import Remembered
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas import ids
from onepen.schemas.ids import id_ok
from onepen.schemas.inputs import Input, digest
from onepen.schemas.limits import ISSUED_AT_FUTURE_MS, ISSUED_AT_PAST_MS
from onepen.schemas.policies import Policy
from onepen.schemas.statuses import Disposition, IfMissed, Mode, OnBusy, Reason, RunStatus, Target, Verdict

Detail = dict[str, Any]


def admit(turn: Turn, record: Input) -> None:
    """Give an input record its verdict, and its final disposition where that is already known."""
    reason = _outside_window(turn, record)
    if reason is not None:
        _turn_away(turn, record, reason, {"field": "input_id"} if reason is Reason.INVALID else None)
        return
    own = digest(record)
    known = remembering.known(turn, record.input_id)
    if known is not None:
        _repeat(turn, record, own, known)
        return
    if not remembering.has_room(turn, record.mode):
        _turn_away(turn, record, Reason.TOO_MANY_INPUTS, None)
        return
    if turn.session.head.erased:
        _refuse(turn, record, own, Reason.ERASED)
        return
    policy = turn.rules.policy(record.tenant_id)
    field = input_rules.broken_rule(record, policy)
    if field is not None:
        _refuse(turn, record, own, Reason.INVALID, {"field": field})
        return
    if record.parent is not None and record.session_id in record.parent.ancestors:
        _refuse(turn, record, own, Reason.CYCLE)
        return
    if record.mode == Mode.ABORT and record.target_kind == Target.INPUT:
        _abort_input(turn, record, own)
        return
    _treat(turn, record, own, modes.treatment(record, policy, _situation(turn)))


def _outside_window(turn: Turn, record: Input) -> Reason | None:
    """What cannot be remembered is judged first: an id that is none, and a time outside of the window."""
    if not id_ok(record.input_id):
        return Reason.INVALID
    if record.issued_at_ms < turn.now_ms - ISSUED_AT_PAST_MS:
        return Reason.TOO_OLD
    if record.issued_at_ms > turn.now_ms + ISSUED_AT_FUTURE_MS:
        return Reason.FROM_THE_FUTURE
    return None


def _situation(turn: Turn) -> Situation:
    run = turn.session.head.run
    if run is None:
        return Situation.FREE
    return Situation.CANCELLING if run.status is RunStatus.CANCELLING else Situation.BUSY


def _turn_away(turn: Turn, record: Input, reason: Reason, detail: Detail | None) -> None:
    """Refuse without taking the id."""
    turn.answer(
        record, Verdict.REFUSED, reason=reason, disposition=Disposition.REFUSED, run_id=_active(turn), detail=detail
    )


def _active(turn: Turn) -> str | None:
    run = turn.session.head.run
    return None if run is None else run.run_id


def _repeat(turn: Turn, record: Input, own: str, known: Remembered) -> None:
    """Same id: the same content is a duplicate and gets the first answer, other content is refused."""
    first: Detail = {
        "verdict": known.verdict,
        "reason": known.reason,
        "position": {"partition": known.partition, "offset": known.offset},
    }
    if known.digest != own:
        _turn_away(turn, record, Reason.INPUT_ID_REUSED, {"first": first})
        return
    turn.answer(
        record,
        Verdict.DUPLICATE,
        disposition=Disposition.DUPLICATE,
        run_id=known.run_id,
        detail={"first": first | {"disposition": known.disposition}},
    )


def _refuse(turn: Turn, record: Input, own: str, reason: Reason, detail: Detail | None = None) -> None:
    """Refuse and take the id: a repeat gets the same answer."""
    run_id = _active(turn)
    remembering.remember(
        turn, record, own, Verdict.REFUSED, reason=reason, run_id=None, disposition=Disposition.REFUSED
    )
    turn.answer(record, Verdict.REFUSED, reason=reason, disposition=Disposition.REFUSED, run_id=run_id, detail=detail)


def _treat(turn: Turn, record: Input, own: str, treatment: Treatment) -> None:
    if record.retry_of is not None:
        _retry(turn, record, own)
        return
    _ARMS[treatment](turn, record, own)


def _retry(turn: Turn, record: Input, own: str) -> None:
    """A retry takes over content, options and action lineage of the session's last run."""
    head = turn.session.head
    kept = turn.session.retries.get(starting.LAST)
    if head.run is not None or kept is None or kept.run_id != record.retry_of or kept.until_ms < turn.now_ms:
        _refuse(turn, record, own, Reason.NOT_RETRYABLE, _last_run(turn))
        return
    taken = msgspec.structs.replace(
        record,
        content=kept.input.content,
        timeout_ms=record.timeout_ms or kept.input.timeout_ms,
        max_attempts=record.max_attempts or kept.input.max_attempts,
        recovery=record.recovery or kept.input.recovery,
    )
    _start(turn, taken, own, lineage=kept.lineage)


def _start(turn: Turn, record: Input, own: str, *, lineage: str | None = None) -> None:
    run_id = ids.run_id(record.tenant_id, record.session_id, turn.session.head.run_no + 1)
    remembering.remember(turn, record, own, Verdict.STARTED, run_id=run_id, disposition=Disposition.CONSUMED, keep=True)
    starting.start_run(turn, record, lineage=lineage)
    turn.answer(record, Verdict.STARTED, disposition=Disposition.CONSUMED, run_id=run_id)


def _put(
    turn: Turn, record: Input, own: str, *, verdict: Verdict = Verdict.QUEUED, for_run: str = "", front: bool = False
) -> bool:
    """Put an input into the pending list; False when it was refused because there is no room."""
    policy = turn.rules.policy(record.tenant_id)
    if not pending.has_room(turn, policy, record):
        _refuse(turn, record, own, Reason.QUEUE_FULL)
        return False
    remembering.remember(turn, record, own, verdict, run_id=for_run or None, keep=True)
    pending.append(turn, policy, record, for_run=for_run, front=front)
    turn.answer(record, verdict, run_id=for_run or _active(turn))
    return True


def _queue(turn: Turn, record: Input, own: str) -> None:
    _put(turn, record, own)


def _queue_in_front(turn: Turn, record: Input, own: str) -> None:
    _put(turn, record, own, front=True)


def _interrupt(turn: Turn, record: Input, own: str) -> None:
    if _put(turn, record, own, front=True):
        cancellation.request(turn, record, reason="interrupted")


def _busy(turn: Turn, record: Input, own: str) -> None:
    _refuse(turn, record, own, Reason.BUSY)


def _steer(turn: Turn, record: Input, own: str) -> None:
    run = turn.run
    if record.expected_run_id not in (None, run.run_id):
        _missed(turn, record, own)
        return
    if _put(turn, record, own, verdict=Verdict.STEERED, for_run=run.run_id):
        turn.emit(ev.INPUT_STEERED, {"inputId": record.input_id, "source": record.source, "userId": record.user_id})
        turn.view_wanted = turn.contents_wanted = True


def _missed(turn: Turn, record: Input, own: str) -> None:
    """A steer that finds no run to steer goes by its `if_missed`."""
    policy = turn.rules.policy(record.tenant_id)
    if (record.if_missed or policy.if_missed) == IfMissed.REJECT:
        _refuse(turn, record, own, Reason.MISSED)
        return
    _ARMS[_as_prompt(record, policy, _situation(turn))](turn, record, own)


def _as_prompt(record: Input, policy: Policy, situation: Situation) -> Treatment:
    choice = record.on_busy or policy.on_busy
    if choice == OnBusy.STEER:
        choice = OnBusy.QUEUE.value  # it has just missed the run it was meant for
    return modes.treatment(msgspec.structs.replace(record, mode=Mode.PROMPT, on_busy=choice), policy, situation)


def _no_run(turn: Turn, record: Input, own: str) -> None:
    _refuse(turn, record, own, Reason.NO_ACTIVE_RUN, _last_run(turn))


def _last_run(turn: Turn) -> Detail | None:
    last = turn.session.head.last
    return None if last is None else {"lastRunId": last.run_id, "lastRunStatus": last.status.value}


def _cancel(turn: Turn, record: Input, own: str) -> None:
    run_id = turn.run.run_id
    if record.target_kind == Target.RUN and record.target_id != run_id:
        _refuse(turn, record, own, Reason.STALE_RUN)
        return
    remembering.remember(turn, record, own, Verdict.CANCELLING, run_id=run_id)
    turn.answer(record, Verdict.CANCELLING, run_id=run_id)
    cancellation.await_end(turn, record)
    cancellation.request(turn, record)


def _abort_input(turn: Turn, record: Input, own: str) -> None:
    """An abort of an input id goes by what has become of the input."""
    assert record.target_id is not None
    target = remembering.known(turn, record.target_id)
    if target is None:
        _refuse(turn, record, own, Reason.UNKNOWN_INPUT)
        return
    if pending.remove(turn, record.target_id) is not None:
        turn.dispose(record.target_id, Disposition.WITHDRAWN)
        remembering.remember(turn, record, own, Verdict.WITHDRAWN, disposition=Disposition.DONE)
        turn.answer(
            record, Verdict.WITHDRAWN, disposition=Disposition.DONE, run_id=_active(turn), detail=_named(target)
        )
        turn.view_wanted = True
        return
    run = turn.session.head.run
    if run is not None and run.start_input_id == record.target_id:
        _cancel(turn, record, own)
        return
    settled = turn.session.ids.get(record.target_id)
    assert settled is not None
    _refuse(turn, record, own, Reason.ALREADY_SETTLED, _named(settled))


def _named(target: Remembered) -> Detail:
    """What became of an input, for the receipt of an abort that named it."""
    return {
        "target": {
            "verdict": target.verdict,
            "reason": target.reason,
            "disposition": target.disposition,
            "runId": target.run_id,
        }
    }


def _answered(turn: Turn, record: Input, own: str, refused: tuple[Reason, Detail | None] | None) -> None:
    if refused is not None:
        _refuse(turn, record, own, refused[0], refused[1])
        return
    run_id = _active(turn)
    remembering.remember(turn, record, own, Verdict.ANSWERED, run_id=run_id, disposition=Disposition.DONE)
    turn.answer(record, Verdict.ANSWERED, disposition=Disposition.DONE, run_id=run_id)


def _decide(turn: Turn, record: Input, own: str) -> None:
    """An approval of this run, or else an action in doubt of an earlier one."""
    refused = settling.by_answer(turn, record) if settling.means_doubt(record) else approvals.answer(turn, record)
    _answered(turn, record, own, refused)


def _settle(turn: Turn, record: Input, own: str) -> None:
    if not settling.means_doubt(record):
        _refuse(turn, record, own, Reason.NO_ACTIVE_RUN, _last_run(turn))
        return
    _answered(turn, record, own, settling.by_answer(turn, record))


def _cancelled(turn: Turn, record: Input, own: str) -> None:
    if settling.means_doubt(record):
        _answered(turn, record, own, settling.by_answer(turn, record))
        return
    _refuse(turn, record, own, Reason.CANCELLED)


def _erase(turn: Turn, record: Input, own: str) -> None:
    """Nothing is admitted from here on; what is active is cancelled with its queue, then all is gone."""
    run = turn.session.head.run
    turn.session.head.erased = True
    if run is None:
        remembering.remember(turn, record, own, Verdict.ERASED, disposition=Disposition.DONE)
        turn.answer(record, Verdict.ERASED, disposition=Disposition.DONE)
        erasing.purge(turn)
        return
    remembering.remember(turn, record, own, Verdict.ERASED, run_id=run.run_id)
    turn.answer(record, Verdict.ERASED, run_id=run.run_id)
    cancellation.await_end(turn, record)
    cancellation.request(turn, record, reason="erased", with_queue=True)


_ARMS: dict[Treatment, Callable[[Turn, Input, str], None]] = {
    Treatment.START: _start,
    Treatment.QUEUE: _queue,
    Treatment.QUEUE_IN_FRONT: _queue_in_front,
    Treatment.INTERRUPT: _interrupt,
    Treatment.STEER: _steer,
    Treatment.MISSED: _missed,
    Treatment.BUSY: _busy,
    Treatment.NO_RUN: _no_run,
    Treatment.CANCEL: _cancel,
    Treatment.WIDEN: _cancel,
    Treatment.SETTLE: _settle,
    Treatment.DECIDE: _decide,
    Treatment.CANCELLED: _cancelled,
    Treatment.ERASE: _erase,
}

assert _ARMS.keys() == set(Treatment)
