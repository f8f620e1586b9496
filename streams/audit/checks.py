"""All checks of an audit by name: what each looks at, and which invariants of the protocol it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onepen.streams.audit import admission, effects, history, limits, tables, time_limits, waiting
from onepen.streams.audit.evidence import Evidence, Violation

__all__ = ["ON_TABLES", "ON_TOPICS", "Check"]


@dataclass(frozen=True)
class Check:
    """`invariants` are named as in the protocol's list; `looked_at` counts what the check goes through."""

    name: str
    invariants: str
    judge: Callable[[Evidence], list[Violation]]
    looked_at: Callable[[Evidence], int]


def _sessions(evidence: Evidence) -> int:
    return len(evidence.by_session)


def _runs(evidence: Evidence) -> int:
    return len(evidence.by_run)


def _events(evidence: Evidence) -> int:
    return len(evidence.events)


def _inputs(evidence: Evidence) -> int:
    return len(evidence.client_inputs)


def _receipts(evidence: Evidence) -> int:
    return len(evidence.receipts)


def _all_inputs(evidence: Evidence) -> int:
    return len(evidence.inputs) + len(evidence.unreadable)


def _rows(evidence: Evidence) -> int:
    t = evidence.tables
    return 0 if t is None else sum(map(len, (t.runs, t.events, t.inputs, t.actions, t.refused)))


ON_TOPICS: tuple[Check, ...] = (
    Check("one_active_run", "I1", history.one_active_run, _sessions),
    Check("gapless", "I2", history.gapless, _events),
    Check("hash_chain", "I2", history.chained, _events),
    Check("finality", "I3", history.final, _runs),
    Check("legal_steps", "I4", history.legal_steps, _runs),
    Check("balanced", "I4", history.balanced, _runs),
    Check("causes_in_order", "I5", history.causes_in_order, _events),
    Check("causes_exist", "I5", history.causes_exist, _events),
    Check("conservation", "I5", admission.conserved, _inputs),
    Check("verdicts", "I5", admission.verdicts_follow_rules, _inputs),
    Check("consumed_once", "I5", admission.consumed_once, _inputs),
    Check("set_aside", "I5", admission.unreadable_set_aside, _all_inputs),
    Check("generations", "I6", effects.generations, _runs),
    Check("leases_follow_claims", "I6", effects.leases_follow_claims, _runs),
    Check("only_the_owner_writes", "I6", effects.only_the_owner_writes, _events),
    Check("refused_wrote_nothing", "I6", effects.refused_records_wrote_nothing, _receipts),
    Check("timers_on_time", "I10", time_limits.timers_on_time, _events),
    Check("deadlines", "I10", time_limits.deadlines, _runs),
    Check("bounded_events", "I11", limits.bounded_events, _events),
    Check("bounded_list", "I11", waiting.bounded_list, _receipts),
    Check("steers_settled", "I12", waiting.steers_settled, _runs),
    Check("queue_in_order", "I13", waiting.queue_in_order, _receipts),
    Check("cancel_is_a_barrier", "I14", effects.cancel_is_a_barrier, _runs),
    Check("permits", "I14", effects.permits, _events),
    Check("doubts_stand", "I14", effects.doubts_stand, _events),
)

ON_TABLES: tuple[Check, ...] = (
    Check("tables_equal_fold", "I18", tables.equal_to_fold, _rows),
    Check("replay_by_run", "I18", tables.replay_by_run, _runs),
    Check("rows_below_offset", "I19", tables.below_offset, _rows),
    Check("one_active_row", "I20", tables.one_active_in_table, _sessions),
    Check("disposed_in_tables", "I5", tables.disposed_in_tables, _inputs),
)
