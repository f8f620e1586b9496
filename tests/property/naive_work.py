"""What a holder reports, judged naively: branches, steers, the gate of actions, the final report (sections 6 to 10).

Part of `naive_model`: plain functions over its dicts. A branch is open if it stands in a list here; an action is open
while its state is waiting, approved or permitted, a child while its call is open.
"""

from __future__ import annotations

from typing import Any

import orjson

from onepen.schemas.worker_records import Report

Facts = dict[str, Any]
STARTS = ("model.request.started", "tool.started", "action.requested", "subtask.started", "run.compaction_started",
          "input.applied")  # fmt: skip
OPEN_STATES = ("waiting", "approved", "permitted")

COMPARED = 16
"""So many reports, the last ones, are compared with what is sent again (decision 0003)."""


def open_keys(session: Any, run: Facts) -> list[Facts]:
    return [key for key in session.keys.values() if key["run"] == run["no"] and key["state"] in OPEN_STATES]


def open_calls(session: Any, run: Facts) -> list[Facts]:
    return [call for call in session.calls.values() if call["run"] == run["no"] and call["state"] == "open"]


def branches(session: Any, run: Facts) -> list[tuple[str, str]]:
    """Everything that was started and has no end yet."""
    found = [("model_request", name) for name in run["model"]] + [("tool", name) for name in run["tool"]]
    if run["compaction"] is not None:
        found.append(("compaction", run["compaction"]))
    for key in open_keys(session, run):
        found.append(("action", f"{key['name']}/{key['key']}"))
        if key["state"] == "waiting":
            found.append(("approval", f"{key['name']}/{key['key']}"))
    return found + [("subtask", call["id"]) for call in open_calls(session, run)]


def only_waits(session: Any, run: Facts) -> bool:
    """Approvals (with the actions they hold back) or children are the only open branches."""
    waiting = [f"{key['name']}/{key['key']}" for key in open_keys(session, run) if key["state"] == "waiting"]
    found = branches(session, run)
    return bool(found) and all(
        kind in ("approval", "subtask") or (kind == "action" and name in waiting) for kind, name in found
    )


def void(key: Facts) -> None:
    """An action that was asked for and is not permitted any more. What was in doubt before is in doubt again."""
    key["state"] = "in_doubt" if key["was_in_doubt"] else "voided"


def void_in_receipt(run: Facts, key: Facts) -> None:
    """Voided by a cancel or by the end of its run, which the terminal event names (a doubt it names as a doubt)."""
    void(key)
    if key["state"] == "voided":
        run["voided"].append((key["name"], key["key"]))


def close_what_the_holder_had(session: Any, run: Facts) -> None:
    run.update(model=[], tool=[], own_limits={}, compaction=None, compaction_ends=None)
    for key in open_keys(session, run):
        if key["state"] == "permitted":
            key["state"] = "in_doubt"


def close_everything(session: Any, run: Facts, status: str) -> None:
    close_what_the_holder_had(session, run)
    for key in open_keys(session, run):
        void_in_receipt(run, key)
    for call in open_calls(session, run):
        call["state"] = "detached" if status == "completed" else "aborted"


# -- reports -------------------------------------------------------------------------------------------------------


def report(session: Any, record: Report, run: Facts) -> str | None:
    if record.no in run["reports"]:
        known = record.no <= run["report_no"] - COMPARED or run["reports"][record.no] == record.events
        return None if known else "report_conflict"
    if record.no != run["report_no"] + 1:
        return "report_gap"
    run["report_no"] = record.no
    run["reports"][record.no] = record.events
    run["idle"] = 0
    for event in record.events:
        reason = judge(session, run, event.type, orjson.loads(event.payload))
        if reason is not None:
            session.told["events"].append(reason)
    return None


def judge(session: Any, run: Facts, kind: str, payload: Facts) -> str | None:
    """Why one event of a report is refused; None if it is taken."""
    if run["status"] not in ("running", "compacting", "cancelling"):
        return "run_ended"
    if run["status"] == "cancelling" and kind in STARTS:
        return "run_cancelling"
    match kind:
        case "message.completed" | "x.note":
            return None
        case "model.request.started":
            return _opened(run["model"], payload["turnId"])
        case "model.request.finished":
            return _closed(run["model"], payload["turnId"])
        case "tool.started":
            return _tool_started(run, payload)
        case "tool.finished":
            run["own_limits"].pop(payload["toolCallId"], None)
            return _closed(run["tool"], payload["toolCallId"])
        case "run.compaction_started":
            return _compaction_started(session, run, payload["compactionId"])
        case "run.compaction_finished" | "run.compaction_failed":
            return compaction_ended(run, payload["compactionId"])
        case "input.applied":
            return _applied(session, run, payload["inputId"])
        case "action.requested":
            return _action_requested(session, run, payload)
        case "action.finished":
            return _action_finished(session, run, payload)
        case "subtask.started":
            return _subtask(session, run, payload)
        case _:
            return _final(session, run, payload)


def _opened(branch_ids: list[str], name: str) -> str | None:
    if name in branch_ids:
        return "already_open"
    branch_ids.append(name)
    return None


def _closed(branch_ids: list[str], name: str) -> str | None:
    if name not in branch_ids:
        return "not_open"
    branch_ids.remove(name)
    return None


def _tool_started(run: Facts, payload: Facts) -> str | None:
    reason = _opened(run["tool"], payload["toolCallId"])
    if reason is None and "progressRenewals" in payload:
        run["own_limits"][payload["toolCallId"]] = payload["progressRenewals"]
    return reason


def _compaction_started(session: Any, run: Facts, name: str) -> str | None:
    if run["status"] == "compacting":
        return "already_open"
    run.update(status="compacting", compaction=name, compaction_ends=session.now + run["policy"]["compactionMs"])
    return None


def compaction_ended(run: Facts, name: str) -> str | None:
    if run["compaction"] != name:
        return "not_open"
    run.update(compaction=None, compaction_ends=None)
    if run["status"] == "compacting":
        run["status"] = "running"
    return None


def _applied(session: Any, run: Facts, name: str) -> str | None:
    if run["status"] == "compacting":
        return "compacting"
    mine = [entry["id"] for entry in session.pending if entry["for_run"] == run["no"]]
    if name not in mine:
        return "unknown_steer"
    if name != mine[0]:
        return "out_of_order"
    session.pending = [entry for entry in session.pending if entry["id"] != name]
    session.settle(name, "consumed")
    return None


def _subtask(session: Any, run: Facts, payload: Facts) -> str | None:
    call = session.calls.get(payload["callId"])
    asked = (payload["sessionId"], payload["content"])
    if call is not None and call["lineage"] == run["lineage"]:
        if call["asked"] != asked:
            return "key_conflict"
        return None if call["state"] == "open" else "already_ended"
    if payload["sessionId"] == "session-42":
        return "cycle"
    session.calls[payload["callId"]] = {
        "id": payload["callId"], "run": run["no"], "lineage": run["lineage"], "asked": asked, "state": "open",
    }  # fmt: skip
    return None


def _final(session: Any, run: Facts, payload: Facts) -> str | None:
    """The end that the holder reports; of a run in cancelling it ends the holder's own part, and the run if that is
    all there was."""
    status = payload["terminalStatus"]
    cancelling = run["status"] == "cancelling"
    if not cancelling and status == "completed" and any(kind != "subtask" for kind, _ in branches(session, run)):
        return "still_open"
    run["final"] = (run["owner"][0], run["generation"], run["report_no"])
    if cancelling:
        close_what_the_holder_had(session, run)
        session.take_right_away(run)
        session.end_cancelled_if_nothing_is_open(run)
    else:
        session.finish(run, status, retryable=bool(payload.get("retryable")))
    return None


# -- section 8: the gate of actions --------------------------------------------------------------------------------


def remembered(session: Any, key: Facts) -> bool:
    """A key is remembered while a run of its lineage is active, and 24 h beyond the end of the last one."""
    last = [run for run in session.runs if run["lineage"] == key["lineage"]][-1]
    return last["ended"] is None or session.now <= last["ended"] + 24 * 3_600_000


def _action_requested(session: Any, run: Facts, payload: Facts) -> str | None:
    key = session.keys.get((payload["name"], payload["actionKey"]))
    if key is None or not remembered(session, key) or key["state"] in ("voided", "not_performed"):
        return _ask(session, run, payload, None)
    if key["digest"] != payload["argsDigest"]:
        return "key_conflict"
    state = key["state"]
    if state == "waiting":
        return None
    if state == "approved":
        blocked = not key["was_in_doubt"] and _other_doubts(session, run, payload)
        return "in_doubt" if blocked else _permit(session, run, key)
    if state == "permitted":
        return "in_flight"
    if state == "in_doubt":
        resolution = payload.get("resolution")
        if resolution == "reconciled_not_performed" or (resolution == "repeat" and key["honours"]):
            return _ask(session, run, payload, key)
        return "in_doubt"
    return "already_ended"


def _other_doubts(session: Any, run: Facts, payload: Facts) -> bool:
    """Whether another key of that name is in doubt in this lineage, or repeats a doubt and has not ended: no key but
    the doubted ones is permitted then."""
    return any(
        (key["state"] == "in_doubt" or (key["was_in_doubt"] and key["state"] in OPEN_STATES))
        and key["lineage"] == run["lineage"]
        and key["key"] != payload["actionKey"]
        for key in session.keys.values()
        if key["name"] == payload["name"]
    )


def _ask(session: Any, run: Facts, payload: Facts, doubted: Facts | None) -> str | None:
    """Open the key: permitted at once, or after the approval of a person."""
    name = payload["name"]
    if doubted is None and _other_doubts(session, run, payload):
        return "in_doubt"
    people = bool(payload.get("approval")) or name in run["policy"]["approvalActions"]
    repeats = doubted is not None and payload["resolution"] == "repeat"
    same = doubted if doubted is not None and repeats and doubted["run"] == run["no"] else {}
    key: Facts = {
        "name": name, "key": payload["actionKey"], "digest": payload["argsDigest"], "state": "waiting",
        "run": run["no"], "lineage": run["lineage"], "honours": bool(payload.get("honoursKeys")) or repeats,
        "asked_people": people, "approval_ends": session.now + run["policy"]["approvalMs"] if people else None,
        "was_in_doubt": repeats, "deadline": None, "answer": None, "generation": same.get("generation"),
        "report": same.get("report"),
    }  # fmt: skip
    if not people:
        reason = _permit(session, run, key)
        if reason is not None:
            return reason
    session.keys[name, payload["actionKey"]] = key
    return None


def _permit(session: Any, run: Facts, key: Facts) -> str | None:
    """The right to begin, never past the lease or the run."""
    run_ends = run["timeout_at"] if run["left"] is None else session.now + run["left"]
    deadline = min(session.now + run["policy"]["permitMs"], run["lease_ends"], run_ends)
    if deadline <= session.now:
        return "lease_expired"
    key.update(state="permitted", deadline=deadline, generation=run["generation"], report=run["report_no"])
    session.told["permitted"].append((key["name"], key["key"], deadline))
    return None


def late_evidence(session: Any, record: Report) -> None:
    """A refused report of the generation that held a permit settles the doubt, once the run is over."""
    run = session.active()
    for event in record.events:
        payload = orjson.loads(event.payload)
        key = session.keys.get((payload.get("name"), payload.get("actionKey")))
        if event.type != "action.finished" or key is None or key["state"] != "in_doubt":
            continue
        named = (session.numbers.get(record.run_id), record.generation)
        told = payload.get("reportNo", key["report"]) == key["report"]
        if key["was_in_doubt"] and payload["status"] == "not_performed":
            continue
        if named == (key["run"], key["generation"]) and (run is None or run["no"] != key["run"]) and \
                remembered(session, key) and told:  # fmt: skip
            key["state"] = payload["status"]


def _action_finished(session: Any, run: Facts, payload: Facts) -> str | None:
    key = session.keys.get((payload["name"], payload["actionKey"]))
    if key is None or key["run"] != run["no"] or key["state"] != "permitted":
        return "not_open"
    if payload.get("reportNo", key["report"]) != key["report"]:
        return "not_open"
    # What was in doubt before a repeat is so still when only the repeat was not performed.
    key["state"] = "in_doubt" if key["was_in_doubt"] and payload["status"] == "not_performed" else payload["status"]
    return None
