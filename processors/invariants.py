"""What always holds, as named predicates: over a session, and over the events of one or more sessions.

Rule 1: pure, and independent of how a decision was made: nothing here is called by `decide`.
Rule 2: a predicate answers True or False; `broken` names all that fail. Tests, simulator and audit use the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from onepen.processors.event_invariants import EVENTS, Events
from onepen.processors.session import Session, encode_body
from onepen.processors.timers import armed
from onepen.schemas import ids
from onepen.schemas.limits import (
    LISTED_MAX,
    OPEN_BRANCHES_MAX,
    OPEN_CHILDREN_MAX,
    PENDING_BYTES_MAX,
    PENDING_MAX,
    REFUSED_REPORTS_KEPT,
    REMEMBERED_EXTRA,
    REMEMBERED_MAX,
)
from onepen.schemas.statuses import ACTIVE, TERMINAL, ActionState, BranchKind, RunStatus

HEAD_BYTES_MAX: Final = 160 * 1024
"""Hard bound with the longest ids everywhere; with ids of ordinary length a head stays below 16 KiB."""


def one_active_run(session: Session) -> bool:
    """The run of the head is active and is the one counted last; none is left behind."""
    head = session.head
    if head.run is None:
        return head.last is None or (head.last.run_no == head.run_no and head.last.status in TERMINAL)
    return head.run.status in ACTIVE and head.run.run_no == head.run_no


def run_id_is_derived(session: Session) -> bool:
    run = session.head.run
    return run is None or run.run_id == ids.run_id(session.tenant_id, session.session_id, run.run_no)


def branches_are_counted(session: Session) -> bool:
    """The counters of the head agree with the open branches; an idle session has none."""
    kinds = [branch.kind for _, branch in session.branches.items()]
    run = session.head.run
    if run is None:
        return not kinds
    counted = (run.open_approvals, run.open_children)
    found = (kinds.count(BranchKind.APPROVAL), kinds.count(BranchKind.SUBTASK))
    return run.open_branches == len(kinds) <= OPEN_BRANCHES_MAX and counted == found and found[1] <= OPEN_CHILDREN_MAX


def actions_fit_their_branches(session: Session) -> bool:
    """Exactly the actions that wait, are approved or permitted have an open branch."""
    open_states = (ActionState.WAITING, ActionState.APPROVED, ActionState.PERMITTED)
    unended = {name for name, action in session.actions.items() if action.state in open_states}
    branches = [branch for _, branch in session.branches.items()]
    if unended != {branch.id for branch in branches if branch.kind is BranchKind.ACTION}:
        return False
    waiting = {name for name in unended if _state(session, name) == ActionState.WAITING}
    return waiting == {branch.id for branch in branches if branch.kind is BranchKind.APPROVAL}


def _state(session: Session, name: str) -> str | None:
    action = session.actions.get(name)
    return None if action is None else action.state


def nothing_unpermitted_in_cancelling(session: Session) -> bool:
    """After a cancel nothing waits for a permit, and no offer is open."""
    run = session.head.run
    if run is None or run.status is not RunStatus.CANCELLING:
        return True
    return run.open_approvals == 0 and not run.offer_expires_ms and bool(run.owner or run.open_branches)


def a_lease_or_an_offer(session: Session) -> bool:
    """An active run is offered or owned, never both; in `cancelling` it is never offered."""
    run = session.head.run
    if run is None:
        return True
    if run.status is RunStatus.CANCELLING:
        return not run.offer_expires_ms
    return bool(run.owner) != bool(run.offer_expires_ms) and bool(run.owner) == bool(run.lease_expires_ms)


def active_runs_have_a_deadline(session: Session) -> bool:
    run = session.head.run
    return run is None or any(due.timer.run_id == run.run_id for due in armed(session))


def pending_within_bounds(session: Session) -> bool:
    """Number and size; every entry is a kept input without a disposition; nothing is pending for another run."""
    head = session.head
    if len(head.pending) > PENDING_MAX or sum(entry.size_bytes for entry in head.pending) > PENDING_BYTES_MAX:
        return False
    run_id = None if head.run is None else head.run.run_id
    for entry in head.pending:
        known = session.ids.get(entry.input_id)
        if known is None or known.input is None or known.disposition is not None:
            return False
        if entry.for_run not in ("", run_id):
            return False
    return len({entry.input_id for entry in head.pending}) == len(head.pending)


def idle_means_nothing_pending(session: Session) -> bool:
    return session.head.run is not None or not session.head.pending


def content_is_kept_only_where_needed(session: Session) -> bool:
    """A kept input is pending or started the active run: nothing else of a session's past keeps its content."""
    head = session.head
    needed = {entry.input_id for entry in head.pending}
    if head.run is not None:
        needed.add(head.run.start_input_id)
    return {input_id for input_id, known in session.ids.items() if known.input is not None} == needed


def ids_are_counted(session: Session) -> bool:
    count = len(session.ids.names())
    return session.head.remembered == count <= REMEMBERED_MAX + REMEMBERED_EXTRA


def undisposed_inputs_have_a_place(session: Session) -> bool:
    """An accepted input without a final disposition is pending, or an abort or erase that waits for an end."""
    head = session.head
    pending = {entry.input_id for entry in head.pending}
    waiting = set() if head.run is None else {head.run.run_id}
    return all(
        known.disposition is not None or input_id in pending or (known.mode in _AWAIT_END and known.run_id in waiting)
        for input_id, known in session.ids.items()
    )


_AWAIT_END: Final = ("abort", "erase")


def compacting_is_an_open_compaction(session: Session) -> bool:
    """The state, the id, the deadline and the branch of a compaction agree; a cancel leaves the branch to its end."""
    run = session.head.run
    found = [branch.id for _, branch in session.branches.items() if branch.kind is BranchKind.COMPACTION]
    if run is None:
        return not found
    if found != ([run.compaction_id] if run.compaction_id else []) or bool(found) != bool(run.compaction_deadline_ms):
        return False
    return run.status is RunStatus.CANCELLING or (run.status is RunStatus.COMPACTING) == bool(found)


def calls_fit_their_branches(session: Session) -> bool:
    """Exactly the open calls have an open branch."""
    unended = {name for name, call in session.calls.items() if not call.status}
    return unended == {b.id for _, b in session.branches.items() if b.kind is BranchKind.SUBTASK}


def an_erased_session_holds_nothing(session: Session) -> bool:
    """Erased and at rest: only the run counter, the last hash, the mark and the ids are left."""
    head = session.head
    if not head.erased:
        return True
    if head.run is not None:
        return head.run.status is RunStatus.CANCELLING and not head.pending
    kept = (session.actions, session.calls, session.retries, session.branches)
    return not any(parts.names() for parts in kept) and head.checkpoint is None and head.last is None


def interrupts_are_in_front(session: Session) -> bool:
    fronts = [entry.front for entry in session.head.pending]
    return fronts == sorted(fronts, reverse=True)


def lists_within_bounds(session: Session) -> bool:
    run = session.head.run
    if run is None:
        return True
    doubts = len(run.doubts) <= LISTED_MAX + OPEN_BRANCHES_MAX
    return doubts and max(len(run.stopped), len(run.voided)) <= LISTED_MAX and len(run.refused) <= REFUSED_REPORTS_KEPT


def head_size_bounded(session: Session) -> bool:
    return len(encode_body(session.head)) <= HEAD_BYTES_MAX


def loads_as_it_was_written(session: Session) -> bool:
    """The records of a session and nothing else make it up: what was loaded writes the same records."""
    written = whole(session)
    return whole(Session.load(session.tenant_id, session.session_id, written)) == written


def whole(session: Session) -> dict[bytes, bytes]:
    """Every state record of a session, whether or not it has changed."""
    copy = session.fork()
    copy.dirty = True
    copy.pending_written = ()
    for parts in (copy.ids, copy.actions, copy.branches, copy.calls, copy.retries):
        for name, value in list(parts.items()):
            parts.put(name, value)  # type: ignore[arg-type]
    return {key: value for key, value in copy.changes().items() if value is not None}


SESSION: Final[tuple[Callable[[Session], bool], ...]] = (
    one_active_run,
    run_id_is_derived,
    branches_are_counted,
    actions_fit_their_branches,
    nothing_unpermitted_in_cancelling,
    a_lease_or_an_offer,
    active_runs_have_a_deadline,
    pending_within_bounds,
    idle_means_nothing_pending,
    content_is_kept_only_where_needed,
    ids_are_counted,
    undisposed_inputs_have_a_place,
    compacting_is_an_open_compaction,
    calls_fit_their_branches,
    an_erased_session_holds_nothing,
    interrupts_are_in_front,
    lists_within_bounds,
    head_size_bounded,
    loads_as_it_was_written,
)


def broken(session: Session | None, events: Events = ()) -> list[str]:
    """Names of the predicates that do not hold, of the session and of its events."""
    found = [] if session is None else [check.__name__ for check in SESSION if not check(session)]
    return found + [check.__name__ for check in EVENTS if not check(events)]
