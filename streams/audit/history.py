"""Structure of the event log: one pen per session, no gap, no repeat, nothing after the end, an unbroken chain.

Each function is one pass over the events and knows nothing of the others, so that one damage turns one answer red.
"""

from __future__ import annotations

from onepen.schemas.codec import event_body
from onepen.schemas.events import (
    RUN_CANCEL_REQUESTED,
    RUN_FINISHED,
    RUN_STARTED,
    chain_hash,
)
from onepen.schemas.ids import run_id
from onepen.schemas.limits import ZERO_HASH
from onepen.streams.audit.evidence import Evidence, LoggedEvent, Violation

OPENS = {
    "model.request.started": ("model", "turnId"),
    "tool.started": ("tool", "toolCallId"),
    "action.requested": ("action", "actionKey"),
    "action.permitted": ("action", "actionKey"),
    "approval.requested": ("approval", "actionKey"),
    "subtask.started": ("subtask", "callId"),
    "run.compaction_started": ("compaction", "compactionId"),
}
CLOSES = {
    "model.request.finished": ("model", "turnId"),
    "tool.finished": ("tool", "toolCallId"),
    "action.finished": ("action", "actionKey"),
    "action.voided": ("action", "actionKey"),
    "action.in_doubt": ("action", "actionKey"),
    "approval.answered": ("approval", "actionKey"),
    "approval.expired": ("approval", "actionKey"),
    "approval.voided": ("approval", "actionKey"),
    "subtask.finished": ("subtask", "callId"),
    "run.compaction_finished": ("compaction", "compactionId"),
    "run.compaction_failed": ("compaction", "compactionId"),
}
LEGAL_END = {
    "running": {"completed", "failed", "timed_out"},
    "compacting": {"failed", "timed_out"},
    "cancelling": {"cancelled"},
}
Branch = tuple[str, str, str]


def branch(one: LoggedEvent, table: dict[str, tuple[str, str]]) -> Branch | None:
    """(kind, name, id) of the branch that an event opens or closes; None for all others."""
    found = table.get(one.event.type)
    if found is None:
        return None
    kind, member = found
    name = str(one.payload.get("name", "")) if kind in ("action", "approval") else ""
    return kind, name, str(one.payload.get(member))


def one_active_run(evidence: Evidence) -> list[Violation]:
    """At every prefix of the log each session has at most one run that started and has not finished."""
    found = []
    for events in evidence.by_session.values():
        active: str | None = None
        for one in events:
            if one.event.type == RUN_STARTED:
                if active is not None:
                    found.append(Violation("one active run", str(one), f"{active} is still active"))
                active = one.event.run_id
            elif active != one.event.run_id:
                found.append(Violation("one active run", str(one), f"the active run is {active}"))
            elif one.event.type == RUN_FINISHED:
                active = None
        if active is not None and evidence.quiet:
            found.append(Violation("one active run", str(events[-1]), f"{active} never finished"))
    return found


def gapless(evidence: Evidence) -> list[Violation]:
    """seq counts 1, 2, 3 … in each run, run_no 1, 2, 3 … in each session; run ids are the derived ones."""
    found = []
    for (tenant, session), events in evidence.by_session.items():
        run_no, seq = 0, 0
        for one in events:
            e = one.event
            if e.run_no == run_no + 1 and e.type == RUN_STARTED:
                run_no, seq = e.run_no, 0
            if e.run_no != run_no or e.seq != seq + 1:
                found.append(Violation("gapless", str(one), f"expected run {run_no} seq {seq + 1}"))
                run_no = e.run_no
            seq = e.seq
            if e.run_id != run_id(tenant, session, e.run_no):
                found.append(Violation("gapless", str(one), "the run id is not the one derived from its number"))
            if (e.seq == 1) != (e.type == RUN_STARTED):
                found.append(Violation("gapless", str(one), "the first event of a run, and only it, is run.started"))
    return found


def causes_in_order(evidence: Evidence) -> list[Violation]:
    """Events follow their causes: (offset, index) rises strictly, on one partition, and time never falls."""
    found = []
    for events in evidence.by_session.values():
        before: LoggedEvent | None = None
        for one in events:
            cause = one.event.cause
            if cause.partition != one.partition:
                found.append(Violation("causes", str(one), f"caused on partition {cause.partition}"))
            if before is not None:
                last = before.event.cause
                if (cause.offset, cause.index) <= (last.offset, last.index):
                    found.append(
                        Violation("causes", str(one), "its cause does not come after that of the event before")
                    )
                if one.event.at_ms < before.event.at_ms:
                    found.append(Violation("causes", str(one), "time runs backwards"))
            before = one
    return found


def causes_exist(evidence: Evidence) -> list[Violation]:
    """Each event names a record that stands on the inputs topic (if it is kept) and has no dead letter."""
    found = []
    for one in evidence.events:
        where = f"inputs {one.cause[0]}:{one.cause[1]}"
        if one.cause in evidence.dead:
            found.append(Violation("causes", str(one), f"the record at {where} has a dead letter"))
        elif one.cause not in evidence.input_at and evidence.kept(one.cause):
            found.append(Violation("causes", str(one), f"there is no record at {where}"))
    return found


def final(evidence: Evidence) -> list[Violation]:
    """Nothing of a run comes after its run.finished, and there is one."""
    found = []
    for events in evidence.by_run.values():
        ended = False
        for one in events:
            if ended:
                found.append(Violation("finality", str(one), "the run had finished"))
            ended = ended or one.event.type == RUN_FINISHED
        if not ended and evidence.quiet:
            found.append(Violation("finality", str(events[-1]), "the run never finished"))
    return found


def chained(evidence: Evidence) -> list[Violation]:
    """prevHash runs through the whole session from 32 zero bytes; hash is SHA-256 over it and the record's bytes."""
    found = []
    for events in evidence.by_session.values():
        last = ZERO_HASH
        for one in events:
            if one.event.prev_hash != last:
                found.append(Violation("hash chain", str(one), "prevHash is not the hash of the event before"))
            if chain_hash(one.event.prev_hash, event_body(one.data)) != one.event.hash:
                found.append(Violation("hash chain", str(one), "hash does not match the bytes"))
            last = one.event.hash
    return found


def legal_steps(evidence: Evidence) -> list[Violation]:
    """Statuses change along the table of protocol section 3, and each end is one of the four."""
    found = []
    for events in evidence.by_run.values():
        status = ""
        for one in events:
            kind = one.event.type
            if kind == RUN_STARTED:
                status = "running"
            elif kind == RUN_CANCEL_REQUESTED:
                if status not in ("running", "compacting"):
                    found.append(Violation("legal steps", str(one), f"a {status} run cannot be cancelled"))
                status = "cancelling"
            elif kind == "run.compaction_started":
                if status != "running":
                    found.append(Violation("legal steps", str(one), f"a {status} run cannot be compacted"))
                status = "compacting"
            elif kind in ("run.compaction_finished", "run.compaction_failed") and status == "compacting":
                status = "running"
            elif kind == RUN_FINISHED:
                end = one.payload.get("terminalStatus")
                if end not in LEGAL_END.get(status, set()):
                    found.append(Violation("legal steps", str(one), f"{status} may not become {end}"))
                status = str(end)
    return found


def balanced(evidence: Evidence) -> list[Violation]:
    """Every model request, tool, action and approval that started ends before its run; no end without start."""
    found = []
    for events in evidence.by_run.values():
        open_branches: dict[Branch, LoggedEvent] = {}
        for one in events:
            opened, closed = branch(one, OPENS), branch(one, CLOSES)
            if opened is not None:
                open_branches.setdefault(opened, one)
            if closed is not None and open_branches.pop(closed, None) is None:
                found.append(Violation("balance", str(one), f"ends {closed}, which is not open"))
            if one.event.type == RUN_FINISHED:
                found += [Violation("balance", str(o), f"{b} has no end") for b, o in open_branches.items()]
                open_branches.clear()
    return found
