"""`onepen processor|sink|views|worker|migrate`: one process each, in the foreground, ended by SIGTERM or Ctrl-C.

Rule: here are arguments and what is said; how a process is ended and found is in `serving`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from onepen.cli.app_groups import CONTEXT, add_command, new_group
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.local_stack import PROCESSORS_VARIABLE, handed_on
from onepen.cli.log_lines import LOG_NAME_VARIABLE, LogFormat
from onepen.cli.options import (
    BootstrapOption,
    DataDirOption,
    LogFormatOption,
    MetricsPortOption,
    TenantOption,
    settings_of,
)
from onepen.cli.output import note, write_data
from onepen.cli.serving import ReadyWhenRecovered, claim_if_ours, on_file, process_on_file, serve
from onepen.cli.terminal_text import printable
from onepen.schemas.errors import Invalid

if TYPE_CHECKING:
    from onepen.streams.settings import Settings
    from onepen.streams.worker import Worker

DRAIN_SIGNAL = signal.SIGUSR1
DRAIN_TIMEOUT_MS = 20_000


def register(app: typer.Typer) -> None:
    """Hang the commands into the command tree."""
    app.add_typer(processor_group, short_help="Run the processor: every decision is made here.")
    add_command(app, sink, "Run the sink: the log into PostgreSQL.")
    add_command(app, views, "Run the live views over committed events.")
    add_command(app, worker, "Run a worker: yours, or an example.")
    add_command(app, migrate, "Bring the tables in PostgreSQL to this release.")


processor_group = new_group(
    "processor",
    """Run the processor: it decides every input and writes events, receipts and state.

    \b
    Examples:
      onepen processor                 run in the foreground until SIGTERM or Ctrl-C
      ONEPEN_SLOT=host-1 onepen processor
      onepen processor --metrics-port 9464 --log-format json
      onepen processor --workers 4     four processes: slots <host>-0 to <host>-3, restarted when they crash
      onepen processor drain           hand the partitions of a slot that will not come back to the others
    """,
)
processor_group.info.invoke_without_command = True
processor_group.info.no_args_is_help = False


@processor_group.callback()
def processor(
    context: typer.Context,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=256,
            metavar="N",
            envvar=PROCESSORS_VARIABLE,
            help="So many processes, each with a slot and a metrics port of its own.",
        ),
    ] = 1,
    metrics_port: MetricsPortOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Replaced by the group's own help."""
    if context.invoked_subcommand is not None:
        return
    from onepen.streams.processor import run_processor

    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, metrics_port=metrics_port)
    if workers > 1:
        return run_pool(settings, workers, log_format)
    drain_wish = threading.Event()
    logging.getLogger("onepen").addHandler(ReadyWhenRecovered())
    with on_file(settings.data_dir, f"processor.{settings.slot}"):
        serve(
            "processor",
            lambda stop: run_processor(settings, stop, drain_wish),
            wishes={DRAIN_SIGNAL: drain_wish},
            log_format=log_format,
        )


def run_pool(settings: Settings, workers: int, log_format: LogFormat) -> None:
    """So many processors as children of this process, until it is told to end."""
    from onepen.streams.process_pool import Member, ProcessPool, slots

    def member(number: int, slot: str) -> Member:
        env = handed_on(settings) | {
            "ONEPEN_SLOT": slot,
            "ONEPEN_LOG_FORMAT": log_format.value,
            PROCESSORS_VARIABLE: "1",
            LOG_NAME_VARIABLE: slot,
        }
        if settings.metrics_port is not None:
            env["ONEPEN_METRICS_PORT"] = str(settings.metrics_port + number if settings.metrics_port else 0)
        # -P: the working directory is no place to import from.
        return Member(f"processor {slot}", [sys.executable, "-P", "-m", "onepen", "processor"], env)

    drain_wish = threading.Event()
    pool = ProcessPool([member(number, slot) for number, slot in enumerate(slots(settings.slot, workers))])
    with on_file(settings.data_dir, f"processors.{settings.slot}"):
        serve(
            "processors",
            lambda stop: pool.run(stop, stop_signal=lambda: DRAIN_SIGNAL if drain_wish.is_set() else signal.SIGTERM),
            wishes={DRAIN_SIGNAL: drain_wish},
            log_format=log_format,
        )


@processor_group.command("drain", context_settings=dict(CONTEXT))
def drain(data_dir: DataDirOption = None) -> int:
    """End the processor of this slot (ONEPEN_SLOT) and give its partitions to the others at once.

    SIGTERM alone keeps the slot: a restart within the group's session goes on where it stood. Under `onepen up` the
    supervisor starts a drained processor again. Processes that were started by `--workers` end together.

    \b
    Example:
      ONEPEN_SLOT=host-1 onepen processor drain
    """
    from onepen.streams.deadline import Deadline
    from onepen.streams.process_identity import is_running, signal_exactly

    settings = settings_of(data_dir=data_dir)
    found = process_on_file(settings.data_dir, f"processors.{settings.slot}")
    found = found or process_on_file(settings.data_dir, f"processor.{settings.slot}")
    if found is None:
        raise Failure(
            f"no processor of slot {settings.slot} is on file in {settings.data_dir} on this machine",
            ExitCode.NOT_FOUND,
        )
    signal_exactly(found, DRAIN_SIGNAL)
    deadline = Deadline(DRAIN_TIMEOUT_MS)
    while is_running(found):
        if deadline.expired:
            raise Failure(f"processor {found.pid} still runs after {DRAIN_TIMEOUT_MS} ms", ExitCode.NO_ANSWER)
        time.sleep(0.05)
    note(f"onepen: the processor of slot {settings.slot} (pid {found.pid}) gave its partitions away and ended")
    return ExitCode.OK


def sink(
    metrics_port: MetricsPortOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Run the sink: it writes events and receipts into PostgreSQL (ONEPEN_DSN or ONEPEN_DSN_FILE).

    \b
    Examples:
      ONEPEN_DSN_FILE=/run/secrets/dsn onepen sink
      onepen sink --metrics-port 9465 --log-format json
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, metrics_port=metrics_port)
    settings.require_dsn()
    from onepen.streams.feed import run_sink
    from onepen.streams.readiness import say_ready

    serve("sink", lambda stop: run_sink(settings, stop, ready=say_ready), log_format=log_format)


def views(data_dir: DataDirOption = None, bootstrap: BootstrapOption = None) -> None:
    """Run the live views: a Faust application that counts active runs and outcomes from committed events.

    It writes what it counts to views.json in the data directory.

    \b
    Example:
      onepen views
    """
    from onepen.streams.readiness import say_ready
    from onepen.streams.views import run_views

    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap)
    claim_if_ours(settings.data_dir)
    serve("views", lambda stop: run_views(settings, stop, ready=say_ready))


def migrate(data_dir: DataDirOption = None) -> None:
    """Bring the tables in PostgreSQL to this release. Forward only; may be repeated.

    \b
    Example:
      ONEPEN_DSN_FILE=/run/secrets/owner-dsn onepen migrate
    """
    applied = apply_migrations(settings_of(data_dir=data_dir).require_dsn())
    for name in applied:
        write_data(printable(f"applied {name}"))
    if not applied:
        note("onepen: nothing to do: the tables are up to date")


def apply_migrations(dsn: str) -> list[str]:
    """Apply the migrations that the database lacks; their names."""
    from onepen.sinks.postgres.migrate import migrate as run_migrations

    return asyncio.run(run_migrations(dsn))


def worker(
    application: Annotated[
        str | None, typer.Option("--app", metavar="MODULE:ATTRIBUTE", help="Your Worker [a small example].")
    ] = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Run a worker: the one you name, or an example that answers every prompt.

    The module is looked for in the current directory first. The example takes its time over a prompt with the word
    slowly (steer or abort it meanwhile), and asks for an approval over one with the word mail.

    \b
    Examples:
      onepen worker
      onepen worker --app my_agent:worker
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant)
    os.environ.update(handed_on(settings))  # a worker of the user's reads its settings by itself
    chosen = _load_worker(application) if application is not None else _example(settings)
    from onepen.cli.example_worker import tell_when_ready
    from onepen.streams.readiness import say_ready

    tell_when_ready(chosen, say_ready)
    serve("worker", chosen.serve)


def _example(settings: Settings) -> Worker:
    from onepen.cli.example_worker import example_worker

    return example_worker(settings)


def _load_worker(name: str) -> Worker:
    from importlib import import_module

    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise Invalid("app: must be MODULE:ATTRIBUTE, as in my_agent:worker", field="app")
    from onepen.streams.worker import Worker

    sys.path.insert(0, os.getcwd())
    try:
        found: object = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Invalid(f"app: {name}: {error}", field="app") from None
    if not isinstance(found, Worker):
        raise Invalid(f"app: {name} is {type(found).__name__}, not a Worker", field="app")
    return found
