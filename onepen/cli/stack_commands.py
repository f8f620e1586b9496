"""`onepen up|down|reset|status|logs`: the local stack, from one command.

Rule: `up` supervises; it stays until Ctrl-C and ends everything in order. The others look at what is on file and at
the processes themselves, and touch nothing that is not ours.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.options import DataDirOption, FormatOption, settings_of
from onepen.cli.output import Format, cell, coloured, note, show_record, show_rows, write_data
from onepen.cli.terminal_text import printable

if TYPE_CHECKING:
    from onepen.streams.settings import Settings
    from onepen.streams.stack_state import StackStatus
    from onepen.streams.supervisor import Supervisor

START_TIMEOUT_MS = 300_000
"""Covers the first download on a slow line; a warm start takes some seconds."""

TURN_MS = 200


def register(app: typer.Typer) -> None:
    """Hang the commands into the command tree."""
    add_command(app, up, "Start the local stack and stay up; --demo plays the founding story.")
    add_command(app, down, "End the local stack; its data stays.")
    add_command(app, reset, "End the local stack and remove its data.")
    add_command(app, status, "Show the local stack as it is now.")
    add_command(app, logs, "Print the logs of its processes.")


def up(
    data_dir: DataDirOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once everything is ready.")] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Play the founding story live, then stay up.")] = False,
    once: Annotated[bool, typer.Option("--once", help="With --demo: end after the story, with its exit code.")] = False,
    kafka_port: Annotated[
        int | None, typer.Option("--kafka-port", min=1, max=65535, metavar="PORT", help="Wish for Kafka's port.")
    ] = None,
    postgres_port: Annotated[
        int | None,
        typer.Option("--postgres-port", min=1, max=65535, metavar="PORT", help="Wish for PostgreSQL's port."),
    ] = None,
) -> int:
    """Start Kafka, PostgreSQL, processor, sink, views and an example worker, and stay up until Ctrl-C.

    The first start downloads Kafka (44 MB). A port that is taken is replaced by a free one, and that is said. Data
    stays in the data directory and is there again at the next start. With ONEPEN_BOOTSTRAP or ONEPEN_DSN set, those
    services are used instead of started.

    \b
    Examples:
      onepen up                      start, print addresses, stay until Ctrl-C
      onepen up --demo               the same, and play the founding story
      onepen up --demo --once        end after the story: exit 0 when every check holds
      onepen up --detach             return once ready; `onepen down` ends it
    """
    if once and not demo:
        raise Failure("--once goes with --demo (see onepen up --help)", ExitCode.USAGE)
    if once and detach:
        raise Failure("--once and --detach contradict each other: --detach stays up", ExitCode.USAGE)
    directory = _directory(data_dir)
    running = _running_stack(directory)
    if running is not None:
        return _use_running(running, demo=demo)
    wishes = [f"--kafka-port={kafka_port}"] if kafka_port else []
    wishes += [f"--postgres-port={postgres_port}"] if postgres_port else []
    if detach:
        return _up_detached(directory, wishes, demo=demo)
    return _up_here(directory, kafka_port, postgres_port, demo=demo, once=once)


def _directory(data_dir: Path | None) -> Path:
    return settings_of(data_dir=data_dir).data_dir.expanduser().absolute()


def _running_stack(directory: Path) -> StackStatus | None:
    from onepen.streams.stack_state import status

    now = _status(directory) if directory.exists() else status(directory)
    return now if now.supervisor_pid is not None else None


def _status(directory: Path) -> StackStatus:
    from onepen.streams.stack_state import status

    try:
        return status(directory)
    except (ValueError, OSError) as error:
        raise Failure(f"{directory}: {error}", ExitCode.FINDING) from None


def _use_running(running: StackStatus, *, demo: bool) -> int:
    note(
        f"onepen: a stack is already up in {running.data_dir}"
        f" (supervisor pid {running.supervisor_pid}, {running.phase})"
    )
    if running.phase != "running":
        return ExitCode.CONFLICT
    settings = settings_of(data_dir=running.data_dir)
    _show_addresses(settings)
    if not demo:
        return ExitCode.CONFLICT
    return _play(settings, once=True)


def _up_detached(directory: Path, wishes: list[str], *, demo: bool) -> int:
    from onepen.cli.local_stack import OWN_NAMES
    from onepen.streams.data_dir import claim
    from onepen.streams.deadline import Deadline
    from onepen.streams.stack_control import start_detached

    claim(directory, *OWN_NAMES)
    log_path = directory / "logs" / "up.log"
    log_path.parent.mkdir(exist_ok=True)
    log_path.unlink(missing_ok=True)
    argv = [sys.executable, "-P", "-m", "onepen", "up", f"--data-dir={directory}", *wishes]
    stop = threading.Event()
    teller = threading.Thread(target=_tell_progress, args=(log_path, stop), daemon=True)
    teller.start()
    try:
        start_detached(argv, directory, log_path, Deadline(START_TIMEOUT_MS))
    finally:
        stop.set()
        teller.join(2)
    settings = settings_of(data_dir=directory)
    _show_addresses(settings)
    _show_next()
    return _play(settings, once=True) if demo else ExitCode.OK


def _tell_progress(log_path: Path, stop: threading.Event) -> None:
    """Pass the progress lines of the detached process on, as they come."""
    position = 0
    last_turn = False
    while not last_turn:
        last_turn = stop.wait(TURN_MS / 1000)
        if log_path.exists():
            with log_path.open("rb") as stream:
                stream.seek(position)
                whole, _, _ = stream.read().rpartition(b"\n")
            position += len(whole) + 1 if whole else 0
            for line in whole.decode("utf-8", "replace").splitlines():
                if line.startswith("  · "):
                    note(line)


def _up_here(directory: Path, kafka_port: int | None, postgres_port: int | None, *, demo: bool, once: bool) -> int:
    from onepen.cli.local_stack import OWN_NAMES, StackPlan, start_stack
    from onepen.streams.data_dir import claim
    from onepen.streams.deadline import Deadline
    from onepen.streams.stack_control import StopSignals
    from onepen.streams.supervisor import Supervisor

    began_s = time.monotonic()
    claim(directory, *OWN_NAMES)
    note(f"onepen: starting in {directory}")
    with StopSignals() as signals, Supervisor(directory, progress=_progress) as supervisor:
        plan = StackPlan(directory, kafka_port, postgres_port)
        starting = _Task(lambda: start_stack(supervisor, plan, Deadline(START_TIMEOUT_MS), _progress))
        if not starting.wait(signals):
            note("onepen: interrupted; ending what was started")
            return ExitCode.INTERRUPTED
        settings: Settings = starting.result()
        note(f"onepen: ready after {time.monotonic() - began_s:.1f} s")
        _show_addresses(settings)
        if demo:
            playing = _Task(lambda: _play(settings, once=once))
            if not playing.wait(signals, supervisor):
                _show_cursor_again()
                return _ended(supervisor, interrupted_early=True)
            code = int(playing.result())
            if once:
                return code
        _show_next()
        note("onepen: Ctrl-C ends everything in order; the data stays")
        while not signals.requested and supervisor.failure is None:
            signals.wait(TURN_MS)
        return _ended(supervisor, interrupted_early=False)


def _ended(supervisor: Supervisor, *, interrupted_early: bool) -> int:
    failure = supervisor.failure
    if failure is not None:
        raise Failure(f"the stack gave up: {failure.text()}", ExitCode.FINDING)
    note("onepen: ending the stack")
    return ExitCode.INTERRUPTED if interrupted_early else ExitCode.OK


def _show_cursor_again() -> None:
    """The story hides the cursor while it draws, and was left in the middle."""
    from onepen.cli.demo_command import console

    console().show_cursor(True)


class _Task:
    """Something slow beside the main thread, which must stay free for signals."""

    def __init__(self, work: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Any) -> None:
        try:
            self._value = work()
        except BaseException as error:  # handed to the main thread by `result`
            self._error = error
        finally:
            self._done.set()

    def wait(self, signals: Any, supervisor: Supervisor | None = None) -> bool:
        """Wait for the end of the work; False when a signal (or the stack's failure) came first."""
        while not self._done.wait(0.05):
            if signals.requested or (supervisor is not None and supervisor.failure is not None):
                return False
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def _play(settings: Settings, *, once: bool) -> int:
    from onepen.cli.demo_command import play_story

    return play_story(settings, once=once)


def _progress(sentence: str) -> None:
    note(f"  · {sentence}")


def _show_addresses(settings: Settings) -> None:
    from onepen.cli.local_stack import address_lines

    for line in address_lines(settings):
        write_data(printable(line))


def _show_next() -> None:
    from onepen.cli.local_stack import NEXT_COMMANDS

    write_data("Next:")
    for command in NEXT_COMMANDS:
        write_data(f"  {command}")


def down(data_dir: DataDirOption = None) -> int:
    """End the local stack in order. The data stays; nothing happens when no stack is up.

    Only processes on file are ended, and only while their start time is the one on file.

    \b
    Example:
      onepen down
    """
    from onepen.streams.stack_control import down as end_stack

    directory = _directory(data_dir)
    report = end_stack(directory)
    if not report.was_running:
        note(f"onepen: no stack is up in {directory}")
        return ExitCode.OK
    _tell_down(report, directory)
    return ExitCode.FINDING if report.left else ExitCode.OK


def _tell_down(report: Any, directory: Path) -> None:
    note(f"onepen: ended {', '.join(report.ended) or 'the supervisor'} in {directory}")
    if report.forced:
        note(f"onepen: only SIGKILL ended {', '.join(report.forced)}")
    if report.left:
        note(f"onepen: could not end {', '.join(report.left)}")


def reset(
    data_dir: DataDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Required without a terminal.")] = False,
) -> int:
    """End the local stack and remove its data: topics, tables, logs, keys. Nothing else in the directory is touched.

    \b
    Examples:
      onepen reset
      onepen reset --yes --data-dir /tmp/try
    """
    from onepen.streams.stack_control import reset as remove_stack

    directory = _directory(data_dir)
    if not directory.exists():
        note(f"onepen: nothing to remove: {directory} does not exist")
        return ExitCode.OK
    if not yes:
        if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
            raise Failure(
                f"reset removes all data in {directory}: say --yes (there is no terminal to ask)", ExitCode.USAGE
            )
        note(f"onepen: this ends the stack and removes its data in {directory}. Type yes to go on:")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            note("onepen: nothing was removed")
            return ExitCode.FINDING
    report, left = remove_stack(directory)
    if report.was_running:
        _tell_down(report, directory)
    note(f"onepen: removed the data in {directory}" + (f"; left alone: {', '.join(left)}" if left else ""))
    return ExitCode.OK


def status(data_dir: DataDirOption = None, output: FormatOption = Format.TEXT) -> int:
    """Show the local stack as it is now: exit 0 when everything runs, 1 when not.

    \b
    Examples:
      onepen status
      onepen status -o json
    """
    directory = _directory(data_dir)
    now = _status(directory)
    healthy = now.phase == "running" and all(child.alive for child in now.children)
    children = [
        {
            "name": c.name,
            "phase": c.phase,
            "alive": c.alive,
            "pid": c.pid,
            "crashes": c.crashes,
            "exit_code": c.exit_code,
        }
        for c in now.children
    ]
    if output is not Format.TEXT:
        # The DSN holds a password: it stays in the state file, which only its owner can read.
        addresses = {name: value for name, value in now.addresses.items() if name != "dsn"}
        record = {
            "dataDir": str(now.data_dir),
            "phase": now.phase,
            "supervisorPid": now.supervisor_pid,
            "addresses": addresses,
            "children": children,
            "failure": now.failure,
        }
        show_record(record, output)
        return ExitCode.OK if healthy else ExitCode.FINDING
    write_data(f"stack       {coloured(cell(now.phase), 'green' if healthy else 'red')} in {cell(now.data_dir)}")
    if now.failure:
        note(now.failure)
    show_rows(children, ("name", "phase", "alive", "pid", "crashes"), output, empty="no processes are on file")
    if now.phase == "running":
        _show_addresses(settings_of(data_dir=directory))
    elif now.phase in ("absent", "stopped"):
        note("onepen: not running; `onepen up` starts it")
    return ExitCode.OK if healthy else ExitCode.FINDING


def logs(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One process; without it, all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=100_000, help="Last lines of each log.")] = 50,
    data_dir: DataDirOption = None,
) -> int:
    """Print the logs of the stack's processes. Control characters in them do not reach the terminal.

    \b
    Examples:
      onepen logs processor
      onepen logs --follow
    """
    from onepen.cli.log_files import LogFile, follow_logs

    directory = _directory(data_dir)
    paths = {path.stem: path for path in sorted((directory / "logs").glob("*.log"))}
    if name is not None and name not in paths:
        known = ", ".join(paths) or "none"
        raise Failure(f"no log of {name!r} in {directory} (there are: {known})", ExitCode.NOT_FOUND)
    chosen = [name] if name is not None else list(paths)
    files = [LogFile(paths[one], one if len(chosen) > 1 else "") for one in chosen]
    for file in files:
        for line in file.last(lines):
            write_data(line)
    if not files:
        note(f"onepen: there are no logs in {directory}")
    if follow:
        follow_logs(files, write_data)
    return ExitCode.OK
