"""Cancel, leases and external actions: what may still happen, by whom, and how often it did.

Joins three books that are kept apart: the events, the records the workers sent, and the ledger of the outside target.
"""

from __future__ import annotations

import orjson

from onepen.schemas.events import (
    ACTION_FINISHED,
    ACTION_IN_DOUBT,
    ACTION_PERMITTED,
    ACTION_REQUESTED,
    ACTION_VOIDED,
    APPROVAL_ANSWERED,
    APPROVAL_EXPIRED,
    APPROVAL_REQUESTED,
    RUN_CANCEL_REQUESTED,
    RUN_FINISHED,
    RUN_LEASE_LOST,
    RUN_LEASED,
    RUN_RELEASED,
    RUN_STARTED,
)
from onepen.schemas.limits import ACTION_KEYS_KEPT_MS, LISTED_MAX
from onepen.schemas.worker_records import Claim, Report, WorkerHead
from onepen.streams.audit.evidence import Effect, Evidence, LoggedEvent, Violation, grouped
from onepen.streams.audit.history import CLOSES, OPENS, Branch, branch

REPEAT = "repeat"
RESOLUTIONS = (REPEAT, "reconciled_not_performed")
MOVES_DEADLINE = (RUN_STARTED, APPROVAL_ANSWERED, APPROVAL_EXPIRED)


def cancel_is_a_barrier(evidence: Evidence) -> list[Violation]:
    """After the abort nothing begins, what waits is voided at once, and `cancelled` comes after every end."""
    found = []
    for events in evidence.by_run.values():
        asked: LoggedEvent | None = None
        waiting: dict[Branch, LoggedEvent] = {}
        for one in events:
            kind, opened, closed = one.event.type, branch(one, OPENS), branch(one, CLOSES)
            if asked is not None and opened is not None:
                found.append(Violation("cancel", str(one), f"begins after the abort at {asked}"))
            if asked is not None and one.cause != asked.cause:
                found += [Violation("cancel", str(w), "not voided in the step of the abort") for w in waiting.values()]
                waiting.clear()
            if opened is not None and kind in (ACTION_REQUESTED, APPROVAL_REQUESTED):
                waiting[opened] = one
            elif kind == ACTION_PERMITTED and opened is not None:
                waiting.pop(opened, None)
            if closed is not None:
                waiting.pop(closed, None)
            if kind == RUN_CANCEL_REQUESTED:
                asked = one
            elif kind == RUN_FINISHED:
                found += _cancelled_end(one, asked, events)
    return found


def _cancelled_end(end: LoggedEvent, asked: LoggedEvent | None, events: list[LoggedEvent]) -> list[Violation]:
    found = []
    cancelled = end.payload.get("terminalStatus") == "cancelled"
    if cancelled != (asked is not None):
        found.append(Violation("cancel", str(end), "cancelled if and only if an abort was accepted"))
    if asked is None or not cancelled:
        return found
    after = [e for e in events if e.event.seq > asked.event.seq]
    listed = {(str(i.get("name")), str(i.get("actionKey"))) for i in end.payload.get("inDoubt") or []}
    doubts = {
        (str(e.payload.get("name")), str(e.payload.get("actionKey"))) for e in after if e.event.type == ACTION_IN_DOUBT
    }
    if not doubts <= listed and len(listed) < LISTED_MAX:
        found.append(Violation("cancel", str(end), f"does not name what is in doubt: {sorted(doubts - listed)}"))
    if end.payload.get("inputId") != asked.payload.get("inputId"):
        found.append(Violation("cancel", str(end), "names another abort than the one accepted first"))
    return found


def generations(evidence: Evidence) -> list[Violation]:
    """Along a run the generation never falls, and each (run, generation) has one worker at most."""
    found = []
    for events in evidence.by_run.values():
        generation = 0
        owner: dict[int, str] = {}
        for one in events:
            if one.event.generation < generation:
                found.append(Violation("generation", str(one), f"falls from {generation} to {one.event.generation}"))
            generation = max(generation, one.event.generation)
            if one.event.type == RUN_LEASED:
                worker = str(one.payload.get("workerId"))
                if owner.setdefault(one.event.generation, worker) != worker:
                    found.append(Violation("generation", str(one), f"belongs to {owner[one.event.generation]} too"))
    return found


def _owners(events: list[LoggedEvent]) -> dict[int, str]:
    return {e.event.generation: str(e.payload.get("workerId")) for e in events if e.event.type == RUN_LEASED}


def only_the_owner_writes(evidence: Evidence) -> list[Violation]:
    """An event that follows from a worker's record has that record's generation, and its worker held the lease."""
    found = []
    for run, events in evidence.by_run.items():
        owners = _owners(events)
        lost: set[int] = set()
        for one in events:
            cause = evidence.input_at.get(one.cause)
            if cause is not None and isinstance(cause.record, Report):
                head: WorkerHead = cause.record
                if head.run_id != run:
                    continue  # the report ended the run before this one; what follows is the processor's own step
                if owners.get(head.generation) != head.worker_id or head.generation in lost:
                    found.append(Violation("ownership", str(one), f"written by {head.worker_id}, who holds no lease"))
            if one.event.type in (RUN_LEASE_LOST, RUN_RELEASED):
                # The step raises the generation first, so its events carry the one that nobody holds yet.
                lost |= {g for g in owners if g < one.event.generation}
    return found


def refused_records_wrote_nothing(evidence: Evidence) -> list[Violation]:
    """A worker record that was refused as a whole is the cause of no event of its run."""
    found = []
    for one in evidence.receipts:
        if one.receipt.kind != "worker" or (one.receipt.detail and b'"refused"' in one.receipt.detail):
            continue  # of a report judged event by event only the named events were refused
        logged = evidence.input_at.get(one.about)
        gone = logged is None and not evidence.kept(one.about)
        if not gone and (logged is None or not isinstance(logged.record, WorkerHead)):
            found.append(Violation("refusals", str(one), "there is no worker record at that position"))
            continue
        for event in evidence.by_cause.get(one.about, []):
            found.append(Violation("refusals", str(event), f"caused by a record refused {one.receipt.reason}"))
    return found


def leases_follow_claims(evidence: Evidence) -> list[Violation]:
    """run.leased follows from the claim of the worker that it names."""
    found = []
    for one in evidence.events:
        if one.event.type != RUN_LEASED or not evidence.kept(one.cause):
            continue
        cause = evidence.input_at.get(one.cause)
        claim = cause.record if cause is not None and isinstance(cause.record, Claim) else None
        if claim is None or claim.worker_id != one.payload.get("workerId") or claim.generation != one.event.generation:
            found.append(
                Violation("generation", str(one), "does not follow from a claim of that worker and generation")
            )
    return found


Key = tuple[int, str, str, str]


def _key(one: LoggedEvent) -> Key:
    return *one.session, str(one.payload.get("name")), str(one.payload.get("actionKey"))


def doubts_stand(evidence: Evidence) -> list[Violation]:
    """An action in doubt is asked for again with a resolution only, and while it stands no other key of its name is
    permitted in its lineage; it ends by `ok` or `error`, a reconciliation, or (after its run) a receipt."""
    found = []
    settled = _settlements(evidence)
    lineages: dict[str, object] = {}
    doubts: dict[Key, LoggedEvent] = {}
    excused: set[Key] = set()  # of several in doubt each may be resolved, or none ever could
    for one in evidence.events:
        kind, key = one.event.type, _key(one)
        if not evidence.whole(one.cause):
            continue  # what settled a doubt before it may not have been read
        if kind == RUN_STARTED:
            lineages[one.event.run_id] = one.payload.get("lineage")
        elif kind == ACTION_IN_DOUBT:
            doubts[key] = one
        elif kind in (ACTION_REQUESTED, ACTION_PERMITTED):
            of_name = [other for other in doubts if other[:3] == key[:3]]
            for other in of_name:
                if _settled(settled.get(other, []), doubts[other], one):
                    del doubts[other]
            if kind == ACTION_PERMITTED and key not in excused:
                beside = [doubts[other] for other in of_name if other != key and other in doubts]
                found += [
                    Violation("permits", str(one), f"permitted beside {doubt}")
                    for doubt in beside
                    if _same(lineages, doubt, one)
                ]
            if kind == ACTION_REQUESTED:
                (excused.add if key in doubts else excused.discard)(key)
                resolution = one.payload.get("resolution")
                if key in doubts and resolution not in RESOLUTIONS:
                    found.append(Violation("permits", str(one), f"asked for anew, in doubt since {doubts[key]}"))
                if resolution != REPEAT:
                    doubts.pop(key, None)
        elif kind == ACTION_FINISHED and one.payload.get("status") != "not_performed":
            doubts.pop(key, None)
        elif kind == ACTION_FINISHED and key in doubts:
            found.append(Violation("permits", str(one), f"a repeat ended the doubt of {doubts.pop(key)}"))
    return found


def _settlements(evidence: Evidence) -> dict[Key, list[int]]:
    """Offsets of the inputs that settled an action after its run."""
    found: dict[Key, list[int]] = {}
    for one in evidence.receipts:
        receipt = one.receipt
        if receipt.kind == "action":
            told = orjson.loads(receipt.detail or b"{}")
            key = receipt.tenant_id, receipt.session_id, str(told.get("name")), str(told.get("actionKey"))
            found.setdefault(key, []).append(receipt.offset)
    return found


def _settled(offsets: list[int], doubt: LoggedEvent, one: LoggedEvent) -> bool:
    """True when a receipt lies between the two, or the key is forgotten by now."""
    forgotten = one.event.at_ms - doubt.event.at_ms >= ACTION_KEYS_KEPT_MS and doubt.event.run_id != one.event.run_id
    return forgotten or any(doubt.event.cause.offset < offset <= one.event.cause.offset for offset in offsets)


def _same(lineages: dict[str, object], doubt: LoggedEvent, one: LoggedEvent) -> bool:
    lineage = lineages.get(one.event.run_id)
    return lineage is not None and lineage == lineages.get(doubt.event.run_id)


def permits(evidence: Evidence) -> list[Violation]:
    """Intent before permit, an approval where one was asked for, no second permit of a key that is open or done."""
    found = []
    state: dict[Key, str] = {}
    done_ms: dict[Key, int] = {}
    for one in evidence.events:
        kind, key = one.event.type, _key(one)
        now = state.get(key, "")
        if kind == ACTION_REQUESTED:
            remembered = one.event.at_ms - done_ms.get(key, -ACTION_KEYS_KEPT_MS) < ACTION_KEYS_KEPT_MS
            if now == "permitted" or (now == "done" and remembered):
                found.append(Violation("permits", str(one), f"begins anew while the key is {now}"))
            state[key] = "requested"
        elif kind == APPROVAL_REQUESTED:
            state[key] = "waiting"
        elif kind == APPROVAL_ANSWERED:
            state[key] = "approved" if one.payload.get("decision") == "approve" else "denied"
        elif kind == ACTION_PERMITTED:
            if now not in ("requested", "approved"):
                found.append(Violation("permits", str(one), f"permitted while the key is {now or 'unknown'}"))
            state[key] = "permitted"
        elif kind == ACTION_FINISHED:
            state[key] = "" if one.payload.get("status") == "not_performed" else "done"
            done_ms[key] = one.event.at_ms
        elif kind == ACTION_IN_DOUBT:
            state[key] = "in_doubt"
        elif kind == ACTION_VOIDED:
            state[key] = ""
    return found


def effects_once(evidence: Evidence) -> list[Violation]:
    """Each effect in the ledger has its permit of the same run and generation; a key was effective once at most."""
    found = []
    permitted = {
        (one.event.session_id, *_key(one)[2:], one.event.run_id, one.event.generation): one
        for one in evidence.events
        if one.event.type == ACTION_PERMITTED
    }
    ended = {
        (one.event.session_id, *_key(one)[2:]): one
        for one in evidence.events
        if one.event.type in (ACTION_FINISHED, ACTION_VOIDED, ACTION_IN_DOUBT)
    }
    for effect in evidence.effects:
        wanted = effect.session_id, effect.name, effect.action_key, effect.run_id, effect.generation
        permit = permitted.get(wanted)
        if permit is None:
            found.append(Violation("effects", str(effect), "no permit in the log has its key, run and generation"))
        elif permit.payload.get("argsDigest") != effect.args_digest:
            found.append(Violation("effects", str(effect), f"other arguments than those permitted at {permit}"))
        end = ended.get((effect.session_id, effect.name, effect.action_key))
        if end is not None and (end.event.type == ACTION_VOIDED or end.payload.get("status") == "not_performed"):
            found.append(Violation("effects", str(effect), f"happened, yet the log says otherwise at {end}"))
    done: dict[object, list[Effect]] = grouped(
        (e for e in evidence.effects if e.effective), lambda e: (e.session_id, e.name, e.action_key)
    )
    for effects in done.values():
        found += [Violation("effects", str(e), f"done before: {effects[0]}") for e in effects[1:]]
    return found


def done_means_done(evidence: Evidence, watched: frozenset[str]) -> list[Violation]:
    """Every action of a `watched` name that the log calls `ok` stands in the ledger as effective."""
    known = {(e.session_id, e.name, e.action_key) for e in evidence.effects if e.effective}
    return [
        Violation("effects", str(one), "ended ok, but the target's ledger does not have it")
        for one in evidence.events
        if one.event.type == ACTION_FINISHED
        and one.payload.get("status") == "ok"
        and one.payload.get("name") in watched
        and (one.event.session_id, *_key(one)[2:]) not in known
    ]
