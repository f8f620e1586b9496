"""Form of an input: what is attributed but breaks a rule is refused `invalid`.

Clients check the same at the edge with better words; this is the check that cannot be gone around.
"""

from __future__ import annotations

from onepen.schemas.ids import id_ok
from onepen.schemas.inputs import JSON, TEXT, Content, Input
from onepen.schemas.limits import DURATION_MS_MAX, RECORD_BYTES_MAX, RENDERED_BYTES_MAX, SUBTASK_DEPTH_MAX
from onepen.schemas.policies import Policy
from onepen.schemas.statuses import IfMissed, Mode, OnBusy, Recovery, Scope, Target
from onepen.schemas.strict_json import canonical, well_formed

_TEXT_CHARS_MAX = 1024
_URI_CHARS_MAX = 2048
_MODES, _ON_BUSY, _IF_MISSED = frozenset(Mode), frozenset(OnBusy), frozenset(IfMissed)
_SCOPES, _RECOVERIES = frozenset(Scope), frozenset(Recovery)
_WITH_CONTENT = frozenset((Mode.PROMPT, Mode.STEER, Mode.FOLLOW_UP, Mode.AUTO))
_DECISIONS = frozenset(("approve", "deny", "ok", "error", "not_performed"))
_MAY_STEER = frozenset((Mode.STEER, Mode.AUTO))


def broken_rule(record: Input, policy: Policy) -> str | None:
    """Name of the first field that breaks a rule of form (or the tenant's rule on content), or None."""
    checks = (
        ("mode", record.mode in _MODES),
        ("source", 1 <= len(record.source) <= 128),
        ("content", _content_ok(record) and _where_ok(record, policy)),
        ("on_busy", record.on_busy is None or record.on_busy in _ON_BUSY),
        ("if_missed", record.if_missed is None or record.if_missed in _IF_MISSED),
        ("ttl_ms", _duration_ok(record.ttl_ms)),
        ("timeout_ms", _duration_ok(record.timeout_ms)),
        ("max_attempts", record.max_attempts is None or 1 <= record.max_attempts <= 100),
        ("scope", record.scope is None or (record.mode == Mode.ABORT and record.scope in _SCOPES)),
        ("reason", record.reason is None or len(record.reason) <= _TEXT_CHARS_MAX),
        ("expected_run_id", _expected_ok(record)),
        ("retry_of", record.retry_of is None or (record.mode == Mode.PROMPT and id_ok(record.retry_of))),
        ("recovery", record.recovery is None or record.recovery in _RECOVERIES),
        ("parent", _parent_ok(record)),
        ("target", _target_ok(record)),
        ("answer", _answer_ok(record)),
    )
    return next((field for field, fine in checks if not fine), None)


def _duration_ok(value: int | None) -> bool:
    return value is None or 1 <= value <= DURATION_MS_MAX


def _content_ok(record: Input) -> bool:
    content = record.content
    if record.mode not in _WITH_CONTENT or record.retry_of is not None:
        return content is None
    if content is None or not 1 <= len(content.media_type) <= 128:
        return False
    if content.data is None:
        uri_ok = content.uri is not None and 1 <= len(content.uri) <= _URI_CHARS_MAX
        return uri_ok and id_ok(content.digest) and content.size_bytes >= 0
    return content.uri is None and len(content.data) <= RECORD_BYTES_MAX and _readable(content)


def _readable(content: Content) -> bool:
    data = content.data
    assert data is not None
    if content.media_type == JSON:
        return well_formed(data)
    if content.media_type == TEXT:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return False
        # Each control character takes six bytes in JSON: what is accepted must fit the event it becomes.
        return 6 * len(data) <= RENDERED_BYTES_MAX or len(canonical(text)) <= RENDERED_BYTES_MAX
    return True


def _where_ok(record: Input, policy: Policy) -> bool:
    """A tenant whose content must be erasable sends it as pointer and digest only."""
    return not policy.erasable_content or record.content is None or record.content.data is None


def _expected_ok(record: Input) -> bool:
    if record.expected_run_id is None:
        return True
    return id_ok(record.expected_run_id) and (record.mode in _MAY_STEER or record.on_busy == OnBusy.STEER)


def _parent_ok(record: Input) -> bool:
    parent = record.parent
    if parent is None:
        return True
    ids = (parent.session_id, parent.run_id, parent.call_id, *parent.ancestors)
    return (
        record.mode in (Mode.PROMPT, Mode.ABORT) and len(parent.ancestors) <= SUBTASK_DEPTH_MAX and all(map(id_ok, ids))
    )


def _target_ok(record: Input) -> bool:
    if record.mode != Mode.ABORT:
        return record.target_kind is None and record.target_id is None
    if record.target_kind == Target.ACTIVE:
        return record.target_id is None
    return record.target_kind in (Target.RUN, Target.INPUT) and id_ok(record.target_id)


def _answer_ok(record: Input) -> bool:
    if record.mode != Mode.ANSWER:
        return record.action_key is record.action_name is record.args_digest is record.decision is None
    return (
        id_ok(record.action_key)
        and (record.action_name is None or id_ok(record.action_name))
        and id_ok(record.args_digest)
        and record.decision in _DECISIONS
    )
