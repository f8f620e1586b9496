"""What became of an input and why, in plain words, from the log alone: receipts, events, inputs, dead letters.

Rule: nothing is decided again here. The words rest on records with their positions, so that a reader can look them up.
`explain` is pure; `look_up` reads what it needs: one session's records on one partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from onepen.schemas import codec
from onepen.schemas.errors import Poison
from onepen.schemas.events import INPUT_APPLIED, INPUT_CARRIED_OVER, RUN_CANCEL_REQUESTED, RUN_FINISHED, Event
from onepen.schemas.ids import output_key
from onepen.schemas.inputs import Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import Reason, Verdict
from onepen.streams.audit.evidence import LoggedEvent, LoggedInput, LoggedReceipt, Position
from onepen.streams.audit.modes import Timeline
from onepen.streams.dead_letters import REASON
from onepen.streams.settings import Settings
from onepen.streams.topic_scan import TopicScan
from onepen.streams.verifying import dead_offset

__all__ = ["REASONS", "Facts", "explain", "look_up"]

REASONS: Final[dict[str, str]] = {
    Reason.TOO_OLD: "its issued_at lies more than 24 h before the time of the log: too old to tell a repeat from",
    Reason.FROM_THE_FUTURE: "its issued_at lies more than 1 h after the time of the log: the client's clock is wrong",
    Reason.INPUT_ID_REUSED: "its id was used before by an input with other content",
    Reason.TOO_MANY_INPUTS: "the session already remembers as many input ids as it may",
    Reason.INVALID: "one of its fields breaks a rule of form",
    Reason.ERASED: "the session was erased and is never used again",
    Reason.CYCLE: "the session it would run in is one of its own ancestors",
    Reason.NOT_RETRYABLE: "only the session's last run can be retried, while none is active, and only if it timed out "
    "or failed retryably within the last 24 h",
    Reason.NO_ACTIVE_RUN: "no run was active",
    Reason.STALE_RUN: "it names a run that is not the active one, and a stop never touches another run",
    Reason.UNKNOWN_INPUT: "the session remembers no input with the id it names",
    Reason.ALREADY_SETTLED: "the input it names was settled before",
    Reason.CANCELLED: "the run was being cancelled, and then no approval is answered any more",
    Reason.UNKNOWN_APPROVAL: "nothing waits for such an answer",
    Reason.DIGEST_MISMATCH: "its digest is not that of the arguments that were asked about",
    Reason.ALREADY_ANSWERED: "an earlier answer in the log decided",
    Reason.BUSY: "a run was active, and it asked to be refused then",
    Reason.MISSED: "it found no run to steer, and it asked to be refused then",
    Reason.QUEUE_FULL: "the list of waiting inputs was full",
    Reason.ABORTED: "an abort took the waiting inputs with it",
}
"""Reasons that the receipt of an input may give."""


@dataclass
class Facts:
    """Records of one session, and what the log has of one input id in it."""

    tenant_id: int
    session_id: str
    input_id: str
    inputs: list[LoggedInput] = field(default_factory=list)
    """All inputs (in the protocol's sense) of the session that are kept."""
    receipts: list[LoggedReceipt] = field(default_factory=list)
    """All receipts of inputs of the session."""
    events: list[LoggedEvent] = field(default_factory=list)
    dead: dict[Position, str] = field(default_factory=dict)
    """Dead letters of the session's inputs, with their reasons."""


def look_up(settings: Settings, input_id: str, session_id: str | None = None) -> list[Facts]:
    """What the log has about an input id of the settings' tenant: one for each session that used it.

    Without a session all partitions are searched. Raises `Retryable` when the log cannot be read.
    """
    tenant_id = settings.tenant_id
    with ExitStack() as stack:
        scans = _Scans(settings, stack)
        if session_id is not None:
            wanted: Iterable[str] = [session_id]
        else:
            wanted = sorted(set(scans.sessions_with(tenant_id, input_id)))
        found = [scans.facts(tenant_id, session, input_id) for session in wanted]
    return [facts for facts in found if _positions(facts)]


class _Scans:
    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        topics = settings.topics

        def scan(topic: str) -> TopicScan:
            return stack.enter_context(TopicScan(settings, topic))

        self._inputs, self._receipts = scan(topics.inputs), scan(topics.receipts)
        self._events, self._dead = scan(topics.events), scan(topics.deadletters)
        self._count = self._inputs.partitions()

    def sessions_with(self, tenant_id: int, input_id: str) -> Iterator[str]:
        """Sessions that have an input or a receipt with this id."""
        for scan in (self._inputs, self._receipts):
            for partition in range(self._count):
                for record in _decoded(scan, partition, input_id.encode()):
                    value = record[1]
                    if isinstance(value, Input | Receipt) and (value.tenant_id, value.input_id) == (
                        tenant_id,
                        input_id,
                    ):
                        yield value.session_id

    def facts(self, tenant_id: int, session_id: str, input_id: str) -> Facts:
        partition = partition_of(session_id.encode(), self._count)
        facts = Facts(tenant_id, session_id, input_id)
        key = output_key(tenant_id, session_id)
        for raw, value in _decoded(self._inputs, partition, b"", session_id.encode()):
            if isinstance(value, Input) and (value.tenant_id, value.session_id) == (tenant_id, session_id):
                facts.inputs.append(LoggedInput(partition, raw.offset, raw.at_ms, value))
        for raw, value in _decoded(self._receipts, partition, b"", key):
            if isinstance(value, Receipt) and value.kind == "input":
                facts.receipts.append(LoggedReceipt(partition, raw.offset, value))
        for raw, value in _decoded(self._events, partition, b"", key):
            if isinstance(value, Event):
                facts.events.append(LoggedEvent(partition, raw.offset, raw.value or b"", value))
        here = {one.position for one in facts.inputs}
        letters = self._dead.read(partition % self._dead.partitions(), *self._dead.ends(partition))
        for letter in letters:
            offset = dead_offset(letter, self._inputs.topic, partition)
            if offset is not None and (partition, offset) in here:
                facts.dead[partition, offset] = (dict(letter.headers).get(REASON) or b"").decode("utf-8", "replace")
        return facts


def _decoded(scan: TopicScan, partition: int, part: bytes, key: bytes | None = None) -> Iterator[tuple[Any, Any]]:
    """Records of a partition whose bytes contain `part`, under `key` where one is given, with what they are."""
    for raw in scan.read(partition, *scan.ends(partition)):
        if raw.value is None or part not in raw.value or (key is not None and raw.key != key):
            continue
        try:
            yield raw, codec.decode(raw.value)
        except Poison:
            continue


def _positions(facts: Facts) -> list[Position]:
    """Where records with the id stand, by the inputs that are kept and by the receipts."""
    found = {one.position for one in facts.inputs if _is(one, facts.input_id)}
    found |= {one.about for one in facts.receipts if one.receipt.input_id == facts.input_id}
    return sorted(found)


def _is(one: LoggedInput, input_id: str) -> bool:
    return isinstance(one.record, Input) and one.record.input_id == input_id


def explain(facts: Facts) -> list[dict[str, Any]]:
    """One account for each record with the id, in log order: its facts as JSON members, and `told`, sentences."""
    return [_Account(facts, position).told() for position in _positions(facts)]


class _Account:
    """The account of one input record."""

    def __init__(self, facts: Facts, position: Position) -> None:
        self._facts = facts
        self._position = position
        self._logged = next((one for one in facts.inputs if one.position == position), None)
        about = [one for one in facts.receipts if one.about == position]
        self._verdict = next((one for one in about if one.receipt.verdict is not None), None)
        self._end = next((one for one in about if one.receipt.disposition is not None), None)
        self._before = Timeline(facts.events).before(position[1])
        self._run_no = {one.event.run_id: one.event.run_no for one in facts.events}

    def told(self) -> dict[str, Any]:
        record = None if self._logged is None else self._logged.record
        known: Any = record if isinstance(record, Input) else (self._verdict or self._end)
        shown = known.receipt if isinstance(known, LoggedReceipt) else known
        verdict, end = (None if one is None else one.receipt for one in (self._verdict, self._end))
        return {
            "inputId": self._facts.input_id,
            "sessionId": self._facts.session_id,
            "tenantId": self._facts.tenant_id,
            "mode": shown.mode,
            "source": shown.source,
            "userId": shown.user_id,
            "position": {"partition": self._position[0], "offset": self._position[1]},
            "activeRunId": self._before.active,
            "cancelling": self._before.cancelling,
            "verdict": verdict and verdict.verdict,
            "reason": verdict and verdict.reason,
            "disposition": end and end.disposition,
            "dispositionReason": end and end.reason,
            "runId": (end and end.run_id) or (verdict and verdict.run_id),
            "deadLetter": self._facts.dead.get(self._position),
            "receipts": [_place(one) for one in (self._verdict, self._end) if one is not None],
            "events": [
                {"type": one.event.type, "runId": one.event.run_id, "seq": one.event.seq, **_place(one)}
                for one in self._events()
            ],
            "told": list(self._sentences(shown)),
        }

    def _events(self) -> list[LoggedEvent]:
        """Events that follow from the record or name the input."""
        return [
            one
            for one in self._facts.events
            if one.cause == self._position or one.payload.get("inputId") == self._facts.input_id
        ]

    # -- sentences -------------------------------------------------------------------------------------------------

    def _sentences(self, shown: Any) -> Iterator[str]:
        yield f"It is a {shown.mode} from {shown.source} (user {shown.user_id}) at inputs {_at(self._position)}."
        dead = self._facts.dead.get(self._position)
        if dead is not None:
            yield f"It was set aside as a dead letter: {dead}. No session was changed by it."
            return
        if self._verdict is None:
            yield "It has not been decided yet: no receipt about it stands in the log."
            return
        yield self._situation()
        yield from self._verdict_told(self._verdict.receipt)
        if self._end is not None and self._end is not self._verdict:
            yield self._end_told(self._end)
        elif self._end is None:
            yield self._waits()
        yield from self._run_end()

    def _run(self, run_id: str | None) -> str:
        number = self._run_no.get(run_id or "")
        return f"run {number} ({run_id})" if number is not None else f"run {run_id}"

    def _situation(self) -> str:
        if self._before.active is None:
            return "At that place in the log the session had no active run."
        status = "being cancelled" if self._before.cancelling else "active"
        return f"At that place in the log {self._run(self._before.active)} was {status}."

    def _verdict_told(self, receipt: Receipt) -> Iterator[str]:
        detail = {} if receipt.detail is None else orjson.loads(receipt.detail)
        run = self._run(receipt.run_id)
        match receipt.verdict:
            case Verdict.STARTED:
                yield f"So it started {run}."
            case Verdict.QUEUED:
                yield "So it was put into the list of waiting inputs."
                if self._caused(RUN_CANCEL_REQUESTED):
                    yield f"It interrupts: {run} was cancelled for it, and it stands in front of the list."
            case Verdict.STEERED:
                yield f"So it was handed to {run}, to be applied when its worker takes it up."
            case Verdict.CANCELLING if self._before.cancelling:
                yield f"The first cancel of {run} stands; this one waits for the same end."
            case Verdict.CANCELLING:
                yield f"So {run} was told to stop."
            case Verdict.ANSWERED:
                yield "It decided what was asked, as the first answer in the log."
            case Verdict.WITHDRAWN:
                yield f"It took input {self._target()} out of the list of waiting inputs."
            case Verdict.ERASED:
                yield "From here on the session takes no input; what it held goes when no run is active."
            case Verdict.DUPLICATE:
                yield self._duplicate(detail)
            case _:
                yield from self._refused(receipt, detail)

    def _caused(self, event_type: str) -> bool:
        return any(one.cause == self._position and one.event.type == event_type for one in self._facts.events)

    def _target(self) -> str:
        record = None if self._logged is None else self._logged.record
        return str(record.target_id) if isinstance(record, Input) else "it named"

    def _duplicate(self, detail: dict[str, Any]) -> str:
        first = detail.get("first") or {}
        where = first.get("position") or {}
        verdict, reason = first.get("verdict"), first.get("reason")
        said = f"{verdict} ({reason})" if reason else str(verdict)
        return (
            f"It repeats the input at inputs {where.get('partition')}:{where.get('offset')}, which was {said}; "
            "a repeat changes nothing."
        )

    def _refused(self, receipt: Receipt, detail: dict[str, Any]) -> Iterator[str]:
        reason = str(receipt.reason)
        yield f"It was refused ({reason}): {REASONS.get(reason, reason)}. A refusal changes nothing."
        if "field" in detail:
            yield f"The field is {detail['field']}."
        if detail.get("lastRunId"):
            yield f"The session's last run was {self._run(detail['lastRunId'])}, which ended {detail['lastRunStatus']}."
        target = detail.get("target")
        if isinstance(target, dict):
            became = target.get("disposition") or target.get("verdict")
            yield f"The input it names was {became}" + (
                f" by {self._run(target['runId'])}." if target["runId"] else "."
            )
        if detail.get("inputId"):
            yield f"The answer that decided is input {detail['inputId']}."

    def _end_told(self, end: LoggedReceipt) -> str:
        receipt, run = end.receipt, self._run(end.receipt.run_id)
        where = f"(receipts {end.partition}:{end.offset})"
        named = [one for one in self._events() if one.event.run_id == receipt.run_id]
        match receipt.disposition:
            case "consumed":
                applied = next((one for one in named if one.event.type == INPUT_APPLIED), None)
                if applied is not None:
                    return f"{_capital(run)} applied it as its event {applied.event.seq} {where}."
                carried = any(one.event.type == INPUT_CARRIED_OVER for one in self._events())
                before = (
                    "The run it was meant for ended first, so it kept its place in the list; then it"
                    if carried
                    else "It"
                )
                return f"{before} began {run} {where}."
            case "withdrawn":
                return f"It was withdrawn{self._withdrawer()}, before anything used it {where}."
            case "discarded":
                return f"It was discarded ({receipt.reason}): {REASONS.get(str(receipt.reason), '')} {where}."
            case "expired":
                return f"Its time to live was over before it could start {where}."
            case "done":
                return f"It was done when {run} had ended {where}."
        return f"In the end it was {receipt.disposition} {where}."

    def _withdrawer(self) -> str:
        """The abort that took it out: the first behind it that names it and was granted."""
        granted = {one.about for one in self._facts.receipts if one.receipt.verdict == Verdict.WITHDRAWN}
        for one in self._facts.inputs:
            if one.position > self._position and one.position in granted and self._names_it(one):
                return f" by input {one.record.input_id} at inputs {_at(one.position)}"  # type: ignore[union-attr]
        return ""

    def _names_it(self, one: LoggedInput) -> bool:
        record = one.record
        return isinstance(record, Input) and (record.target_kind, record.target_id) == ("input", self._facts.input_id)

    def _waits(self) -> str:
        assert self._verdict is not None
        if self._verdict.receipt.verdict in (Verdict.CANCELLING, Verdict.ERASED):
            return f"It waits for the end of {self._run(self._verdict.receipt.run_id)}."
        return "It still waits: nothing has used it yet."

    def _run_end(self) -> Iterator[str]:
        """How the run ended that the input became a part of, or that it stopped."""
        assert self._verdict is not None
        last = self._end or self._verdict
        if last.receipt.run_id is None or self._verdict.receipt.verdict in (Verdict.REFUSED, Verdict.DUPLICATE):
            return
        run_id = last.receipt.run_id
        for one in self._facts.events:
            if one.event.run_id == run_id and one.event.type == RUN_FINISHED:
                status, reason = one.payload.get("terminalStatus"), one.payload.get("reason")
                why = f" ({reason})" if isinstance(reason, str) and reason else ""
                yield f"{_capital(self._run(run_id))} ended {status}{why} at events {one.partition}:{one.offset}."
                return
        if last.receipt.disposition == "consumed":
            yield f"{_capital(self._run(run_id))} has not ended yet."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _at(position: Position) -> str:
    return f"{position[0]}:{position[1]}"


def _place(one: LoggedEvent | LoggedReceipt) -> dict[str, Any]:
    topic = "events" if isinstance(one, LoggedEvent) else "receipts"
    return {"topic": topic, "partition": one.partition, "offset": one.offset}
