"""Those outside the city: clients of all modes, people who answer, the tenant's administrator, the nemesis.

Each input has a label that says what was drawn (`interrupt`, `auto scheduler`, `retry`); the city counts what became
of it under that label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from onepen.schemas.inputs import Content, Input
from onepen.schemas.policies import PolicyRecord

if TYPE_CHECKING:
    from tests.simulation.city import City

POLICY: dict[str, Any] = {
    "leaseMs": 3_000, "renewMs": 1_000, "permitMs": 1_500, "cancelMs": 4_000, "runTimeoutMs": 40_000, "offerMs": 800,
    "offerMaxMs": 2_000, "approvalMs": 6_000, "compactionMs": 1_500,
}  # fmt: skip
CHANGES: tuple[dict[str, Any], ...] = (
    {}, {"onBusy": "reject"}, {"onBusy": "interrupt", "ifMissed": "reject"}, {"approvalActions": ["mail"]},
    {"autoSteers": ["scheduler"]}, {"pendingMax": 2}, {"recovery": "rerun", "queuedTtlMs": 5_000},
)  # fmt: skip
MODES = (
    "prompt", "prompt", "prompt", "interrupt", "prompt steer", "prompt reject", "steer", "steer", "steer expected",
    "follow_up", "auto", "auto", "abort", "abort run", "abort input", "retry", "retry",
)  # fmt: skip


class Crowd:
    """Draws from the city's random numbers, so a seed is one history."""

    def __init__(self, city: City) -> None:
        self.city = city
        self.inputs = 0
        self.labels: dict[str, str] = {}
        self.going_home = False
        self.erases_after_ms = city.random.choice([25_000, 40_000, 10**9, 10**9])
        self.policies = 1
        self.policy_record = PolicyRecord(tenant_id=7, version=1, body=orjson.dumps(POLICY))

    def input(self, session_id: str, mode: str, label: str, **members: Any) -> Input:
        self.inputs += 1
        input_id = f"i{self.inputs}"
        self.labels[input_id] = label
        if mode not in ("abort", "answer", "erase") and "retry_of" not in members:
            members["content"] = Content(data=b"go")
        return Input(
            input_id=input_id, issued_at_ms=self.city.now_ms, tenant_id=7, user_id=1, session_id=session_id, mode=mode,
            **{"source": "ui"} | members,
        )  # fmt: skip

    def client(self) -> None:
        if self.going_home:
            return
        city, draw = self.city, self.city.random
        session_id = "child" if draw.random() < 0.12 else "s"
        if city.faults and session_id == "s" and city.since_start_ms() > self.erases_after_ms:
            self.erases_after_ms = 10**9
            city.post(self.input("s", "erase", "erase"))
            return
        head = city.sessions[session_id].head
        failed = head.run is None and head.last is not None and head.last.status in ("failed", "timed_out")
        city.post(self.drawn(session_id, "retry" if failed and draw.random() < 0.6 else draw.choice(MODES)))

    def drawn(self, session_id: str, what: str) -> Input:
        draw = self.city.random
        head = self.city.sessions[session_id].head
        last = head.run or head.last
        run_id = last.run_id if last is not None else "run-0"
        if what.startswith("abort"):
            return self.abort(session_id, what, run_id)
        if what == "retry":
            return self.input(session_id, "prompt", what, retry_of=run_id)
        members: dict[str, Any] = {}
        if draw.random() < 0.3:
            members["recovery"] = draw.choice(["resume", "rerun", "fail"])
        if draw.random() < 0.2:
            members |= draw.choice([{"timeout_ms": 3_000}, {"max_attempts": 1}, {"ttl_ms": 2_000}])
        match what:
            case "interrupt" | "prompt steer" | "prompt reject":
                return self.input(session_id, "prompt", what, on_busy=what.split()[-1], **members)
            case "steer":
                return self.input(session_id, "steer", what, if_missed=draw.choice(["queue", "reject"]), **members)
            case "steer expected":
                missed = draw.choice(["queue", "reject"])
                meant = draw.choice([run_id, "run-of-yesterday"])
                label = f"{what} {'run' if meant == run_id else 'other'}"
                return self.input(session_id, "steer", label, if_missed=missed, expected_run_id=meant, **members)
            case "auto":
                source = draw.choice(["ui", "remote", "scheduler"])
                return self.input(session_id, "auto", f"auto {source}", source=source, **members)
            case _:
                return self.input(session_id, what, what, **members)

    def abort(self, session_id: str, what: str, run_id: str) -> Input:
        draw = self.city.random
        members: dict[str, Any] = {"target_kind": "active"}
        if what == "abort run":
            members = {"target_kind": "run", "target_id": draw.choice([run_id, "run-of-yesterday"])}
        elif what == "abort input":
            members = {"target_kind": "input", "target_id": f"i{max(self.inputs - draw.randrange(6), 1)}"}
        return self.input(session_id, "abort", what, scope=draw.choice(["run", "run_and_queue"]), **members)

    # -- people ------------------------------------------------------------------------------------------------------

    def person(self) -> None:
        """Answers what waits for an answer, and looks up at the target what is in doubt after its run."""
        city = self.city
        for session_id, session in city.sessions.items():
            run_id = session.head.run.run_id if session.head.run is not None else None
            for _, action in list(session.actions.items()):
                if action.state == "waiting":
                    decision = city.random.choice(["approve", "approve", "deny"])
                elif action.state == "in_doubt" and action.run_id != run_id and city.now_ms > action.deadline_ms:
                    decision = "ok" if city.target.did(action.key) else "not_performed"
                else:
                    continue
                if not city.chance(0.3) and city.random.random() < 0.5:
                    city.post(self.input(
                        session_id, "answer", f"answer {decision}", action_key=action.key, action_name=action.name,
                        args_digest=action.args_digest, decision=decision,
                    ))  # fmt: skip

    def administrator(self) -> None:
        """Another version of the policy, which runs under way do not see."""
        if self.going_home or not self.city.faults:
            return
        self.policies += 1
        if any(session.head.run is not None for session in self.city.sessions.values()):
            self.city.seen["policy changed under a run"] += 1
        change = self.city.random.choice(CHANGES)
        body = orjson.dumps({**POLICY, **change})
        self.city.append(PolicyRecord(tenant_id=7, version=self.policies, body=body))

    def nemesis(self) -> None:
        city = self.city
        busy = [name for name, agents in city.agents.items() if any(agent.flying for agent in agents)]
        name = city.random.choice(busy or sorted(city.agents))
        if city.chance(0.3 if busy else 0.1):
            city.seen["frozen"] += 1
            city.frozen_until[name] = city.now_ms + city.random.choice([500, 2_500, 5_000, 9_000])
        elif city.chance(0.3 if busy else 0.05):
            city.seen["killed"] += 1
            city.agents[name].clear()
        elif city.chance(0.1):
            city.skew[name] += city.random.choice([0, 0, 400])
