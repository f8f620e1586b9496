"""Synthetic but well-formed event and receipt streams for tests of the sink: real framing, chained hashes.

A small hand-written generator, on purpose independent of the core: it makes one active run per session, every
terminal status, actions with approvals, actions settled after their run, steers, queued inputs, subtasks with late
notices, compactions, refusals, refused worker records, erased sessions and odd Unicode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from onepen.schemas import codec, ids
from onepen.schemas.events import Cause, Event, EventDraft
from onepen.schemas.limits import ZERO_HASH
from onepen.schemas.partitioning import partition_of
from onepen.schemas.receipts import Receipt
from onepen.schemas.strict_json import canonical

START_MS = 1_760_000_000_000
ODD_TEXTS = ("a\x00b", "\u2028\u2029", "🦄 e\u0301", "\ufeffbom", "\x1b[31mred", "'; drop table x; --", '"\\', "ÿ" * 50)
ENDS = ("completed", "failed", "cancelled", "timed_out")


@dataclass
class Streams:
    """What a processor would have written: events and receipts per partition, in order."""

    partitions: int
    events: dict[int, list[tuple[Event, bytes]]] = field(default_factory=dict)
    receipts: dict[int, list[tuple[Receipt, bytes]]] = field(default_factory=dict)
    erased: set[tuple[int, str]] = field(default_factory=set)

    def all_events(self) -> Iterator[Event]:
        for records in self.events.values():
            yield from (event for event, _ in records)


@dataclass
class _Session:
    tenant_id: int
    session_id: str
    partition: int
    run_no: int = 0
    last_hash: bytes = ZERO_HASH
    doubts: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    erased: bool = False


class Generator:
    """Deterministic for a seed."""

    def __init__(
        self,
        seed: int,
        *,
        partitions: int = 3,
        sessions: int = 6,
        tenants: tuple[int, ...] = (1, 2),
        erase: float = 0.0,
        objects_root: str = "/objects",
    ) -> None:
        """`erase`: how likely a session is erased, with its run or between two, each time something would begin."""
        self._random = random.Random(seed)
        self._erase = erase
        self._objects_root = objects_root
        self.streams = Streams(partitions, {p: [] for p in range(partitions)}, {p: [] for p in range(partitions)})
        self._at_ms = START_MS
        self._offsets = dict.fromkeys(range(partitions), 1)
        self._sessions = []
        for number in range(sessions):
            session_id = f"session-{number // len(tenants)}"
            tenant_id = tenants[number % len(tenants)]
            self._sessions.append(_Session(tenant_id, session_id, partition_of(session_id.encode(), partitions)))

    def make(self, runs: int) -> Streams:
        """`runs` runs over the sessions, interleaved; the last one begun is left active."""
        open_runs: dict[int, Iterator[None]] = {}
        begun = 0
        while begun < runs or open_runs:
            index = self._random.randrange(len(self._sessions))
            if index in open_runs:
                if next(open_runs[index], "ended") == "ended":
                    del open_runs[index]
            elif begun < runs:
                begun += 1
                open_runs[index] = self._next(self._sessions[index], leave_open=begun == runs)
            else:
                index = self._random.choice(list(open_runs))
                if next(open_runs[index], "ended") == "ended":
                    del open_runs[index]
        for session in self._sessions:
            self._settle(session)
        return self.streams

    def _next(self, session: _Session, *, leave_open: bool) -> Iterator[None]:
        self._settle(session)
        if session.erased:
            return self._after_erase(session)
        erased = self._random.random() < self._erase
        if not erased:
            return self._run(session, leave_open=leave_open)
        session.erased = True
        self.streams.erased.add((session.tenant_id, session.session_id))
        if session.run_no and self._random.random() < 0.5:
            return self._erase_at_rest(session)
        return self._run(session, leave_open=False, erased=True)

    def _erase_at_rest(self, session: _Session) -> Iterator[None]:
        self._receipt(session, input_id="erase", mode="erase", verdict="erased", disposition="done")
        yield

    def _after_erase(self, session: _Session) -> Iterator[None]:
        """What still comes of a session that is erased: refusals, a second erase, a child that ends late."""
        refused = {"verdict": "refused", "disposition": "refused", "reason": "erased"}
        self._receipt(session, input_id="too-late", mode="prompt", **refused)
        yield
        self._receipt(session, input_id="erase-2", mode="erase", **refused)
        self._notice(session, ids.run_id(session.tenant_id, session.session_id, 1))

    def _notice(self, session: _Session, run_id: str) -> None:
        self._receipt(session, kind="notice", user_id=None, source=None, input_id="sub-1", run_id=run_id,
                      reason="run_ended", detail=b'{"callId":"c-1","status":"completed"}')  # fmt: skip

    def _settle(self, session: _Session) -> None:
        """Tell of some actions that are in doubt how they ended; while no run of the session is active."""
        for run_id, about in session.doubts:
            if session.erased or self._random.random() < 0.3:
                continue
            status = self._random.choice(("ok", "error", "not_performed"))
            by = self._random.choice(({"by": 9, "inputId": "an-9"}, {"workerId": "w-1"}))
            self._receipt(session, kind="action", user_id=None, source=None, run_id=run_id,
                          detail=canonical({**about, "status": status, **by}))  # fmt: skip
        session.doubts.clear()

    def _tick(self) -> int:
        self._at_ms += self._random.choice((0, 1, 7, 1000))
        return self._at_ms

    def _position(self, session: _Session) -> int:
        self._offsets[session.partition] += self._random.choice((1, 2))
        return self._offsets[session.partition]

    def _receipt(self, session: _Session, **fields: Any) -> int:
        offset = fields.pop("offset", None) or self._position(session)
        receipt = Receipt(
            tenant_id=session.tenant_id,
            session_id=session.session_id,
            partition=session.partition,
            offset=offset,
            at_ms=self._tick(),
            **{"kind": "input", "user_id": 7, "source": "ui"} | fields,
        )
        self.streams.receipts[session.partition].append((receipt, codec.encode(receipt)))
        return offset

    def _run(self, session: _Session, *, leave_open: bool, erased: bool = False) -> Iterator[None]:
        session.run_no += 1
        run_no, seq, generation = session.run_no, 0, 1
        run_id = ids.run_id(session.tenant_id, session.session_id, run_no)
        cause = self._position(session)
        made = {"tenant_id": session.tenant_id, "session_id": session.session_id, "run_id": run_id, "run_no": run_no}

        def emit(kind: str, raw: bytes | None = None, **payload: Any) -> None:
            nonlocal seq
            seq += 1
            draft = EventDraft(
                **made,  # type: ignore[arg-type]
                seq=seq,
                type=kind,
                generation=generation,
                at_ms=self._tick(),
                cause=Cause(session.partition, cause if seq == 1 else self._position(session), 0),
                payload=canonical(payload) if raw is None else raw,
            )
            event, data = codec.seal(draft, session.last_hash)
            session.last_hash = event.hash
            self.streams.events[session.partition].append((event, data))

        input_id = f"in-{run_no}"
        self._receipt(session, offset=cause, input_id=input_id, mode="prompt", verdict="started", run_id=run_id)
        emit(
            "run.started", inputMode="prompt", tenantId=session.tenant_id, inputId=input_id, source="ui", userId=7,
            mediaType="text/plain", content=self._random.choice(ODD_TEXTS), policyVersion=0,
            timeoutAt=self._at_ms + 3_600_000, maxAttempts=3,
            inputPosition={"partition": session.partition, "offset": cause}, recovery="resume", lineage=run_id,
            **self._kin(session, run_id),
        )  # fmt: skip
        yield
        for attempt in range(1, self._random.choice((2, 2, 3))):
            generation += attempt > 1
            lease_ends = self._at_ms + 30_000
            emit("run.leased", workerId=f"w-{attempt}", inbox=1, attempt=attempt, leaseExpiresAt=lease_ends)
            yield
            yield from self._subtask(emit, session, run_id, f"c-{attempt}")
            yield from self._compaction(emit, session, f"k-{attempt}")
            for number in range(self._random.randrange(4)):
                emit("tool.started", toolCallId=f"call-{attempt}-{number}", toolName="query")
                yield
                emit("tool.finished", toolCallId=f"call-{attempt}-{number}", toolName="query", status="ok",
                     text=self._random.choice(ODD_TEXTS))  # fmt: skip
                emit("message.completed", b'{"b": 1.50, "a":[1e3,-0.0,"x\\u0000y"],"a":2}')
                emit("x.unheard-of", anything={"a": [None, True, 0.1, -0.0, 2**63 - 1]})
            yield from self._action(emit, session, run_id, f"mail-{attempt}")
            emit("input.applied", inputId="st", mediaType="text/plain", pointer=self._pointer(session, f"st-{run_no}"))
            if self._random.random() < 0.3:
                emit("run.lease_lost", workerId=f"w-{attempt}", attempt=attempt, reason="expired")
                self._receipt(session, kind="worker", record="report", worker_id=f"w-{attempt}", run_id=run_id,
                              generation=generation, report_no=4, reason="stale_generation",
                              detail=b'{"types":["x.\\u0000"]}')  # fmt: skip
        queued = self._receipt(session, input_id=f"q-{run_no}", mode="follow_up", verdict="queued", run_id=run_id)
        yield
        if not leave_open:
            end = "cancelled" if erased else self._random.choice(ENDS)
            erase = self._receipt(session, input_id="er", mode="erase", verdict="erased") if erased else None
            if end == "cancelled":
                emit("run.cancel_requested", reason="stop", by=7, source="ui", inputId="ab", scope="run")
                yield
            emit("run.finished", terminalStatus=end, reason="r" if end != "completed" else None,
                 **({"forced": True} if end == "cancelled" else {}))  # fmt: skip
            started, waiting = (
                {"input_id": input_id, "mode": "prompt"},
                {"input_id": f"q-{run_no}", "mode": "follow_up"},
            )
            self._receipt(session, offset=cause, disposition="consumed", run_id=run_id, **started)
            self._receipt(session, offset=queued, disposition="discarded", reason="aborted", **waiting)
            if erase is not None:
                self._receipt(session, offset=erase, input_id="er", mode="erase", disposition="done", run_id=run_id)
        reason = "erased" if erased else "busy"
        self._receipt(session, input_id=f"late-{run_no}", mode="steer", verdict="refused", disposition="refused",
                      reason=reason, run_id=run_id)  # fmt: skip

    def _pointer(self, session: _Session, name: str) -> dict[str, Any]:
        uri = f"file://{self._objects_root}/{session.tenant_id}/{ids.object_folder(session.session_id)}/{name}"
        return {"uri": uri, "digest": "0" * 64, "sizeBytes": 5}

    def _kin(self, session: _Session, run_id: str) -> dict[str, Any]:
        if session.run_no == 1:
            parent = {"sessionId": "above", "runId": "run-above", "callId": "c-9", "depth": 1}
            return {"parent": parent, "pointer": self._pointer(session, "first")}
        return {"retryOf": ids.run_id(session.tenant_id, session.session_id, session.run_no - 1)}

    def _subtask(self, emit: Any, session: _Session, run_id: str, call_id: str) -> Iterator[None]:
        if self._random.random() < 0.5:
            return
        about = {"callId": call_id, "sessionId": "child"}
        emit("subtask.started", **about, inputId="sub-1", pointer=self._pointer(session, "handed-over"))
        yield
        if self._random.random() < 0.5:
            emit("subtask.finished", **about, status="completed", runId="run-c", result={"a": "\x00"}, timeoutAt=None)
        else:
            emit("subtask.finished", **about, status="detached")
            self._notice(session, run_id)

    def _compaction(self, emit: Any, session: _Session, compaction_id: str) -> Iterator[None]:
        if self._random.random() < 0.5:
            return
        emit("run.compaction_started", compactionId=compaction_id, deadlineAt=self._at_ms + 1000)
        yield
        if self._random.random() < 0.3:
            emit("run.compaction_failed", compactionId=compaction_id, reason="deadline")
        else:
            uri = self._pointer(session, f"{session.run_no}-{compaction_id}")["uri"]
            checkpoint = {"uri": uri, "digest": "0" * 64, "bytes": 9, "throughSeq": 2}
            emit("run.compaction_finished", compactionId=compaction_id, checkpoint=checkpoint)

    def _action(self, emit: Any, session: _Session, run_id: str, key: str) -> Iterator[None]:
        about = {"actionKey": key, "name": "send_mail"}
        emit("action.requested", **about, argsDigest="d1")
        if self._random.random() < 0.5:
            emit("approval.requested", **about, argsDigest="d1", expiresAt=self._at_ms + 1000)
            yield
            decision = self._random.choice(("approve", "deny"))
            emit("approval.answered", **about, decision=decision, by=9, source="ui", inputId="an-1", timeoutAt=None)
            if decision == "deny":
                emit("action.voided", **about, reason="denied")
                return
        emit("action.permitted", **about, argsDigest="d1", deadlineAt=self._at_ms + 500, validMs=500)
        yield
        if self._random.random() < 0.3:
            emit("action.in_doubt", **about, reason="lease_lost")
            session.doubts.append((run_id, about))
        else:
            emit("action.finished", **about, status="ok", result={"text": "a\x00b"})
