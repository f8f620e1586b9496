"""The closed vocabularies of the protocol: statuses, modes, verdicts, dispositions, reasons.

The same words stand in records, tables, the command line and the documentation.
"""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    RUNNING = "running"
    COMPACTING = "compacting"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


ACTIVE = frozenset({RunStatus.RUNNING, RunStatus.COMPACTING, RunStatus.CANCELLING})
TERMINAL = frozenset(RunStatus) - ACTIVE


class Mode(StrEnum):
    PROMPT = "prompt"
    STEER = "steer"
    FOLLOW_UP = "follow_up"
    AUTO = "auto"
    ABORT = "abort"
    ANSWER = "answer"
    ERASE = "erase"


class OnBusy(StrEnum):
    QUEUE = "queue"
    REJECT = "reject"
    STEER = "steer"
    INTERRUPT = "interrupt"


class IfMissed(StrEnum):
    QUEUE = "queue"
    REJECT = "reject"


class Scope(StrEnum):
    RUN = "run"
    RUN_AND_QUEUE = "run_and_queue"


class Target(StrEnum):
    """What an abort names: a run id, an input id, or explicitly whatever is active."""

    RUN = "run"
    INPUT = "input"
    ACTIVE = "active"


class Verdict(StrEnum):
    STARTED = "started"
    QUEUED = "queued"
    STEERED = "steered"
    CANCELLING = "cancelling"
    ANSWERED = "answered"
    WITHDRAWN = "withdrawn"
    ERASED = "erased"
    DUPLICATE = "duplicate"
    REFUSED = "refused"


class Disposition(StrEnum):
    CONSUMED = "consumed"
    WITHDRAWN = "withdrawn"
    DISCARDED = "discarded"
    EXPIRED = "expired"
    REFUSED = "refused"
    DUPLICATE = "duplicate"
    DONE = "done"


class Reason(StrEnum):
    """Why something was refused or discarded. Order of checks = order in this list, per kind of record."""

    # input records
    TOO_OLD = "too_old"
    FROM_THE_FUTURE = "from_the_future"
    INPUT_ID_REUSED = "input_id_reused"
    TOO_MANY_INPUTS = "too_many_inputs"
    INVALID = "invalid"
    ERASED = "erased"
    CYCLE = "cycle"
    NOT_RETRYABLE = "not_retryable"
    NO_ACTIVE_RUN = "no_active_run"
    STALE_RUN = "stale_run"
    UNKNOWN_INPUT = "unknown_input"
    ALREADY_SETTLED = "already_settled"
    CANCELLED = "cancelled"
    UNKNOWN_APPROVAL = "unknown_approval"
    DIGEST_MISMATCH = "digest_mismatch"
    ALREADY_ANSWERED = "already_answered"
    BUSY = "busy"
    MISSED = "missed"
    QUEUE_FULL = "queue_full"
    ABORTED = "aborted"
    # worker records (`invalid` as above)
    NO_INBOX = "no_inbox"
    UNKNOWN_RUN = "unknown_run"
    BAD_TOKEN = "bad_token"
    RUN_ENDED = "run_ended"
    STALE_GENERATION = "stale_generation"
    ALREADY_OWNED = "already_owned"
    NOT_OWNER = "not_owner"
    NOT_RUNNING = "not_running"
    REPORT_CONFLICT = "report_conflict"
    REPORT_GAP = "report_gap"
    # events inside a report
    UNKNOWN_TYPE = "unknown_type"
    COMPACTING = "compacting"
    RUN_CANCELLING = "run_cancelling"
    ALREADY_OPEN = "already_open"
    NOT_OPEN = "not_open"
    TOO_MANY_BRANCHES = "too_many_branches"
    TOO_DEEP = "too_deep"
    STILL_OPEN = "still_open"
    UNKNOWN_STEER = "unknown_steer"
    OUT_OF_ORDER = "out_of_order"
    KEY_CONFLICT = "key_conflict"
    IN_FLIGHT = "in_flight"
    IN_DOUBT = "in_doubt"
    ALREADY_ENDED = "already_ended"
    LEASE_EXPIRED = "lease_expired"
    # notices in a view that is not a refusal
    RECORDED = "recorded"
    LEASE_LOST = "lease_lost"
    RELEASED = "released"
    TIMED_OUT = "timed_out"
    FORCED = "forced"
    NO_WORKER = "no_worker"
    STALLED = "stalled"
    WORKER_LOST = "worker_lost"


class ActionState(StrEnum):
    """State of an action key (protocol section 8)."""

    WAITING = "waiting"
    APPROVED = "approved"
    PERMITTED = "permitted"
    IN_DOUBT = "in_doubt"
    VOIDED = "voided"
    NOT_PERFORMED = "not_performed"
    OK = "ok"
    ERROR = "error"


class BranchKind(StrEnum):
    MODEL_REQUEST = "model_request"
    TOOL = "tool"
    ACTION = "action"
    APPROVAL = "approval"
    SUBTASK = "subtask"
    COMPACTION = "compaction"


class Recovery(StrEnum):
    """What a takeover does with the run: go on, begin again from its inputs, or end it."""

    RESUME = "resume"
    RERUN = "rerun"
    FAIL = "fail"


class TimerKind(StrEnum):
    OFFER = "offer"
    LEASE = "lease"
    RUN = "run"
    CANCEL = "cancel"
    APPROVAL = "approval"
    COMPACTION = "compaction"
    QUEUED = "queued"
    FORGET = "forget"
