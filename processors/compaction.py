"""Compaction: a state of the run and an open branch, never a second flag. Only a pointer enters log and tables.

Inputs that arrive meanwhile wait in the pending list and are handed over in order when it ends, well or badly.
"""

from __future__ import annotations

import re
from typing import Any

from onepen.processors.turn import Turn
from onepen.schemas import events as ev
from onepen.schemas.ids import INT64_MAX, id_ok
from onepen.schemas.limits import CHECKPOINT_URI_CHARS_MAX, OPEN_BRANCHES_MAX
from onepen.schemas.statuses import Reason, RunStatus
from onepen.schemas.strict_json import members_unchanged

Payload = dict[str, Any]
_DIGEST = re.compile(r"[0-9a-f]{64}")


def started(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    """Announce a compaction; at most one is open."""
    run = turn.run
    if not id_ok(payload.get("compactionId")):
        return Reason.INVALID
    if run.compaction_id:
        return Reason.ALREADY_OPEN
    if run.open_branches >= OPEN_BRANCHES_MAX:
        return Reason.TOO_MANY_BRANCHES
    deadline_ms = turn.now_ms + turn.run_policy.compaction_ms
    members = members_unchanged(raw) | {"compactionId": payload["compactionId"], "deadlineAt": deadline_ms}
    turn.emit(ev.COMPACTION_STARTED, members)
    return None


def finished(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    """The new context is stored: `checkpoint {uri, digest, bytes, throughSeq}`. A late end is refused by its id."""
    if not _pointer_ok(payload.get("checkpoint"), turn.run.seq):
        return Reason.INVALID
    return _ended(turn, ev.COMPACTION_FINISHED, payload, raw)


def failed(turn: Turn, payload: Payload, raw: bytes, no: int) -> Reason | None:
    return _ended(turn, ev.COMPACTION_FAILED, payload, raw)


def _ended(turn: Turn, event_type: str, payload: Payload, raw: bytes) -> Reason | None:
    compaction_id = payload.get("compactionId")
    if not id_ok(compaction_id):
        return Reason.INVALID
    if turn.run.compaction_id != compaction_id:
        return Reason.NOT_OPEN
    turn.emit(event_type, payload, raw)
    turn.contents_wanted = True
    return None


def _pointer_ok(pointer: Any, last_seq: int) -> bool:
    if not isinstance(pointer, dict):
        return False
    uri, digest, size, through = (pointer.get(name) for name in ("uri", "digest", "bytes", "throughSeq"))
    return (
        isinstance(uri, str)
        and 1 <= len(uri) <= CHECKPOINT_URI_CHARS_MAX
        and isinstance(digest, str)
        and _DIGEST.fullmatch(digest) is not None
        and type(size) is int
        and 0 <= size <= INT64_MAX
        and type(through) is int
        and 1 <= through <= last_seq
    )


def close(turn: Turn, reason: str) -> None:
    """End an open compaction that nobody will end any more."""
    run = turn.run
    if run.compaction_id:
        turn.emit(ev.COMPACTION_FAILED, {"compactionId": run.compaction_id, "reason": reason})
        turn.contents_wanted = True


def deadline_passed(turn: Turn) -> None:
    """The worker did not finish in time: back to running, and its late end will be refused by its id."""
    assert turn.run.status is not RunStatus.RUNNING
    close(turn, "deadline")
    turn.view_wanted = True
