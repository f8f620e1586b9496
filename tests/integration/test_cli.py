"""The commands against a real pipeline: topics, processor, sink and example worker, all started by the command line."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from onepen.cli import example_worker, main
from onepen.streams.settings import load_settings
from tests.integration.running_pipeline import serving
from tests.services import fresh_topic_prefix

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ANSWER_S = 60
PROCESSES = ("processor", "sink", "worker")


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, object]:
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass
class Pipeline:
    """A running pipeline under a prefix of its own, and the command line that reaches it."""

    environment: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "onepen", *arguments]
        return subprocess.Popen(argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)

    def run_process(self, *arguments: str, stdin: str = "") -> Answer:
        """As a user has it: a process of its own."""
        argv = [sys.executable, "-m", "onepen", *arguments]
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, timeout=ANSWER_S, input=stdin.encode(), check=False
        )
        answer = Answer(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert "Traceback" not in answer.err, answer.err
        return answer

    def run(self, *arguments: str, stdin: str = "") -> Answer:
        """The same entry point in this process: what a process costs is paid in few tests only."""
        out, err = io.StringIO(), io.StringIO()
        given = SimpleNamespace(buffer=io.BytesIO(stdin.encode()), isatty=lambda: False)
        with (
            patch.dict(os.environ, self.environment, clear=True),
            patch.object(sys, "stdin", given),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = main(arguments)
        return Answer(code, out.getvalue(), err.getvalue())

    def until(self, condition: Callable[[Answer], bool], *arguments: str) -> Answer:
        """Ask again until the tables have caught up with the log."""
        end_s = time.monotonic() + 30
        while True:
            answer = self.run(*arguments)
            if condition(answer):
                return answer
            assert time.monotonic() < end_s, answer
            time.sleep(0.1)


@pytest.fixture(scope="module")
def pipeline(kafka_bootstrap: str, module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    data_dir = tmp_path_factory.mktemp("cli")
    (data_dir / "objects").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONEPEN_")}
    pipeline = Pipeline(
        kept
        | {
            "ONEPEN_BOOTSTRAP": kafka_bootstrap,
            "ONEPEN_DSN": module_dsn,
            "ONEPEN_PREFIX": fresh_topic_prefix(),
            "ONEPEN_PARTITIONS": "3",
            "ONEPEN_TOKEN_KEY": secrets.token_hex(32),
            "ONEPEN_DATA_DIR": str(data_dir),
            "ONEPEN_OBJECTS_ROOT": str(data_dir / "objects"),
        }
    )
    assert pipeline.run("topics", "check").code == 1
    applied = pipeline.run("topics", "apply")
    assert applied.code == 0, applied.err
    assert pipeline.run("topics", "check").code == 0
    assert "applied 0001" in pipeline.run("migrate").out
    log = (data_dir / "processes.log").open("wb")
    try:
        for name in PROCESSES:
            pipeline.processes.append(pipeline.start(name, stdout=log.fileno(), stderr=log.fileno()))
        yield pipeline
    finally:
        for process in reversed(pipeline.processes):
            process.terminate()
        codes = [process.wait(20) for process in pipeline.processes]
        log.close()
    assert codes == [0] * len(PROCESSES), (data_dir / "processes.log").read_text()


@pytest.fixture(scope="module")
def unhurried(pipeline: Pipeline) -> Iterator[Pipeline]:
    """The same for a tenant of its own, whose prompts with the word `slowly` go on until they are stopped."""
    own = Pipeline(pipeline.environment | {"ONEPEN_TENANT_ID": str(secrets.randbelow(10**9) + 1000)})
    with patch.dict(os.environ, own.environment, clear=True):
        worker = example_worker.example_worker(load_settings())
    with patch.object(example_worker, "SLOW_STEP_S", 3600.0), serving(worker, ANSWER_S * 1000):
        yield own


def session() -> str:
    return f"s-{secrets.token_hex(6)}"


def test_a_prompt_is_started_and_followed_to_its_end(pipeline: Pipeline) -> None:
    name = session()
    answer = pipeline.run_process("prompt", name, "Grüße", "--follow", "-o", "jsonl")
    assert answer.code == 0, answer.err
    verdict, *events = answer.lines
    assert verdict["verdict"] == "started"
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["type"] == "run.started"
    assert events[-1]["type"] == "run.finished"
    assert {event["runId"] for event in events} == {verdict["runId"]}

    replay = pipeline.run_process("run", "replay", str(verdict["runId"]), "-o", "jsonl")
    assert replay.code == 0, replay.err
    assert replay.lines == events
    assert set(replay.lines[0]) == {"sessionId", "runId", "seq", "type", "payload"}
    full = pipeline.run("run", "replay", str(verdict["runId"]), "--full", "--session", name)
    assert {"at", "cause", "generation", "hash", "prevHash", "runNo", "tenantId"} < set(full.lines[0])


def test_what_the_tables_show(pipeline: Pipeline) -> None:
    name = session()
    sent = pipeline.run("prompt", name, "Show me", "--follow", "-o", "jsonl")
    assert sent.code == 0, sent.err
    run_id, input_id = str(sent.lines[0]["runId"]), str(sent.lines[0]["inputId"])

    shown = pipeline.until(lambda a: '"completed"' in a.out, "run", "show", run_id, "-o", "json").json
    assert (shown["runId"], shown["sessionId"], shown["status"]) == (run_id, name, "completed")
    listed = pipeline.run("run", "list", "--session", name, "-o", "jsonl").lines
    assert [run["runId"] for run in listed] == [run_id]
    for status, found in (("completed", listed), ("failed", [])):
        assert pipeline.run("run", "list", "--session", name, "--status", status, "-o", "jsonl").lines == found
    assert name in {str(one["sessionId"]) for one in pipeline.run("session", "list", "-o", "jsonl").lines}
    assert pipeline.run("session", "show", name, "-o", "json").json["sessionId"] == name
    asked = pipeline.until(lambda a: '"consumed"' in a.out, "input", "show", input_id, "-o", "jsonl").lines
    assert [(one["verdict"], one["disposition"]) for one in asked] == [("started", "consumed")]
    assert name in pipeline.run("session", "list").out
    assert run_id in pipeline.run("run", "show", run_id).out


@pytest.mark.parametrize("what", [("run", "show"), ("run", "replay"), ("session", "show"), ("input", "show")])
def test_what_does_not_exist_is_said_in_one_line(what: tuple[str, str], pipeline: Pipeline) -> None:
    answer = pipeline.run(*what, "no-such-thing")
    assert (answer.code, answer.out) == (6, "")
    assert answer.err.count("\n") == 1
    assert "no-such-thing" in answer.err


def test_a_refusal_exits_by_the_protocol(pipeline: Pipeline) -> None:
    answer = pipeline.run("abort", session(), "--active", "-o", "json")
    assert answer.code == 3
    assert (answer.json["verdict"], answer.json["reason"]) == ("refused", "no_active_run")
    assert pipeline.run("steer", session(), "x", "--if-missed", "reject").code == 3


def test_b02_a_repeat_is_a_duplicate_and_other_content_is_refused(pipeline: Pipeline) -> None:
    name, input_id, issued = session(), f"in-{secrets.token_hex(8)}", str(time.time_ns() // 1_000_000)
    same = ("--input-id", input_id, "--issued-at", issued, "-o", "json")
    first = pipeline.run("prompt", name, "once", *same)
    assert (first.code, first.json["verdict"]) == (0, "started")
    again = pipeline.run("prompt", name, "once", *same)
    assert (again.code, again.json["verdict"], again.json["runId"]) == (0, "duplicate", first.json["runId"])
    other = pipeline.run("prompt", name, "twice", *same)
    assert (other.code, other.json["reason"]) == (3, "input_id_reused")


def test_send_answers_line_by_line(pipeline: Pipeline) -> None:
    names = [session() for _ in range(5)]
    lines = [json.dumps({"mode": "prompt", "session_id": name, "content": {"ask": name}}) for name in names]
    lines.insert(2, '{"mode": "prompt", "session_id": "a b", "content": "x"}')
    lines.append(json.dumps({"mode": "abort", "session_id": session(), "target_kind": "active"}))
    answer = pipeline.run_process("send", "--in-flight", "3", stdin="\n".join(lines) + "\n")
    assert answer.code == 2
    assert [line["sessionId"] for line in answer.lines[:5]] == names
    assert {line["verdict"] for line in answer.lines[:5]} == {"started"}
    assert answer.lines[5]["reason"] == "no_active_run"
    assert re.fullmatch(r"onepen: line 3: session_id: .*\n", answer.err)


def test_content_reaches_the_log_whole_and_the_terminal_tamed(pipeline: Pipeline) -> None:
    hostile = "\x1b]52;c;ZXZpbA==\x07\u202ereversed\x00\r\nend"
    name = session()
    sent = pipeline.run_process("prompt", name, "-", "--follow", stdin=hostile)
    assert sent.code == 0, sent.err
    assert not set(sent.out + sent.err) & set("\x1b\x07\u202e\x00\r")
    run_id = re.search(r"run-[0-9a-f]{32}", sent.out)
    assert run_id is not None
    replay = pipeline.run("run", "replay", run_id.group())
    assert not set(replay.out) & set("\x1b\x07\u202e\x00\r")
    payload = replay.lines[0]["payload"]
    assert isinstance(payload, dict)
    assert payload["content"] == hostile
    listed = pipeline.until(lambda a: name in a.out, "session", "list")
    assert not set(listed.out) & set("\x1b\x07\u202e\x00\r")


def test_tail_sees_what_happens_and_ends_by_ctrl_c(pipeline: Pipeline, tmp_path: Path) -> None:
    name, seen = session(), tmp_path / "seen.jsonl"
    with seen.open("wb") as out, (tmp_path / "err").open("wb") as err:
        tail = pipeline.start("tail", name, "-o", "jsonl", stdout=out.fileno(), stderr=err.fileno())
        try:
            end_s = time.monotonic() + 60
            while "following" not in (tmp_path / "err").read_text():
                assert tail.poll() is None, (tmp_path / "err").read_text()
                assert time.monotonic() < end_s
                time.sleep(0.05)
            assert pipeline.run("prompt", name, "seen?", "--follow").code == 0
            while "run.finished" not in seen.read_text():
                assert tail.poll() is None, (tmp_path / "err").read_text()
                assert time.monotonic() < end_s
                time.sleep(0.05)
            tail.send_signal(signal.SIGINT)
            assert tail.wait(20) == 130
        finally:
            tail.kill()
            tail.wait()
    events = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert (tmp_path / "err").read_text().count("Traceback") == 0


def test_a_policy_is_put_changed_and_shown(pipeline: Pipeline) -> None:
    tenant = str(secrets.randbelow(10**9) + 1000)
    before = pipeline.run("policy", "show", "--tenant", tenant, "-o", "json")
    assert (before.json["version"], before.json["leaseMs"]) == (0, 30_000)
    policy = '{"leaseMs": 3000, "renewMs": 1000, "permitMs": 1500, "cancelMs": 4000}'
    put = pipeline.run("policy", "put", "-", "--tenant", tenant, "-o", "json", stdin=policy)
    assert (put.code, put.json["taken"], put.json["unknown"]) == (0, 3, 0), put.err
    shown = pipeline.run("policy", "show", "--tenant", tenant, "-o", "json")
    assert (shown.json["version"], shown.json["leaseMs"]) == (1, 3000)
    assert pipeline.run("policy", "put", "-", "--tenant", tenant, stdin=policy).code == 5
    longer = policy.replace("3000", "6000")
    changed = pipeline.run("policy", "put", "-", "--version", "2", "--tenant", tenant, stdin=longer)
    assert changed.code == 0, changed.err
    again = pipeline.run("policy", "show", "--tenant", tenant, "-o", "json")
    assert (again.json["version"], again.json["leaseMs"]) == (2, 6000)
    contradiction = pipeline.run("policy", "put", "-", "--version", "3", "--tenant", tenant, stdin='{"renewMs": 29000}')
    assert contradiction.code == 2


def test_no_wait_prints_where_it_was_written(pipeline: Pipeline) -> None:
    answer = pipeline.run("prompt", session(), "later", "--no-wait", "-o", "json")
    assert answer.code == 0, answer.err
    assert {"inputId", "issuedAt", "position"} <= set(answer.json)


def test_queued_expired_steered_and_aborted(unhurried: Pipeline) -> None:
    pipeline, name = unhurried, session()
    assert pipeline.run("prompt", name, "go slowly").code == 0
    assert pipeline.run("prompt", name, "busy?", "--on-busy", "reject").code == 3
    late = pipeline.run("prompt", name, "too late", "--ttl-ms", "300", "--follow", "-o", "jsonl")
    assert (late.code, late.lines[0]["verdict"]) == (1, "queued")
    assert "started no run: expired" in late.err
    assert pipeline.run("steer", name, "a hint", "-o", "json").json["verdict"] == "steered"
    aborted = pipeline.run("abort", name, "--active", "--reason", "enough", "--follow", "-o", "jsonl")
    assert aborted.code == 0, aborted.err
    assert aborted.lines[0]["verdict"] == "cancelling"
    payload = aborted.lines[-1]["payload"]
    assert isinstance(payload, dict)
    assert (payload["terminalStatus"], payload["reason"]) == ("cancelled", "enough")


def test_an_approval_is_answered_by_the_command_that_was_shown(pipeline: Pipeline, tmp_path: Path) -> None:
    name, seen, said = session(), tmp_path / "seen", tmp_path / "said"
    with seen.open("wb") as out, said.open("wb") as err:
        asking = pipeline.start("prompt", name, "mail them", "--follow", stdout=out.fileno(), stderr=err.fileno())
        try:
            end_s = time.monotonic() + 60
            while (shown := re.search("to answer it: onepen (.*)", said.read_text())) is None:
                assert asking.poll() is None, said.read_text()
                assert time.monotonic() < end_s, seen.read_text()
                time.sleep(0.05)
            command = shlex.split(shown.group(1))
            assert pipeline.run(*command, "-o", "json").json["verdict"] == "answered"
            assert asking.wait(60) == 0, said.read_text()
        finally:
            asking.kill()
            asking.wait()
    assert pipeline.run(*command).code == 3


def test_a_drained_processor_gives_its_partitions_away(pipeline: Pipeline, tmp_path: Path) -> None:
    other = Pipeline(pipeline.environment | {"ONEPEN_SLOT": "other-1"})
    log = tmp_path / "other.log"
    with log.open("wb") as out:
        process = other.start("processor", stdout=out.fileno(), stderr=out.fileno())
        try:
            end_s = time.monotonic() + 60
            while not re.search(r"assigned: \[\d", log.read_text()):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end_s, log.read_text()
                time.sleep(0.05)
            drained = other.run("processor", "drain")
            assert drained.code == 0, drained.err
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
    assert other.run("processor", "drain").code == 6
    # Every partition is served again at once: ids of sessions spread over all of them.
    lines = [json.dumps({"mode": "prompt", "session_id": session(), "content": "still there?"}) for _ in range(9)]
    answer = pipeline.run("send", "--in-flight", "9", stdin="\n".join(lines))
    assert (answer.code, {line["verdict"] for line in answer.lines}) == (0, {"started"})


def test_the_rest_of_the_inputs_and_an_erase_that_takes_the_objects(unhurried: Pipeline) -> None:
    pipeline, name, objects = unhurried, session(), Path(unhurried.environment["ONEPEN_OBJECTS_ROOT"])

    def stored() -> list[Path]:
        return [path for path in objects.rglob("*") if path.is_file()]

    assert stored() == []
    text = "word " * 80_000
    done = pipeline.run("prompt", name, "-", "--follow", "-o", "jsonl", stdin=text)
    assert done.code == 0, done.err
    assert "pointer" in str(done.lines[1]["payload"])
    done = pipeline.run("prompt", name, "please delegate and compact this", "--follow", "-o", "jsonl")
    assert done.code == 0, done.err
    assert {"subtask.finished", "run.compaction_finished"} <= {str(line.get("type")) for line in done.lines}
    assert len(stored()) == 2
    first = pipeline.run("prompt", name, "slowly", "--run-timeout-ms", "600000", "-o", "json").json
    run_id = str(first["runId"])
    hint = pipeline.run("auto", name, "hint", "--source", "ui", "--expected-run", run_id, "-o", "json")
    assert hint.json["verdict"] == "steered"
    missed = pipeline.run("auto", name, "x", "--source", "ui", "--expected-run", "run-0", "--if-missed", "reject")
    assert (missed.code, "missed" in missed.out) == (3, True)
    assert pipeline.run("auto", name, "nightly", "--source", "scheduler", "-o", "json").json["verdict"] == "queued"
    urgent = pipeline.run("prompt", name, "secret", "--on-busy", "interrupt", "--erasable", "--follow", "-o", "jsonl")
    assert urgent.code == 0, urgent.err
    assert len(stored()) == 3
    refused = pipeline.run("retry", run_id)
    assert (refused.code, "not_retryable" in refused.out) == (3, True)
    assert pipeline.run("retry", "run-" + "0" * 32).code == 6
    erased = pipeline.run("erase", name, "--yes", "--follow", "-o", "jsonl")
    assert erased.code == 0, erased.err
    assert erased.lines[-1]["disposition"] == "done"
    assert pipeline.run("prompt", name, "again").code == 3
    end_s = time.monotonic() + 60
    while stored():
        assert time.monotonic() < end_s, stored()
        time.sleep(0.1)


def test_b23_a_run_that_timed_out_is_retried(unhurried: Pipeline) -> None:
    pipeline, name = unhurried, session()
    lost = pipeline.run("prompt", name, "slowly", "--run-timeout-ms", "1000", "--follow", "-o", "jsonl")
    assert lost.code == 1
    run_id = str(lost.lines[0]["runId"])
    again = pipeline.run("retry", run_id, "--run-timeout-ms", "600000", "-o", "json").json
    assert again["verdict"] == "started"
    assert pipeline.run("abort", name, "--active", "--follow", "-o", "jsonl").code == 0
