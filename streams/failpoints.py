"""Named points of the processor's loop at which a test may kill, freeze or break it.

Rule: nothing in the product sets `strike`; no setting, option or variable of the environment reaches it. While it is
None a point costs one look at a module's name. Only a test, inside its own process, puts a function there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

AFTER_POLL: Final = "after_poll"
AFTER_DECIDE: Final = "after_decide"
AFTER_PRODUCE: Final = "after_produce"
"""Passed once for every record of a transaction that was handed over."""
BEFORE_COMMIT: Final = "before_commit"
AFTER_SEND_OFFSETS: Final = "after_send_offsets"
"""The transaction is whole; its EndTxn was not sent yet."""
AFTER_COMMIT: Final = "after_commit"
"""EndTxn was answered; whether the answer is believed is not decided yet."""
BEFORE_PUBLISH: Final = "before_publish"
IN_DOUBT: Final = "in_doubt"
"""An outcome is not known; the writers were not replaced yet."""
IN_ASSIGNED: Final = "in_assigned"
IN_REVOKED: Final = "in_revoked"
IN_RECOVERY: Final = "in_recovery"
"""Passed by every slice of reading that has begun."""

POINTS: Final = (
    AFTER_POLL,
    AFTER_DECIDE,
    AFTER_PRODUCE,
    BEFORE_COMMIT,
    AFTER_SEND_OFFSETS,
    AFTER_COMMIT,
    BEFORE_PUBLISH,
    IN_DOUBT,
    IN_ASSIGNED,
    IN_REVOKED,
    IN_RECOVERY,
)

strike: Callable[[str], None] | None = None


def at(point: str) -> None:
    """The loop is at `point`. What a test put into `strike` may raise anything, or never return."""
    if strike is not None:
        strike(point)
