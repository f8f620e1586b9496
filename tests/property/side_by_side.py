"""The same facts, as the core and the naive model each write them down: what followed from a record, and the state."""

from __future__ import annotations

from typing import Any

import orjson

from onepen.processors import timers
from onepen.processors.decide import Decision
from onepen.schemas.limits import REFUSED_RECEIPTS_PER_GENERATION
from onepen.schemas.statuses import TimerKind
from tests.property import naive_right, naive_work
from tests.property.naive_model import NaiveSession
from tests.unit.processors.stage import Stage


def core_told(stage: Stage, decision: Decision) -> dict[str, Any]:
    """What followed from one record, as the model tells it."""
    told: dict[str, Any] = {
        "verdict": None, "reason": None, "settled": {}, "worker": None, "events": [], "permitted": [], "finished": [],
        "offers": [offer.generation for offer in decision.offers],
    }  # fmt: skip
    for receipt in decision.receipts:
        if receipt.kind == "input":
            if receipt.offset == stage.offset and receipt.verdict is not None:
                told["verdict"], told["reason"] = str(receipt.verdict), receipt.reason
            if receipt.disposition is not None:
                reason = receipt.reason if receipt.disposition == "discarded" else None
                told["settled"][receipt.input_id] = (str(receipt.disposition), reason)
        elif receipt.kind == "worker":
            events = "refused" in orjson.loads(receipt.detail or b"{}")
            told.update({"events": [receipt.reason]} if events else {"worker": receipt.reason})
    for event in decision.events:
        payload = orjson.loads(event.payload)
        if event.type == "action.permitted":
            told["permitted"].append((payload["name"], payload["actionKey"], payload["deadlineAt"]))
        elif event.type == "run.finished":
            listed = [sorted((one["name"], one["actionKey"]) for one in payload.get(name, ())) for name in
                      ("inDoubt", "voided")]  # fmt: skip
            told["finished"].append((event.run_no, payload["terminalStatus"], payload.get("forced", False),
                                     payload.get("retryable", False), *listed))  # fmt: skip
    return told


def evidence_is_full(stage: Stage) -> bool:
    """Refusals are only counted by now: the receipts of a generation are bounded, which the model knows nothing of."""
    head = stage.session.head
    counts = [one.refused_records for one in (head, head.run, head.last) if one is not None]
    return max(counts) > REFUSED_RECEIPTS_PER_GENERATION


def core_branches(stage: Stage) -> set[tuple[str, str]]:
    return {(branch.kind.value, branch.id) for _, branch in stage.session.branches.items()}


def core_state(stage: Stage, forgotten: list[tuple[str, str]]) -> dict[str, Any]:
    head = stage.session.head
    state: dict[str, Any] = {
        "runs": head.run_no,
        "last": None if head.last is None else (head.last.run_no, head.last.status.value),
        "erased": head.erased,
        "pending": [(one.input_id, one.for_run != "", one.front) for one in head.pending],
        "keys": {
            (one.name, one.key): str(one.state)
            for _, one in stage.session.actions.items()
            if (one.name, one.key) not in forgotten
        },
        "deadlines": sorted(
            (one.timer.deadline_ms, str(one.timer.kind), one.timer.subject)
            for one in timers.armed(stage.session)
            if one.timer.kind != TimerKind.FORGET
        ),
        "run": None,
    }
    if head.run is not None:
        run = head.run
        state["run"] = {
            "status": run.status.value, "generation": run.generation, "lost": run.losses,
            "report_no": run.report_no if run.owner else 0,
            "owner": (run.owner, run.inbox) if run.owner else None, "branches": core_branches(stage),
        }  # fmt: skip
    return state


def model_state(model: NaiveSession, forgotten: list[tuple[str, str]]) -> dict[str, Any]:
    run = model.active()
    ended = [one for one in model.runs if one["ended"] is not None]
    gone = model.erased and run is None
    return {
        "runs": len(model.runs),
        "last": None if not ended or gone else (ended[-1]["no"], ended[-1]["status"]),
        "erased": model.erased,
        "pending": [(one["id"], one["for_run"] is not None, one["front"]) for one in model.pending],
        "keys": {name: key["state"] for name, key in model.keys.items() if name not in forgotten},
        "deadlines": sorted(naive_right.deadlines(model)),
        "run": run and {
            "status": run["status"], "generation": run["generation"], "lost": run["lost"], "owner": run["owner"],
            "report_no": run["report_no"] if run["owner"] else 0, "branches": set(naive_work.branches(model, run)),
        },
    }  # fmt: skip


def difference(record: Any, found: dict[str, Any], expected: dict[str, Any]) -> str:
    lines = [f"{name}: core {found[name]!r}, model {expected[name]!r}" for name in found
             if found[name] != expected[name]]  # fmt: skip
    return f"{record!r}\n  " + "\n  ".join(lines)
