"""The founding story, played on the real thing: one session, many hands, one pen.

An operator and the scheduler write at the same moment; a steer, a follow-up, an abort while a mail waits for approval;
a worker that freezes and wakes too late, one that is killed, a run that takes too long, an input sent twice. Then the
eight questions of the launch checklist are answered from outside (`onepen.demo.checks`).

Needs addresses only (Kafka, PostgreSQL, prefix); brings its own tenant, policy, sessions, workers and mail server.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from onepen.demo.answers import Agreement, compare_views, print_agreement, print_answers
from onepen.demo.cast import Cast
from onepen.demo.checks import Answer, Evidence, Expectations, LoggedEvent, answer_all, exit_code
from onepen.demo.gather import gather, starts_now
from onepen.demo.mail_server import MailServer
from onepen.demo.stage import Stage
from onepen.demo.story_worker import SEND_MAIL
from onepen.schemas import events as names
from onepen.schemas.errors import Fatal
from onepen.schemas.policies import PolicyRecord, policy_body
from onepen.streams.client import Client, Sent
from onepen.streams.policy_log import policies_in_force, put_policy
from onepen.streams.settings import Settings

__all__ = ["POLICY", "TENANT_ID", "Told", "play", "tell"]

Scripts = list[list[list[Any]]]

TENANT_ID: Final = 4242
USER_ID: Final = 7
POLICY_VERSION: Final = 1
POLICY: Final[dict[str, Any]] = {
    "leaseMs": 3_000,
    "renewMs": 1_000,
    "permitMs": 1_500,
    "cancelMs": 4_000,
    "offerMs": 1_000,
    "offerMaxMs": 1_000,
    "runTimeoutMs": 120_000,
    "approvalActions": [SEND_MAIL],
}
WORKERS: Final = 3
STEP_MS: Final = 10_000
"""How long the log may take for one step of the story."""
LEASE_LOSS_MS: Final = 15_000
TAKEOVER_MS: Final = 20_000
GATHER_MS: Final = 30_000
TOOL_MS: Final = 700
LONG_MS: Final = 60_000
SLOW_TIMEOUT_MS: Final = 3_000

DESK: Final[Scripts] = [
    [["model", 300], ["tool", "look_up", 300], ["steer"],
     ["together", ["model", LONG_MS], ["tool", "search", LONG_MS], ["mail", "customer@example.com"]]],
    [["model", 200], ["mail", "customer@example.com"], ["say", "The customer has been told."]],
    [["model", 200], ["say", "Nothing else is open."]],
]  # fmt: skip
ERRAND: Final[Scripts] = [[["tool", "search", TOOL_MS], ["model", 200]]]
SLOW: Final[Scripts] = [[["model", LONG_MS]]]


@dataclass
class _Play:
    """What the acts share."""

    settings: Settings
    stage: Stage
    cast: Cast
    client: Client
    mail: MailServer
    nonce: str
    frozen_pid: int = 0

    def session(self, name: str) -> str:
        return f"{name}-{self.nonce}"


@dataclass(frozen=True)
class Told:
    """A story that came to its end, and what the checks say of it."""

    evidence: Evidence
    expected: Expectations
    answers: list[Answer]
    agreement: Agreement
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 only when every answer is green and the live views agree with SQL."""
        return max(exit_code(self.answers), int(not self.agreement.holds))


def play(settings: Settings, console: Console, *, once: bool = False) -> int:
    """Play the story, print the answers: 0 only when every check holds. `once` is the caller's plan for afterwards.

    Raises `OnepenError` when the pipeline cannot be reached; nothing it started is left running.
    """
    try:
        told = tell(settings, console)
    except TimeoutError as error:
        sentences = (f"The story broke off: {error}", *getattr(error, "__notes__", ()))
        console.print(". ".join(sentences), style="bold red", soft_wrap=True)
        return 1
    print_answers(console, told.answers)
    print_agreement(console, told.agreement)
    green = sum(answer.green for answer in told.answers)
    style = "bold green" if told.exit_code == 0 else "bold red"
    console.print(f"{green} of {len(told.answers)} answers green, {told.seconds:.1f} s", style=style)
    return told.exit_code


def tell(settings: Settings, console: Console) -> Told:
    """Play the story live and judge it. Raises `TimeoutError` naming the record that did not come in time."""
    began_s = time.monotonic()
    nonce = f"{time.time_ns() // 1_000_000:x}"[-8:]
    starts = starts_now(settings)
    own = settings.model_copy(update={"tenant_id": TENANT_ID, "user_id": USER_ID})
    with MailServer() as mail, Cast(settings, TENANT_ID) as cast:
        with Client(settings=own) as client, Stage(settings, console, TENANT_ID, starts) as stage:
            scene = _Play(settings, stage, cast, client, mail, nonce)
            sessions = _perform(scene)
        evidence = gather(settings, TENANT_ID, sessions, starts, effects=mail.ledger(), timeout_ms=GATHER_MS)
        agreement = compare_views(settings, cast.views_path(), TENANT_ID, _reach(evidence), timeout_ms=GATHER_MS)
    expected = _expectations(scene.frozen_pid)
    return Told(evidence, expected, answer_all(evidence, expected), agreement, time.monotonic() - began_s)


def _expectations(frozen_pid: int) -> Expectations:
    return Expectations(
        runs_completed=4,
        queued=2,
        steered=1,
        duplicates=1,
        cancelled=1,
        voided=1,
        timed_out=1,
        takeovers=2,
        late_refusals=1,
        frozen_worker_pid=frozen_pid,
        effects=1,
        approvals=1,
        watched_actions=frozenset({SEND_MAIL}),
    )


def _reach(evidence: Evidence) -> dict[int, int]:
    reach: dict[int, int] = {}
    for one in evidence.events:
        reach[one.partition] = max(one.offset, reach.get(one.partition, 0))
    return reach


def _perform(play: _Play) -> list[str]:
    """All acts; the sessions they used."""
    desk, errand, pier, slow = (play.session(name) for name in ("desk", "errand", "pier", "slow"))
    play.cast.start_workers(WORKERS, play.mail.address, play.nonce)
    play.cast.start_scheduler(desk, _task("Remind the customer of the appointment", DESK))
    _put_policy(play)
    for session, title in ((desk, "desk"), (slow, "slow"), (errand, "errand"), (pier, "pier")):
        play.stage.open(session, title)
    play.cast.await_workers(WORKERS)
    play.cast.await_scheduler()
    play.stage.say("story", f"{WORKERS} workers and a scheduler are up: {play.cast.pids()}")
    first = _same_moment(play, desk)
    play.client.prompt(slow, _task("A question without an answer", SLOW), source="ui", timeout_ms=SLOW_TIMEOUT_MS)
    play.stage.say("operator", f"asks in 'slow' with {SLOW_TIMEOUT_MS} ms to go")
    _steer_and_abort(play, desk)
    _approve(play, desk)
    _frozen_worker(play, errand)
    _killed_worker(play, pier)
    _repeat(play, first)
    play.stage.await_event(slow, names.RUN_FINISHED, STEP_MS, terminalStatus="timed_out")
    return [desk, errand, pier, slow]


def _task(text: str, scripts: Scripts) -> dict[str, Any]:
    return {"text": text, "scripts": scripts}


def _put_policy(play: _Play) -> None:
    """The tenant's policy goes in through the log, once; a later story finds it in force."""
    body = policy_body(POLICY)
    known = policies_in_force(play.settings, timeout_ms=STEP_MS).get(TENANT_ID)
    if known is not None and known.body == body and len(known.partitions) == play.settings.partitions:
        play.stage.say("operator", f"finds policy {known.version} of tenant {TENANT_ID} in force")
        return
    fate = put_policy(
        play.settings, PolicyRecord(tenant_id=TENANT_ID, version=POLICY_VERSION, body=body), timeout_ms=STEP_MS
    )
    if fate.unknown or any(reason != "policy_not_newer" for reason in fate.refused.values()):
        raise Fatal(f"the story's policy was not taken: {fate}")
    play.stage.say("operator", f"puts policy {POLICY_VERSION} of tenant {TENANT_ID} into the log: {_shown(POLICY)}")


def _shown(policy: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in policy.items() if isinstance(value, int))


def _same_moment(play: _Play, desk: str) -> Sent:
    play.stage.say("story", "operator and scheduler write to the same session at the same moment")
    play.cast.set_off()
    sent = play.client.prompt(desk, _task("Write to the customer", DESK), source="ui")
    sent.verdict(STEP_MS)
    play.stage.await_event(desk, names.RUN_STARTED, STEP_MS)
    play.stage.await_receipt(lambda r: r.session_id == desk and r.verdict == "queued", STEP_MS, "the second verdict")
    return sent


def _steer_and_abort(play: _Play, desk: str) -> None:
    stage = play.stage
    stage.await_event(desk, names.TOOL_FINISHED, STEP_MS, toolName="look_up")
    stage.say("user", "steers: mention the refund as well")
    steer = play.client.steer(desk, "Mention the refund as well", source="remote")
    stage.await_event(desk, names.INPUT_APPLIED, STEP_MS, inputId=steer.input_id)
    stage.say("user", "queues a follow-up")
    play.client.follow_up(desk, _task("Is anything else open?", DESK), source="ui")
    asked = stage.await_event(desk, names.APPROVAL_REQUESTED, STEP_MS)
    stage.await_event(desk, names.TOOL_STARTED, STEP_MS, toolName="search")
    stage.say("user", f"aborts run {asked.event.run_no} while its mail waits for approval")
    play.client.abort(desk, run_id=asked.event.run_id, reason="wrong customer", source="ui")
    stage.await_event(desk, names.RUN_FINISHED, STEP_MS, terminalStatus="cancelled")


def _approve(play: _Play, desk: str) -> None:
    stage = play.stage
    asked = stage.await_event(desk, names.APPROVAL_REQUESTED, STEP_MS, run_no=2)
    stage.say("operator", f"approves the mail of run {asked.event.run_no}")
    play.client.answer(
        desk,
        action_key=asked.payload["actionKey"],
        action_name=asked.payload["name"],
        args_digest=asked.payload["argsDigest"],
        decision="approve",
        source="ui",
    )
    ended = stage.await_event(desk, names.ACTION_FINISHED, STEP_MS, run_no=2)
    calls = play.mail.ledger()
    stage.say("mail", f"{len(calls)} calls, {sum(c.effective for c in calls)} mail sent: {ended.payload.get('result')}")
    stage.await_event(desk, names.RUN_FINISHED, STEP_MS, run_no=3, terminalStatus="completed")


def _holder(play: _Play, lease: LoggedEvent) -> int:
    """The pid of the process that holds a lease, read from its worker id and known to be ours."""
    worker = str(lease.payload["workerId"])
    found = [pid for pid in play.cast.pids() if str(pid) in worker.replace(".", "-").replace(":", "-").split("-")]
    if len(found) != 1:
        raise Fatal(f"worker id {worker} names no single process of the story ({play.cast.pids()})")
    return found[0]


def _begun(play: _Play, session: str) -> int:
    """Wait until a worker has begun the session's run; its pid."""
    lease = play.stage.await_event(session, names.RUN_LEASED, STEP_MS)
    play.stage.await_event(session, names.TOOL_STARTED, STEP_MS)
    return _holder(play, lease)


def _frozen_worker(play: _Play, errand: str) -> None:
    stage = play.stage
    play.client.prompt(errand, _task("Run an errand", ERRAND), source="ui")
    pid = play.frozen_pid = _begun(play, errand)
    play.cast.signal(pid, signal.SIGSTOP)
    stage.say("story", f"SIGSTOP to worker {pid}: frozen past its lease", "bold red")
    stage.await_event(errand, names.RUN_LEASE_LOST, LEASE_LOSS_MS)
    ended = stage.await_event(errand, names.RUN_FINISHED, TAKEOVER_MS, terminalStatus="completed")
    stage.say("story", f"generation {ended.event.generation} has finished; SIGCONT to worker {pid}", "bold red")
    play.cast.signal(pid, signal.SIGCONT)
    late = stage.await_receipt(
        lambda r: r.session_id == errand and r.record == "report" and f"-{pid}-" in str(r.worker_id),
        STEP_MS,
        f"the refusal of the late report of {pid}",
    )
    stage.say("story", f"its late report was refused: receipts {late.partition}:{late.offset}")


def _killed_worker(play: _Play, pier: str) -> None:
    stage = play.stage
    play.client.prompt(pier, _task("Wait at the pier", ERRAND), source="ui")
    pid = _begun(play, pier)
    play.cast.signal(pid, signal.SIGKILL)
    stage.say("story", f"SIGKILL to worker {pid}", "bold red")
    stage.await_event(pier, names.RUN_LEASE_LOST, LEASE_LOSS_MS)
    ended = stage.await_event(pier, names.RUN_FINISHED, TAKEOVER_MS, terminalStatus="completed")
    stage.say("story", f"taken over and finished under generation {ended.event.generation}")


def _repeat(play: _Play, first: Sent) -> None:
    play.stage.say("operator", "sends the first input once more, unchanged")
    play.client.resend(first)
    play.stage.await_receipt(
        lambda r: r.input_id == first.input_id and r.verdict == "duplicate", STEP_MS, "the verdict on the repeat"
    )
