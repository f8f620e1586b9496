"""A deliberately naive session, written by hand from the protocol: what must become of every record.

Nothing of the core is imported, nothing is indexed, kept compact or clever: one list of runs, one list of what is
pending, one dict of inputs, one of action keys. Where the protocol is silent it follows infra/decisions/0003 and the
notes in processors/README.md. Inputs and the course of runs are here; `naive_right` judges who may write and what time
does, `naive_work` what a holder reports.

`step` answers in a dict what followed; the lists and dicts afterwards are the state that the core must agree with.
"""

from __future__ import annotations

from typing import Any

from onepen.schemas.inputs import Input
from onepen.schemas.notices import Notice
from onepen.schemas.timers import Timer
from onepen.schemas.worker_records import Report
from tests.property import naive_right, naive_work

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
ACTIVE = ("running", "compacting", "cancelling")

DEFAULTS: dict[str, Any] = {
    "onBusy": "queue", "ifMissed": "queue", "offerMs": 5_000, "offerMaxMs": 30_000, "leaseMs": 30_000,
    "permitMs": 10_000, "runTimeoutMs": HOUR_MS, "cancelMs": 30_000, "approvalMs": DAY_MS, "queuedTtlMs": None,
    "maxAttempts": 3, "pendingMax": 20, "approvalActions": [], "compactionMs": 300_000, "noWorkerOffers": 20,
    "progressRenewals": 60, "recovery": "resume", "autoSteers": ["ui", "remote"],
}  # fmt: skip

Facts = dict[str, Any]


class NaiveSession:
    """One session. Runs are known by their numbers; a token is good unless it is the forged one."""

    def __init__(self) -> None:
        self.now = 0
        self.policy = dict(DEFAULTS)
        self.runs: list[Facts] = []
        self.pending: list[Facts] = []
        self.inputs: dict[str, Facts] = {}
        self.keys: dict[tuple[str, str], Facts] = {}
        self.calls: dict[str, Facts] = {}
        self.erased = False
        self.told: Facts = {}

    def step(self, record: Any, stamp: int, run_numbers: dict[str, int]) -> Facts:
        """Take one record; `run_numbers` says which number each run id of the session has."""
        self.now = max(self.now, stamp)
        self.numbers = run_numbers
        self.told = {
            "verdict": None, "reason": None, "settled": {}, "worker": None, "events": [], "permitted": [],
            "finished": [], "offers": [],
        }  # fmt: skip
        if isinstance(record, Input):
            self.client(record)
        elif isinstance(record, Timer):
            naive_right.timer(self, record)
        elif isinstance(record, Notice):
            naive_right.notice(self, record)
        else:
            reason = naive_right.worker(self, record)
            if isinstance(record, Report) and reason in ("run_ended", "stale_generation", "not_owner"):
                naive_work.late_evidence(self, record)
            counted_only = self.erased and self.active() is None
            self.told["worker"] = None if counted_only else reason
            if counted_only:  # also what the report that ended it was refused in part
                self.told["events"] = []
        run = self.active()
        if run is not None:
            self.keep_clock(run)
        return self.told

    def active(self) -> Facts | None:
        return self.runs[-1] if self.runs and self.runs[-1]["status"] in ACTIVE else None

    # -- what is told ----------------------------------------------------------------------------------------------

    def verdict(self, record: Input, verdict: str, reason: str | None = None, run: int | None = None) -> None:
        """The one verdict of an input; it takes the id."""
        self.told["verdict"], self.told["reason"] = verdict, reason
        self.inputs[record.input_id] = {"record": record, "verdict": verdict, "run": run, "disposition": None}
        if verdict == "refused":
            self.settle(record.input_id, "refused")

    def settle(self, input_id: str, disposition: str, reason: str | None = None) -> None:
        """The one final disposition of an input."""
        assert self.inputs[input_id]["disposition"] is None
        self.inputs[input_id]["disposition"] = disposition
        self.told["settled"][input_id] = (disposition, reason)

    def no_verdict(self, record: Input, verdict: str, reason: str | None) -> None:
        """An answer that does not take the id, or leaves it with its first verdict."""
        self.told["verdict"], self.told["reason"] = verdict, reason
        self.told["settled"][record.input_id] = (verdict, None)

    # -- section 4: inputs -----------------------------------------------------------------------------------------

    def client(self, record: Input) -> None:
        if record.issued_at_ms < self.now - DAY_MS:
            self.no_verdict(record, "refused", "too_old")
        elif record.issued_at_ms > self.now + HOUR_MS:
            self.no_verdict(record, "refused", "from_the_future")
        elif record.input_id in self.inputs:
            same = self.inputs[record.input_id]["record"] == record
            self.no_verdict(record, *(("duplicate", None) if same else ("refused", "input_id_reused")))
        elif self.erased:
            self.verdict(record, "refused", "erased")
        elif not self.well_formed(record):
            self.verdict(record, "refused", "invalid")
        elif record.retry_of is not None:
            self.retry(record)
        else:
            modes = {"prompt": self.prompt, "follow_up": self.follow_up, "steer": self.steer, "auto": self.auto}
            modes |= {"abort": self.abort, "answer": self.answer, "erase": self.erase}
            modes[record.mode](record)

    def well_formed(self, record: Input) -> bool:
        if record.mode == "abort":
            return record.target_kind is not None
        if record.mode in ("answer", "erase"):
            return True
        may_steer = record.mode in ("steer", "auto") or record.on_busy == "steer"
        return bool(record.content or record.retry_of) and (record.expected_run_id is None or may_steer)

    def prompt(self, record: Input, missed: bool = False) -> None:
        run = self.active()
        on_busy = record.on_busy or self.policy["onBusy"]
        if run is None:
            self.start(record)
        elif on_busy == "reject":
            self.verdict(record, "refused", "busy")
        elif on_busy == "steer" and run["status"] != "cancelling" and not missed:
            self.steer(record)
        elif on_busy == "interrupt":
            self.interrupt(record, run)
        else:
            self.queue(record)

    def interrupt(self, record: Input, run: Facts) -> None:
        if not self.room(record):
            self.verdict(record, "refused", "queue_full")
            return
        place = len([entry for entry in self.pending if entry["front"]])
        self.verdict(record, "queued")
        self.pending.insert(place, self.entry(record, None, front=True))
        if run["status"] != "cancelling":
            self.cancel(run)

    def follow_up(self, record: Input) -> None:
        if self.active() is None:
            self.start(record)
        else:
            self.queue(record)

    def steer(self, record: Input) -> None:
        run = self.active()
        expected = record.expected_run_id
        meets = run is not None and run["status"] != "cancelling"
        if meets and expected is not None and self.numbers.get(expected) != run["no"]:  # type: ignore[index]
            meets = False
        if not meets:
            if (record.if_missed or self.policy["ifMissed"]) == "reject":
                self.verdict(record, "refused", "missed")
            else:
                self.prompt(record, missed=True)
        elif not self.room(record):
            self.verdict(record, "refused", "queue_full")
        else:
            self.verdict(record, "steered", run=run["no"])  # type: ignore[index]
            self.pending.append(self.entry(record, run["no"]))  # type: ignore[index]

    def auto(self, record: Input) -> None:
        run = self.active()
        if run is not None and run["status"] != "cancelling" and record.source in self.policy["autoSteers"]:
            self.steer(record)
        else:
            self.follow_up(record)

    def retry(self, record: Input) -> None:
        last = self.runs[-1] if self.runs else None
        named = self.numbers.get(record.retry_of or "")
        if last is None or last["no"] != named or not last["retryable"] or self.now > last["ended"] + DAY_MS:
            self.verdict(record, "refused", "not_retryable")
        else:
            self.start(record, again=last)

    def queue(self, record: Input) -> None:
        if not self.room(record):
            self.verdict(record, "refused", "queue_full")
            return
        self.verdict(record, "queued")
        self.pending.append(self.entry(record, None))

    def room(self, record: Input) -> bool:
        return bool(len(self.pending) < self.policy["pendingMax"])

    def entry(self, record: Input, for_run: int | None, front: bool = False) -> Facts:
        ttl = record.ttl_ms if record.ttl_ms is not None else self.policy["queuedTtlMs"]
        return {
            "id": record.input_id, "for_run": for_run, "front": front, "record": record,
            "if_missed": record.if_missed or self.policy["ifMissed"],
            "expires": None if ttl is None else self.now + ttl,
        }  # fmt: skip

    def abort(self, record: Input) -> None:
        run = self.active()
        if record.target_kind == "input":
            self.abort_input(record, run)
        elif run is None:
            self.verdict(record, "refused", "no_active_run")
        elif record.target_kind == "run" and self.numbers.get(record.target_id or "") != run["no"]:
            self.verdict(record, "refused", "stale_run")
        else:
            self.abort_run(record, run)

    def abort_input(self, record: Input, run: Facts | None) -> None:
        if not self.remembered(record.target_id or "", run):
            self.verdict(record, "refused", "unknown_input")
        elif any(entry["id"] == record.target_id for entry in self.pending):
            self.pending = [entry for entry in self.pending if entry["id"] != record.target_id]
            self.settle(record.target_id or "", "withdrawn")
            self.verdict(record, "withdrawn")
            self.settle(record.input_id, "done")
        elif run is not None and run["input"] == record.target_id:
            self.abort_run(record, run)
        else:
            self.verdict(record, "refused", "already_settled")

    def remembered(self, input_id: str, run: Facts | None) -> bool:
        """An id is remembered for 24 h, and as long as its input is pending or its run is active."""
        known = self.inputs.get(input_id)
        if known is None:
            return False
        if known["disposition"] is None or (run is not None and known["run"] == run["no"]):
            return True
        return bool(known["record"].issued_at_ms + DAY_MS >= self.now)

    def abort_run(self, record: Input, run: Facts) -> None:
        self.verdict(record, "cancelling", run=run["no"])
        run["aborts"].append(record.input_id)
        if record.scope == "run_and_queue":
            self.discard_pending()
        if run["status"] != "cancelling":
            self.cancel(run)

    def discard_pending(self) -> None:
        for entry in self.pending:
            self.settle(entry["id"], "discarded", "aborted")
        self.pending = []

    def erase(self, record: Input) -> None:
        run = self.active()
        self.verdict(record, "erased")
        self.erased = True
        if run is None:
            self.settle(record.input_id, "done")
            self.forget_everything()
            return
        run["aborts"].append(record.input_id)
        self.discard_pending()
        if run["status"] != "cancelling":
            self.cancel(run)

    def forget_everything(self) -> None:
        """What remains of an erased session is its run counter; late evidence is only counted."""
        self.keys, self.calls = {}, {}

    def answer(self, record: Input) -> None:
        """Approve or deny: for an approval. Any other decision tells how an action in doubt ended, after its run."""
        if record.decision in ("approve", "deny"):
            self.answer_approval(record)
        else:
            self.answer_doubt(record)

    def answer_doubt(self, record: Input) -> None:
        run = self.active()
        key = self.keys.get((record.action_name or "", record.action_key or ""))
        if key is None or (run is not None and key["run"] == run["no"]) or not naive_work.remembered(self, key):
            self.verdict(record, "refused", "unknown_approval")
        elif key["state"] != "in_doubt":
            self.verdict(record, "refused", "already_answered")
        elif key["digest"] != record.args_digest:
            self.verdict(record, "refused", "digest_mismatch")
        else:
            key["state"] = record.decision
            self.answered(record)

    def answer_approval(self, record: Input) -> None:
        run = self.active()
        key = self.keys.get((record.action_name or "", record.action_key or ""))
        if run is None:
            self.verdict(record, "refused", "no_active_run")
        elif run["status"] == "cancelling":
            self.verdict(record, "refused", "cancelled")
        elif key is None or key["run"] != run["no"] or not key["asked_people"]:
            self.verdict(record, "refused", "unknown_approval")
        elif key["answer"] is not None:
            self.verdict(record, "refused", "already_answered")
        elif key["state"] != "waiting":
            self.verdict(record, "refused", "unknown_approval")
        elif key["digest"] != record.args_digest:
            self.verdict(record, "refused", "digest_mismatch")
        else:
            key["answer"] = record.decision
            if record.decision == "approve":
                key["state"] = "approved"
            else:
                naive_work.void(key)
            self.answered(record)

    def answered(self, record: Input) -> None:
        active = self.active()
        self.verdict(record, "answered", run=None if active is None else active["no"])
        self.settle(record.input_id, "done")

    # -- runs ------------------------------------------------------------------------------------------------------

    def start(self, record: Input, again: Facts | None = None) -> None:
        """A run begins. `again`: the run whose work a retry takes over."""
        no = len(self.runs) + 1
        if record.input_id not in self.inputs:
            self.verdict(record, "started", run=no)
        self.settle(record.input_id, "consumed")
        self.inputs[record.input_id]["run"] = no
        options = again["options"] if again is not None else record
        policy = dict(self.policy)
        run: Facts = {
            # what holds for all of it
            "no": no, "input": record.input_id, "options": options, "policy": policy,
            "lineage": no if again is None else again["lineage"], "recovery": options.recovery or policy["recovery"],
            "max_attempts": options.max_attempts or policy["maxAttempts"],
            # who may write
            "status": "running", "generation": 0, "owner": None, "lost": 0, "unclaimed": 0, "no_room": False,
            "report_no": 0, "reports": {}, "renewal_no": 0, "idle": 0, "final": None,
            # what is open, apart from actions and calls
            "model": [], "tool": [], "own_limits": {}, "compaction": None,
            # deadlines; `left` is what the run has left while its clock stands still
            "lease_ends": None, "offer_ends": None, "compaction_ends": None, "cancel_ends": None,
            "timeout_at": self.now + (options.timeout_ms or policy["runTimeoutMs"]), "left": None,
            # the end
            "aborts": [], "voided": [], "retryable": False, "ended": None,
        }  # fmt: skip
        self.runs.append(run)
        self.offer(run)

    def offer(self, run: Facts) -> None:
        """The right to write is nobody's: one more generation, and an offer of it."""
        length = min(run["policy"]["offerMs"] * 2 ** run["unclaimed"], run["policy"]["offerMaxMs"])
        self.take_right_away(run)
        run["offer_ends"] = self.now + length
        self.told["offers"].append(run["generation"])

    def take_right_away(self, run: Facts) -> None:
        run.update(owner=None, lease_ends=None, offer_ends=None, no_room=False, generation=run["generation"] + 1)
        run.update(report_no=0, reports={}, renewal_no=0, idle=0)

    def cancel(self, run: Facts) -> None:
        """Section 7: the stop is decided; who still holds something may end it until the deadline."""
        run["status"] = "cancelling"
        run["cancel_ends"] = self.now + run["policy"]["cancelMs"]
        for key in naive_work.open_keys(self, run):
            if key["state"] in ("waiting", "approved"):
                naive_work.void_in_receipt(run, key)
        if run["owner"] is None:
            self.take_right_away(run)
            self.end_cancelled_if_nothing_is_open(run)

    def end_cancelled_if_nothing_is_open(self, run: Facts) -> None:
        if run["owner"] is None and not naive_work.branches(self, run):
            self.finish(run, "cancelled")

    def finish(self, run: Facts, status: str, forced: bool = False, retryable: bool = False) -> None:
        """The end of a run, its steers and its aborts; the next run starts in the same step."""
        naive_work.close_everything(self, run, status)
        run.update(status=status, retryable=retryable or status == "timed_out", ended=self.now)
        doubts = sorted((key["name"], key["key"]) for key in self.keys.values()
                        if key["state"] == "in_doubt" and key["lineage"] == run["lineage"])  # fmt: skip
        self.told["finished"].append((run["no"], status, forced, run["retryable"], doubts, sorted(run["voided"])))
        for entry in list(self.pending):
            if entry["for_run"] == run["no"]:
                entry["for_run"] = None
                if entry["if_missed"] == "reject":
                    self.pending.remove(entry)
                    self.settle(entry["id"], "discarded", "missed")
        for input_id in run["aborts"]:
            self.settle(input_id, "done")
        if self.erased:
            self.forget_everything()
        while self.pending and self.active() is None:
            entry = self.pending.pop(0)
            if entry["expires"] is not None and entry["expires"] <= self.now:
                self.settle(entry["id"], "expired")
            else:
                self.start(entry["record"])

    def keep_clock(self, run: Facts) -> None:
        """The run's deadline stands still while the run only waits for a person or a child."""
        if naive_work.only_waits(self, run):
            if run["left"] is None and run["timeout_at"] is not None:
                run["left"], run["timeout_at"] = max(run["timeout_at"] - self.now, 0), None
        elif run["left"] is not None:
            run["timeout_at"], run["left"] = self.now + run["left"], None
