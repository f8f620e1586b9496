"""Random lives of a family of sessions, decided by the real core: every check of an audit passes on each of them.

Prompts with every option, steers, interrupts, aborts of each kind, answers, retries, erases, policies, workers that
lose their leases, compactions, actions with and without approval, children in other sessions. What the checks must
find is shown by the damaged copies in tests/unit/demo; here they must find nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from onepen.processors import actions, reports
from onepen.processors.decide import Command, Moment, decide
from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.processors.state_keys import pair
from onepen.processors.timers import due
from onepen.processors.turn import Turn
from onepen.schemas.inputs import Content, Input
from onepen.schemas.policies import Policy, PolicyRecord, policy_body
from onepen.schemas.statuses import Reason
from onepen.schemas.worker_records import Claim, Release, Renew, Report, ReportEvent
from onepen.streams.audit import Evidence, LoggedEvent, LoggedInput, LoggedReceipt
from onepen.streams.audit.checks import ON_TABLES, ON_TOPICS
from onepen.streams.audit.effects import doubts_stand
from onepen.streams.audit.evidence import Tables
from onepen.streams.audit.families import Families
from onepen.streams.audit.fold import expected_checkpoints, expected_subtasks
from tests.unit.demo.world import rows_of, with_changes

TENANT = 7
SESSIONS = ("a", "b", "c")
STEPS = 160
KEYS = Keys("k", b"s" * 32)
SEEDS = range(60)


@dataclass
class Life:
    """One partition with a few sessions; a clock; records for other sessions are delivered as they are written."""

    random: random.Random
    now_ms: int = 1_800_000_000_000
    offset: int = 10
    rules: Rules = field(default_factory=lambda: Rules.start(KEYS))
    sessions: dict[str, Session] = field(default_factory=dict)
    inputs: list[LoggedInput] = field(default_factory=list)
    events: list[LoggedEvent] = field(default_factory=list)
    receipts: list[LoggedReceipt] = field(default_factory=list)
    sent: list[Input] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    policy_version: int = 0

    def put(self, command: Command) -> None:
        self.offset += self.random.randint(1, 3)
        self.now_ms += self.random.randint(0, 300)
        self.inputs.append(LoggedInput(0, self.offset, self.now_ms, command))
        session = self.session(command.session_id)
        decision = decide(self.rules, session, command, Moment(0, self.offset, self.now_ms))
        self.sessions[command.session_id] = decision.session
        for event, data in zip(decision.events, decision.event_bytes, strict=True):
            self.events.append(LoggedEvent(0, 2 * len(self.events), data, event))
            self.seen[event.type] += 1
        for receipt in decision.receipts:
            self.receipts.append(LoggedReceipt(0, 2 * len(self.receipts), receipt))
            self.seen[f"{receipt.kind} {receipt.verdict} {receipt.disposition} {receipt.reason}"] += 1
        for forward in decision.forwards:
            self.put(forward)

    def session(self, name: str) -> Session:
        return self.sessions.get(name) or Session.load(TENANT, name, {})

    def policy(self) -> None:
        self.policy_version += 1
        pick = self.random.choice
        policy = Policy(
            version=self.policy_version, on_busy=pick(["queue", "reject", "steer", "interrupt"]),
            if_missed=pick(["queue", "reject"]), auto_steers=pick([(), ("ui",)]), max_attempts=pick([1, 3]),
            no_worker_offers=pick([2, 20]), progress_renewals=3, pending_max=pick([3, 20]),
            run_timeout_ms=pick([60_000, 3_600_000]), approval_ms=pick([5_000, 86_400_000]), compaction_ms=10_000,
        )  # fmt: skip
        record = PolicyRecord(tenant_id=TENANT, version=policy.version, body=policy_body(policy))
        self.offset += 1
        self.inputs.append(LoggedInput(0, self.offset, self.now_ms, record))
        self.rules, _ = admit_policy(self.rules, record)

    # -- clients ----------------------------------------------------------------------------------------------------

    def ask(self, name: str) -> None:
        pick = self.random.choice
        if self.sent and self.random.random() < 0.08:
            self.put(pick(self.sent))
            return
        mode = pick(
            ["prompt"] * 5 + ["steer", "steer", "follow_up", "auto", "auto", "abort", "abort", "answer", "answer"]
        )
        if self.random.random() < 0.006:
            mode = "erase"
        fields = getattr(self, f"_{mode}")(name)
        record = Input(
            input_id=f"in-{len(self.sent)}" + "x" * pick([0] * 30 + [200]),
            issued_at_ms=self.now_ms, tenant_id=TENANT, user_id=1, session_id=name,
            mode=mode, source=pick(["ui", "scheduler"]), **fields,
        )  # fmt: skip
        self.sent.append(record)
        self.put(record)

    def _prompt(self, name: str) -> dict[str, Any]:
        pick = self.random.choice
        last = self.session(name).head.last
        if last is not None and self.random.random() < 0.3:
            return {"retry_of": last.run_id}
        return {
            "content": Content(data=b"do it"),
            "on_busy": pick([None, "queue", "reject", "steer", "interrupt"]),
            "if_missed": pick([None, "queue", "reject"]),
            "ttl_ms": pick([None, None, 2_000]),
            "recovery": pick([None, "resume", "rerun", "fail"]),
        }

    def _steer(self, name: str) -> dict[str, Any]:
        fields = self._follow_up(name)
        fields["expected_run_id"] = self.random.choice([None, None, self._run_id(name), "run-other"])
        return fields | {"on_busy": self.random.choice([None, "interrupt", "reject"])}

    def _auto(self, name: str) -> dict[str, Any]:
        return self._follow_up(name)

    def _follow_up(self, name: str) -> dict[str, Any]:
        return {"content": Content(data=b"more"), "if_missed": self.random.choice([None, "queue", "reject"])}

    def _erase(self, name: str) -> dict[str, Any]:
        return {}

    def _abort(self, name: str) -> dict[str, Any]:
        scope = self.random.choice([None, "run", "run_and_queue"])
        kind = self.random.choice(["active", "run", "input"])
        if kind == "active":
            return {"target_kind": kind, "scope": scope}
        if kind == "run":
            return {
                "target_kind": kind,
                "target_id": self.random.choice([self._run_id(name), "run-other"]),
                "scope": scope,
            }
        ids = [r.input_id for r in self.sent if r.session_id == name][-6:]
        return {"target_kind": kind, "target_id": self.random.choice([*ids, "in-nobody"])}

    def _answer(self, name: str) -> dict[str, Any]:
        known = list(self.session(name).actions.items())
        key, action_name = "k-nobody", "send"
        if known and self.random.random() < 0.9:
            action = self.random.choice(known)[1]
            key, action_name = action.key, action.name
        decision = self.random.choice(["approve", "approve", "deny", "ok", "not_performed"])
        return {"action_key": key, "action_name": action_name, "args_digest": "d", "decision": decision}

    def _run_id(self, name: str) -> str:
        run = self.session(name).head.run
        return "run-none" if run is None else run.run_id

    # -- workers ----------------------------------------------------------------------------------------------------

    def work(self, name: str) -> None:
        run = self.session(name).head.run
        if run is None:
            return
        head = {
            "tenant_id": TENANT, "session_id": name, "run_id": run.run_id, "generation": run.generation,
            "token": KEYS.token(TENANT, name, run.run_id, run.generation), "worker_id": run.owner or "w-1", "inbox": 0,
        }  # fmt: skip
        if self.random.random() < 0.05:
            head["generation"] = max(1, run.generation - 1)
            head["token"] = KEYS.token(TENANT, name, run.run_id, head["generation"])
        if not run.owner:
            self.put(Claim(**head))
            return
        choice = self.random.random()
        if choice < 0.12:
            self.put(Renew(**head, no=run.renewal_no + 1, suspended=self.random.random() < 0.1))
        elif choice < 0.16:
            self.put(Release(**head, reason="shutdown"))
        else:
            self.put(Report(**head, no=run.report_no + 1, events=tuple(self._events(name))))

    def _events(self, name: str) -> list[ReportEvent]:
        return [self._event(name) for _ in range(self.random.randint(1, 3))]

    def _event(self, name: str) -> ReportEvent:
        session = self.session(name)
        run = session.head.run
        assert run is not None
        pick = self.random.choice
        small = str(self.random.randint(0, 3))
        steers = [entry.input_id for entry in session.head.pending if entry.for_run]
        action = {"actionKey": f"k{small}", "name": pick(["send", "pay"]), "argsDigest": "d"}
        pointer = {"uri": "mem:x", "digest": "0" * 64, "bytes": 1, "throughSeq": 1}
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("model.request.started", {"turnId": small}),
            ("model.request.finished", {"turnId": small, "status": "ok"}),
            ("tool.started", {"toolCallId": small, "toolName": "t"}),
            ("tool.finished", {"toolCallId": small, "toolName": "t", "status": "ok"}),
            ("action.requested", action | {"approval": pick([True, False])}),
            ("action.requested", action | {"resolution": "reconciled_not_performed"}),
            (
                "action.requested",
                action | {"resolution": "repeat", "honoursKeys": True, "approval": pick([True, False])},
            ),
            ("action.requested", action | {"honoursKeys": True}),
            ("action.finished", action | {"status": pick(["ok", "error", "not_performed"])}),
            ("run.compaction_started", {"compactionId": small}),
            ("run.compaction_finished", {"compactionId": run.compaction_id or small, "checkpoint": pointer}),
            ("run.compaction_failed", {"compactionId": small, "reason": "deadline"}),
            (
                "subtask.started",
                {"callId": small, "sessionId": pick(["child-1", "child-2", *SESSIONS]), "content": "x"},
            ),
            ("message.completed", {"text": "hello", "timeoutAt": 5, "reason": 7}),
            ("input.applied", {"inputId": pick(steers) if steers else "in-nobody"}),
            ("input.applied", {"inputId": steers[0] if steers else "in-nobody"}),
        ]
        for _, known in session.actions.items():
            naming = {"name": known.name, "actionKey": known.key, "argsDigest": "d"}
            if known.honours_keys and known.state == "in_doubt":
                kinds += [("action.requested", naming | {"resolution": "repeat", "honoursKeys": True})] * 4
            elif known.repeats_doubt and known.state == "permitted":
                kinds += [("action.finished", naming | {"status": pick(["ok", "not_performed"])})] * 4
        if self.random.random() < 0.15:
            kinds = [("run.finished", {"terminalStatus": pick(["completed", "failed"]), "retryable": True})]
        kind, payload = pick(kinds)
        return ReportEvent(type=kind, payload=orjson.dumps(payload))

    def wait(self) -> None:
        self.now_ms += self.random.choice([500, 3_000, 11_000, 31_000, 200_000])
        for name in list(self.sessions):
            for one in due(self.session(name), self.now_ms):
                self.put(one.timer)

    def step(self) -> None:
        name = self.random.choice([*SESSIONS, "child-1", "child-2"])
        choice = self.random.random()
        if choice < 0.02:
            self.policy()
        elif choice < 0.3 and name in SESSIONS:
            self.ask(name)
        elif choice < 0.36:
            self.wait()
        else:
            self.work(name)

    def evidence(self) -> Evidence:
        made = Evidence(self.events, self.receipts, self.inputs, quiet=False)
        tables = rows_of(made)
        full = Tables(
            tables.runs, tables.events, tables.inputs, tables.actions, tables.refused,
            [{"run_key": k[0], "seq": k[1], **row} for k, row in expected_checkpoints(made).items()],
            [{"run_key": k[0], "call_id": k[1], **row} for k, row in expected_subtasks(made).items()],
        )  # fmt: skip
        return with_changes(made, tables=full)


def lived(seed: int) -> Life:
    life = Life(random.Random(seed))
    for _ in range(STEPS):
        life.step()
    return life


def violations(evidence: Evidence) -> list[str]:
    found = [f"{check.name}: {one}" for check in (*ON_TOPICS, *ON_TABLES) for one in check.judge(evidence)]
    families = Families()
    families.take(evidence)
    return found + [str(one) for one in families.end()]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_found_where_nothing_is_wrong(seed: int) -> None:
    assert violations(lived(seed).evidence()) == []


@pytest.mark.parametrize("seed", range(40))
def test_nor_at_any_moment_of_a_live_system(seed: int) -> None:
    """The reading began at `decided`; later receipts and events are there in part."""
    life = lived(seed)
    whole = life.evidence()
    chance = random.Random(seed)
    for _ in range(20):
        decided = chance.choice(life.inputs).offset
        later = decided + chance.randint(0, 20)
        count = sum(1 for r in life.receipts if _written_by(life, r) < decided)
        seen = [r for r in life.receipts if _written_by(life, r) < later]
        cut = with_changes(
            whole,
            events=[e for e in whole.events if e.cause[1] < later],
            receipts=seen[: chance.randint(count, len(seen))],
            decided={0: decided},
            tables=None,
        )
        found = [f"{check.name}: {one}" for check in ON_TOPICS for one in check.judge(cut)]
        assert found == []


@pytest.mark.parametrize("seed", range(20))
def test_nor_where_inputs_were_deleted_with_age(seed: int) -> None:
    """Inputs are kept for some days, events, receipts and policies for ever."""
    life = lived(seed)
    whole = life.evidence()
    for first in [one.offset for one in life.inputs][:: STEPS // 12]:
        kept = [one for one in whole.inputs if one.offset >= first]
        aged = with_changes(whole, inputs=kept, kept_from={0: first}, policies=life.rules.versions)
        assert violations(aged) == [], first


def _ends_the_doubt(turn: Turn, payload: dict[str, Any], raw: bytes, no: int) -> Reason | None:
    action = turn.session.actions.get(pair(payload["name"], payload["actionKey"]))
    if action is None or action.state != "permitted" or action.run_id != turn.run.run_id:
        return Reason.NOT_OPEN
    turn.emit("action.finished", payload, raw)
    return None


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("_name_in_doubt", lambda turn, action, payload: None),
        ("_resolve", lambda turn, action, payload, raw, no: actions._open(turn, payload, raw, no)),
        ("finished", _ends_the_doubt),
    ],
    ids=["beside a doubt", "without a resolution", "by a repeat that was not performed"],
)
def test_a_core_that_forgets_doubts_is_found(
    name: str, instead: Callable[..., Reason | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, name, instead)
    monkeypatch.setitem(reports._ARMS, "action.finished", actions.finished)
    for seed in range(400):
        evidence = lived(seed).evidence()
        if doubts_stand(evidence):
            return
    pytest.fail("in 400 histories nothing was found")


def _written_by(life: Life, receipt: LoggedReceipt) -> int:
    """Offset of the input whose decision wrote a receipt."""
    if not hasattr(life, "_causes"):
        life._causes = _causes(life)  # type: ignore[attr-defined]
    found: int = life._causes[receipt.offset]  # type: ignore[attr-defined]
    return found


def _causes(life: Life) -> dict[int, int]:
    again = Life(random.Random(0))
    causes: dict[int, int] = {}
    for one in life.inputs:
        if isinstance(one.record, PolicyRecord):
            again.rules, _ = admit_policy(again.rules, one.record)
            continue
        session = again.session(one.record.session_id)
        decision = decide(again.rules, session, one.record, Moment(0, one.offset, one.at_ms))
        again.sessions[one.record.session_id] = decision.session
        for _ in decision.receipts:
            causes[2 * len(causes)] = one.offset
    return causes


def test_the_lives_show_what_they_are_for() -> None:
    """Facts that must have happened somewhere, or the silence of the checks would mean nothing."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        seen += lived(seed).seen
    wanted = [
        "run.lease_lost", "run.released", "approval.answered", "approval.expired", "approval.voided",
        "action.in_doubt", "action.voided", "input.applied", "input.carried_over", "run.compaction_finished",
        "run.compaction_failed", "subtask.started", "subtask.finished", "run.cancel_requested",
        "input None discarded aborted", "input None discarded missed", "input None expired None",
        "input None withdrawn None", "input erased None None", "input duplicate duplicate None",
        "input refused refused not_retryable", "input refused refused queue_full", "input refused refused busy",
        "input refused refused missed", "input refused refused stale_run", "input refused refused erased",
        "worker None None stale_generation", "action None None None",
    ]  # fmt: skip
    assert not [fact for fact in wanted if not seen[fact]]


@pytest.mark.parametrize("lost", ["the child's input", "a notice", "an abort", "an input sent twice"])
def test_a_record_between_sessions_that_is_lost(lost: str) -> None:
    """Children: each of these is found in some life."""
    found = 0
    for seed in SEEDS:
        life = lived(seed)
        inputs = list(life.inputs)
        chosen = [n for n, one in enumerate(inputs) if _between(one, lost)]
        if not chosen:
            continue
        if lost == "an input sent twice":
            twice = inputs[chosen[-1]]
            inputs.append(LoggedInput(0, life.offset + 1, life.now_ms, twice.record))
        else:
            del inputs[chosen[-1]]
        families = Families()
        families.take(with_changes(life.evidence(), inputs=inputs))
        found += bool(list(families.end()))
    assert found >= 3


def _between(one: LoggedInput, what: str) -> bool:
    record = one.record
    if what == "a notice":
        return type(record).__name__ == "Notice"
    child = isinstance(record, Input) and record.parent is not None
    return child and (record.mode == "abort") == (what == "an abort")  # type: ignore[union-attr]


def test_a_policy_that_was_not_in_force_is_noticed() -> None:
    """The checks judge by the policy of the position: with the policies left out, some verdict fits no rule."""
    found = 0
    for seed in SEEDS:
        evidence = lived(seed).evidence()
        without = [one for one in evidence.inputs if not isinstance(one.record, PolicyRecord)]
        found += bool(violations(with_changes(evidence, inputs=without)))
    assert found > len(SEEDS) // 4
