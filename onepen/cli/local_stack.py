"""Bringing the local stack up: services, topics, tables, then the processes of onepen, as children of one supervisor.

Rule: what does not depend on each other starts at the same time (Kafka with its topics beside PostgreSQL with its
migrations). Children learn their addresses from the environment, so no secret stands in an argument list. Services
named by ONEPEN_BOOTSTRAP or ONEPEN_DSN are used instead of started.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onepen.cli.serving import RUN_DIR
from onepen.schemas.errors import OnepenError

if TYPE_CHECKING:
    from onepen.streams.deadline import Deadline
    from onepen.streams.settings import Settings
    from onepen.streams.supervisor import Child, Supervisor

Progress = Callable[[str], None]

PROCESSORS_VARIABLE = "ONEPEN_PROCESSOR_WORKERS"
"""So many processors run under one parent."""
PROCESSES = ("processor", "sink", "views", "worker")
PGPASS_NAME = "pgpass"
OBJECTS_DIR = "objects"
OWN_NAMES = ("token.key", PGPASS_NAME, RUN_DIR, "views.json", OBJECTS_DIR)
"""What the command line adds to a data directory: `reset` removes it with the rest."""


@dataclass(frozen=True)
class StackPlan:
    """What to start: wishes for ports (None: the remembered one, else any), and the directory."""

    data_dir: Path
    kafka_port: int | None = None
    postgres_port: int | None = None


def start_stack(supervisor: Supervisor, plan: StackPlan, deadline: Deadline, progress: Progress) -> Settings:
    """Start everything and wait until it is ready; the settings that clients use.

    Raises what went wrong first (`StackFailed`, `EmbeddedKafkaError`, `EmbeddedPostgresError`, `OnepenError`).
    """
    from onepen.streams.settings import ensure_token_key

    ensure_token_key(plan.data_dir)
    (plan.data_dir / OBJECTS_DIR).mkdir(exist_ok=True)
    _together(
        lambda: _kafka_with_topics(supervisor, plan, deadline, progress),
        lambda: _postgres_with_tables(supervisor, plan, deadline, progress),
    )
    settings = _settings(plan)
    progress("Starting " + ", ".join(PROCESSES))
    supervisor.start(*(process_child(name, settings) for name in PROCESSES), deadline=deadline)
    supervisor.set_running()
    return settings


def _settings(plan: StackPlan) -> Settings:
    from onepen.streams.settings import load_settings

    return load_settings(data_dir=plan.data_dir)


def _kafka_with_topics(supervisor: Supervisor, plan: StackPlan, deadline: Deadline, progress: Progress) -> None:
    from onepen.streams.embedded_kafka import EmbeddedKafka
    from onepen.streams.embedded_stack import kafka_child
    from onepen.streams.settings import load_settings
    from onepen.streams.topic_admin import apply

    bootstrap = os.environ.get("ONEPEN_BOOTSTRAP")
    if not bootstrap:
        kafka = EmbeddedKafka(plan.data_dir / "kafka", port=plan.kafka_port, progress=progress)
        bootstrap = kafka.prepare()
        progress("Starting Kafka")
        supervisor.start(kafka_child(kafka), deadline=deadline)
    settings = load_settings(data_dir=plan.data_dir, bootstrap=bootstrap)
    done = apply(settings, max(1_000, deadline.remaining_ms()))
    if done:
        progress(f"Topics: {'; '.join(done)}" if len(done) <= 2 else f"Topics: created {settings.prefix}.*")
    supervisor.set_address("bootstrap", bootstrap)
    supervisor.set_address("prefix", settings.prefix)


def _postgres_with_tables(supervisor: Supervisor, plan: StackPlan, deadline: Deadline, progress: Progress) -> None:
    from onepen.cli.service_commands import apply_migrations
    from onepen.sinks.embedded_postgres import EmbeddedPostgres
    from onepen.streams.embedded_stack import postgres_child
    from onepen.streams.settings import load_settings

    own = load_settings(data_dir=plan.data_dir)
    if os.environ.get("ONEPEN_DSN") or own.dsn_file is not None:
        dsn = own.require_dsn()
    else:
        postgres = EmbeddedPostgres(plan.data_dir / "postgres", port=plan.postgres_port, progress=progress)
        dsn = postgres.prepare()
        progress("Starting PostgreSQL")
        supervisor.start(postgres_child(postgres), deadline=deadline)
    if applied := apply_migrations(dsn):
        progress(f"Tables: applied {', '.join(applied)}")
    write_pgpass(plan.data_dir, dsn)
    supervisor.set_address("dsn", dsn)


def _together(*tasks: Callable[[], None]) -> None:
    """Run the tasks at the same time; raise the first error, without waiting for the other tasks then."""
    condition = threading.Condition()
    errors: list[BaseException] = []
    left = len(tasks)

    def run(task: Callable[[], None]) -> None:
        nonlocal left
        failed: BaseException | None = None
        try:
            task()
        except BaseException as error:  # handed to the caller's thread
            failed = error
        with condition:
            left -= 1
            if failed is not None:
                errors.append(failed)
            condition.notify_all()

    for task in tasks:
        # Daemons: a download that hangs must not keep an interrupted command alive.
        threading.Thread(target=run, args=(task,), daemon=True).start()
    with condition:
        condition.wait_for(lambda: bool(errors) or left == 0)
    if errors:
        raise errors[0]


def process_child(name: str, settings: Settings) -> Child:
    """One process of onepen as a child: `python -m onepen NAME`, ready when it says so in its ready file."""
    from onepen.streams.readiness import READY_FILE_VARIABLE
    from onepen.streams.supervisor import Child

    ready_path = settings.data_dir / RUN_DIR / f"{name}.ready"
    ready_path.parent.mkdir(exist_ok=True)
    ready_path.unlink(missing_ok=True)
    return Child(
        name,
        # -P: the data directory, where children run, is no place to import from.
        [sys.executable, "-P", "-m", "onepen", name],
        env=child_environment(settings) | _metrics_port(name, settings) | {READY_FILE_VARIABLE: str(ready_path)},
        ready=ready_path.exists,
    )


def _metrics_port(name: str, settings: Settings) -> dict[str, str]:
    """The processors show metrics on the named port and those behind it, one each, the sink on the next one."""
    port, wish = settings.metrics_port, os.environ.get(PROCESSORS_VARIABLE, "")
    processors = int(wish) if wish.isdecimal() else 1  # what is no number ends the processor with a sentence
    return {"ONEPEN_METRICS_PORT": str(port + processors)} if name == "sink" and port else {}


def child_environment(settings: Settings) -> dict[str, str]:
    """What a process of the stack has to know, as environment."""
    return handed_on(settings) | {"ONEPEN_DSN": settings.require_dsn(), "PYTHONUNBUFFERED": "1"}


def handed_on(settings: Settings) -> dict[str, str]:
    """What options and the local stack have named, as environment, for code that reads its settings by itself.

    All of it or nothing: where one address is in the environment, the others of the local stack are not looked for.
    A DSN in a file stays there.
    """
    found = {
        "ONEPEN_BOOTSTRAP": settings.bootstrap,
        "ONEPEN_PREFIX": settings.prefix,
        "ONEPEN_PARTITIONS": str(settings.partitions),
        "ONEPEN_TENANT_ID": str(settings.tenant_id),
        "ONEPEN_DATA_DIR": str(settings.data_dir),
    }
    if settings.dsn is not None:
        found["ONEPEN_DSN"] = settings.dsn.get_secret_value()
    if settings.objects_root is not None:
        found["ONEPEN_OBJECTS_ROOT"] = str(settings.objects_root)
    return found


def write_pgpass(data_dir: Path, dsn: str) -> Path:
    """A password file for psql, so that no password stands on the screen or in an argument list."""
    from urllib.parse import unquote, urlsplit

    from onepen.sinks.postgres_dsn import hosts

    parts = urlsplit(dsn)
    database, user = unquote(parts.path.lstrip("/")) or "*", unquote(parts.username or "") or "*"
    password = unquote(parts.password or "")
    lines = [
        ":".join(text.replace("\\", "\\\\").replace(":", "\\:") for text in (*place, database, user, password)) + "\n"
        for place in hosts(dsn)
    ]
    path = data_dir / PGPASS_NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.writelines(lines)
    return path


def psql_command(data_dir: Path, dsn: str) -> str:
    """A line to paste that opens psql, without the password in it."""
    from shlex import quote
    from urllib.parse import unquote, urlsplit

    from onepen.sinks.postgres_dsn import hosts

    parts = urlsplit(dsn)
    host, port = hosts(dsn)[0]
    database, user = unquote(parts.path.lstrip("/")) or "postgres", unquote(parts.username or "") or "postgres"
    file = quote(str(data_dir / PGPASS_NAME))
    return f"PGPASSFILE={file} psql -h {quote(host)} -p {port} -U {quote(user)} {quote(database)}"


def address_lines(settings: Settings) -> list[str]:
    """The ready-to-paste lines that `up` and `status` end with."""
    from shlex import quote

    data_dir = quote(str(settings.data_dir))
    lines = [f"Kafka       {settings.bootstrap}  (topics {settings.prefix}.*)"]
    try:
        lines.append(f"PostgreSQL  {psql_command(settings.data_dir, settings.require_dsn())}")
    except OnepenError:
        lines.append("PostgreSQL  (no address)")
    where = "" if _is_default(settings) else f"export ONEPEN_DATA_DIR={data_dir}"
    return [*lines, *([f"Elsewhere   {where}"] if where else [])]


def _is_default(settings: Settings) -> bool:
    from onepen.streams.settings import default_data_dir

    return settings.data_dir == default_data_dir()


NEXT_COMMANDS = (
    'onepen prompt session-42 "What is new?" --follow',
    "onepen tail --all",
    "onepen run list",
    "onepen status",
    "onepen down",
)
