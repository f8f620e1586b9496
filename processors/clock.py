"""The run's clock: its deadline does not count time in which the run only waits for a person or a child.

"Only waits" is read from the state: approvals (and the actions they hold back) and children are the only open branches.
"""

from __future__ import annotations

from onepen.processors.session import Run
from onepen.schemas.statuses import RunStatus

_CANCELLING = RunStatus.CANCELLING
"""A member of an enum costs a look-up of its own; this one is asked for by every record."""


def only_waits(open_branches: int, open_approvals: int, open_children: int) -> bool:
    """True when every open branch is a child, an approval or the action an approval holds back (one each)."""
    return open_branches > 0 and open_branches == 2 * open_approvals + open_children


def waits(run: Run) -> bool:
    return only_waits(run.open_branches, run.open_approvals, run.open_children)


def settle(run: Run, now_ms: int) -> None:
    """Stop or start the run's clock so that it agrees with the open branches."""
    if run.waiting_left_ms < 0 and not run.open_approvals and not run.open_children:
        return  # it runs, and there is nobody to wait for
    waiting = waits(run) and run.status is not _CANCELLING
    if waiting and run.waiting_left_ms < 0:
        run.waiting_left_ms = max(0, run.timeout_at_ms - now_ms)
        run.timeout_at_ms = 0
    elif not waiting:
        resume(run, now_ms)


def resume(run: Run, now_ms: int) -> None:
    """Let the clock run on from where it stopped."""
    if run.waiting_left_ms >= 0:
        run.timeout_at_ms = now_ms + run.waiting_left_ms
        run.waiting_left_ms = -1


def timeout_after(
    run: Run, now_ms: int, *, branches_closed: int, approvals_closed: int = 0, children_closed: int = 0
) -> int | None:
    """Value of `timeoutAt` in the event that ends a wait and closes so many branches in all.

    None while the run goes on waiting only.
    """
    branches = run.open_branches - branches_closed
    if only_waits(branches, run.open_approvals - approvals_closed, run.open_children - children_closed):
        return None
    return run.timeout_at_ms if run.waiting_left_ms < 0 else now_ms + run.waiting_left_ms
