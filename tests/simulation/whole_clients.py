"""Those outside: clients that ask, repeat themselves and are late; people who answer; garbage."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from onepen.schemas import codec
from onepen.schemas.inputs import Content, Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.policies import PolicyRecord

if TYPE_CHECKING:
    from tests.simulation.whole_world import World

TENANTS = (7, 8)
POLICY = {"leaseMs": 3_000, "renewMs": 1_000, "permitMs": 1_500, "cancelMs": 4_000, "runTimeoutMs": 30_000,
          "offerMs": 800, "offerMaxMs": 2_000, "approvalMs": 6_000, "compactionMs": 2_000, "progressRenewals": 15,
          "noWorkerOffers": 12}  # fmt: skip
VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"maxAttempts": 1}, {"queuedTtlMs": 2_500}, {"onBusy": "interrupt"}, {"recovery": "fail"}, {"cancelMs": 2_000},
    {"pendingMax": 2}, {"approvalActions": ["mail"]}, {"ifMissed": "reject"}, {"leaseMs": 1_500, "renewMs": 500},
    {"runTimeoutMs": 4_000}, {"approvalMs": 500},
)  # fmt: skip
RECENT = 40
BUG = b"this input meets a bug of the core"


class Clients:
    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.minted = 0
        self.recent: list[Input] = []
        self.policy_version = 1
        self.policy: dict[str, Any] = POLICY
        self.answered = 0
        for partition in range(world.partitions):
            self._policy(partition)

    def _policy(self, partition: int) -> None:
        for tenant in TENANTS:
            record = PolicyRecord(tenant_id=tenant, version=self.policy_version, body=orjson.dumps(self.policy))
            self.world.broker.append(self.world.topics.inputs, partition, b"policy", codec.encode(record))

    def new_policy(self) -> None:
        """Other rules under a new version; sometimes a version that is not higher, which is a dead letter."""
        if self.random.random() < 0.7:
            self.policy_version += 1
            self.policy = POLICY | self.random.choice(VARIANTS)
        for partition in range(self.world.partitions):
            self._policy(partition)

    def garbage(self) -> None:
        partition = self.random.randrange(self.world.partitions)
        self.world.broker.append(self.world.topics.inputs, partition, b"s0", b"\x00garbage")

    def ask(self) -> None:
        """One input record, new or sent again."""
        if self.recent and self.random.random() < 0.12:
            self._again()
            return
        record = self._new()
        self.recent = [*self.recent[-RECENT:], record]
        self.world.post(record)

    def _again(self) -> None:
        record = self.random.choice(self.recent)
        if self.random.random() < 0.1 and record.content is not None:
            record = Input(**{name: getattr(record, name) for name in record.__struct_fields__}
                           | {"content": Content(data=b"something else")})  # fmt: skip
        self.world.post(record)

    def _mint(self, mode: str, **members: Any) -> Input:
        self.minted += 1
        issued_ms = self.world.time.now_ms
        if self.random.random() < 0.02:
            issued_ms += self.random.choice([-2, 2]) * 24 * 3_600_000
        session = members.pop("session_id", None) or self._session()
        tenant = members.pop("tenant_id", None) or self.random.choice(TENANTS)
        return Input(
            **{"input_id": f"i{self.minted}", "issued_at_ms": issued_ms, "tenant_id": tenant, "user_id": 1,
               "session_id": session, "mode": mode, "source": self.random.choice(["ui", "scheduler", "queue"]),
               **members}
        )  # fmt: skip

    def _session(self) -> str:
        # A few are busy, so that they have queues; the others mostly start runs.
        sessions = self.world.sessions
        return sessions[min(int(self.random.expovariate(0.5)), len(sessions) - 1)]

    def _new(self) -> Input:
        roll = self.random.random()
        text = {"content": Content(data=b"go on")}
        if roll < 0.5:
            return self._prompt(text)
        if roll < 0.62:
            expected = {"expected_run_id": self._some_run()} if self.random.random() < 0.2 else {}
            return self._mint("steer", if_missed=self.random.choice(["queue", "reject", None]), **expected, **text)
        if roll < 0.72:
            return self._mint("follow_up", ttl_ms=self.random.choice([None, None, 1_500]), **text)
        if roll < 0.80:
            return self._mint("auto", **text)
        if roll < 0.95:
            return self._abort()
        if roll < 0.985:
            return self._retry() or self._prompt(text)
        return self._settle() or self._erase() or self._prompt(text)

    def _prompt(self, text: dict[str, Any]) -> Input:
        if self.random.random() < 0.02:
            text = {"content": Content(data=BUG)}
        busy = self.random.choice([None, None, "queue", "reject", "steer", "interrupt"])
        timeout_ms = self.random.choice([None, None, None, 1_500, 5_000])
        recovery = self.random.choice([None, None, "rerun", "fail"])
        ttl_ms = self.random.choice([None, None, 2_000])
        return self._mint("prompt", on_busy=busy, timeout_ms=timeout_ms, recovery=recovery, ttl_ms=ttl_ms, **text)

    def _some_run(self) -> str | None:
        runs = [one.run_id for one in self.world.watch.sessions.values()]
        return self.random.choice(runs) if runs else None

    def _abort(self) -> Input:
        scope = self.random.choice(["run", "run", "run_and_queue"])
        finished = list(self.world.watch.finished.items())
        roll = self.random.random()
        if roll < 0.3 and self.recent:
            of = self.random.choice(self.recent)
            who = {"session_id": of.session_id, "tenant_id": of.tenant_id}
            return self._mint("abort", target_kind="input", target_id=of.input_id, scope=scope, **who)
        if roll < 0.4 and finished:
            (tenant, session), (event, _) = self.random.choice(finished)
            who = {"session_id": session, "tenant_id": tenant}
            return self._mint("abort", target_kind="run", target_id=event.run_id, scope=scope, **who)
        return self._mint("abort", target_kind="active", scope=scope, reason="enough")

    def _retry(self) -> Input | None:
        ended = [(key, event) for key, (event, payload) in self.world.watch.finished.items()
                 if payload["terminalStatus"] == "timed_out" or payload.get("retryable")]  # fmt: skip
        if not ended:
            return None
        (tenant, session), event = self.random.choice(ended)
        return self._mint("prompt", retry_of=event.run_id, tenant_id=tenant, session_id=session)

    def _settle(self) -> Input | None:
        """Tell what became of an action that its run left in doubt."""
        if not self.world.watch.doubts or self.random.random() < 0.4:
            return None
        (tenant, session), doubt = self.random.choice(self.world.watch.doubts)
        run_no = self.world.watch.sessions[tenant, session].run_no
        decision = self.world.target.end_of((tenant, session), run_no, doubt["actionKey"])
        return self._mint("answer", tenant_id=tenant, session_id=session, action_key=doubt["actionKey"],
                          action_name=doubt["name"], args_digest="d1", decision=decision)  # fmt: skip

    def _erase(self) -> Input | None:
        mortal = [name for name in self.world.sessions if name.startswith("m")]
        return self._mint("erase", session_id=self.random.choice(mortal)) if self.random.random() < 0.5 else None

    def answer(self) -> None:
        """A person looks at what waits for approval. Some answer twice, some differently, some not at all."""
        waiting = self.world.watch.approvals
        healed = not self.world.faults
        while waiting:
            event, payload = waiting.pop()
            if not healed and self.random.random() < 0.2:
                continue
            for _ in range(1 if healed else self.random.choice([1, 1, 2])):
                post = partial(self.world.post, self._mint(
                    "answer", tenant_id=event.tenant_id, session_id=event.session_id, source="ui",
                    action_key=payload["actionKey"], action_name=payload["name"], args_digest=payload["argsDigest"],
                    decision=self.random.choice(["approve", "approve", "deny"]),
                ))  # fmt: skip
                self.world.time.after(self.random.choice([50, 700, 3_000]), post)


def partition_for(session_id: str, partitions: int) -> int:
    return partition_of(session_id.encode(), partitions)
