"""Who may write, and what time does to a run, judged naively (sections 6, 10 and 11).

Part of `naive_model`: plain functions over its dicts. Each worker record is judged by the state it meets, each timer by
the deadlines armed at that moment.
"""

from __future__ import annotations

from typing import Any

from onepen.schemas.notices import Notice
from onepen.schemas.timers import Timer
from onepen.schemas.worker_records import Claim, Release, Renew, Report
from tests.property import naive_work

Facts = dict[str, Any]
FORGED = "k1.forged"
INBOXES = 12


def worker(session: Any, record: Any) -> str | None:
    """Why a worker record is refused; None if it is taken."""
    if record.inbox >= INBOXES:
        return "no_inbox"
    no = session.numbers.get(record.run_id)
    run = session.active()
    ended = [one for one in session.runs if one["ended"] is not None]
    known = [one["no"] for one in (*ended[-1:], run) if one is not None]
    if no in known and record.token == FORGED:
        return "bad_token"
    if ended and no == ended[-1]["no"]:
        return worker_after_the_end(session, record, ended[-1])
    if run is None or no != run["no"]:
        return "unknown_run"
    if record.generation != run["generation"]:
        return worker_after_handing_back(session, record, run)
    if isinstance(record, Claim):
        return claim(session, record, run)
    if isinstance(record, Release) and record.reason == "no_room":
        if run["owner"] is not None:
            return "already_owned"
        run["no_room"] = True
        return None
    if run["owner"] != (record.worker_id, record.inbox):
        return "not_owner"
    if isinstance(record, Renew):
        renew(session, record, run)
    elif isinstance(record, Release):
        lose(session, run, counts=False)
    else:
        return naive_work.report(session, record, run)
    return None


def worker_after_the_end(session: Any, record: Any, last: Facts) -> str | None:
    """Nothing is taken any more; a repeated final report is answered as recorded."""
    return None if repeats_final(session, record, last) else "run_ended"


def worker_after_handing_back(session: Any, record: Any, run: Facts) -> str | None:
    return None if repeats_final(session, record, run) else "stale_generation"


def repeats_final(session: Any, record: Any, run: Facts) -> bool:
    if not isinstance(record, Report) or run["final"] is None:
        return False
    worker, generation, no = run["final"]
    return (record.worker_id, record.generation) == (worker, generation) and record.no <= no


def claim(session: Any, record: Claim, run: Facts) -> str | None:
    me = (record.worker_id, record.inbox)
    if run["owner"] is not None:
        return None if run["owner"] == me else "already_owned"
    if run["status"] != "running":
        return "not_running"
    run.update(owner=me, unclaimed=0, offer_ends=None)
    run["lease_ends"] = session.now + run["policy"]["leaseMs"]
    return None


def renew(session: Any, record: Renew, run: Facts) -> None:
    if record.no <= run["renewal_no"]:
        return
    run["renewal_no"] = record.no
    run["lease_ends"] = session.now + run["policy"]["leaseMs"]
    if run["status"] == "cancelling" or record.suspended or naive_work.only_waits(session, run):
        return
    run["idle"] += 1
    if run["idle"] >= max([run["policy"]["progressRenewals"], *run["own_limits"].values()]):
        session.finish(run, "timed_out")


def lose(session: Any, run: Facts, counts: bool) -> None:
    """A lease ends without a final report: lost by its timer, or given back."""
    if run["status"] == "cancelling":
        session.finish(run, "cancelled", forced=True)
        return
    naive_work.close_what_the_holder_had(session, run)
    run["status"] = "running"
    run["lost"] += 1 if counts else 0
    if run["recovery"] == "fail" or run["lost"] >= run["max_attempts"]:
        session.finish(run, "failed", retryable=True)
    else:
        session.offer(run)


def notice(session: Any, record: Notice) -> None:
    """Section 10: what became of a child's input; after the parent's end a receipt and nothing else."""
    run = session.active()
    call = session.calls.get(record.call_id)
    if run is None or call is None or call["run"] != run["no"] or call["state"] != "open":
        return
    call["state"] = "ended"
    if run["status"] == "cancelling":
        session.end_cancelled_if_nothing_is_open(run)


# -- section 11: deadlines -----------------------------------------------------------------------------------------


def deadlines(session: Any) -> list[tuple[int, str, str]]:
    """Every armed deadline: (when, kind, subject)."""
    run = session.active()
    armed = [(entry["expires"], "queued", entry["id"]) for entry in session.pending]
    if run is not None:
        cancelling = run["status"] == "cancelling"
        armed += [(run["offer_ends"], "offer", ""), (run["lease_ends"], "lease", ""),
                  (run["cancel_ends"], "cancel", ""),
                  (run["compaction_ends"], "compaction", run["compaction"]),
                  (None if cancelling else run["timeout_at"], "run", "")]  # fmt: skip
        armed += [(key["approval_ends"], "approval", f"{key['name']}/{key['key']}")
                  for key in naive_work.open_keys(session, run) if key["state"] == "waiting"]  # fmt: skip
    return [(at, kind, subject) for at, kind, subject in armed if at is not None]


def timer(session: Any, record: Timer) -> None:
    run = session.active()
    due = [(kind, subject) for at, kind, subject in deadlines(session) if at <= session.now]
    if (record.kind, record.subject) not in due:
        return
    if record.kind == "queued":
        session.pending = [entry for entry in session.pending if entry["id"] != record.subject]
        session.settle(record.subject, "expired")
        return
    assert run is not None
    if session.numbers.get(record.run_id) != run["no"] or record.generation != run["generation"]:
        return
    match record.kind:
        case "offer":
            offer_unclaimed(session, run)
        case "lease":
            lose(session, run, counts=True)
        case "run":
            session.finish(run, "timed_out")
        case "cancel":
            session.finish(run, "cancelled", forced=True)
        case "compaction":
            naive_work.compaction_ended(run, run["compaction"])
        case "approval":
            name, _, key = record.subject.partition("/")
            naive_work.void(session.keys[name, key])


def offer_unclaimed(session: Any, run: Facts) -> None:
    if not run["no_room"]:
        run["unclaimed"] += 1
    if run["unclaimed"] >= run["policy"]["noWorkerOffers"]:
        session.finish(run, "timed_out")
    else:
        session.offer(run)
