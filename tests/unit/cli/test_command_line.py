"""Arguments, exit codes and error lines, through the one entry point and without any server."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from onepen.cli import event_log, main
from onepen.cli.exit_codes import MEANING, ExitCode
from onepen.schemas.limits import RECORD_BYTES_MAX

Run = Callable[..., tuple[int, str, str]]

# Nothing listens there, and the data directory is empty: what passes the checks of form ends with 4.
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    for name in [name for name in os.environ if name.startswith("ONEPEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ONEPEN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("ONEPEN_BOOTSTRAP", NOWHERE)

    def call(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        stream = SimpleNamespace(buffer=io.BytesIO(stdin or b""), isatty=lambda: stdin is None)
        monkeypatch.setattr(sys, "stdin", stream)
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text.strip()


def commands() -> list[list[str]]:
    groups = {
        "policy": ["put", "show"],
        "topics": ["plan", "apply", "check"],
        "session": ["list", "show"],
        "run": ["list", "show", "replay"],
        "input": ["show"],
        "processor": ["drain"],
        "deadletters": ["list", "show", "redrive"],
        "partition": ["list", "mend"],
    }
    flat = "up down reset status logs prompt steer follow-up auto retry abort answer erase send tail"
    flat += " sink views worker migrate demo"
    flat += " verify archive audit why simulate-policy"
    every = [[name] for name in [*flat.split(), *groups]]
    return every + [[group, name] for group, names in groups.items() for name in names]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_teaches_with_an_example(command: list[str], run: Run) -> None:
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert "Example" in out
    assert f"onepen {' '.join(command)}" in out


def test_the_help_documents_every_exit_code(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for exit_code, meaning in MEANING.items():
        assert f"{exit_code.value:>5}  {meaning}" in out


def test_the_help_loads_no_driver() -> None:
    """So that it answers at once: 0.5 s on a machine at rest."""
    script = (
        "import sys; from onepen.cli import main; main(['--help'])\n"
        "heavy = ('confluent_kafka', 'asyncpg', 'faust', 'fastavro', 'rich')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


USAGE = {
    "no arguments": (["prompt"], "Missing argument 'SESSION'"),
    "unknown command": (["promt"], "No such command 'promt'"),
    "unknown option": (["prompt", "s", "x", "--colour"], "No such option"),
    "not a number": (["prompt", "s", "x", "--ttl-ms", "soon"], "valid integer"),
    "empty session": (["prompt", "", "x"], "session_id: must not be empty"),
    "blank in the id": (["prompt", "a b", "x"], "session_id: only printable ASCII"),
    "id too long": (["prompt", "s" * 129, "x"], "session_id: longer than 128"),
    "empty source": (["prompt", "s", "x", "--source", ""], "source: "),
    "wrong on_busy": (["prompt", "s", "x", "--on-busy", "maybe"], "on_busy: "),
    "ttl of nothing": (["follow-up", "s", "x", "--ttl-ms", "0"], "ttl_ms: "),
    "tenant zero": (["prompt", "s", "x", "--tenant", "0"], "tenant_id: "),
    "user beyond 64 bits": (["prompt", "s", "x", "--user", str(2**63)], "user"),
    "broken JSON": (["prompt", "s", "{", "--json"], "content: not JSON"),
    "too large": (["prompt", "s", "x" * (RECORD_BYTES_MAX + 1)], "content: more than 256 KiB"),
    "just too large encoded": (["prompt", "s", "x" * RECORD_BYTES_MAX], "content: the record is"),
    "no such file": (["steer", "s", "@/nowhere/at/all"], "content: cannot read"),
    "stdin is a terminal": (["steer", "s", "-"], "content: '-' reads stdin, and stdin is a terminal"),
    "no target": (["abort", "s"], "target: name exactly one of --run, --input, --active"),
    "two targets": (["abort", "s", "--active", "--run", "run-1"], "--run and --active"),
    "wrong scope": (["abort", "s", "--active", "--scope", "all"], "scope: "),
    "wrong decision": (["answer", "s", "perhaps", "--key", "k", "--name", "n", "--digest", "d"], "decision: "),
    "issued without id": (["prompt", "s", "x", "--issued-at", "1"], "issued_at: "),
    "erase without yes": (["erase", "s"], "--yes does it"),
    "no content": (["prompt", "s"], "content: Missing argument 'CONTENT'"),
    "content and retry": (["prompt", "s", "x", "--retry-of", "run-1"], "retry_of: a retry takes over the content"),
    "expected run of a queueing prompt": (
        ["prompt", "s", "x", "--expected-run", "run-1"],
        "expected_run_id: goes with",
    ),
    "wrong recovery": (["auto", "s", "x", "--recovery", "maybe"], "recovery: "),
    "retry of no run": (["retry", "a b"], "run_id: only printable ASCII"),
    "erasable without a store": (["auto", "s", "x", "--erasable"], "none is configured (ONEPEN_OBJECTS_ROOT)"),
    "unknown status": (["run", "list", "--status", "asleep"], "'asleep' is not one of"),
    "active and a status": (["run", "list", "--active", "--status", "failed"], "--active and --status"),
    "follow without wait": (["prompt", "s", "x", "--no-wait", "--follow"], "--follow and --no-wait"),
    "once without demo": (["up", "--once"], "--once goes with --demo"),
    "unknown command of a group": (["topics", "show"], "No such command 'show'"),
    "empty bootstrap": (["topics", "plan", "--bootstrap", ""], "bootstrap: must not be empty"),
    "worker without colon": (["worker", "--app", "nothing"], "app: must be MODULE:ATTRIBUTE"),
    "worker that is missing": (["worker", "--app", "no_such_module:worker"], "app: "),
    "policy file missing": (["policy", "put", "/nowhere.json"], "policy: cannot read"),
}


@pytest.mark.parametrize("name", USAGE)
def test_bad_input_is_one_line_naming_the_culprit(name: str, run: Run) -> None:
    arguments, said = USAGE[name]
    code, out, err = run(*arguments)
    assert code == ExitCode.USAGE, err
    assert out == ""
    assert said in one_line(err)


def test_no_escape_sequence_comes_back_in_an_error(run: Run) -> None:
    for arguments in (["prompt", "s\x1b]0;x\x07", "x"], ["\x1b[2J"], ["prompt", "s", "@\x1b[31m\u202e"]):
        code, _, err = run(*arguments)
        assert code == ExitCode.USAGE
        assert not set(one_line(err)) & set("\x1b\x07\u202e")


BAD_LINES = {
    b"nonsense": "line 1: json: not JSON",
    b"[1]": "line 1: json: must be an object",
    b"\xff\xfe": "line 1: json: not UTF-8 text",
    b'{"mode": "prompt"}': "line 1: session_id: is missing",
    b'{"mode": "shout", "session_id": "s", "content": "x"}': "line 1: mode: must be 'prompt'",
    b'{"mode": "prompt", "session_id": 7, "content": "x"}': "line 1: session_id: ",
    b'{"mode": "prompt", "session_id": "s"}': "line 1: content: ",
    b'{"mode": "prompt", "session_id": "s", "content": "x", "colour": 1}': "line 1: colour: is no member",
    b'{"mode": "prompt", "session_id": "s", "content": "x", "ttl_ms": "9"}': "line 1: ttl_ms: ",
    b'{"mode": "prompt", "session_id": "s", "content": "x", "ttl_ms": 1.5}': "line 1: ttl_ms: ",
    b'{"mode": "prompt", "session_id": "s", "content": NaN}': "line 1: json: NaN is not JSON",
    b'{"mode": "prompt", "session_id": "s", "content": "\\ud800"}': "lone surrogate",
    b'{"mode": "abort", "session_id": "s"}': "line 1: target_kind: ",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_send_names_line_and_field(line: bytes, run: Run) -> None:
    code, out, err = run("send", stdin=line + b"\n")
    assert (code, out) == (ExitCode.USAGE, "")
    assert BAD_LINES[line] in one_line(err)


def test_send_counts_lines_and_skips_blank_ones(run: Run) -> None:
    code, _, err = run("send", stdin=b"\n  \n{}\n{}\n")
    assert code == ExitCode.USAGE
    assert [line.split(":")[1].strip() for line in err.splitlines()] == ["line 3", "line 4"]
    _, _, err = run("send", "--stop-on-error", stdin=b"{}\n{}\n")
    one_line(err)


def test_send_reads_no_terminal(run: Run) -> None:
    code, _, err = run("send")
    assert code == ExitCode.USAGE
    assert "stdin is a terminal" in one_line(err)


def test_an_unknown_outcome_says_how_to_ask_again(run: Run) -> None:
    code, out, err = run("prompt", "s", "x", "--timeout-ms", "300", "--input-id", "in-1", "--issued-at", "17")
    assert (code, out) == (ExitCode.NO_ANSWER, "")
    assert "--input-id in-1 --issued-at 17" in err
    assert "Traceback" not in err


def test_large_content_goes_where_objects_lie(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a store the same content passes the checks of form; it then ends at the broker that is not there."""
    (tmp_path / "objects").mkdir()
    monkeypatch.setenv("ONEPEN_OBJECTS_ROOT", str(tmp_path / "objects"))
    code, _, err = run("prompt", "s", "-", "--timeout-ms", "300", stdin=b"x" * (3 * RECORD_BYTES_MAX))
    assert code == ExitCode.NO_ANSWER
    assert "KiB" not in err
    (stored,) = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert stored.stat().st_size == 3 * RECORD_BYTES_MAX


def test_the_plan_asks_no_broker(run: Run) -> None:
    code, out, err = run("topics", "plan", "-o", "jsonl")
    assert code == 0
    assert err == ""
    assert json.loads(out.splitlines()[0])["topic"] == "onepen.inputs"


def test_settings_that_are_wrong_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPEN_PARTITIONS", "many")
    code, _, err = run("topics", "plan")
    assert code == ExitCode.USAGE
    assert "ONEPEN_PARTITIONS" in one_line(err)


@pytest.mark.parametrize("variable", ["ONEPEN_DSN", "ONEPEN_DSN_FILE"])
@pytest.mark.parametrize("command", ["migrate", "sink", "audit", "session list", "demo"])
def test_a_password_that_is_not_encoded_is_said_and_not_shown(
    command: str, variable: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dsn = "postgresql://user:hush#hush@host/db"
    (tmp_path / "dsn").write_text(dsn)
    monkeypatch.setenv(variable, dsn if variable == "ONEPEN_DSN" else str(tmp_path / "dsn"))
    code, out, err = run(*command.split())
    assert (code, out) == (ExitCode.USAGE, ""), err
    assert f"{variable}: " in one_line(err)
    assert "percent-encode" in err
    assert "hush" not in err


@pytest.mark.parametrize(
    ("properties", "says"),
    [
        ('{"isolation.level": "read_uncommitted"}', "isolation.level cannot be set: "),
        ('{"client.rack": "a", "enable.partition.eof": false}', "enable.partition.eof cannot be set: "),
        ('{"foo.bar": "1"}', 'ONEPEN_KAFKA: No such configuration property: "foo.bar"'),
        ('{"security.protocol": "pigeon"}', 'value "pigeon" for configuration property "security.protocol"'),
    ],
)
@pytest.mark.parametrize(
    "command",
    ["tail s", "why in-1", "prompt s x", "topics check", "partition list", "processor", "sink", "worker"],
)
def test_a_property_that_is_not_taken_is_bad_usage_of_every_command(
    command: str, properties: str, says: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEPEN_KAFKA", properties)
    monkeypatch.setenv("ONEPEN_DSN", "postgresql://u@127.0.0.1:9/db")
    monkeypatch.setenv("ONEPEN_TOKEN_KEY", "k" * 64)
    code, out, err = run(*command.split())
    assert (code, out) == (ExitCode.USAGE, ""), err
    assert says in one_line(err)


def test_the_sink_says_that_it_needs_an_address(run: Run) -> None:
    code, _, err = run("sink")
    assert code == ExitCode.USAGE
    assert "ONEPEN_DSN" in one_line(err)


def test_a_policy_that_contradicts_itself_is_refused_before_it_is_sent(run: Run) -> None:
    code, _, err = run("policy", "put", "-", stdin=b'{"leaseMs": 3000, "renewMs": 2000}')
    assert code == ExitCode.USAGE
    assert "three renewals must fit the lease" in one_line(err)
    code, _, err = run("policy", "put", "-", stdin=b'{"lease": 3000}')
    assert "lease" in one_line(err)


def test_the_stack_commands_without_a_stack(run: Run, tmp_path: Path) -> None:
    code, out, err = run("status")
    assert (code, "absent" in out) == (ExitCode.FINDING, True)
    assert "not running" in err
    assert run("down")[0] == 0
    assert run("reset")[0] == 0
    code, _, err = run("logs", "processor")
    assert code == ExitCode.NOT_FOUND
    assert "no log of 'processor'" in one_line(err)
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("x")
    code, _, err = run("reset", "--yes", "--data-dir", str(other))
    assert code == ExitCode.CONFLICT
    one_line(err)
    assert (other / "precious.txt").exists()
    code, _, err = run("reset", "--data-dir", str(other), stdin=b"yes\n")
    assert code == ExitCode.USAGE
    assert "--yes" in one_line(err)


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    script = f"{sys.executable} -m onepen topics plan -o jsonl | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")  # 0: all was written before the reader was gone


class StandsStill:
    """A reader of a log whose broker died right after it was opened."""

    caught_up = False

    def __init__(self, settings: object) -> None:
        self.next_offsets: dict[tuple[str, int], int] = {}

    def open(self, starts: Mapping[tuple[str, int], int | None]) -> None:
        self.next_offsets = dict.fromkeys(starts, 0)

    def poll(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


def test_a_replay_whose_broker_dies_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepen.streams.outside_reader.end_offsets", lambda *_: {0: 7, 1: 7})
    monkeypatch.setattr("onepen.streams.log_tail.LogTail", StandsStill)
    monkeypatch.setattr(event_log, "STANDS_STILL_S", 0.05)
    code, out, err = run("run", "replay", "run-1")
    assert (code, out) == (ExitCode.NO_ANSWER, "")
    assert "is a broker away?" in one_line(err)
