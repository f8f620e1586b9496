"""The supervisor with real processes: restarts, giving up, ending in order, and never a stranger."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onepen.streams.child_process import launch
from onepen.streams.data_dir import DataDirError, claim
from onepen.streams.deadline import Deadline
from onepen.streams.log_rotation import rotate_if_large
from onepen.streams.process_identity import ProcessIdentity, identify, is_running
from onepen.streams.stack_control import down, reset, start_detached
from onepen.streams.stack_state import ChildRecord, StackRecord, read_record, status
from onepen.streams.supervisor import Child, StackFailed, Supervisor

WAIT_MS = 20_000
FOREVER = "import time, sys\nprint('up', flush=True)\nwhile True: time.sleep(1)\n"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n" + (
    "while True: time.sleep(1)\n"
)


def wait_for(condition: Callable[[], bool], what: str, timeout_ms: int = WAIT_MS) -> None:
    deadline = Deadline(timeout_ms)
    while not condition():
        deadline.check(what)
        time.sleep(0.02)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


def said(log_path: Path, word: str) -> bool:
    return log_path.exists() and word in log_path.read_text("utf-8", "replace")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of ours."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def test_a_killed_child_is_started_again(data_dir: Path) -> None:
    with Supervisor(data_dir) as supervisor:
        log_path = data_dir / "logs" / "one.log"
        child = Child("one", python(FOREVER), ready=lambda: said(log_path, "up"))
        supervisor.start(child, deadline=Deadline(WAIT_MS))
        first = supervisor.pid_of("one")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: supervisor.pid_of("one") not in (None, first), "the restart")
        wait_for(lambda: log_path.read_text().count("up") == 2, "the second start in the same log")
        wait_for(lambda: status(data_dir).children[0].crashes == 1, "the crash in the state file")
        assert status(data_dir).children[0].alive


def test_five_crashes_stop_the_stack_and_show_the_log(data_dir: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(data_dir, progress=told.append)
    with supervisor:
        supervisor.start(Child("steady", python(FOREVER)), deadline=Deadline(WAIT_MS))
        steady_pid = supervisor.pid_of("steady")
        assert steady_pid is not None
        steady = identify(steady_pid)
        assert steady is not None
        code = "import sys; print('cannot \\x1b[31mread\\x1b[0m the file', flush=True); sys.exit(3)"
        child = Child("broken", python(code), ready=lambda: False)
        with pytest.raises(StackFailed) as caught:
            supervisor.start(child, deadline=Deadline(WAIT_MS))
        assert supervisor.wait_ended(WAIT_MS)
        assert not is_running(steady)
    text = str(caught.value)
    assert "broken: ended 5 times within a minute, the last time with code 3" in text
    assert text.count("cannot") == 5
    assert "\x1b" not in text
    assert status(data_dir).phase == "failed"
    assert "broken" in (status(data_dir).failure or "")
    assert [line.rsplit(" ", 2)[1] for line in told if "again" in line] == ["0.2", "0.4", "0.8", "1.6"]


def test_a_program_that_is_not_there_is_said_in_its_log(data_dir: Path) -> None:
    with Supervisor(data_dir) as supervisor:
        child = Child("gone", ["/nowhere/at/all"], restart=False, ready=lambda: False)
        with pytest.raises(StackFailed, match="cannot run /nowhere/at/all"):
            supervisor.start(child, deadline=Deadline(WAIT_MS))


def test_a_child_that_is_never_ready_fails_the_start(data_dir: Path) -> None:
    with Supervisor(data_dir) as supervisor:
        child = Child("slow", python(FOREVER), ready=lambda: False)
        with pytest.raises(StackFailed, match="slow: not ready within 300 ms"):
            supervisor.start(child, deadline=Deadline(300))
    assert not status(data_dir).children[0].alive


def test_children_end_in_reverse_order_and_a_deaf_one_takes_no_time_from_the_others(
    data_dir: Path, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    code = """
        import signal, sys, time
        def end(*_):
            with open(sys.argv[1], "a") as f: f.write(sys.argv[2] + "\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        while True: time.sleep(1)
    """
    supervisor = Supervisor(data_dir)
    with supervisor:
        logs = data_dir / "logs"
        for name, argv, word in (
            ("first", python(code, str(order), "first"), "up"),
            ("second", python(code, str(order), "second"), "up"),
            ("deaf", python(DEAF), "deaf"),
        ):
            log_path = logs / f"{name}.log"
            child = Child(name, argv, ready=lambda p=log_path, w=word: said(p, w))  # type: ignore[misc]
            supervisor.start(child, deadline=Deadline(WAIT_MS))
        began_s = time.monotonic()
        supervisor.stop(timeout_ms=3_000)
        took_s = time.monotonic() - began_s
    assert order.read_text().split() == ["second", "first"]
    assert took_s > 0.9, "the deaf one was given a part of the time"
    assert [child.exit_code for child in status(data_dir).children] == [0, 0, -signal.SIGKILL]
    assert status(data_dir).phase == "stopped"


def test_the_grandchildren_of_a_killed_child_end_with_it(data_dir: Path, tmp_path: Path) -> None:
    pid_path = tmp_path / "pid"
    code = """
        import subprocess, sys, time
        child = subprocess.Popen(["sleep", "300"])
        open(sys.argv[1], "w").write(str(child.pid) + "\\n")
        while True: time.sleep(1)
    """
    with Supervisor(data_dir) as supervisor:
        child = Child("parent", python(code, str(pid_path)), restart=False)
        supervisor.start(child, deadline=Deadline(WAIT_MS))
        wait_for(lambda: pid_path.exists() and pid_path.read_text().endswith("\n"), "the grandchild")
        grandchild = identify(int(pid_path.read_text()))
        assert grandchild is not None
        os.kill(supervisor.pid_of("parent") or 0, signal.SIGKILL)
        wait_for(lambda: not is_running(grandchild), "the end of the grandchild")


def test_the_state_file_is_private_and_names_pid_and_start_time(data_dir: Path) -> None:
    with Supervisor(data_dir) as supervisor:
        supervisor.start(Child("one", python(FOREVER)), deadline=Deadline(WAIT_MS))
        supervisor.set_address("dsn", "postgresql://secret")
        supervisor.set_running()
        wait_for(lambda: status(data_dir).phase == "running", "the phase on file")
        path = data_dir / "stack.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        content = json.loads(path.read_text())
        assert content["addresses"] == {"dsn": "postgresql://secret"}
        for process in (content["supervisor"], content["children"][0]):
            assert identify(process["pid"]) == ProcessIdentity(process["pid"], process["start_time"])
        assert status(data_dir).supervisor_pid == os.getpid()


def test_a_directory_has_one_supervisor(data_dir: Path) -> None:
    with Supervisor(data_dir), pytest.raises(DataDirError, match="already runs"):
        Supervisor(data_dir)
    with Supervisor(data_dir):
        pass


SUPERVISING = """
    import sys, time
    from pathlib import Path
    from onepen.streams.deadline import Deadline
    from onepen.streams.stack_control import StopSignals
    from onepen.streams.supervisor import Child, Supervisor

    data_dir, deaf, forever = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    with StopSignals() as stop, Supervisor(data_dir) as supervisor:
        for name, code, word in (("deaf", deaf, "deaf"), ("polite", forever, "up")):
            log = data_dir / "logs" / (name + ".log")
            ready = lambda: log.exists() and word in log.read_text()
            child = Child(name, [sys.executable, "-c", code], ready=ready)
            supervisor.start(child, deadline=Deadline(20_000))
        supervisor.set_running()
        while not stop.wait(1_000):
            pass
        supervisor.stop(timeout_ms=2_000)
"""


def supervised_elsewhere(data_dir: Path) -> tuple[ProcessIdentity, list[ProcessIdentity]]:
    """A stack of another process: its supervisor and its two children."""
    argv = python(SUPERVISING, str(data_dir), DEAF, FOREVER)
    data_dir.parent.mkdir(exist_ok=True)
    start_detached(argv, data_dir, data_dir.parent / "detached.log", Deadline(WAIT_MS))
    record = read_record(data_dir)
    assert record is not None
    children = [child.identity for child in record.children if child.identity is not None]
    assert len(children) == 2
    assert all(is_running(process) for process in children)
    return record.supervisor, children


def reap(process: ProcessIdentity) -> None:
    """Take the end of a process that this one started, so that it does not stay as a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)


def test_children_die_with_a_killed_supervisor(data_dir: Path) -> None:
    supervisor, children = supervised_elsewhere(data_dir)
    os.kill(supervisor.pid, signal.SIGKILL)
    reap(supervisor)
    wait_for(lambda: not any(map(is_running, children)), "the end of the children", 5_000)
    assert status(data_dir).phase == "died"
    assert not down(data_dir).was_running
    with Supervisor(data_dir) as successor:
        successor.start(Child("next", python(FOREVER)), deadline=Deadline(WAIT_MS))


@pytest.mark.parametrize("watch_by_pipe", [False, True], ids=["kernel", "pipe"])
def test_a_launched_process_dies_with_its_parent_both_ways(tmp_path: Path, watch_by_pipe: bool) -> None:
    if not watch_by_pipe and sys.platform != "linux":
        pytest.skip("the kernel's death signal is Linux's")
    code = """
        import sys, time
        from pathlib import Path
        from onepen.streams.child_process import launch
        process = launch([sys.executable, "-c", sys.argv[2]], log_path=Path(sys.argv[1]),
                         watch_by_pipe=sys.argv[3] == "True")
        print(process.pid, flush=True)
        time.sleep(300)
    """
    log_path = tmp_path / "log"
    argv = python(code, str(log_path), DEAF, str(watch_by_pipe))
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = identify(int(parent.stdout.readline()))
        assert child is not None
        wait_for(lambda: said(log_path, "deaf"), "the child")
        parent.kill()
    wait_for(lambda: not is_running(child), "the end of the child", 10_000)


def test_a_pipe_watcher_leaves_when_its_process_ends(tmp_path: Path) -> None:
    process = launch(python("print('done')"), log_path=tmp_path / "log", watch_by_pipe=True)
    assert process.wait(WAIT_MS) == 0
    assert said(tmp_path / "log", "done")
    assert process.watch_fd is None


def test_down_ends_a_stack_of_another_process_and_says_so_once(data_dir: Path) -> None:
    supervisor, children = supervised_elsewhere(data_dir)
    report = down(data_dir)
    reap(supervisor)
    assert report.was_running
    assert report.ended == ("deaf", "polite")
    assert report.left == ()
    assert not any(map(is_running, [supervisor, *children]))
    assert status(data_dir).phase == "stopped"
    assert not down(data_dir).was_running


def test_down_ends_a_stack_whose_supervisor_is_frozen(data_dir: Path) -> None:
    supervisor, children = supervised_elsewhere(data_dir)
    os.kill(supervisor.pid, signal.SIGSTOP)
    report = down(data_dir, timeout_ms=4_000)
    reap(supervisor)
    assert "supervisor" in report.forced
    assert not any(map(is_running, [supervisor, *children]))


def record_with(pid: int, start_time: str, data_dir: Path) -> None:
    claim(data_dir)
    child = ChildRecord("postgres", "running", pid=pid, start_time=start_time, log="logs/postgres.log")
    StackRecord(ProcessIdentity(pid, start_time), "running", children=[child]).write(data_dir)


def test_down_and_a_new_supervisor_never_end_a_stranger_with_the_same_pid(
    data_dir: Path, stranger: subprocess.Popen[bytes]
) -> None:
    own = identify(stranger.pid)
    assert own is not None
    record_with(stranger.pid, own.start_time + "0", data_dir)
    assert not down(data_dir).was_running
    assert status(data_dir).phase == "died"
    assert not status(data_dir).children[0].alive
    with Supervisor(data_dir):
        pass
    assert stranger.poll() is None
    # The same record with the right start time is ours: the test can fail.
    record_with(stranger.pid, own.start_time, data_dir)
    assert down(data_dir).was_running
    assert stranger.wait(5) == -signal.SIGTERM


def test_a_new_supervisor_ends_what_a_dead_one_left(data_dir: Path, stranger: subprocess.Popen[bytes]) -> None:
    own = identify(stranger.pid)
    assert own is not None
    record_with(stranger.pid, own.start_time, data_dir)
    told: list[str] = []
    with Supervisor(data_dir, progress=told.append):
        assert stranger.wait(5) == -signal.SIGTERM
    assert any("left by an earlier supervisor" in line for line in told)


def test_reset_removes_what_is_ours_and_nothing_else(data_dir: Path) -> None:
    with Supervisor(data_dir) as supervisor:
        supervisor.start(Child("one", python(FOREVER)), deadline=Deadline(WAIT_MS))
    (data_dir / "kafka").mkdir()
    (data_dir / "kafka" / "segment").write_text("data")
    (data_dir / "notes.txt").write_text("mine")
    _, left = reset(data_dir)
    assert left == ["notes.txt"]
    assert [entry.name for entry in data_dir.iterdir()] == ["notes.txt"]
    with pytest.raises(DataDirError, match="not a data directory of onepen"):
        reset(data_dir)
    assert (data_dir / "notes.txt").read_text() == "mine"


def test_a_directory_with_foreign_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataDirError, match="has content that onepen did not make"):
        Supervisor(tmp_path)
    with pytest.raises(DataDirError):
        reset(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_marker_cannot_point_out_of_its_directory(data_dir: Path, tmp_path: Path) -> None:
    claim(data_dir)
    (tmp_path / "outside").write_text("keep")
    (data_dir / ".onepen-data.json").write_text(json.dumps({"names": ["../outside"]}))
    with pytest.raises(DataDirError, match="damaged"):
        reset(data_dir)
    assert (tmp_path / "outside").exists()


def test_a_detached_command_that_fails_is_told_with_its_log(data_dir: Path, tmp_path: Path) -> None:
    argv = python("import sys; print('no such broker'); sys.exit(4)")
    with pytest.raises(DataDirError, match=r"(?s)ended with code 4.*no such broker"):
        start_detached(argv, data_dir, tmp_path / "log", Deadline(WAIT_MS))


def test_large_logs_move_aside_while_the_child_goes_on_writing(data_dir: Path) -> None:
    code = """
        import time
        number = 0
        while True:
            number += 1
            print(f"line {number} " + "x" * 1000, flush=True)
            time.sleep(0.002)
    """
    with Supervisor(data_dir, max_log_bytes=200_000) as supervisor:
        supervisor.start(Child("noisy", python(code)), deadline=Deadline(WAIT_MS))
        log_path = data_dir / "logs" / "noisy.log"
        wait_for(lambda: log_path.with_name("noisy.log.1").exists(), "the first rotation")
        wait_for(lambda: said(log_path, "line "), "new lines in the emptied log")
        assert "\0" not in log_path.read_text()


def test_only_the_wanted_number_of_old_logs_is_kept(tmp_path: Path) -> None:
    log_path = tmp_path / "x.log"
    for number in range(6):
        log_path.write_text(f"content {number}")
        assert rotate_if_large(log_path, max_bytes=3, kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    assert (tmp_path / "x.log.1").read_text() == "content 5"
    assert (tmp_path / "x.log.2").read_text() == "content 4"
    assert not rotate_if_large(log_path, max_bytes=3)
