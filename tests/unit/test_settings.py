"""Settings: order of sources, one clear line per error, secrets that stay secret."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from onepen.schemas.errors import Invalid
from onepen.streams.settings import Settings, ensure_token_key, load_settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("ONEPEN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ONEPEN_DATA_DIR", str(tmp_path))


def write_stack(tmp_path: Path, **fields: str) -> None:
    (tmp_path / "stack.json").write_text(json.dumps({"phase": "running", "addresses": fields}))


def test_given_over_environment_over_stack_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().bootstrap == "127.0.0.1:9092"
    write_stack(tmp_path, bootstrap="stack:1", dsn="postgresql://stack", prefix="fromstack")
    settings = load_settings()
    assert (settings.bootstrap, settings.prefix) == ("stack:1", "fromstack")
    assert settings.require_dsn() == "postgresql://stack"
    monkeypatch.setenv("ONEPEN_BOOTSTRAP", "env:2")
    monkeypatch.setenv("ONEPEN_DSN", "postgresql://env")
    assert load_settings().bootstrap == "env:2"
    assert load_settings().require_dsn() == "postgresql://env"
    assert load_settings(bootstrap="given:3").bootstrap == "given:3"


def test_a_named_dsn_file_wins_over_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stack(tmp_path, dsn="postgresql://stack")
    (tmp_path / "dsn").write_text("postgresql://file\n")
    monkeypatch.setenv("ONEPEN_DSN_FILE", str(tmp_path / "dsn"))
    assert load_settings().require_dsn() == "postgresql://file"


def test_objects_of_a_local_stack_lie_in_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stack(tmp_path, bootstrap="stack:1")
    assert load_settings(data_dir=tmp_path).objects_root is None
    (tmp_path / "objects").mkdir()
    assert load_settings(data_dir=tmp_path).objects_root == tmp_path / "objects"
    assert load_settings(data_dir=tmp_path, bootstrap="other:1").objects_root is None, "another stack's objects"
    monkeypatch.setenv("ONEPEN_OBJECTS_ROOT", "/elsewhere")
    assert load_settings(data_dir=tmp_path).objects_root == Path("/elsewhere")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ONEPEN_PARTITIONS", "many", "ONEPEN_PARTITIONS"),
        ("ONEPEN_PARTITIONS", "0", "ONEPEN_PARTITIONS"),
        ("ONEPEN_PREFIX", "a b", "ONEPEN_PREFIX"),
        ("ONEPEN_SLOT", "a/b", "ONEPEN_SLOT"),
        ("ONEPEN_GROUP_PROTOCOL", "other", "ONEPEN_GROUP_PROTOCOL"),
        ("ONEPEN_TENANT_ID", str(2**63), "ONEPEN_TENANT_ID"),
        ("ONEPEN_KAFKA", "{", "kafka"),
        ("ONEPEN_KAFKA", "[1]", "ONEPEN_KAFKA"),
    ],
)
def test_errors_are_one_line_that_names_the_variable(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(Invalid) as caught:
        load_settings()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kafka_properties_are_text_and_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "ONEPEN_KAFKA", '{"socket.timeout.ms": 5, "log.connection.close": true, "sasl.password": "hush"}'
    )
    settings = load_settings()
    client = settings.kafka_client({"socket.timeout.ms": 9})
    assert client["socket.timeout.ms"] == "5"
    assert client["log.connection.close"] == "true"
    assert "hush" not in repr(settings)


def test_secrets_are_not_shown_and_settings_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPEN_DSN", "postgresql://u:hush@h/d")
    monkeypatch.setenv("ONEPEN_TOKEN_KEY", "hush" * 10)
    settings = load_settings()
    assert "hush" not in repr(settings) + str(settings)
    with pytest.raises(Exception, match="frozen"):
        settings.bootstrap = "x"  # type: ignore[misc]


def test_a_dsn_that_cannot_be_taken_apart_is_not_shown() -> None:
    with pytest.raises(Invalid, match=r"ONEPEN_DSN: .*percent-encode") as refused:
        load_settings(dsn="postgresql://u:hush#hush@h/d")
    assert "hush" not in str(refused.value)
    with pytest.raises(ValidationError) as direct:
        Settings(dsn=SecretStr("postgresql://u:hush#hush@h/d"))
    assert "hush" not in str(direct.value)


def test_the_token_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no token key"):
        load_settings().require_token_key()
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(ensure_token_key(tmp_path / "new"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8
    assert list((tmp_path / "new").iterdir()) == [paths[0]]
    assert paths[0].stat().st_mode & 0o777 == 0o600
    key = load_settings(data_dir=tmp_path / "new").require_token_key()
    assert len(key) == 64


@pytest.mark.parametrize("content", [None, b"", b"short", b"\xff\xfe"])
def test_a_bad_token_key_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Invalid) as caught:
        load_settings(token_key_file=path).require_token_key()
    assert "\n" not in str(caught.value)


def test_a_broken_stack_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("{")
    with pytest.raises(Invalid, match=r"stack\.json"):
        load_settings()


def test_no_dsn_says_how_to_name_one() -> None:
    with pytest.raises(Invalid, match="ONEPEN_DSN"):
        Settings().require_dsn()
