"""Options that many commands share, once: their names, their help, and the settings they lead to.

Rule: no option takes a secret. The DSN, its password and the token key come from the environment or from files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onepen.cli.log_lines import LogFormat
from onepen.cli.output import Format
from onepen.schemas.errors import Invalid
from onepen.schemas.ids import check_id, check_int64

if TYPE_CHECKING:
    from onepen.streams.settings import Settings

FormatOption = Annotated[
    Format, typer.Option("--output", "-o", help="text for people, json one document, jsonl one JSON value a line.")
]
DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Where the local stack keeps its data [ONEPEN_DATA_DIR]."),
]
BootstrapOption = Annotated[
    str | None,
    typer.Option("--bootstrap", metavar="HOST:PORT", help="Kafka [ONEPEN_BOOTSTRAP; else the local stack]."),
]
TenantOption = Annotated[int | None, typer.Option("--tenant", metavar="N", help="Tenant [ONEPEN_TENANT_ID; else 1].")]
UserOption = Annotated[int | None, typer.Option("--user", metavar="N", help="User [ONEPEN_USER_ID; else 1].")]
TimeoutOption = Annotated[
    int, typer.Option("--timeout-ms", min=1, max=86_400_000, metavar="MS", help="How long to wait for an answer.")
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65_535,
        metavar="PORT",
        help="Serve /metrics, /healthz, /readyz [ONEPEN_METRICS_PORT].",
    ),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option("--log-format", envvar="ONEPEN_LOG_FORMAT", help="text for people, json one object a line."),
]
PartitionOption = Annotated[int | None, typer.Option("--partition", min=0, metavar="N", help="Only this partition.")]
ArchiveOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="ARCHIVE", help="Begin at an archived state: a file, or a folder of them."),
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=100_000, metavar="N", help="At most so many rows.")]

DEFAULT_TIMEOUT_MS = 15_000


def settings_of(
    *,
    data_dir: Path | None = None,
    bootstrap: str | None = None,
    tenant: int | None = None,
    user: int | None = None,
    **more: Any,
) -> Settings:
    """The settings of this command: its options over the environment over the local stack over defaults."""
    from onepen.streams.settings import load_settings

    if bootstrap == "":
        raise Invalid("bootstrap: must not be empty", field="bootstrap")
    if tenant is not None:
        check_int64(tenant, "tenant")
    if user is not None:
        check_int64(user, "user")
    return load_settings(data_dir=data_dir, bootstrap=bootstrap, tenant_id=tenant, user_id=user, **more)


def checked_id(text: str, field: str) -> str:
    """An id given as an argument. Raises `Invalid` naming `field`."""
    return check_id(text, field)
