"""The core and the naive model side by side: Hypothesis draws records and time, both decide, everything is compared.

Rules draw what is plausible (a holder that works, people who answer, deadlines that pass) and what is not (strangers,
repeats, hasty timers). side_by_side.py is the only place that knows how the two write down the same thing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from onepen.processors import invariants
from onepen.processors.decide import Command, Decision
from onepen.schemas.inputs import Input
from onepen.schemas.notices import Notice
from onepen.schemas.statuses import TimerKind
from onepen.schemas.worker_records import Claim, Release, Renew, Report
from tests.property import naive_right, naive_work
from tests.property.naive_model import DAY_MS, DEFAULTS, HOUR_MS, NaiveSession
from tests.property.naive_right import FORGED, INBOXES
from tests.property.side_by_side import core_branches, core_state, core_told, difference, evidence_is_full, model_state
from tests.unit.processors.stage import Stage, report_event

# The stage loads the session from its bytes after every record: that check is left to the end.
CHECKS = [check for check in invariants.SESSION if check is not invariants.loads_as_it_was_written]
WORKERS = ("w1", "w2")
POLICIES: tuple[dict[str, Any], ...] = (
    {}, {}, {"onBusy": "reject", "ifMissed": "reject"}, {"approvalActions": ["mail"], "pendingMax": 2},
    {"onBusy": "interrupt", "autoSteers": ["scheduler"]}, {"onBusy": "steer", "maxAttempts": 1},
    {"noWorkerOffers": 2, "progressRenewals": 3, "pendingMax": 1}, {"recovery": "fail", "queuedTtlMs": 40_000},
    {"permitMs": 20_000, "approvalMs": 20_000, "runTimeoutMs": 60_000, "recovery": "rerun"},
)  # fmt: skip
WORK = (
    "model+a", "model+b", "model-a:ok", "model-b:ok", "tool+a", "tool+b,limit=5", "tool-a:ok", "tool-b:cancelled",
    "msg", "x.note:n", "act+k1", "act-k1:error", "act+k2,approval", "act-k2:ok", "compact+a", "compact+b",
    "compact-a:ok", "compact-b:failed", "sub+a", "sub+b", "sub+a,text=other", "sub+c,to=session-42",
)  # fmt: skip
GATE = (
    "", "", "", ",approval", ",approval", ",digest=d2", ",honours", ",resolution=repeat", ",honours,resolution=repeat",
    ",resolution=reconciled_not_performed", ",honours,approval,resolution=repeat",
)  # fmt: skip
FINALS = ("done:completed", "done:completed", "done:failed", "done:failed,retryable")
TIMERS = ("another run's", "another generation's")
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "if_missed": st.sampled_from(("queue", "reject")),
        "ttl_ms": st.sampled_from((1_000, 40_000)),
        "timeout_ms": st.sampled_from((2_000, 50_000)),
        "max_attempts": st.sampled_from((1, 2)),
        "recovery": st.sampled_from(("resume", "rerun", "fail")),
    },
)
ON_BUSY = st.sampled_from((None, "queue", "reject", "steer", "interrupt"))
EXPECTED = st.sampled_from((None, None, None, "active", "r1", "nobody"))
SOURCES = st.sampled_from(("ui", "remote", "scheduler"))


class SideBySide(RuleBasedStateMachine):
    """One session, twice."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.model = NaiveSession()
        self.ids = 0
        self.reports: list[Report] = []
        self.failed = False

    # -- the two, and what is compared -------------------------------------------------------------------------------

    def step(self, record: Command) -> Decision:
        self.failed = True  # until everything below was found equal
        numbers = {self.stage.run_id(f"r{no}"): no for no in range(1, self.stage.session.head.run_no + 2)}
        told = self.model.step(record, self.stage.now_ms, numbers)
        decision = self.stage.decide(record)
        if isinstance(record, Input):
            self.stage.sent.setdefault(record.input_id, record)
        found = core_told(self.stage, decision)
        expected = {**told, "events": told["events"][:1]}
        if found["worker"] is None and not found["events"] and evidence_is_full(self.stage):
            expected |= {"worker": None, "events": []}
        assert found == expected, difference(record, found, expected)
        forgotten = [name for name, key in self.model.keys.items() if not naive_work.remembered(self.model, key)]
        found, expected = core_state(self.stage, forgotten), model_state(self.model, forgotten)
        assert found == expected, difference(record, found, expected)
        broken = [check.__name__ for check in CHECKS if not check(self.stage.session)]
        assert not broken, broken
        self.failed = False
        self.count(record, told)
        return decision

    def count(self, record: Command, told: dict[str, Any]) -> None:
        kind = record.mode if isinstance(record, Input) else type(record).__name__
        self.seen[f"{kind} {told['verdict'] or told['worker'] or ''} {told['reason'] or ''}".strip()] += 1
        self.seen.update(f"event refused {reason}" for reason in told["events"])
        self.seen.update(f"disposed {way} {why or ''}".strip() for way, why in told["settled"].values())
        self.seen.update(f"finished {status}{' forced' * forced}" for _, status, forced, *_ in told["finished"])
        if told["permitted"]:
            self.seen["permitted"] += 1

    @property
    def run(self) -> Any:
        return self.stage.session.head.run

    def head(self, worker: str, **options: Any) -> dict[str, Any]:
        return self.stage.worker_head(worker, {name: str(value) for name, value in options.items()})

    def new_id(self) -> str:
        self.ids += 1
        return f"i{self.ids}"

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: dict[str, Any]) -> None:
        self.policy(policy)

    def policy(self, policy: dict[str, Any]) -> None:
        self.stage.policy(**policy)
        self.model.policy = {**DEFAULTS, **policy}

    # -- clients -----------------------------------------------------------------------------------------------------

    @rule(on_busy=ON_BUSY, options=OPTIONS)
    def prompt(self, on_busy: str | None, options: dict[str, Any]) -> None:
        self.step(self.stage.input("prompt", self.new_id(), on_busy=on_busy, **options))

    @rule(
        mode=st.sampled_from(("steer", "steer", "auto")), on_busy=ON_BUSY, source=SOURCES, expected=EXPECTED,
        options=OPTIONS,
    )  # fmt: skip
    def steer(self, mode: str, on_busy: str | None, source: str, expected: str | None, options: Any) -> None:
        self.meant(mode, on_busy, source, expected, options)

    @rule(mode=st.sampled_from(("prompt", "follow_up")), source=SOURCES, expected=EXPECTED, options=OPTIONS)
    def other_input(self, mode: str, source: str, expected: str | None, options: Any) -> None:
        self.meant(mode, "steer" if mode == "prompt" else None, source, expected, options)

    def meant(self, mode: str, on_busy: str | None, source: str, expected: str | None, options: Any) -> None:
        """An input that may name the run it is meant for."""
        if expected is not None:
            no = self.stage.session.head.run_no
            expected = self.stage.run_id(f"r{no}" if expected == "active" else expected)
        record = self.stage.input(
            mode, self.new_id(), on_busy=on_busy, source=source, expected_run_id=expected, **options
        )
        self.step(record)

    @rule(
        aim=st.sampled_from(("active", "last", "r1", "r1", "input", "pending", "pending", "none")),
        scope=st.sampled_from((None, "run", "run_and_queue")), back=st.integers(0, 4),
    )  # fmt: skip
    def abort(self, aim: str, scope: str | None, back: int) -> None:
        members: dict[str, Any] = {"target_kind": "active"}
        if aim in ("last", "r1"):
            name = f"r{self.stage.session.head.run_no}" if aim == "last" else aim
            members = {"target_kind": "run", "target_id": self.stage.run_id(name)}
        elif aim == "pending" and self.model.pending:
            entry = self.model.pending[back % len(self.model.pending)]
            members = {"target_kind": "input", "target_id": entry["id"]}
        elif aim in ("input", "pending"):
            members = {"target_kind": "input", "target_id": f"i{max(self.ids - back, 1)}"}
        elif aim == "none":
            members = {}
        self.step(self.stage.input("abort", self.new_id(), scope=scope, **members))

    @precondition(lambda self: any(key["state"] in ("waiting", "in_doubt") for key in self.model.keys.values()))
    @rule(
        digest=st.sampled_from(("d1", "d1", "d2")), outcome=st.sampled_from(("ok", "error", "not_performed")),
        decision=st.sampled_from(("approve", "approve", "deny")), swap=st.sampled_from((False,) * 6 + (True,)),
        again=st.sampled_from((None, None, "approve", "deny", "error")),
    )  # fmt: skip
    def answer(self, digest: str, outcome: str, decision: str, swap: bool, again: str | None) -> None:
        """A person answers what waits for one, or tells how an action in doubt has ended (or the one for the other);
        and another person after the first."""
        name = sorted(name for name, key in self.model.keys.items() if key["state"] in ("waiting", "in_doubt"))[0]
        in_doubt = (self.model.keys[name]["state"] == "in_doubt") != swap
        self.send_answer(name, digest, outcome if in_doubt else decision)
        if again is not None:
            self.send_answer(name, digest, again)

    @rule(
        name=st.sampled_from(("mail", "post")), key=st.sampled_from(("k1", "k2", "k9")),
        digest=st.sampled_from(("d1", "d2")), decision=st.sampled_from(("approve", "deny", "ok")),
    )  # fmt: skip
    def stray_answer(self, name: str, key: str, digest: str, decision: str) -> None:
        self.send_answer((name, key), digest, decision)

    def send_answer(self, name: tuple[str, str], digest: str, decision: str) -> None:
        members = {"action_name": name[0], "action_key": name[1], "args_digest": digest, "decision": decision}
        self.step(self.stage.input("answer", self.new_id(), **members))

    @precondition(lambda self: self.model.runs and (self.model.active() is None or len(self.model.inputs) % 4 == 0))
    @rule(back=st.sampled_from((0, 0, 0, 1)))
    def retry(self, back: int) -> None:
        no = max(self.stage.session.head.run_no - back, 1)
        record = self.stage.input("prompt", self.new_id(), retry_of=self.stage.run_id(f"r{no}"))
        self.step(msgspec.structs.replace(record, content=None))

    @precondition(lambda self: self.stage.sent)
    @rule(back=st.integers(0, 5), changed=st.booleans())
    def repeat(self, back: int, changed: bool) -> None:
        sent = list(self.stage.sent.values())
        record = sent[max(len(sent) - 1 - back, 0)]
        self.step(msgspec.structs.replace(record, user_id=record.user_id + 1) if changed else record)

    @rule(minted=st.sampled_from((-DAY_MS - 1, -DAY_MS, HOUR_MS, HOUR_MS + 1)), policy=st.sampled_from(POLICIES))
    def another_policy(self, minted: int, policy: dict[str, Any]) -> None:
        """Another version of the policy, and an input from the edge of its window that meets it."""
        self.policy(policy)
        now_ms = max(self.stage.now_ms, self.model.now)
        self.step(self.stage.input("follow_up", self.new_id(), issued_at_ms=now_ms + minted))

    @precondition(lambda self: len(self.model.inputs) > 6 and not self.model.erased)
    @rule(dice=st.integers(0, 2))
    def erase(self, dice: int) -> None:
        if dice == 2:
            self.step(self.stage.input("erase", self.new_id()))

    # -- workers -----------------------------------------------------------------------------------------------------

    def held(self) -> bool:
        """Whether somebody holds a run now; if not, one step is made towards it."""
        if self.run is None:
            self.step(self.stage.input("prompt", self.new_id()))
        elif not self.run.owner and self.run.status != "cancelling":
            self.step(Claim(**self.head(WORKERS[self.run.generation % 2])))
        return self.run is not None and bool(self.run.owner)

    @precondition(lambda self: not self.model.erased or self.run is not None)
    @rule(
        reports=st.lists(st.lists(st.sampled_from((*WORK, "applied")), min_size=1, max_size=5), min_size=1, max_size=3),
        skip=st.sampled_from((1,) * 8 + (0, 2)), final=st.sampled_from((None,) * 7 + FINALS),
    )  # fmt: skip
    def report(self, reports: list[list[str]], skip: int, final: str | None) -> None:
        if self.held():
            for words in reports[:-1]:
                self.send_report(words, 1)
            self.send_report([*reports[-1], *([final] if final else [])], skip)

    @precondition(lambda self: not self.model.erased or self.run is not None)
    @rule(
        asked=st.lists(
            st.tuples(
                st.sampled_from(("k1", "k2")), st.sampled_from(("mail", "mail", "post")), st.sampled_from(GATE),
                st.sampled_from((None, None, "ok", "error", "not_performed")),
            ), min_size=1, max_size=4,
        )
    )  # fmt: skip
    def actions(self, asked: list[tuple[str, str, str, str | None]]) -> None:
        """Actions at the gate: asked for, in one of all ways, and perhaps ended in the same report."""
        for key, name, ask, end in asked:
            if self.held():
                words = [f"act+{key},name={name}{ask}"] + ([f"act-{key}:{end},name={name}"] if end else [])
                self.send_report(words, 1)

    @precondition(lambda self: self.model.keys and self.run is not None and self.run.owner)
    @rule(which=st.integers(0, 3), ask=st.sampled_from(("", "", *GATE)))
    def action_asked_again(self, which: int, ask: str) -> None:
        names = sorted(self.model.keys)
        name, key = names[which % len(names)]
        self.send_report([f"act+{key},name={name}{ask}"], 1)

    @precondition(lambda self: self.run is not None and self.run.owner)
    @rule(
        final=st.sampled_from((*FINALS, "done:cancelled")),
        close=st.sampled_from((True, True, False)),
        wait_ms=st.sampled_from((0, 0, 1_000, 40_000)),
    )
    def final_report(self, final: str, close: bool, wait_ms: int) -> None:
        """The end, at times so late that deadlines have passed whose timers were not consumed yet."""
        self.stage.now_ms += wait_ms
        if final == "done:cancelled" and self.run.status != "cancelling":
            final = "done:failed"
        self.send_report([*(self.ends() if close else ()), final], 1)

    def send_report(self, words: list[str], skip: int) -> None:
        steers = [entry.input_id for entry in self.stage.session.head.pending if entry.for_run]
        named = [f"applied:{(steers or ['i1'])[0]}" if word == "applied" else word for word in words]
        no = self.run.report_no + skip
        if no < 1:
            return
        record = Report(**self.head(self.run.owner), no=no, events=tuple(report_event(word) for word in named))
        self.reports.append(record)
        self.step(record)

    @precondition(lambda self: self.run is not None and self.run.owner)
    @precondition(lambda self: any(entry.for_run for entry in self.stage.session.head.pending))
    @rule(which=st.sampled_from((0, 1)))
    def apply_a_steer(self, which: int) -> None:
        steers = [entry.input_id for entry in self.stage.session.head.pending if entry.for_run]
        self.send_report([f"applied:{steers[which % len(steers)]}"], 1)

    def ends(self) -> list[str]:
        """The ends of all that is open and that a worker ends."""
        ends = {"model_request": "model-{}:ok", "tool": "tool-{}:ok", "compaction": "compact-{}:ok"}
        words = []
        for kind, name in sorted(core_branches(self.stage)):
            if kind in ends:
                words.append(ends[kind].format(name))
            elif kind == "action":
                words.append("act-{1}:ok,name={0}".format(*name.split("/")))
        return words

    @precondition(lambda self: self.reports)
    @rule(back=st.integers(0, 3))
    def report_again(self, back: int) -> None:
        self.step(self.reports[max(len(self.reports) - 1 - back, 0)])

    @precondition(lambda self: self.run is not None and self.run.owner)
    @rule(
        skip=st.sampled_from((1, 1, 1, 0, 3)), suspended=st.booleans(), times=st.sampled_from((1, 2, 3)),
        wait_ms=st.sampled_from((0, 1_000, 9_000)),
    )  # fmt: skip
    def renew(self, skip: int, suspended: bool, times: int, wait_ms: int) -> None:
        for _ in range(times):
            if self.run is not None and self.run.owner:
                no = max(self.run.renewal_no + skip, 1)
                self.step(Renew(**self.head(self.run.owner), no=no, suspended=suspended))
                self.stage.now_ms += wait_ms

    @precondition(lambda self: not self.model.erased or self.run is not None)
    @rule(word=st.sampled_from(("act+k1", "act+k2", "act+k2,name=post", "act+k1,honours", "act+k1,approval", "tool+a")))
    def a_holder_is_lost(self, word: str) -> None:
        """Somebody begins something and is not heard of any more."""
        if self.held():
            self.send_report([word], 1)
        if self.run is not None and self.run.owner:
            self.stage.now_ms = max(self.stage.now_ms, self.run.lease_expires_ms)
            self.step(self.stage.timer("lease"))

    @precondition(lambda self: self.run is not None)
    @rule(what=st.sampled_from(("shutdown", "shutdown", "no_room", "claim again", "claim", "claim")))
    def release_or_rival(self, what: str) -> None:
        """The holder gives the run back, a worker without room passes, or somebody claims what is held."""
        worker = "w9" if what == "claim" else self.run.owner or "w1"
        if what.startswith("claim"):
            self.step(Claim(**self.head(worker)))
        else:
            self.step(Release(**self.head(worker), reason=what))

    @precondition(lambda self: self.model.runs)
    @rule(
        kind=st.sampled_from(("claim", "renew", "report", "shutdown", "no_room")), run=st.sampled_from((0, 0, 0, 1)),
        worker=st.sampled_from((*WORKERS, "w9")), behind=st.integers(-1, 2), no=st.integers(1, 3),
        event=st.sampled_from(("done:completed", "act-k1:ok", "act-k2:error", "tool+a")),
        inbox=st.sampled_from((3, 3, 3, 4, INBOXES)), forged=st.sampled_from((False, False, True)),
    )  # fmt: skip
    def stranger(
        self, kind: str, run: int, worker: str, behind: int, no: int, event: str, inbox: int, forged: bool
    ) -> None:
        run_no = max(len(self.model.runs) - run, 1)
        generation = self.model.runs[run_no - 1]["generation"] - behind
        if generation < 1:
            return
        head = self.head(worker, g=generation, run=f"r{run_no}", inbox=inbox)
        if forged or behind < 0:  # of a generation that was never offered nobody has the token
            head["token"] = FORGED
        match kind:
            case "claim":
                self.step(Claim(**head))
            case "renew":
                self.step(Renew(**head, no=no))
            case "report":
                self.step(Report(**head, no=no, events=(report_event(event),)))
            case _:
                self.step(Release(**head, reason=kind))

    @precondition(lambda self: self.model.calls)
    @rule(which=st.integers(0, 1), status=st.sampled_from(("completed", "failed", "refused")))
    def child_ends(self, which: int, status: str) -> None:
        """What became of a child's input, mostly of one whose branch is open."""
        names = sorted(self.model.calls, key=lambda name: self.model.calls[name]["state"] != "open")
        known = self.stage.session.calls.get(names[which % len(names)])
        run = self.run or self.stage.session.head.last
        if known is not None and run is not None:
            self.step(Notice(
                tenant_id=7, session_id="session-42", run_id=run.run_id, call_id=known.call_id, reason=None,
                child_session_id="child", child_input_id=known.child_input_id, child_run_id=None, status=status,
                result=None,
            ))  # fmt: skip

    # -- time --------------------------------------------------------------------------------------------------------

    @rule(wait_ms=st.sampled_from((1, 900, 900, 5_000, 5_000, 12_000, 61_000, HOUR_MS, DAY_MS + 1)))
    def time_passes(self, wait_ms: int) -> None:
        self.stage.now_ms += wait_ms

    @precondition(lambda self: bool(naive_right.deadlines(self.model)))
    @rule(which=st.integers(0, 3), early=st.sampled_from((0, 0, 0, 1)), whose=st.sampled_from(("its",) * 4 + TIMERS))
    def a_deadline_comes(self, which: int, early: int, whose: str) -> None:
        """Time goes on to an armed deadline (or just before it) and its timer is consumed, or one of something else."""
        armed = sorted(naive_right.deadlines(self.model))
        at, kind, subject = armed[which % len(armed)]
        self.stage.now_ms = max(self.stage.now_ms, at - early)
        other: dict[str, Any] = {"another run's": {"run_id": self.stage.run_id("r9")}}.get(whose, {})
        if whose == "another generation's" and self.run is not None:
            other = {"generation": self.run.generation - 1}
        self.step(self.stage.timer(kind, subject=subject, **other))

    @rule(kind=st.sampled_from([kind.value for kind in TimerKind]), behind=st.sampled_from((0, 0, 1)))
    def hasty_timer(self, kind: str, behind: int) -> None:
        subject = {"approval": "mail/k1", "queued": f"i{self.ids}", "compaction": "a"}.get(kind, "")
        generation = (self.run.generation if self.run is not None else 1) - behind
        self.step(self.stage.timer(kind, subject=subject, generation=generation))

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Aborts and deadlines alone bring every session to rest; then every input has its disposition."""
        if self.failed:
            return
        for _ in range(80):
            if self.run is None:
                break
            if self.run.status != "cancelling":
                self.step(self.stage.input("abort", self.new_id(), target_kind="active", scope="run_and_queue"))
                continue
            at, kind, subject = min(one for one in naive_right.deadlines(self.model) if one[1] in ("lease", "cancel"))
            self.stage.now_ms = max(self.stage.now_ms, at)
            self.step(self.stage.timer(kind, subject=subject))
        assert self.run is None, "a run that does not end"
        open_inputs = [name for name, one in self.model.inputs.items() if one["disposition"] is None]
        assert not open_inputs, open_inputs
        assert invariants.broken(self.stage.session, self.stage.events) == []
