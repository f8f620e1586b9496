"""A session driven by a script of bytes: each byte chooses what happens next, plausible or hostile.

One script is one history, so Hypothesis can shrink it and a seed can make it. After every record all invariants are
checked; `end` brings the session to rest by an abort and timers alone and checks what must hold of the whole history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import orjson

from onepen.processors import event_invariants, invariants, timers
from onepen.processors.decide import Command, Decision, Moment, decide
from onepen.processors.evolve import evolve
from onepen.processors.rules import Rules
from onepen.processors.session import Session
from onepen.schemas import codec
from onepen.schemas.inputs import Content, Input, Parent
from onepen.schemas.notices import Notice
from onepen.schemas.statuses import RunStatus
from onepen.schemas.worker_records import Claim, Release, Renew, Report, ReportEvent
from tests.unit.processors.stage import Stage, report_event

T = TypeVar("T")
WORKERS = ("w1", "w2", "w3")
KEYS = ("k1", "k2", "k3")
NAMES = ("mail", "post")
WAITS_MS = (0, 1, 900, 5_000, 5_000, 12_000, 30_000, 30_000, 61_000, 3_600_000, 86_400_000)
NASTY_TEXT = ("", " ", "é", "a/b", "%2F", "x" * 200, "k1", "run.finished", "\0", "queue", "active", "reject", "run")
NASTY_NUMBER = (None, 0, -1, 1, 2**63 - 1, -(2**63), 86_400_000)
NASTY_JSON = (
    b"", b"{", b"[]", b"null", b'{"a":NaN}', b'{"a":1e999}', b"\xff", b'{"a":"\\ud800"}',
    b'{"a":' * 70 + b"1" + b"}" * 70, b'{"terminalStatus":"completed","forced":true}',
    b'{"terminalStatus":"completed","terminalStatus":"failed"}', b'{"status":["ok"],"turnId":"a","toolCallId":"a"}',
    b'{"status":{"ok":1},"actionKey":"k1","name":"mail"}', b'{"actionKey":"k1","name":"mail","argsDigest":["d1"]}',
    b'{"terminalStatus":["completed"]}', b'{"terminalStatus":"failed","retryable":123456789012345678901234567890}',
    b'{"actionKey":"k1","name":"mail","argsDigest":"d1","resolution":[]}', b'{"inputId":{}}', b'{"turnId":"\\u0000"}',
    b'{"actionKey":"k1","name":"mail","argsDigest":"d1","honoursKeys":1}',
    b'{"actionKey":"k1","name":"mail","status":"ok","result":{"n":123456789012345678901234567890}}',
)  # fmt: skip
POLICIES: tuple[dict[str, Any], ...] = (
    {"onBusy": "reject"}, {"approvalActions": ["mail"]}, {"pendingMax": 2}, {"onBusy": "interrupt"},
    {"noWorkerOffers": 2, "progressRenewals": 3}, {"recovery": "fail", "autoSteers": []},
)  # fmt: skip
EVENT_TYPES = (
    "model.request.started", "model.request.finished", "tool.started", "tool.finished", "message.completed",
    "action.requested", "action.finished", "input.applied", "run.finished", "run.started", "x.", "x.a b", "",
    "subtask.started", "subtask.finished", "run.compaction_started", "run.compaction_finished", "run.released",
)  # fmt: skip
ACTION_EXTRAS = (
    "", "", "", ",approval", ",approval", ",digest=d2", ",honours", ",resolution=repeat",
    ",resolution=reconciled_not_performed", ",honours,approval,resolution=repeat",
)  # fmt: skip
OF_THE_HOLDER = ("report_no", "renewal_no", "lease_expires_ms", "idle_renewals", "report_digests", "open_branches")
ID_FREE = ("from_the_future", "too_many_inputs", "invalid", "too_old", "input_id_reused")


class Finished(Exception):
    """The script has ended."""


class World:
    """One session and the log that made it. `seen` counts what has happened, so that a test can ask for more."""

    def __init__(self, script: bytes, seen: Counter[str] | None = None, session_id: str = "session-42") -> None:
        self.script = iter(script)
        self.seen: Counter[str] = Counter() if seen is None else seen
        self.stage = Stage(session_id=session_id)
        self.sub_extras: tuple[str, ...] = ("", "", ",to=session-42", ",text=other")
        self.ids = 0
        self.log: list[tuple[Rules, Command, Moment]] = []
        self.folded = Session.load(self.stage.tenant_id, self.stage.session_id, {})
        self.framed: list[bytes] = []
        self.replies: list[bytes] = []
        self.settled: set[str] = set()
        self.told: list[Notice] = []
        self.children: list[Input] = []
        if self.one_of((True, False, False)):
            self.stage.policy(**self.one_of(POLICIES))

    def turns(self) -> Sequence[Callable[[], None]]:
        return (
            self.client, self.client, self.holder, self.holder, self.holder, self.holder, self.holder, self.person,
            self.time, self.time, self.stranger, self.abort, self.repeat, self.hostile_input, self.nonsense,
            self.child, self.notice, self.retry, self.retry, self.rarely,
        )  # fmt: skip

    def run(self) -> None:
        turns = self.turns()
        try:
            while True:
                self.one_of(turns)()
        except Finished:
            self.end()

    def one_of(self, options: Sequence[T]) -> T:
        for byte in self.script:
            return options[byte % len(options)]
        raise Finished

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, command: Command) -> Decision:
        stage = self.stage
        decision = stage.decide(command)
        self.log.append((stage.rules, command, Moment(stage.partition, stage.offset, stage.now_ms)))
        for event in decision.events:
            evolve(self.folded, event, orjson.loads(event.payload))
        for receipt in decision.receipts:
            if receipt.kind == "action":
                detail = orjson.loads(receipt.detail or b"{}")
                self.settled.add(f"{detail['name']}/{detail['actionKey']}")
        for event in decision.events:
            if event.type == "action.requested":
                payload = orjson.loads(event.payload)
                self.settled.discard(f"{payload['name']}/{payload['actionKey']}")
        self.told += [record for record in decision.forwards if isinstance(record, Notice)]
        self.children += [one for one in decision.forwards if isinstance(one, Input) and one.mode == "prompt"]
        self.framed += decision.event_bytes
        self.replies += _replies(decision)
        self.seen.update(word for word in stage.words(decision))
        self.seen.update(event.type for event in decision.events)
        self.check()
        return decision

    def check(self) -> None:
        session = self.stage.session
        # The stage loads the session from its bytes after every record: that check is left to the end.
        checks = [check for check in invariants.SESSION if check is not invariants.loads_as_it_was_written]
        broken = [check.__name__ for check in checks if not check(session)]
        assert not broken, broken
        self.check_fold()

    def check_fold(self) -> None:
        """Folding the events from nothing rebuilds the run and the action keys."""
        now, folded = self.stage.session, self.folded
        assert folded.head.run_no == now.head.run_no
        assert (folded.head.run is None) == (now.head.run is None)
        if now.head.run is not None and folded.head.run is not None:
            assert of_the_log(folded) == of_the_log(now)
            assert folded.head.run.generation <= now.head.run.generation
        for name, action in now.actions.items():
            mine = folded.actions.get(name)
            assert mine is not None
            if name not in self.settled:  # after its run a doubt is settled by a receipt, never by an event
                assert (mine.state, mine.answer) == (action.state, action.answer)
            assert mine.args_digest == action.args_digest
        if not now.head.erased:
            assert folded.head.checkpoint == now.head.checkpoint

    def check_conservation(self) -> None:
        """One verdict per input record, at most one final disposition; at rest exactly one."""
        receipts = [receipt for receipt in self.stage.receipts if receipt.kind == "input"]
        verdicts = Counter(receipt.offset for receipt in receipts if receipt.verdict is not None)
        dispositions = Counter(receipt.offset for receipt in receipts if receipt.disposition is not None)
        inputs = {moment.offset for _, command, moment in self.log if isinstance(command, Input)}
        assert verdicts == Counter(inputs), "an input without its verdict, or with two"
        assert set(dispositions.values()) <= {1}, "two dispositions of one input"
        if self.stage.session.head.run is None:
            assert dispositions == verdicts, "an input without its final disposition in a session at rest"
        self.check_told()

    def check_told(self) -> None:
        """The parent of a child's input is told its end exactly once: by a notice, where the input was not a repeat."""
        asked = {
            command.input_id
            for _, command, _ in self.log
            if isinstance(command, Input) and command.parent is not None and command.mode == "prompt"
        }
        told = Counter(notice.child_input_id for notice in self.told)
        assert set(told.values()) <= {1}, f"told twice: {told}"
        if self.stage.session.head.run is None:
            assert set(told) == asked, "a parent that waits for ever"

    # -- clients -------------------------------------------------------------------------------------------------

    def new_id(self, letter: str) -> str:
        self.ids += 1
        return f"{letter}{self.ids}"

    def send(self, record: Input) -> Decision:
        self.stage.sent.setdefault(record.input_id, record)
        return self.step(record)

    def client(self) -> None:
        mode = self.one_of(("prompt", "prompt", "steer", "steer", "follow_up", "auto"))
        members: dict[str, Any] = {}
        if self.one_of((False, False, True)):
            members = {
                "on_busy": self.one_of((None, "queue", "reject", "steer", "interrupt")),
                "recovery": self.one_of((None, None, "rerun", "fail")),
                "source": self.one_of(("ui", "scheduler")),
                "if_missed": self.one_of((None, "queue", "reject")),
                "ttl_ms": self.one_of((None, 1_000, 40_000)),
                "timeout_ms": self.one_of((None, 2_000, 50_000)),
                "max_attempts": self.one_of((None, 1, 2)),
            }
        self.send(self.stage.input(mode, self.new_id(mode[0]), **members))

    def child(self) -> None:
        """Another session asks for a run here, or takes its wish back."""
        stage = self.stage
        parent = Parent(session_id="mother", run_id="run-m", call_id="c", ancestors=("top", "mother"))
        mine = [name for name in stage.sent if name.startswith("sub-")]
        if mine and self.one_of((False, True)):
            parent = msgspec.structs.replace(parent, cancel_deadline_ms=stage.now_ms + self.one_of((1, 8_000, 90_000)))
            record = stage.input(
                "abort", self.new_id("a"), target_kind="input", target_id=self.one_of(mine), parent=parent
            )
        else:
            record = stage.input("prompt", self.new_id("sub-"), parent=parent, ttl_ms=self.one_of((None, 1_000)))
        self.send(record)

    def notice(self) -> None:
        """What became of a child's input: mostly of one that this session has asked for, sometimes told twice."""
        if not self.children:
            return
        asked = self.one_of(self.children[-4:])
        assert asked.parent is not None
        self.step(
            Notice(
                tenant_id=asked.tenant_id, session_id=asked.parent.session_id, run_id=asked.parent.run_id,
                call_id=self.one_of((asked.parent.call_id,) * 5 + ("nobody",)), child_session_id=asked.session_id,
                child_input_id=asked.input_id, child_run_id=None, reason=None, result=self.one_of((None, b'"done"')),
                status=self.one_of(("completed", "failed", "refused", "expired", "cancelled")),
            )
        )  # fmt: skip

    def retry(self) -> None:
        last = self.stage.session.head.run_no
        number = self.one_of((last, last, last, 1))
        record = self.stage.input("prompt", self.new_id("p"), retry_of=self.stage.run_id(f"r{number}"))
        self.send(msgspec.structs.replace(record, content=None))

    def rarely(self) -> None:
        """An erase ends nearly everything: one in so many turns."""
        if self.one_of(range(12)) == 0:
            self.send(self.stage.input("erase", self.new_id("e")))
        elif self.one_of((False, True)):
            self.stage.policy(**self.one_of(POLICIES))

    def abort(self) -> None:
        stage = self.stage
        sent = list(stage.sent)[-6:]
        targets = [
            ("active", None),
            ("run", stage.run_id("r1")),
            ("run", stage.run_id(f"r{stage.session.head.run_no}")),
        ]
        kind, target = self.one_of([*targets, *(("input", name) for name in sent)])
        scope = self.one_of((None, "run", "run_and_queue"))
        self.send(stage.input("abort", self.new_id("a"), target_kind=kind, target_id=target, scope=scope))

    def person(self) -> None:
        self.send(
            self.stage.input(
                "answer",
                self.new_id("n"),
                action_key=self.one_of(KEYS),
                action_name=self.one_of((*NAMES, None)),
                decision=self.one_of(("approve", "approve", "deny", "ok", "not_performed")),
                args_digest=self.one_of(("d1", "d1", "d2")),
            )
        )

    def repeat(self) -> None:
        if not self.stage.sent:
            return
        record = self.stage.sent[self.one_of(list(self.stage.sent)[-8:])]
        if self.one_of((False, False, True)):
            record = msgspec.structs.replace(record, user_id=record.user_id + 1)
        decision = self.step(record)
        (receipt,) = [receipt for receipt in decision.receipts if receipt.offset == self.stage.offset]
        assert receipt.verdict == "duplicate" or receipt.reason in ID_FREE, receipt
        assert not decision.events, "a repeat did something"
        self.told = [one for one in self.told if one not in decision.forwards]

    def hostile_input(self) -> None:
        stage = self.stage
        word = self.one_of((None, *NASTY_TEXT))
        number = self.one_of(NASTY_NUMBER)
        data = self.one_of((None, b"", b"x", b"\xff", b"{}", b"[", b"1e999"))
        content = (
            None if data is None else Content(media_type=self.one_of(("text/plain", "application/json", "")), data=data)
        )
        record = msgspec.structs.replace(
            stage.input("prompt", self.one_of((self.new_id("h"), self.new_id("h"), *NASTY_TEXT))),
            mode=self.one_of(("auto", "erase", "prompt", "abort", "answer", "steer", *NASTY_TEXT)),
            source=self.one_of(("ui", *NASTY_TEXT)), target_kind=word, target_id=word, ttl_ms=number, timeout_ms=number,
            content=content, issued_at_ms=stage.now_ms if number is None else self.one_of((stage.now_ms, number)),
            scope=word, on_busy=word, decision=self.one_of((None, word)),
        )  # fmt: skip
        self.step(record)

    # -- workers -------------------------------------------------------------------------------------------------

    def head(self, worker: str, generation: int, **options: str) -> dict[str, Any]:
        return self.stage.worker_head(worker, {"g": str(generation)} | options)

    def current(self) -> int:
        run, last = self.stage.session.head.run, self.stage.session.head.last
        return run.generation if run is not None else last.generation if last is not None else 1

    def holder(self) -> None:
        """The holder does something; without one, somebody claims."""
        run = self.stage.session.head.run
        if run is None:
            return
        if not run.owner:
            self.step(Claim(**self.head(self.one_of(WORKERS), run.generation)))
            return
        head = self.head(run.owner, run.generation)
        match self.one_of(("report",) * 9 + ("renew", "release", "claim")):
            case "renew":
                self.step(Renew(**head, no=run.renewal_no + self.one_of((1, 1, 0, 3)), want_contents=True))
            case "release":
                self.step(Release(**head, reason="shutdown"))
            case "claim":
                self.step(Claim(**head))
            case _:
                events = tuple(self.event() for _ in range(self.one_of((1, 1, 2, 4))))
                self.step(Report(**head, no=run.report_no + self.one_of((1,) * 12 + (0, 2)), events=events))

    def event(self) -> ReportEvent:
        steers = [entry.input_id for entry in self.stage.session.head.pending if entry.for_run]
        kind = self.one_of(
            ("act", "act", "act", "end", "end", "model", "tool", "msg", "done", "applied", "x", "compact", "sub", "sub")
        )
        match kind:
            case "act":
                word = f"act+{self.one_of(KEYS)},name={self.one_of(NAMES)}{self.one_of(ACTION_EXTRAS)}"
            case "end":
                open_now = [branch for _, branch in self.stage.session.branches.items()]
                word = self.end_of(self.one_of(open_now)) if open_now else "tool-a:ok"
            case "model" | "tool":
                word = f"{kind}+{self.one_of(('a', 'b', 'c'))}"
            case "compact":
                word = f"compact{self.one_of(('+a', '+b', '-a:ok', '-b:failed'))}"
            case "sub":
                word = f"sub+{self.one_of(('a', 'b', 'c'))}{self.one_of(self.sub_extras)}"
            case "done":
                word = f"done:{self.one_of(('completed', 'completed', 'failed,retryable', 'failed', 'cancelled'))}"
            case "applied":
                word = f"applied:{self.one_of(steers) if steers else 's1'}"
            case _:
                word = "msg" if kind == "msg" else "x.note:n"
        return report_event(word)

    def end_of(self, branch: Any) -> str:
        match branch.kind:
            case "model_request":
                return f"model-{branch.id}:{self.one_of(('ok', 'aborted'))}"
            case "tool":
                return f"tool-{branch.id}:{self.one_of(('ok', 'cancelled'))}"
            case "compaction":
                return f"compact-{branch.id}:{self.one_of(('ok', 'failed'))}"
            case "subtask" | "approval":
                return "msg"
            case _:
                name, _, key = branch.id.partition("/")
                action = self.stage.session.actions.get(branch.id)
                request = self.one_of(("", "", f",no={action.report_no if action else 1}", ",no=1"))
                return f"act-{key}:{self.one_of(('ok', 'error', 'not_performed'))},name={name}{request}"

    def nonsense(self) -> None:
        """The holder reports what no worker should."""
        run = self.stage.session.head.run
        if run is not None and run.owner:
            event = ReportEvent(type=self.one_of(EVENT_TYPES), payload=self.one_of(NASTY_JSON))
            self.step(Report(**self.head(run.owner, run.generation), no=run.report_no + 1, events=(event,)))

    def stranger(self) -> None:
        """Zombies, strangers, forged tokens: nothing of theirs enters the run."""
        run_before = self.stage.session.head.run
        options: dict[str, str] = {}
        if self.one_of((False, True)):
            options["token"] = "k1.bad"
        run = self.one_of((None, None, "r1", "r9"))
        if run is not None:
            options["run"] = run
        worker = self.one_of((*WORKERS, "stranger", "", "a b"))
        head = self.head(worker, self.current() - self.one_of((1, 1, 0, 2, 3)), **options)
        kind = self.one_of(("claim", "renew", "report", "shutdown", "no_room", "whim"))
        match kind:
            case "claim":
                decision = self.step(Claim(**head))
            case "renew":
                decision = self.step(Renew(**head, no=self.one_of((0, 1, 5))))
            case "report":
                decision = self.step(Report(**head, no=self.one_of((0, 1, 2, 3)), events=(self.event(),)))
            case _:
                decision = self.step(Release(**head, reason=kind))
        if run_before is None or worker == run_before.owner != "":
            return
        run_after = self.stage.session.head.run
        assert not decision.events or kind == "claim", "somebody else wrote into the run"
        if run_after is not None and kind != "claim":
            moved = [name for name in OF_THE_HOLDER if getattr(run_after, name) != getattr(run_before, name)]
            assert not moved, f"somebody else moved {moved}"

    # -- time ----------------------------------------------------------------------------------------------------

    def time(self) -> None:
        match self.one_of(("wait", "wait", "due", "due", "due", "hasty", "back")):
            case "wait":
                self.stage.now_ms += self.one_of(WAITS_MS)
            case "back":
                self.stage.now_ms -= 2_500
            case "due":
                due = self.stage.due()
                if due:
                    self.step(self.one_of(due).timer)
            case _:
                self.hasty_timer()

    def hasty_timer(self) -> None:
        kind = self.one_of(("offer", "lease", "run", "cancel", "approval", "queued", "forget", "progress"))
        subject = self.one_of(("", "mail/k1", "post/k2", *list(self.stage.sent)[-3:]))
        generation = self.current() - self.one_of((0, 0, 1))
        session = self.stage.session
        now_ms = max(self.stage.now_ms, session.head.now_ms)
        due = {one.timer.kind for one in timers.due(session, now_ms)}
        decision = self.step(self.stage.timer(kind, generation=generation, subject=subject))
        if kind not in due:
            assert self.stage.words(decision) == ["."], "a timer did something before its time"

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        stage = self.stage
        stage.now_ms = max(stage.now_ms, stage.session.head.now_ms)
        for _ in range(120):
            if stage.session.head.run is None:
                break
            self.towards_the_end()
        self.check_end()

    def towards_the_end(self) -> None:
        """One step: an abort, or else the next deadline."""
        stage = self.stage
        run = stage.session.head.run
        assert run is not None
        if run.status is not RunStatus.CANCELLING and not stage.session.head.erased:
            self.step(stage.input("abort", self.new_id("the-end-"), target_kind="active"))
            return
        stage.now_ms = max(stage.now_ms, timers.next_deadline_ms(stage.session))
        # In cancelling the deadlines of the cancel and of the lease end the run, whatever else is due.
        due = sorted(stage.due(), key=lambda one: one.timer.kind not in ("cancel", "lease"))
        self.step(due[0].timer)

    def check_end(self) -> None:
        """What must hold of the whole history, in a session at rest."""
        stage = self.stage
        assert stage.session.head.run is None, "a run that cannot end"
        assert invariants.broken(stage.session, stage.events) == []
        assert event_invariants.chain_verifies(self.framed)
        self.check_conservation()
        self.read_the_log_again()

    def read_the_log_again(self) -> None:
        session = Session.load(self.stage.tenant_id, self.stage.session_id, {})
        framed: list[bytes] = []
        replies: list[bytes] = []
        for number, (rules, command, moment) in enumerate(self.log):
            before = invariants.whole(session) if number % 8 == 0 else None
            decision = decide(rules, session, command, moment)
            assert before is None or invariants.whole(session) == before, "decide has changed the session it was given"
            session = decision.session
            framed += decision.event_bytes
            replies += _replies(decision)
        assert replies == self.replies, "the same records give other replies"
        assert framed == self.framed, "the log read again, with no state written in between, gives other bytes"
        assert invariants.whole(session) == invariants.whole(self.stage.session)


def _replies(decision: Decision) -> list[bytes]:
    replies = (*decision.receipts, *decision.offers, *decision.views, *decision.forwards)
    return [codec.encode(reply) for reply in replies]


def of_the_log(session: Session) -> tuple[Any, ...]:
    """What the events say about the active run: a fold of the log must arrive at the same."""
    run = session.head.run
    assert run is not None
    branches = sorted((name, branch.kind, branch.started_ms) for name, branch in session.branches.items())
    own = frozenset((a.name, a.key) for _, a in session.actions.items() if a.run_id == run.run_id)
    return (
        run.run_id, run.status, run.seq, run.owner, run.losses, run.open_branches, run.open_approvals,
        run.cancel_deadline_ms, run.cancel_input_id, run.stopped, run.stopped_count, run.start_input_id, branches,
        run.open_children, run.compaction_id, run.compaction_deadline_ms, run.idle_limits, run.lineage, run.recovery,
        run.handed_back, run.user_id, session.head.checkpoint,
        # A doubt of an earlier run of the lineage may be settled meanwhile, which is a receipt and never an event.
        [doubt for doubt in run.doubts if doubt in own],
    )  # fmt: skip
