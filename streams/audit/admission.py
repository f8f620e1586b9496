"""Entry semantics: one verdict and one disposition per input record, and the verdict is the one the rules name."""

from __future__ import annotations

from onepen.schemas.events import (
    APPROVAL_ANSWERED,
    INPUT_APPLIED,
    INPUT_STEERED,
    RUN_CANCEL_REQUESTED,
    RUN_FINISHED,
    RUN_STARTED,
)
from onepen.schemas.ids import ID_CHARS_MAX
from onepen.schemas.inputs import Input
from onepen.schemas.limits import REMEMBER_MS
from onepen.streams.audit.evidence import (
    Evidence,
    LoggedEvent,
    LoggedInput,
    LoggedReceipt,
    SessionKey,
    Violation,
    grouped,
)
from onepen.streams.audit.modes import OF_THE_RECORD, Before, Timeline, allowed, on_busy

NOT_TAKEN = frozenset({"too_old", "from_the_future", "too_many_inputs"})
"""Refusals that do not take the input id."""

WITH_EVENT = {
    "started": RUN_STARTED,
    "steered": INPUT_STEERED,
    "answered": APPROVAL_ANSWERED,
}
WAITING = frozenset(("queued", "steered", "cancelling", "erased"))
"""Verdicts whose disposition comes later."""


def conserved(evidence: Evidence) -> list[Violation]:
    """Each input record has exactly one verdict or a dead letter, and one disposition in the end: what has none yet is
    pending or belongs to a run that is active."""
    found = []
    about = grouped((r for r in evidence.receipts if r.receipt.kind == "input"), lambda r: r.about)
    active = _active_sessions(evidence)
    for logged, record in evidence.client_inputs:
        receipts: list[LoggedReceipt] = about.pop(logged.position, [])
        verdicts = [r for r in receipts if r.receipt.verdict is not None]
        dispositions = [r for r in receipts if r.receipt.disposition is not None]
        # Without a verdict it has a dead letter, which is kept for a while only.
        missing = not verdicts and evidence.whole(logged.position) and logged.at_ms >= evidence.dead_from_ms
        if len(verdicts) > 1 or missing:
            found.append(Violation("conservation", str(logged), f"{len(verdicts)} verdicts"))
        if len(dispositions) > 1:
            found.append(Violation("conservation", str(logged), f"{len(dispositions)} final dispositions"))
        if not dispositions and evidence.whole(logged.position) and (verdicts or missing):
            found += _undisposed(evidence, logged, verdicts, (record.tenant_id, record.session_id) in active)
        for one in receipts:
            if one.receipt.input_id != record.input_id[:ID_CHARS_MAX]:
                found.append(Violation("conservation", str(one), "names another input id than the record"))
    for position, receipts in about.items():
        if position in evidence.dead:
            found.append(Violation("conservation", str(receipts[0]), "about a record that has a dead letter"))
        elif evidence.kept(position):
            found.append(Violation("conservation", str(receipts[0]), f"there is no input record at {position}"))
    return found


def _active_sessions(evidence: Evidence) -> set[SessionKey]:
    """Sessions that have a run which had not ended when the reading began."""
    active = set()
    for session, events in evidence.by_session.items():
        ended = {one.event.run_id for one in events if one.event.type == RUN_FINISHED and evidence.whole(one.cause)}
        if any(one.event.run_id not in ended for one in events):
            active.add(session)
    return active


def _undisposed(
    evidence: Evidence, logged: LoggedInput, verdicts: list[LoggedReceipt], active: bool
) -> list[Violation]:
    if evidence.quiet:
        return [Violation("conservation", str(logged), "0 final dispositions")]
    verdict = verdicts[0].receipt.verdict if verdicts else None
    if verdict in WAITING and active:
        return []
    why = "no run of its session is active" if verdict in WAITING else f"it was {verdict}"
    return [Violation("conservation", str(logged), f"0 final dispositions, and {why}")]


def unreadable_set_aside(evidence: Evidence) -> list[Violation]:
    """A record of the inputs topic that cannot be read or attributed has a dead letter."""
    return [
        Violation("conservation", str(one), "neither decided nor dead-lettered")
        for one in evidence.unreadable
        if one.position not in evidence.dead and evidence.whole(one.position) and one.at_ms >= evidence.dead_from_ms
    ]


def verdicts_follow_rules(evidence: Evidence) -> list[Violation]:
    """Each verdict is one that the mode allows in the state at that position, and its event stands in the log."""
    found = []
    first: dict[tuple[int, str, str], LoggedInput] = {}
    timelines = {session: Timeline(events) for session, events in evidence.by_session.items()}
    erased = _erased_at(evidence)
    for logged, record in evidence.client_inputs:
        verdict = evidence.verdicts.get(logged.position)
        if verdict is None:
            continue
        session = record.tenant_id, record.session_id
        found += _repeated(first, logged, record, verdict)
        found += _erased(session in erased and erased[session] < logged.offset, verdict)
        timeline = timelines.get(session)
        state = Before(None, False) if timeline is None else timeline.before(logged.offset)
        found += _one_verdict(evidence, logged, record, verdict, state)
    return found


def _repeated(
    first: dict[tuple[int, str, str], LoggedInput], logged: LoggedInput, record: Input, verdict: LoggedReceipt
) -> list[Violation]:
    """An id that was taken is answered as a duplicate as long as it is remembered, whatever happened meanwhile."""
    receipt = verdict.receipt
    identity = record.tenant_id, record.session_id, record.input_id
    known = first.get(identity)
    if known is not None and receipt.verdict != "duplicate" and receipt.reason not in OF_THE_RECORD:
        assert isinstance(known.record, Input)
        if receipt.at_ms <= known.record.issued_at_ms + REMEMBER_MS:
            return [Violation("entry", str(verdict), f"input id stands at {known}, not answered duplicate")]
        first[identity] = logged
    if known is None and receipt.verdict == "duplicate":
        return []  # the first one may have been deleted with age
    if known is None and receipt.reason not in NOT_TAKEN:
        first[identity] = logged
    return []


def _erased_at(evidence: Evidence) -> dict[SessionKey, int]:
    """Session -> offset of the input that erased it; from receipts, which outlive the inputs."""
    found: dict[SessionKey, int] = {}
    for one in evidence.verdicts.values():
        receipt = one.receipt
        if receipt.verdict == "erased":
            found.setdefault((receipt.tenant_id, receipt.session_id), receipt.offset)
    return found


def _erased(erased: bool, verdict: LoggedReceipt) -> list[Violation]:
    receipt = verdict.receipt
    if erased and receipt.verdict not in ("refused", "duplicate"):
        return [Violation("entry", str(verdict), f"{receipt.verdict}, but the session was erased")]
    if receipt.reason == "erased" and not erased and receipt.verdict == "refused":
        return [Violation("entry", str(verdict), "refused erased, but nobody had erased the session")]
    return []


def _one_verdict(
    evidence: Evidence, logged: LoggedInput, record: Input, verdict: LoggedReceipt, state: Before
) -> list[Violation]:
    receipt, caused = verdict.receipt, evidence.by_cause.get(logged.position, [])
    if receipt.verdict == "duplicate" or (receipt.verdict == "refused" and receipt.reason in OF_THE_RECORD):
        return [Violation("entry", str(one), f"caused by an input that was {receipt.verdict}") for one in caused]
    found = []
    policy = evidence.policy(record.tenant_id, logged.position)
    may = allowed(record, state, policy)
    reasons = may.get(str(receipt.verdict))
    if reasons is None or (receipt.verdict == "refused" and receipt.reason not in reasons):
        text = f"{record.mode} with {state} was {receipt.verdict} ({receipt.reason}), the rules say {sorted(may)}"
        found.append(Violation("entry", str(verdict), text))
    if receipt.verdict == "refused":
        found += [Violation("entry", str(one), "caused by a refused input") for one in caused]
    wanted = _wanted_event(record, str(receipt.verdict), state, on_busy(record, policy))
    if wanted is not None and not any(o.event.type == wanted and input_of(o) == record.input_id for o in caused):
        settled_later = receipt.verdict == "answered" and not caused
        if not settled_later:
            found.append(Violation("entry", str(verdict), f"{receipt.verdict}, but the input caused no {wanted}"))
    return found


def _wanted_event(record: Input, verdict: str, state: Before, choice: str) -> str | None:
    """The event that an input with this verdict must have caused."""
    running = state.active is not None and not state.cancelling
    if verdict in ("cancelling", "erased"):
        return RUN_CANCEL_REQUESTED if running else None
    if verdict == "queued" and record.mode in ("prompt", "steer") and choice == "interrupt":
        return RUN_CANCEL_REQUESTED if running else None
    return WITH_EVENT.get(verdict)


def input_of(one: LoggedEvent) -> str | None:
    """The input id that an event names."""
    value = one.payload.get("inputId")
    return value if isinstance(value, str) else None


def consumed_once(evidence: Evidence) -> list[Violation]:
    """An input is consumed by the run that began with it or applied it: once, and by no other."""
    found = []
    consumed: dict[tuple[int, str, str], list[LoggedReceipt]] = {}
    for one in evidence.receipts:
        r = one.receipt
        if r.kind == "input" and r.disposition == "consumed" and r.input_id is not None:
            consumed.setdefault((r.tenant_id, r.session_id, r.input_id), []).append(one)
    used: dict[tuple[int, str, str], list[LoggedEvent]] = {}
    for event in evidence.events:
        if event.event.type in (RUN_STARTED, INPUT_APPLIED):
            used.setdefault((*event.session, input_of(event) or ""), []).append(event)
    for key, events in used.items():
        receipts = consumed.get(key, [])
        named = {one.receipt.run_id for one in receipts}
        for number, event in enumerate(events):
            # A retry takes over the content under an id of its own, so an id is used twice only after it was forgotten.
            if number and event.event.at_ms - events[number - 1].event.at_ms < REMEMBER_MS:
                found.append(Violation("entry", str(event), f"the input was used at {events[number - 1]} already"))
            if not receipts and evidence.whole(event.cause):
                found.append(Violation("entry", str(event), "no receipt says that this input was consumed"))
            elif receipts and event.event.run_id not in named and evidence.whole(event.cause):
                found.append(Violation("entry", str(receipts[0]), f"says {sorted(map(str, named))}, not {event}"))
    for key, receipts in consumed.items():
        if key not in used:
            found.append(Violation("entry", str(receipts[0]), "consumed, but no run began with it or applied it"))
    return found
