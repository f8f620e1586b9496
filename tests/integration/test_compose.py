"""docker-compose.yml is valid, says the same as the embedded stack, and its commands work without Docker."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from onepen.streams.child_process import LAUNCHER_PATH
from onepen.streams.embedded_kafka import BROKER_SETTINGS
from onepen.streams.ports import free_port
from tests.conformance.worlds import wait_for

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "tests" / "data" / "compose-spec" / "compose-spec.json"
BIN = Path(sys.executable).parent
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30

OURS = ("topics", "tables", "processor", "sink", "worker", "views")
ONCE = ("topics", "tables")
WATCHED = ("processor", "sink")

# Where the two brokers must differ: names and addresses of the listeners, and the time that a killed broker waits for
# its former self, which `broker_start` declares dead.
DIFFERENT = {
    "broker.session.timeout.ms",
    "listener.security.protocol.map",
    "inter.broker.listener.name",
    "controller.listener.names",
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_it_is_valid_by_the_compose_specification(compose: dict[str, Any]) -> None:
    schema = json.loads(SCHEMA.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    assert [error.message for error in validator.iter_errors(compose)] == []
    compose = json.loads(json.dumps(compose))
    compose["services"]["sink"]["comand"] = ["typo"]
    assert list(validator.iter_errors(compose)), "the schema refuses what it does not know"


def test_the_broker_is_set_as_the_embedded_one(compose: dict[str, Any]) -> None:
    environment = compose["services"]["kafka"]["environment"]
    for name, value in BROKER_SETTINGS.items():
        if name not in DIFFERENT:
            variable = "KAFKA_" + name.upper().replace(".", "_")
            assert environment.get(variable) == value, variable
    assert compose["services"]["kafka"]["image"] == "apache/kafka:4.2.0"
    assert compose["services"]["postgres"]["image"] == "postgres:18"


def test_it_has_the_processes_of_the_embedded_stack(compose: dict[str, Any]) -> None:
    from onepen.cli.local_stack import PROCESSES

    assert set(compose["services"]) == {"kafka", "postgres", *OURS}
    assert set(PROCESSES) == set(OURS) - set(ONCE)


def test_no_secret_stands_in_it(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|DSN|KEY|SECRET", variable):
                assert value.startswith("/run/secrets/"), f"{name}: {variable}"
        assert "://" not in " ".join(service.get("command", [])), f"{name}: an address in the arguments"


def test_the_secrets_are_made_once(tmp_path: Path) -> None:
    (tmp_path / "infra").mkdir()
    script = shutil.copy(ROOT / "infra" / "make-secrets.sh", tmp_path / "infra")
    made = []
    for _ in range(2):
        subprocess.run(["/bin/sh", script], check=True, timeout=20, capture_output=True)
        directory = tmp_path / ".onepen" / "secrets"
        assert directory.stat().st_mode & 0o777 == 0o700
        made.append({path.name: path.read_text() for path in directory.iterdir()})
    assert made[0] == made[1]
    assert set(made[0]) == {"dsn", "postgres_password", "token_key"}
    assert made[0]["postgres_password"] in made[0]["dsn"]
    assert len(made[0]["token_key"]) == 64


@pytest.fixture
def environment(
    compose: dict[str, Any], kafka_bootstrap: str, fresh_dsn: str, topic_prefix: str, tmp_path: Path
) -> Any:
    """The environment that Compose would give to a service, with the paths and addresses of this test."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "dsn").write_text(fresh_dsn)
    (secrets / "token_key").write_text("5" * 64)

    def of(name: str) -> dict[str, str]:
        data = tmp_path / name
        data.mkdir()
        given = dict(compose["services"][name]["environment"])
        assert given["ONEPEN_BOOTSTRAP"] == "kafka:19092"
        given["ONEPEN_BOOTSTRAP"] = kafka_bootstrap
        places = {"/run/secrets": str(secrets), "/tmp/ready": str(data / "ready"), "/var/lib/onepen": str(data)}
        for variable, value in given.items():
            for there, here in places.items():
                if value.startswith(there):
                    given[variable] = here + value.removeprefix(there)
        if "ONEPEN_METRICS_PORT" in given:
            given |= {"ONEPEN_METRICS_PORT": str(free_port()), "ONEPEN_METRICS_HOST": "127.0.0.1"}
        path = os.pathsep.join((str(BIN), "/usr/bin", "/bin"))
        return given | {"ONEPEN_PREFIX": topic_prefix, "PATH": path, "HOME": str(tmp_path)}

    return of


@pytest.fixture
def started() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    processes: dict[str, subprocess.Popen[bytes]] = {}
    yield processes
    for process in processes.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def healthy(compose: dict[str, Any], name: str, given: dict[str, str]) -> bool:
    """What the health check of the service says, asked as Compose asks."""
    kind, program, *arguments = compose["services"][name]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    port = compose["services"][name]["environment"]["ONEPEN_METRICS_PORT"]
    assert any(f":{port}/readyz" in argument for argument in arguments)
    asked = [argument.replace(f":{port}/", f":{given['ONEPEN_METRICS_PORT']}/") for argument in arguments]
    return subprocess.run([sys.executable, *asked], timeout=20, capture_output=True).returncode == 0


def test_every_command_of_ours_runs_without_docker(
    compose: dict[str, Any], environment: Any, started: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in OURS}

    def start(name: str) -> dict[str, str]:
        given: dict[str, str] = environment(name)
        program, *arguments = compose["services"][name]["command"]
        with logs[name].open("wb") as output:
            started[name] = subprocess.Popen(
                # Ended by the kernel should the tests themselves be killed.
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(LAUNCHER_PATH),
                    "--parent",
                    str(os.getpid()),
                    "--death-signal",
                    str(int(signal.SIGKILL)),
                    "--",
                    str(BIN / program),
                    *arguments,
                ],
                env=given,
                cwd=tmp_path / name,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return given

    for name in ONCE:
        start(name)
        assert started[name].wait(START_TIMEOUT_S) == 0, logs[name].read_text()
    serving = [name for name in OURS if name not in ONCE]
    given = {name: start(name) for name in serving}
    ready = {name: Path(given[name]["ONEPEN_READY_FILE"]) for name in serving}
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all(path.exists() for path in ready.values()):
        for name in serving:
            assert started[name].poll() is None, f"{name} ended: {logs[name].read_text()}"
        late = [f"{name}: {logs[name].read_text()}" for name, path in ready.items() if not path.exists()]
        assert time.monotonic() < deadline, f"not ready: {late}"
        time.sleep(0.1)
    for name in WATCHED:
        asked = partial(healthy, compose, name, given[name])
        wait_for(asked, f"{name} is healthy", START_TIMEOUT_S)
    for name in serving:
        started[name].send_signal(signal.SIGTERM)
    for name in serving:
        assert started[name].wait(STOP_TIMEOUT_S) == 0, logs[name].read_text()
    assert not any(healthy(compose, name, given[name]) for name in WATCHED), "who has stopped is not healthy"
    for name in OURS:
        service = compose["services"][name]
        writable = " ".join([*service.get("volumes", []), *service.get("tmpfs", [])])
        written = {path.name for path in (tmp_path / name).iterdir()} - {"ready"}
        assert not written or "/var/lib/onepen" in writable, f"{name} writes {written}, and cannot"
