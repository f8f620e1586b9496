"""One session on a stage: drives `decide` with commands written as words, and says what followed in words.

Nothing here knows why something is decided; it knows how to write a record down and how to name what came out. The
state is written out and loaded again after every record, so a test that passes also shows that nothing lives only in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from onepen.processors import timers
from onepen.processors.decide import Command, Decision, Moment, decide
from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.schemas import ids
from onepen.schemas.events import Event
from onepen.schemas.inputs import Content, Input, Parent
from onepen.schemas.notices import Notice
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.receipts import Receipt
from onepen.schemas.timers import Timer
from onepen.schemas.views import View
from onepen.schemas.worker_records import Claim, Release, Renew, Report, ReportEvent

START_MS = 1_790_000_000_000
INBOX = 3
KEYS = Keys("k1", b"a secret of the tests")
_NUMBERS = frozenset(("ttl_ms", "timeout_ms", "max_attempts", "user_id", "issued_at_ms"))


@dataclass
class Stage:
    """A session, its clock and everything that was ever written for it."""

    tenant_id: int = 7
    session_id: str = "session-42"
    rules: Rules = field(default_factory=lambda: Rules.start(KEYS))
    now_ms: int = START_MS
    offset: int = 100
    partition: int = 5
    records: dict[bytes, bytes] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    sent: dict[str, Input] = field(default_factory=dict)
    reported: dict[tuple[str, int], Report] = field(default_factory=dict)
    session: Session = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.session = Session.load(self.tenant_id, self.session_id, self.records)

    # -- records ---------------------------------------------------------------------------------------------------

    def run_id(self, name: str) -> str:
        """`r1` is the run with number 1; any other text is taken as it stands."""
        if name[:1] == "r" and name[1:].isdigit():
            return ids.run_id(self.tenant_id, self.session_id, int(name[1:]))
        return name

    def run_name(self, run_id: str | None) -> str:
        for number in range(1, self.session.head.run_no + 2):
            if run_id == ids.run_id(self.tenant_id, self.session_id, number):
                return f"r{number}"
        return str(run_id)

    def input(self, mode: str, input_id: str, **members: Any) -> Input:
        content = members.pop("content", f"text of {input_id}")
        if mode in ("abort", "answer", "erase"):
            content = None
        elif isinstance(content, str):
            content = Content(data=content.encode())
        members = {"source": "ui", "user_id": 11, "issued_at_ms": self.now_ms} | members
        return Input(
            input_id=input_id,
            tenant_id=self.tenant_id,
            session_id=self.session_id,
            mode=mode,
            content=content,
            **members,
        )

    def worker_head(self, worker: str, options: dict[str, str]) -> dict[str, Any]:
        run, last = self.session.head.run, self.session.head.last
        named = options.get("run")
        if named is not None:
            run_id = self.run_id(named)
        else:
            run_id = run.run_id if run is not None else (last.run_id if last is not None else self.run_id("r1"))
        current = run.generation if run is not None else (last.generation if last is not None else 1)
        generation = int(options.get("g", current))
        token = KEYS.token(self.tenant_id, self.session_id, run_id, max(generation, 0))
        return {
            "tenant_id": self.tenant_id,
            "session_id": self.session_id,
            "run_id": run_id,
            "generation": generation,
            "token": options.get("token", token),
            "worker_id": worker,
            "inbox": int(options.get("inbox", INBOX)),
        }

    def timer(self, kind: str, **changes: Any) -> Timer:
        """A timer as the owner would append it now for the active run."""
        run = self.session.head.run
        fields: dict[str, Any] = {
            "tenant_id": self.tenant_id,
            "session_id": self.session_id,
            "kind": kind,
            "run_id": "" if run is None else run.run_id,
            "generation": 0 if run is None else run.generation,
            "subject": "",
            "deadline_ms": self.now_ms,
        }
        return Timer(**(fields | changes))

    # -- deciding --------------------------------------------------------------------------------------------------

    def decide(self, command: Command) -> Decision:
        """Decide one record, write its state out and load the session again from the bytes."""
        self.offset += 1
        moment = Moment(self.partition, self.offset, self.now_ms)
        decision = decide(self.rules, self.session, command, moment)
        self.take(decision)
        return decision

    def take(self, decision: Decision) -> None:
        deadline_ms = timers.next_deadline_ms(decision.session)
        for key, value in decision.session.changes(deadline_ms).items():
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = value
        self.session = Session.load(self.tenant_id, self.session_id, self.records)
        self.events += decision.events
        self.receipts += decision.receipts
        self.decisions.append(decision)

    def policy(self, version: int | None = None, **members: Any) -> None:
        """Put a policy of the session's tenant in force."""
        number = self.rules.policy(self.tenant_id).version + 1 if version is None else version
        self.rules, _ = admit_policy(self.rules, PolicyRecord(
            tenant_id=self.tenant_id, version=number, body=msgspec.json.encode(members)
        ))  # fmt: skip

    def due(self) -> list[timers.Due]:
        return list(timers.due(self.session, self.now_ms))

    # -- words -----------------------------------------------------------------------------------------------------

    def do(self, line: str) -> list[str]:
        """Carry out one command written in words; returns what followed, in words."""
        verb, *words = line.split()
        parts = [word.partition("=") for word in words]
        options = {name: value for name, equals, value in parts if equals and name.isidentifier()}
        names = ["".join(part) for part in parts if not (part[1] and part[0].isidentifier())]
        return _VERBS[verb](self, verb, names, options)

    def words(self, decision: Decision) -> list[str]:
        """Everything that follows from one record, in a fixed order: receipts, events, offers, views, notices, and
        what is sent to other sessions."""
        out = [self._receipt_words(receipt) for receipt in decision.receipts]
        out += [event_words(event) for event in decision.events]
        out += [f"offer:g{offer.generation}" for offer in decision.offers]
        out += [self._view_words(view) for view in decision.views]
        out += [self._forward_words(record) for record in decision.forwards]
        return out or ["."]

    def _receipt_words(self, receipt: Receipt) -> str:
        if receipt.kind == "worker":
            return f"worker:{receipt.reason}"
        if receipt.kind != "input":
            detail = orjson.loads(receipt.detail or b"{}")
            return f"{receipt.kind}:{detail.get('actionKey') or detail['callId']}:{detail['status']}"
        reason = f":{receipt.reason}" if receipt.reason else ""
        if receipt.offset != self.offset:
            return f"{receipt.input_id}={receipt.disposition}{reason}"
        done = f"/{receipt.disposition}" if receipt.disposition not in (None, "refused", "duplicate") else ""
        if receipt.verdict is None:
            return f"{receipt.input_id}={receipt.disposition}{reason}"
        return f"{receipt.verdict}{done}{reason}"

    @staticmethod
    def _forward_words(record: Input | Notice) -> str:
        """A record for another session: `sent:MODE:SESSION`, or what a parent is told, `told:CALL:STATUS`."""
        if isinstance(record, Notice):
            reason = f":{record.reason}" if record.reason else ""
            return f"told:{record.call_id}:{record.status}{reason}"
        return f"sent:{record.mode}:{record.session_id}"

    @staticmethod
    def _view_words(view: View) -> str:
        return f"view:{view.status}" if view.reason is None else f"notice:{view.reason}"


def event_words(event: Event) -> str:
    """An event's type, with what tells it from others of its kind."""
    payload = orjson.loads(event.payload)
    told = [
        str(payload[name])
        for name in (
            "turnId",
            "toolCallId",
            "actionKey",
            "callId",
            "compactionId",
            "inputId",
            "decision",
            "status",
            "terminalStatus",
        )
        if name in payload and event.type != "run.started" and (name, event.type) not in _UNTOLD
    ]
    told += [name for name in ("forced", "retryable") if payload.get(name)]
    return f"+{event.type}" + (f"({','.join(told)})" if told else "")


_UNTOLD = {
    ("inputId", "run.finished"),
    ("inputId", "run.cancel_requested"),
    ("inputId", "approval.answered"),
    ("inputId", "subtask.started"),
}


# -- the verbs -----------------------------------------------------------------------------------------------------


def _input(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    members = _members(options)
    if "issued" in options:
        members["issued_at_ms"] = stage.now_ms + int(options["issued"])
    if members.get("content") == "none":
        members["content"] = None
    if members.get("content") == "pointer":
        members["content"] = Content(uri="s3://b/o", digest="d0", size_bytes=9)
    if "retry_of" in members:
        members["content"] = None
    if "bytes" in members:
        members["content"] = "x" * int(members.pop("bytes"))
    for name in ("expected_run_id", "retry_of"):
        if name in members:
            members[name] = stage.run_id(members[name])
    record = stage.input(verb, names[0], **members)
    stage.sent.setdefault(record.input_id, record)
    return stage.words(stage.decide(record))


def _members(options: dict[str, str]) -> dict[str, Any]:
    return {name: int(value) if name in _NUMBERS else value for name, value in options.items() if name != "issued"}


def _abort(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    options = dict(options)
    target: dict[str, Any] = {"target_kind": "active"}
    if "run" in options:
        target = {"target_kind": "run", "target_id": stage.run_id(options.pop("run"))}
    elif "input" in options:
        target = {"target_kind": "input", "target_id": options.pop("input")}
    if "deadline" in options:
        target["parent"] = parent_of(names[0], cancel_deadline_ms=stage.now_ms + int(options.pop("deadline")))
    record = stage.input("abort", names[0], **target, **_members(options))
    stage.sent.setdefault(record.input_id, record)
    return stage.words(stage.decide(record))


def _answer(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    given = {"args_digest": "d1", "action_name": "mail"} | options
    if given["action_name"] == "none":
        del given["action_name"]
    record = stage.input("answer", names[0], action_key=names[1], decision=names[2], **given)
    stage.sent.setdefault(record.input_id, record)
    return stage.words(stage.decide(record))


def parent_of(call_id: str, ancestors: str = "top,mother", **members: Any) -> Parent:
    """The parent of a child's input: its call has the name of the input."""
    return Parent(
        session_id="mother", run_id="run-m", call_id=call_id, ancestors=tuple(ancestors.split(",")), **members
    )


def _child(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """A prompt that another session has sent for one of its calls."""
    options = dict(options)
    parent = parent_of(names[0], options.pop("ancestors", "top,mother"))
    members = _members(options)
    if "issued" in options:
        members["issued_at_ms"] = stage.now_ms + int(options["issued"])
    record = stage.input("prompt", names[0], parent=parent, source="subtask", **members)
    stage.sent.setdefault(record.input_id, record)
    return stage.words(stage.decide(record))


def _notice(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """What the session of a child tells: `notice CALL STATUS`, of the active or the last run unless run= says else."""
    head = stage.session.head
    run = head.run or head.last
    call = stage.session.calls.get(names[0])
    record = Notice(
        tenant_id=stage.tenant_id,
        session_id=stage.session_id,
        run_id=stage.run_id(options["run"]) if "run" in options else "" if run is None else run.run_id,
        call_id=names[0],
        child_session_id="child",
        child_input_id=options.get("input", call.child_input_id if call is not None else "sub-0"),
        child_run_id="run-c",
        status=names[1],
        reason=None,
        result=b'"the answer"',
    )
    return stage.words(stage.decide(record))


def _again(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """Send an input again, unchanged but for the members given here."""
    record = stage.sent[names[0]]
    if "text" in options:
        record = msgspec.structs.replace(record, content=Content(data=options["text"].encode()))
    return stage.words(stage.decide(record))


def _claim(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    return stage.words(stage.decide(Claim(**stage.worker_head(names[0], options))))


def _renew(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """`renew w1 1`, or `renew w1 1..59` for one after the other: the words of the last."""
    first, _, last = names[1].partition("..")
    suspended = options.get("suspended") == "yes"
    words: list[str] = []
    for no in range(int(first), int(last or first) + 1):
        record = Renew(**stage.worker_head(names[0], options), no=no, suspended=suspended)
        words = stage.words(stage.decide(record))
    return words


def _release(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    return stage.words(stage.decide(Release(**stage.worker_head(names[0], options), reason=names[1])))


def _report(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    worker, no, *events = names
    options = dict(options)
    record = Report(
        **stage.worker_head(worker, options), no=int(no), events=tuple(report_event(text) for text in events)
    )
    stage.reported[worker, int(no)] = record
    return stage.words(stage.decide(record))


def _rereport(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """Send a report again, byte for byte."""
    return stage.words(stage.decide(stage.reported[names[0], int(names[1])]))


def _fire(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """A timer record, appended whether or not it is due."""
    changes: dict[str, Any] = {}
    if "g" in options:
        changes["generation"] = int(options["g"])
    if "run" in options:
        changes["run_id"] = stage.run_id(options["run"])
    if len(names) > 1:
        changes["subject"] = names[1]
    return stage.words(stage.decide(stage.timer(names[0], **changes)))


def _wait(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """Time passes; answers which deadlines have passed."""
    stage.now_ms += int(names[0].replace("_", ""))
    return [f"due:{one.timer.kind}" for one in stage.due()] or ["."]


def _policy(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    members: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("approvalActions", "autoSteers"):
            members[name] = [word for word in value.split(",") if word]
        else:
            members[name] = int(value) if value.isdigit() else value == "true" if value in ("true", "false") else value
    stage.policy(**members)
    return ["."]


def _state(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """What the session looks like now."""
    run = stage.session.head.run
    out = []
    if run is None:
        last = stage.session.head.last
        out.append("idle" if last is None else f"idle:{last.status}")
    else:
        out.append(f"{stage.run_name(run.run_id)}:{run.status}:g{run.generation}")
    out += [f"{e.input_id}@{stage.run_name(e.for_run) if e.for_run else 'next'}" for e in stage.session.head.pending]
    return out


def _keys(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """The action keys of the session and their states."""
    return [f"{action.name}/{action.key}:{action.state}" for _, action in stage.session.actions.items()] or ["."]


def _last(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """Members of the payload of the last event: `last NAME ...`, as NAME=value."""
    payload = orjson.loads(stage.events[-1].payload)
    return [f"{name}={payload.get(name)}" for name in names]


def _offer(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """Members of the last offer."""
    offer = [offer for decision in stage.decisions for offer in decision.offers][-1]
    return [f"{name}={stage.run_name(value) if name == 'lineage' else value}"
            for name in names for value in [getattr(offer, name)]]  # fmt: skip


def _run(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """Members of the active run; times as ms from now (or as they are when not set)."""
    run = stage.session.head.run
    out = []
    for name in names:
        value = getattr(run, name)
        out.append(f"{name}={value - stage.now_ms if name.endswith('_ms') and value > 10**12 else value}")
    return out


def _calls(stage: Stage, verb: str, names: list[str], options: dict[str, str]) -> list[str]:
    """The call ids of the session and what became of them."""
    return [f"{name}:{call.status or 'open'}" for name, call in stage.session.calls.items()] or ["."]


_VERBS: dict[str, Callable[[Stage, str, list[str], dict[str, str]], list[str]]] = {
    "prompt": _input,
    "follow_up": _input,
    "steer": _input,
    "auto": _input,
    "erase": _input,
    "abort": _abort,
    "answer": _answer,
    "again": _again,
    "claim": _claim,
    "renew": _renew,
    "release": _release,
    "report": _report,
    "rereport": _rereport,
    "fire": _fire,
    "wait": _wait,
    "policy": _policy,
    "state": _state,
    "keys": _keys,
    "child": _child,
    "notice": _notice,
    "last": _last,
    "offer": _offer,
    "run": _run,
    "calls": _calls,
}


def report_event(text: str) -> ReportEvent:
    """`model+t1`, `model-t1:ok`, `tool+c1,limit=90`, `tool-c1:ok`, `act+k1,approval`, `act-k1:ok`, `sub+c1,to=child`,
    `compact+z1`, `compact-z1:ok`, `applied:s1`, `done:failed`, `msg`, `x.note`.
    An action's further members: name=, digest=, resolution=, of its end no= (the permitted request); words alone are
    flags."""
    for sign, make in (("+", _start), ("-", _end)):
        head, found, rest = text.partition(sign)
        if found and head in ("model", "tool", "act", "sub", "compact"):
            return make(head, rest)
    head, _, rest = text.partition(":")
    match head:
        case "applied":
            return event_of("input.applied", inputId=rest)
        case "done":
            status, _, flag = rest.partition(",")
            more = {"retryable": True} if flag == "retryable" else {}
            return event_of("run.finished", terminalStatus=status, output="the answer", **more)
        case "msg":
            return event_of("message.completed", text="hello")
        case _:
            return event_of(head, note=rest)


def event_of(kind: str, **payload: Any) -> ReportEvent:
    return ReportEvent(type=kind, payload=orjson.dumps(payload))


def _start(head: str, rest: str) -> ReportEvent:
    name, *more = rest.split(",")
    if head == "model":
        return event_of("model.request.started", turnId=name)
    if head == "tool":
        limit = {"progressRenewals": int(more[0].partition("=")[2])} if more else {}
        return event_of("tool.started", toolCallId=name, toolName="look_up", **limit)
    if head == "compact":
        return event_of("run.compaction_started", compactionId=name)
    if head == "sub":
        given = dict(word.partition("=")[::2] for word in more)
        text = {"content": given.get("text", f"work of {name}")}
        return event_of("subtask.started", callId=name, sessionId=given.get("to", "child"), **text)
    members: dict[str, Any] = {"actionKey": name, "name": "mail", "argsDigest": "d1"}
    for word in more:
        member, _, value = word.partition("=")
        members[{"digest": "argsDigest", "honours": "honoursKeys"}.get(member, member)] = value or True
    return event_of("action.requested", **members)


def _end(head: str, rest: str) -> ReportEvent:
    name, _, status = rest.partition(":")
    if head == "model":
        return event_of("model.request.finished", turnId=name, status=status)
    if head == "tool":
        return event_of("tool.finished", toolCallId=name, status=status)
    if head == "compact":
        if status != "ok":
            return event_of("run.compaction_failed", compactionId=name, reason=status)
        pointer = {"uri": "s3://b/checkpoint", "digest": "ab" * 32, "bytes": 10, "throughSeq": 1}
        return event_of("run.compaction_finished", compactionId=name, checkpoint=pointer)
    status, *more = status.split(",")
    given = dict(word.partition("=")[::2] for word in more)
    of_request = {"reportNo": int(given["no"])} if "no" in given else {}
    return event_of("action.finished", actionKey=name, name=given.get("name", "mail"), status=status, **of_request)


def run_lines(stage: Stage, lines: Iterable[tuple[int, str, list[str], bool]]) -> None:
    """Carry out the lines of a table; a difference names the line."""
    for number, command, expected, whole in lines:
        found = stage.do(command)
        if whole:
            assert found == expected, f"line {number}: {command}\n  expected {expected}\n  found    {found}"
        else:
            missing = [word for word in expected if word not in found]
            assert not missing, f"line {number}: {command}\n  missing {missing}\n  found   {found}"
