"""What one process may tune: addresses, names, keys, slot. One frozen object, read at the entry point only.

Order: explicit environment (`ONEPEN_*`), then the addresses of a running local stack
(`<data_dir>/stack.json`), then defaults. What all processes must agree on (limits, schemas, topic plan) lives
in `schemas` instead. Secrets are `SecretStr`, may come from files (`ONEPEN_DSN_FILE`,
`ONEPEN_TOKEN_KEY_FILE`) and appear in no message.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from onepen.schemas.errors import Invalid
from onepen.schemas.ids import INT64_MAX, INT64_MIN
from onepen.schemas.partitioning import partition_of
from onepen.schemas.topics import DEFAULT_PREFIX, PARTITIONS_DEVELOPMENT, Topics
from onepen.sinks.postgres_dsn import checked
from onepen.streams.kafka_config import refusal

ANSWER_TIMEOUT_MS: Final = 10_000
"""How long a client waits for a broker's answer. One that is suspended, or whose machine is gone, closes no connection:
librdkafka's default of 60 s is longer than a record may be under way, and than another broker takes to lead."""

ENV_PREFIX = "ONEPEN_"
STACK_FILE = "stack.json"
OBJECTS_FOLDER = "objects"
"""Where the processes of a local stack keep objects, below its data directory."""
TOKEN_KEY_FILE = "token.key"
TOKEN_KEY_CHARS_MIN = 32
"""A shorter key could be guessed off line from one token."""

_TOPIC_WORD = re.compile(r"[A-Za-z0-9._-]{1,100}")


def _word(text: str) -> str:
    if _TOPIC_WORD.fullmatch(text) is None:
        raise ValueError("must be 1-100 letters, digits, '.', '_' or '-'")
    return text


def _dsn(secret: SecretStr) -> SecretStr:
    checked(secret.get_secret_value())
    return secret


def _as_text(value: Any) -> Any:
    """librdkafka takes text; JSON numbers and booleans are accepted in ONEPEN_KAFKA for convenience."""
    if not isinstance(value, dict):
        return value
    return {name: json.dumps(v) if isinstance(v, bool | int | float) else v for name, v in value.items()}


def _harmless(properties: dict[str, str]) -> dict[str, str]:
    if (sentence := refusal(properties)) is not None:
        raise ValueError(sentence)
    return properties


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/onepen`, else `~/.local/share/onepen`: found from every working directory."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "onepen"


def default_slot() -> str:
    """`<host>-0`, the host reduced to the characters a transactional id may have."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:90] or "host"
    return f"{host}-0"


Word = Annotated[str, AfterValidator(_word)]
Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]


class Settings(BaseSettings):
    """Immutable. Every field can be set by `ONEPEN_<FIELD>`; build it with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="ignore", env_ignore_empty=True, hide_input_in_errors=True
    )

    bootstrap: Annotated[str, Field(min_length=1)] = "127.0.0.1:9092"
    dsn: Annotated[SecretStr, AfterValidator(_dsn)] | None = None
    dsn_file: Path | None = None
    prefix: Word = DEFAULT_PREFIX
    partitions: Annotated[int, Field(ge=1, le=10_000)] = PARTITIONS_DEVELOPMENT
    replication: Annotated[int, Field(ge=1, le=10)] = 1
    production: bool = False
    tenant_id: Int64 = 1
    user_id: Int64 = 1
    erasable_content: bool = False
    """Clients and workers send content as objects with pointer and digest, whatever its size: it can be erased."""
    data_dir: Path = Field(default_factory=default_data_dir)
    token_key_name: Word = "k1"
    token_key: SecretStr | None = None
    token_key_file: Path | None = None
    slot: Word = Field(default_factory=default_slot)
    group_protocol: Literal["classic", "consumer"] = "classic"
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Where processor and sink answer /metrics, /healthz and /readyz; nowhere when not set, on a free port for 0."""
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    local_archive: bool = True
    """A processor that is stopped keeps its state below `data_dir`, so that its next start need not read it all."""
    objects_root: Path | None = None
    """Where `file://` objects lie, a folder per tenant. Without it, objects of erased sessions are only listed."""
    kafka: Annotated[dict[str, str], BeforeValidator(_as_text), AfterValidator(_harmless)] = Field(
        default_factory=dict, repr=False
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment only, and what the caller gives; no .env file is looked for."""
        return init_settings, env_settings

    @property
    def topics(self) -> Topics:
        """The names of the topics under this prefix."""
        return Topics(self.prefix)

    def kafka_client(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """librdkafka properties of a client: ours, then `extra`, then what the user set in ONEPEN_KAFKA, where nothing
        stands that would break a promise (`kafka_config.REFUSED`)."""
        ours = {"bootstrap.servers": self.bootstrap, "socket.timeout.ms": ANSWER_TIMEOUT_MS, **(extra or {})}
        return {**ours, **self.kafka}

    def partition_of(self, session_id: str) -> int:
        """The partition of a session on inputs, events, receipts and state."""
        return partition_of(session_id.encode(), self.partitions)

    def require_dsn(self) -> str:
        """The address of PostgreSQL with its credentials. Raises `Invalid` saying how to name it."""
        if self.dsn is not None:
            return self.dsn.get_secret_value()
        if self.dsn_file is not None:
            return _of_form(_read_secret(self.dsn_file, "ONEPEN_DSN_FILE"))
        raise Invalid(
            "no PostgreSQL address: set ONEPEN_DSN or ONEPEN_DSN_FILE, or start a local stack: onepen up",
            field="dsn",
        )

    def require_token_key(self) -> bytes:
        """The secret that signs tokens: ONEPEN_TOKEN_KEY, the named file, else the local stack's file."""
        if self.token_key is not None:
            text = self.token_key.get_secret_value()
        elif self.token_key_file is not None:
            text = _read_secret(self.token_key_file, "ONEPEN_TOKEN_KEY_FILE")
        elif (self.data_dir / TOKEN_KEY_FILE).exists():
            text = _read_secret(self.data_dir / TOKEN_KEY_FILE, TOKEN_KEY_FILE)
        else:
            raise Invalid(
                "no token key: set ONEPEN_TOKEN_KEY(_FILE), or start a local stack: onepen up",
                field="token_key",
            )
        if len(text) < TOKEN_KEY_CHARS_MIN:
            raise Invalid(f"token_key: shorter than {TOKEN_KEY_CHARS_MIN} characters", field="token_key")
        return text.encode()


def _of_form(dsn: str) -> str:
    try:
        return checked(dsn)
    except ValueError as error:
        raise Invalid(f"ONEPEN_DSN_FILE: its content {error}", field="dsn_file") from None


def _read_secret(path: Path, name: str) -> str:
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise Invalid(f"{name}: {path} cannot be read ({reason})", field=name) from None
    if not text:
        raise Invalid(f"{name}: {path} is empty", field=name)
    return text


def ensure_token_key(data_dir: Path) -> Path:
    """The file with the local stack's token key, made when missing (mode 0600, 32 random bytes as hex).

    Safe against two callers at once: the first one's key stays, and a file is never seen half written.
    """
    path = data_dir / TOKEN_KEY_FILE
    if path.exists():
        return path
    data_dir.mkdir(parents=True, exist_ok=True)
    draft = data_dir / f".{TOKEN_KEY_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return path


def stack_addresses(data_dir: Path) -> dict[str, Any]:
    """`bootstrap`, `dsn`, `prefix` of the local stack as its supervisor wrote them; empty when none is up."""
    try:
        stored = json.loads((data_dir / STACK_FILE).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise Invalid(f"{data_dir / STACK_FILE} cannot be read: {error}", field="data_dir") from None
    if not isinstance(stored, dict):
        raise Invalid(f"{data_dir / STACK_FILE} is not a JSON object", field="data_dir")
    addresses = stored.get("addresses")
    # A stack that was ended leaves its file behind, and its ports may be somebody else's by now.
    if not isinstance(addresses, dict) or stored.get("phase") not in ("starting", "running"):
        return {}
    return {name: addresses[name] for name in ("bootstrap", "dsn", "prefix") if addresses.get(name)}


def load_settings(**given: Any) -> Settings:
    """`given` (command line) over environment over local stack over defaults. Raises `Invalid`, one line."""
    given = {name: value for name, value in given.items() if value is not None}
    try:
        settings = Settings(**given)
        named = settings.model_fields_set
        found = {
            name: value
            for name, value in stack_addresses(settings.data_dir).items()
            if name not in named and not (name == "dsn" and "dsn_file" in named)
        }
        objects_root = settings.data_dir / OBJECTS_FOLDER
        if "bootstrap" in found and "objects_root" not in named and objects_root.is_dir():
            found["objects_root"] = objects_root
        return Settings(**found, **given) if found else settings
    except ValidationError as error:
        raise _one_line(error) from None
    except SettingsError as error:
        raise Invalid(f"{ENV_PREFIX}*: {error}", field="settings") from None


def _one_line(error: ValidationError) -> Invalid:
    parts = []
    fields = []
    for problem in error.errors(include_input=False, include_url=False, include_context=False):
        field = ".".join(str(part) for part in problem["loc"])
        fields.append(field)
        message = problem["msg"].removeprefix("Value error, ")
        parts.append(f"{ENV_PREFIX}{field.upper()}: {message[:1].lower()}{message[1:]}")
    return Invalid("; ".join(parts), field=fields[0] if fields else None)
