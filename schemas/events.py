"""Events: the envelope, the names of the types, and the JSON rendering for people and replay (protocol section 5).

Payloads of v0 (JSON objects; times are ms since the epoch of the log; members a worker adds travel unchanged):

run.started             inputMode, tenantId, inputId, source, userId, mediaType, content | pointer {uri, digest,
                        sizeBytes}, policyVersion, timeoutAt, maxAttempts, inputPosition {partition, offset},
                        recovery, lineage, retryOf?, parent? {sessionId, runId, callId, depth}
run.leased              workerId, inbox, attempt, leaseExpiresAt
run.lease_lost          workerId, attempt, reason
run.released            workerId, attempt, reason; of a cancelled run that waits for its children alone:
                        reason recorded, workOutcome
model.request.started   turnId, ...
model.request.finished  turnId, status, ...
message.completed, x.*  anything
tool.started            toolCallId, toolName, ...
tool.finished           toolCallId, toolName, status, ...
action.requested        actionKey, name, argsDigest, ...
action.permitted        actionKey, name, argsDigest, deadlineAt, validMs, fencing {runId, generation}, reportNo
action.finished         actionKey, name, status, result?, reportNo?
action.voided           actionKey, name, reason
action.in_doubt         actionKey, name, reason, error?
subtask.started         callId, sessionId, inputId, ...
subtask.finished        callId, sessionId, status, reason?, runId?, result?
run.compaction_started  compactionId, deadlineAt, ...
run.compaction_finished compactionId, checkpoint {uri, digest, bytes, throughSeq}
run.compaction_failed   compactionId, reason
approval.requested      actionKey, name, argsDigest, expiresAt
approval.answered       actionKey, name, decision, by, source, inputId, timeoutAt
approval.expired        actionKey, name, timeoutAt
approval.voided         actionKey, name, reason
input.steered           inputId, source, userId
input.applied           inputId, source, userId, mediaType, content | pointer
input.carried_over      inputId
run.cancel_requested    reason, by, source, inputId, scope, cancelDeadlineAt
run.finished            terminalStatus, and
  completed             the worker's own members (output ...)
  failed                retryable, reason, error?
  timed_out             reason, retryable
  cancelled             forced, reason, by, inputId, stopped [{branch, id, name, tookMs, status}], stoppedCount,
                        voided [{actionKey, name}], inDoubt [...], queued [inputId], queuedCount, workOutcome | null
  every end             voided, inDoubt, inDoubtCount where there are any

`status` is ok, error, unknown, aborted (model requests only), cancelled (tools only), not_performed (actions only); of
a subtask the terminal status of its run, or refused, expired, withdrawn, discarded, aborted, detached.
`content` is text for text/plain, the JSON value for application/json, {"base64": ...} for other media types.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import orjson

RUN_STARTED = "run.started"
RUN_LEASED = "run.leased"
RUN_LEASE_LOST = "run.lease_lost"
RUN_RELEASED = "run.released"
RUN_CANCEL_REQUESTED = "run.cancel_requested"
RUN_FINISHED = "run.finished"
MODEL_STARTED = "model.request.started"
MODEL_FINISHED = "model.request.finished"
MESSAGE_COMPLETED = "message.completed"
TOOL_STARTED = "tool.started"
TOOL_FINISHED = "tool.finished"
ACTION_REQUESTED = "action.requested"
ACTION_PERMITTED = "action.permitted"
ACTION_FINISHED = "action.finished"
ACTION_VOIDED = "action.voided"
ACTION_IN_DOUBT = "action.in_doubt"
APPROVAL_REQUESTED = "approval.requested"
APPROVAL_ANSWERED = "approval.answered"
APPROVAL_EXPIRED = "approval.expired"
APPROVAL_VOIDED = "approval.voided"
SUBTASK_STARTED = "subtask.started"
SUBTASK_FINISHED = "subtask.finished"
COMPACTION_STARTED = "run.compaction_started"
COMPACTION_FINISHED = "run.compaction_finished"
COMPACTION_FAILED = "run.compaction_failed"
INPUT_STEERED = "input.steered"
INPUT_APPLIED = "input.applied"
INPUT_CARRIED_OVER = "input.carried_over"
WORKER_PREFIX = "x."


class Cause(msgspec.Struct, frozen=True, gc=False):
    """The input record an event follows from, and the event's index among those of that record."""

    partition: int
    offset: int
    index: int


class EventDraft(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An event before it is chained. `payload` is JSON text of an object; times are ms since the epoch, of the log."""

    tenant_id: int
    session_id: str
    run_id: str
    run_no: int
    seq: int
    type: str
    generation: int
    at_ms: int
    cause: Cause
    payload: bytes


class Event(EventDraft, frozen=True, gc=False, kw_only=True):
    """A fact about one run: (session, run, seq), never edited or deleted. Hashes are 32 bytes."""

    prev_hash: bytes
    hash: bytes


def chain_hash(prev_hash: bytes, body: bytes) -> bytes:
    """SHA-256(prevHash || Avro bytes of the event without `hash`)."""
    return hashlib.sha256(prev_hash + body).digest()


def render(event: Event, *, full: bool = False) -> dict[str, Any]:
    """The JSON shape of protocol section 5; `full` adds the other envelope fields."""
    shown: dict[str, Any] = {
        "sessionId": event.session_id,
        "runId": event.run_id,
        "seq": event.seq,
        "type": event.type,
        "payload": orjson.loads(event.payload),
    }
    if full:
        shown |= {
            "tenantId": event.tenant_id,
            "runNo": event.run_no,
            "generation": event.generation,
            "at": event.at_ms,
            "cause": {
                "partition": event.cause.partition,
                "offset": event.cause.offset,
                "index": event.cause.index,
            },
            "prevHash": event.prev_hash.hex(),
            "hash": event.hash.hex(),
        }
    return shown
