"""Child runs in other sessions of the same tenant (protocol section 10).

The parent remembers each call id like an action key; the child's input id is derived from it, so asking again never
sends a second record. What travels back, exactly once, is the final disposition of that input.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from onepen.processors import clock
from onepen.processors.session import Call, forgotten
from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.ids import INT64_MAX, id_ok
from onepen.schemas.inputs import JSON, TEXT, Content, Input, Parent
from onepen.schemas.limits import (
    DURATION_MS_MAX,
    OPEN_BRANCHES_MAX,
    OPEN_CHILDREN_MAX,
    RECORD_BYTES_MAX,
    SUBTASK_DEPTH_MAX,
    URI_CHARS_MAX,
)
from onepen.schemas.notices import Notice
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import BranchKind, Mode, OnBusy, Reason, RunStatus, Scope, Target
from onepen.schemas.strict_json import canonical, embed, members_unchanged

Payload = dict[str, Any]
SOURCE = "subtask"
_ASKED_KEPT = 32


def started(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    """Send the child's input, join the open branch, or answer with the recorded end."""
    content = _content(payload)
    timeout_ms = payload.get("timeoutMs")
    if content is None or not (id_ok(payload.get("callId")) and id_ok(payload.get("sessionId"))):
        return Reason.INVALID
    if timeout_ms is not None and not (type(timeout_ms) is int and 1 <= timeout_ms <= DURATION_MS_MAX):
        return Reason.INVALID
    call = turn.session.calls.get(payload["callId"])
    digest = _digest(payload)
    if call is not None and call.lineage == turn.run.lineage and not forgotten(call, turn.now_ms):
        return _again(turn, call, digest)
    reason = _too_many(turn, payload["sessionId"])
    if reason is not None:
        return reason
    _send(turn, payload, raw, content, digest)
    return None


def _content(payload: Payload) -> Content | None:
    """Content as in events: `content` is text or JSON, or `pointer {uri, digest, sizeBytes}`."""
    pointer = payload.get("pointer")
    if pointer is None:
        value = payload.get("content")
        if isinstance(value, str):
            return Content(media_type=TEXT, data=value.encode())
        data = b"" if value is None else canonical(value)  # numbers may be longer there than in the report
        return Content(media_type=JSON, data=data) if 1 <= len(data) <= RECORD_BYTES_MAX else None
    if not isinstance(pointer, dict):
        return None
    uri, digest, size = (pointer.get(name) for name in ("uri", "digest", "sizeBytes"))
    if not (isinstance(uri, str) and 1 <= len(uri) <= URI_CHARS_MAX and isinstance(digest, str)):
        return None
    if len(digest) > 128 or type(size) is not int or not 0 <= size <= INT64_MAX:
        return None
    return Content(media_type=str(payload.get("mediaType", TEXT))[:128], uri=uri, digest=digest, size_bytes=size)


def _digest(payload: Payload) -> str:
    shown = {name: payload.get(name) for name in ("sessionId", "content", "pointer", "timeoutMs")}
    return hashlib.sha256(canonical(shown)).hexdigest()


def _again(turn: Turn, call: Call, digest: str) -> Reason | None:
    if call.digest != digest:
        return Reason.KEY_CONFLICT
    if not call.status:
        return None
    run = turn.run
    run.asked_calls = (*(c for c in run.asked_calls if c != call.call_id), call.call_id)[-_ASKED_KEPT:]
    return Reason.ALREADY_ENDED


def _too_many(turn: Turn, child_session_id: str) -> Reason | None:
    run = turn.run
    chain = _chain(turn)
    if child_session_id in chain:
        return Reason.CYCLE
    if len(chain) > SUBTASK_DEPTH_MAX:
        return Reason.TOO_DEEP
    if run.open_children >= OPEN_CHILDREN_MAX or run.open_branches >= OPEN_BRANCHES_MAX:
        return Reason.TOO_MANY_BRANCHES
    return None


def _chain(turn: Turn) -> tuple[str, ...]:
    """The sessions above a child of this run: the ancestors, and this one."""
    parent = turn.run.parent
    return (*(parent.ancestors if parent is not None else ()), turn.session.session_id)


def derived_id(kind: str, run_id: str, call_id: str) -> str:
    """Input id of what a parent run sends for one of its calls."""
    return f"{kind}-" + hashlib.sha256(f"{run_id}/{call_id}".encode()).hexdigest()[:32]


def _send(turn: Turn, payload: Payload, raw: bytes, content: Content, digest: str) -> None:
    run, session = turn.run, turn.session
    call_id, child = payload["callId"], payload["sessionId"]
    input_id = derived_id("sub", run.run_id, call_id)
    turn.emit(ev.SUBTASK_STARTED, members_unchanged(raw) | _naming(call_id, child) | {"inputId": input_id})
    call = Call(
        call_id=call_id,
        digest=digest,
        child_session_id=child,
        child_input_id=input_id,
        lineage=run.lineage,
        ancestors=_chain(turn),
    )
    session.calls.put(call_id, call)
    turn.forwards.append(
        Input(
            input_id=input_id,
            issued_at_ms=turn.now_ms,
            tenant_id=session.tenant_id,
            user_id=run.user_id,
            session_id=child,
            mode=Mode.PROMPT,
            source=SOURCE,
            content=content,
            on_busy=OnBusy.QUEUE,
            ttl_ms=_lifetime_ms(turn),
            timeout_ms=payload.get("timeoutMs"),
            parent=_parent(turn, call),
        )
    )


def _lifetime_ms(turn: Turn) -> int:
    """How long a child may be queued: no longer than its parent may run. A run's clock stands still while it only waits
    for a child, so two runs whose children are queued behind each other would wait for ever."""
    policy, run = turn.run_policy, turn.run
    run_ms = max(policy.run_timeout_ms, run.timeout_at_ms - run.started_ms)
    run_ms = min(run_ms, DURATION_MS_MAX)
    return min(run_ms, policy.queued_ttl_ms or run_ms)


def _naming(call_id: str, child_session_id: str) -> dict[str, str]:
    return {"callId": call_id, "sessionId": child_session_id}


def _parent(turn: Turn, call: Call, cancel_deadline_ms: int = 0) -> Parent:
    return Parent(
        session_id=turn.session.session_id,
        run_id=turn.run.run_id,
        call_id=call.call_id,
        ancestors=call.ancestors,
        cancel_deadline_ms=cancel_deadline_ms,
    )


def abort_children(turn: Turn, reason: str) -> None:
    """Send every open child an abort that names its input id, once."""
    if not turn.run.open_children:
        return
    for _, branch in list(turn.session.branches.items()):
        if branch.kind is BranchKind.SUBTASK:
            call = turn.session.calls.get(branch.id)
            assert call is not None
            if not call.abort_sent:
                _abort(turn, call, reason)


def _abort(turn: Turn, call: Call, reason: str) -> None:
    run, session = turn.run, turn.session
    session.calls.put(call.call_id, msgspec.structs.replace(call, abort_sent=True))
    turn.forwards.append(
        Input(
            input_id=derived_id("sub-abort", run.run_id, call.call_id),
            issued_at_ms=turn.now_ms,
            tenant_id=session.tenant_id,
            user_id=run.user_id,
            session_id=call.child_session_id,
            mode=Mode.ABORT,
            source=SOURCE,
            target_kind=Target.INPUT,
            target_id=call.child_input_id,
            scope=Scope.RUN,
            reason=f"parent {reason}"[:1024],
            parent=_parent(turn, call, run.cancel_deadline_ms if run.status is RunStatus.CANCELLING else 0),
        )
    )


def close(turn: Turn, status: str) -> None:
    """End the branches of all open children when the parent ends: `aborted`, or `detached` by `completed`."""
    if not turn.run.open_children:
        return
    if status == "aborted":
        abort_children(turn, "ended")
    for _, branch in list(turn.session.branches.items()):
        if branch.kind is BranchKind.SUBTASK:
            call = turn.session.calls.get(branch.id)
            assert call is not None
            turn.emit(ev.SUBTASK_FINISHED, _naming(call.call_id, call.child_session_id) | {"status": status})
            turn.session.calls.put(call.call_id, msgspec.structs.replace(call, status=status))


def keep_calls(turn: Turn, lineage: str, forget_ms: int) -> None:
    """Call ids are remembered as long as action keys (0: while the lineage has an active run)."""
    for name, call in list(turn.session.calls.items()):
        if call.lineage == lineage:
            turn.session.calls.put(name, msgspec.structs.replace(call, forget_ms=forget_ms))


def heard(turn: Turn, notice: Notice) -> bool:
    """A child's input has its final disposition: the end of its branch, or, after the parent's end, a receipt."""
    run = turn.session.head.run
    call = turn.session.calls.get(notice.call_id)
    if (
        run is None
        or run.run_id != notice.run_id
        or call is None
        or call.status
        or call.child_input_id != notice.child_input_id
    ):
        _late(turn, notice)
        return False
    timeout_at = clock.timeout_after(run, turn.now_ms, branches_closed=1, children_closed=1)
    payload: dict[str, Any] = _naming(call.call_id, call.child_session_id) | {
        "status": notice.status,
        "reason": notice.reason,
        "runId": notice.child_run_id,
        "timeoutAt": timeout_at,
    }
    if notice.result is not None:
        payload["result"] = embed(JSON, notice.result)
    turn.emit(ev.SUBTASK_FINISHED, payload)
    ended = msgspec.structs.replace(
        call, status=notice.status, reason=notice.reason, child_run_id=notice.child_run_id, result=notice.result
    )
    turn.session.calls.put(call.call_id, ended)
    run.asked_calls = (*(c for c in run.asked_calls if c != call.call_id), call.call_id)[-_ASKED_KEPT:]
    turn.view_wanted = True
    return True


def _late(turn: Turn, notice: Notice) -> None:
    if turn.session.head.erased and turn.session.head.run is None:
        turn.session.head.refused_records += 1  # of an erased session later evidence is only counted
        return
    turn.receipts.append(
        Receipt(
            kind="notice",
            tenant_id=notice.tenant_id,
            session_id=notice.session_id,
            partition=turn.moment.partition,
            offset=turn.moment.offset,
            at_ms=turn.now_ms,
            input_id=notice.child_input_id[:128],
            run_id=notice.run_id[:128],
            reason=Reason.RUN_ENDED,
            detail=canonical(
                {
                    "callId": notice.call_id[:128],
                    "childSessionId": notice.child_session_id[:128],
                    "childRunId": notice.child_run_id,
                    "status": notice.status[:128],
                }
            ),
        )
    )
