"""Limits and defaults every process must agree on. What one process may tune lives in the settings instead."""

from __future__ import annotations

KIB = 1024
DAY_MS = 24 * 3600 * 1000

RECORD_BYTES_MAX = 256 * KIB
"""Largest encoded input or worker record. Larger content travels as pointer and digest."""

RENDERED_BYTES_MAX = 2 * RECORD_BYTES_MAX + KIB
"""Largest content as it stands in an event: base64 adds a third, escapes of control characters five bytes each."""

EVENT_BYTES_MAX = 768 * KIB
"""Largest encoded event or view: a record's content plus what the processor adds. Topics take 1 MiB."""

JSON_DEPTH_MAX = 64
DURATION_MS_MAX = 30 * DAY_MS
"""Longest lifetime or time-out that an input or a policy may ask for."""

ISSUED_AT_PAST_MS = DAY_MS
ISSUED_AT_FUTURE_MS = 3600 * 1000
REMEMBER_MS = DAY_MS
"""An input id is remembered until `issued_at` plus this, inclusive."""

REMEMBERED_MAX = 10_000
REMEMBERED_EXTRA = 1_000
"""Places beyond REMEMBERED_MAX kept for aborts, answers and erase."""

PENDING_MAX = 20
PENDING_BYTES_MAX = 1024 * KIB
OPEN_BRANCHES_MAX = 100
PROGRESS_RENEWALS_MAX = 10_000
OPEN_CHILDREN_MAX = 20
SUBTASK_DEPTH_MAX = 5
CHILD_CANCEL_AHEAD_MS = 5_000
"""A child's cancel deadline lies so much before its parent's, that its end can still be told."""

URI_CHARS_MAX = 2048
CHECKPOINT_URI_CHARS_MAX = 512
"""The pointer stays in the state of a session at rest, which is at most 1 KiB besides unexpired ids and keys."""
LISTED_MAX = 100
"""Terminal events list at most so many items and a count."""

REFUSED_REPORTS_KEPT = 100
REFUSED_RECEIPTS_PER_GENERATION = 100
ACTION_KEYS_KEPT_MS = DAY_MS
VIEW_CONTENT_BYTES_MAX = 200 * KIB
REPORT_EVENTS_MAX = 100
ACTION_RESULT_BYTES_MAX = 16 * KIB
"""Largest action result kept beside its key; a larger one is named by its event instead."""
VIEW_RESULT_BYTES_MAX = 64 * KIB
"""What one view repeats of recorded action results; the last asked for come first."""

OFFER_HOPS_MAX = 3

ZERO_HASH = bytes(32)

PROTOCOL_VERSION = 0
"""Preview: no promise of compatibility."""

assert RENDERED_BYTES_MAX + 64 * KIB < EVENT_BYTES_MAX, "every accepted record must fit the event it becomes"
assert RECORD_BYTES_MAX + 300 * KIB < EVENT_BYTES_MAX, "a terminal event: the worker's outcome and four lists"
assert EVENT_BYTES_MAX < 1024 * KIB, "max.message.bytes of the topics"
assert VIEW_CONTENT_BYTES_MAX < RECORD_BYTES_MAX
