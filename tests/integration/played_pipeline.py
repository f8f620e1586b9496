"""A short life of some sessions on the real services, told once per pytest session: what verify, audit and why look at.

Processor and sink run in threads of this process. The workers are the real one and, for the takeover, records written
by hand: a worker that claims, reports and then falls silent cannot be had from a well-behaved one.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from pydantic import SecretStr

from onepen.processors.rules import Keys
from onepen.schemas import codec, ids
from onepen.schemas.partitioning import partition_of
from onepen.schemas.worker_records import Claim, Report, ReportEvent
from onepen.sinks.postgres.migrate import migrate
from onepen.streams import topic_admin
from onepen.streams.client import Client
from onepen.streams.feed import run_sink
from onepen.streams.plain_producer import PlainProducer
from onepen.streams.settings import Settings
from onepen.streams.worker import RunContext, Worker
from tests.integration.in_process import only, run_main
from tests.integration.running_pipeline import PARTITIONS, QUICK, Pipeline, eventually, serving
from tests.services import fresh_topic_prefix, run_coroutine

TENANT = 1
UNHURRIED = msgspec.structs.replace(QUICK, offer_ms=60_000, offer_max_ms=60_000, lease_ms=6_000, renew_ms=2_000)
"""One lease has to end; no offer has, and a claim by hand may take its time."""
WAIT_MS = 20_000


@dataclass
class Played(Pipeline):
    """The pipeline, and the inputs by name. `tell` may be called again for more of the same."""

    sink_stop: threading.Event = field(default_factory=threading.Event)
    sink: threading.Thread | None = None
    sent: dict[str, Any] = field(default_factory=dict)
    began: threading.Event = field(default_factory=threading.Event)

    def environment(self, data_dir: Path, **changes: str | None) -> dict[str, str]:
        """Of a command that looks at this pipeline."""
        settings = self.settings
        named = {
            "ONEPEN_BOOTSTRAP": settings.bootstrap,
            "ONEPEN_DSN": settings.require_dsn(),
            "ONEPEN_PREFIX": settings.prefix,
            "ONEPEN_PARTITIONS": str(settings.partitions),
            "ONEPEN_TOKEN_KEY": settings.require_token_key().decode(),
            "ONEPEN_DATA_DIR": str(data_dir),
        } | changes
        return {name: value for name, value in named.items() if value is not None}

    def start_sink(self) -> None:
        self.sink_stop = threading.Event()
        self.sink = threading.Thread(target=run_sink, args=(self.settings, self.sink_stop), daemon=True)
        self.sink.start()

    def stop_sink(self) -> None:
        if self.sink is not None:
            self.sink_stop.set()
            self.sink.join(30)
            assert not self.sink.is_alive()
            self.sink = None

    # -- the sessions -----------------------------------------------------------------------------------------------

    def tell(self, name: str = "") -> None:
        """Steer, queue and repeat; cancel with its queue; takeover and late report; refusals and a dead letter."""
        with serving(self._worker()), self.client() as client:
            self._desk(client, f"desk{name}")
            self._stopped(client, f"stopped{name}")
        with self.client() as client:
            self._lost(client, f"lost{name}")
            self._family(client, f"parent{name}", f"child{name}")
            self._interrupted(client, f"erased{name}")
        self._garbage()

    def tell_first(self) -> None:
        """Only the session `desk`."""
        with serving(self._worker()), self.client() as client:
            self._desk(client, "desk")

    def _worker(self) -> Worker:
        worker = self.worker(max_runs=4)

        @worker.run
        async def answer(ctx: RunContext) -> Any:
            async with ctx.model_request(model="echo"):
                pass
            if ctx.input == "wait for a steer":
                self.began.set()
                while not (steers := await ctx.steers()):  # noqa: ASYNC110 - the log is asked, not an event
                    await asyncio.sleep(0.01)
                return [str(steer) for steer in steers]
            if ctx.input == "wait for the end":
                self.began.set()
                await ctx.tool("slow", lambda: asyncio.sleep(60))
            return await ctx.tool("look_up", lambda: "42")

        return worker

    def _desk(self, client: Client, session: str) -> None:
        self.began.clear()
        first = client.prompt(session, "wait for a steer", source="ui")
        assert first.verdict(WAIT_MS).verdict == "started"
        assert self.began.wait(20)
        queued = client.follow_up(session, "then this", source="scheduler")
        assert queued.verdict(WAIT_MS).verdict == "queued"
        busy = client.prompt(session, "only when free", on_busy="reject")
        assert busy.verdict(WAIT_MS).reason == "busy"
        stale = client.abort(session, run_id="run-" + "0" * 32)
        assert stale.verdict(WAIT_MS).reason == "stale_run"
        steer = client.steer(session, "left", source="ui")
        for one in (steer, queued):
            assert one.disposition(WAIT_MS).disposition == "consumed"
        client.resend(first)
        self.sent |= {f"{session}:first": first, f"{session}:queued": queued, f"{session}:busy": busy,
                      f"{session}:stale": stale, f"{session}:steer": steer}  # fmt: skip
        assert self.run_of(queued.disposition(WAIT_MS).run_id or "", session)

    def _stopped(self, client: Client, session: str) -> None:
        self.began.clear()
        first = client.prompt(session, "wait for the end", source="ui")
        run_id = first.verdict(WAIT_MS).run_id
        assert run_id is not None
        assert self.began.wait(20)
        waiting = client.follow_up(session, "never", source="scheduler")
        withdrawn = client.follow_up(session, "not this", source="scheduler")
        assert withdrawn.verdict(WAIT_MS).verdict == "queued"
        taken_back = client.abort(session, target_input_id=withdrawn.input_id)
        assert taken_back.verdict(WAIT_MS).verdict == "withdrawn"
        stop = client.abort(session, run_id=run_id, scope="run_and_queue", reason="enough")
        assert stop.disposition(WAIT_MS).disposition == "done"
        assert waiting.disposition(WAIT_MS).reason == "aborted"
        late = client.abort(session, active=True)
        assert late.verdict(WAIT_MS).reason == "no_active_run"
        self.sent |= {f"{session}:first": first, f"{session}:waiting": waiting, f"{session}:stop": stop,
                      f"{session}:withdrawn": withdrawn, f"{session}:late": late}  # fmt: skip
        assert self.run_of(run_id, session)

    def _lost(self, client: Client, session: str) -> None:
        frozen = Frozen(self.settings, session)
        first = client.prompt(session, "go", source="remote")
        eventually(lambda: first.position, what="the prompt is in the log")
        frozen.claim()  # of the first offer: it has to stand behind the prompt
        frozen.report(1, ("tool.started", b'{"toolCallId":"c1","toolName":"search"}'))
        subscription = self.subscriber().run(frozen.run_id, session_id=session, timeout_ms=WAIT_MS)
        seen = [next(event for event in subscription if event.type == "run.lease_lost")]
        frozen.report(2, ("tool.finished", b'{"toolCallId":"c1","toolName":"search","status":"ok"}'))
        with serving(self._worker()):
            seen += list(subscription)
        assert seen[-1].type == "run.finished"
        frozen.close()
        self.sent[f"{session}:first"] = first

    def _family(self, client: Client, parent: str, child: str) -> None:
        """A child run in another session, on another partition or the same; the parent hears of its end."""
        above, below = Frozen(self.settings, parent), Frozen(self.settings, child)
        first = client.prompt(parent, "go", source="ui")
        eventually(lambda: first.position, what="the prompt is in the log")
        above.claim()
        wanted = {"callId": "call-1", "sessionId": child, "content": "do a part"}
        above.report(1, ("subtask.started", orjson.dumps(wanted)))
        child_events = self.subscriber().run(
            below.run_id, session_id=child, timeout_ms=WAIT_MS, unknown_after_ms=WAIT_MS
        )
        assert next(child_events).type == "run.started"
        child_events.close()
        below.claim()
        below.report(1, ("run.finished", b'{"terminalStatus":"completed","output":"a part"}'))
        events = self.subscriber().run(above.run_id, session_id=parent, timeout_ms=WAIT_MS)
        assert next(event for event in events if event.type == "subtask.finished")
        above.report(2, ("run.finished", b'{"terminalStatus":"completed"}'))
        assert list(events)[-1].type == "run.finished"
        above.close()
        below.close()
        self.sent[f"{parent}:first"] = first

    def _interrupted(self, client: Client, session: str) -> None:
        """Nobody works here: an interrupt ends the first run at once, an erase the second and the session."""
        client.prompt(session, "first")
        second = client.prompt(session, "instead", on_busy="interrupt")
        assert second.disposition(WAIT_MS).disposition == "consumed"
        waiting = client.auto(session, "later", source="queue")
        erase = client.erase(session)
        assert erase.disposition(WAIT_MS).disposition == "done"
        assert waiting.disposition(WAIT_MS).reason == "aborted"
        late = client.prompt(session, "too late")
        assert late.verdict(WAIT_MS).reason == "erased"
        self.sent |= {f"{session}:second": second, f"{session}:erase": erase, f"{session}:late": late}

    def _garbage(self) -> None:
        producer = PlainProducer(self.settings.kafka_client(), client_id="garbage")
        key = b"garbage"
        where = partition_of(key, self.settings.partitions)
        producer.send(self.settings.topics.inputs, where, key=key, value=b"no avro")
        assert producer.close(10_000) == 0


class Frozen:
    """A worker by hand: it claims generation 1, reports, and never renews."""

    def __init__(self, settings: Settings, session: str) -> None:
        self._topic, self._session = settings.topics.inputs, session
        self._where = settings.partition_of(session)
        self.run_id = ids.run_id(TENANT, session, 1)
        token = Keys(settings.token_key_name, settings.require_token_key()).token(TENANT, session, self.run_id, 1)
        self._head: dict[str, Any] = {
            "tenant_id": TENANT, "session_id": session, "run_id": self.run_id, "generation": 1, "token": token,
            "worker_id": f"frozen-{secrets.token_hex(4)}", "inbox": 0,
        }  # fmt: skip
        self._producer = PlainProducer(settings.kafka_client(), client_id="frozen")

    def claim(self) -> None:
        self._send(Claim(**self._head))

    def report(self, no: int, *events: tuple[str, bytes]) -> None:
        made = tuple(ReportEvent(type=kind, payload=payload) for kind, payload in events)
        self._send(Report(**self._head, no=no, events=made))

    def _send(self, record: Claim | Report) -> None:
        self._producer.send(self._topic, self._where, key=self._session.encode(), value=codec.encode(record))

    def close(self) -> None:
        assert self._producer.close(10_000) == 0


@contextmanager
def playing(bootstrap: str, dsn: str, *, brief: bool = False) -> Iterator[Played]:
    """Topics, tables, processor and sink, with the story told once; `brief`: the first session of it only."""
    prefix = fresh_topic_prefix()
    settings = Settings(
        bootstrap=bootstrap,
        dsn=SecretStr(dsn),
        prefix=prefix,
        partitions=PARTITIONS,
        token_key=SecretStr(secrets.token_hex(32)),
        slot=f"{prefix}-0",
    )
    topic_admin.apply(settings)
    run_coroutine(lambda: migrate(dsn))
    played = Played(settings)
    played.put_policy(UNHURRIED)
    played.start()
    played.start_sink()
    try:
        played.tell_first() if brief else played.tell()
        yield played
    finally:
        played.stop_sink()
        played.halt()


Command = Callable[..., tuple[int, str, str]]


def command_on(
    played: Played, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs command lines in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str, **environment: str | None) -> tuple[int, str, str]:
        only(monkeypatch, played.environment(data_dir, **environment))
        return run_main(capsys, *arguments)

    return run
