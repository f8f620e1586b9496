"""Options and arguments of the commands that send one input, once, and the fields they become.

Rule: arguments become members of one `edge.Request`, which judges the form; nothing is judged twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onepen.cli.content import read_bytes, read_content
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.schemas.limits import RECORD_BYTES_MAX

if TYPE_CHECKING:
    from onepen.streams.settings import Settings

DEFAULT_SOURCE = "cli"

SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]
ContentArgument = Annotated[
    str, typer.Argument(metavar="CONTENT", help="Text; - reads stdin, @FILE a file, @@TEXT is text that begins with @.")
]
OptionalContentArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONTENT]",
        help="Text; - reads stdin, @FILE a file, @@TEXT is text that begins with @. None with --retry-of.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The content is a JSON value, not text.")]
MediaTypeOption = Annotated[
    str | None,
    typer.Option("--media-type", metavar="TYPE", help="The content is bytes of this type (from - or @FILE)."),
]
SourceOption = Annotated[
    str, typer.Option("--source", metavar="NAME", help="Who asks: ui, remote, scheduler, queue, or any text.")
]
InputIdOption = Annotated[
    str | None,
    typer.Option("--input-id", metavar="ID", help="The id of the input [new]. To repeat one, give both this"),
]
IssuedAtOption = Annotated[
    int | None,
    typer.Option("--issued-at", metavar="MS", help="and the time it was issued at, as printed the first time."),
]
OnBusyOption = Annotated[
    str | None,
    typer.Option("--on-busy", metavar="RULE", help="When a run is active: queue (default), reject, steer, interrupt."),
]
IfMissedOption = Annotated[
    str | None, typer.Option("--if-missed", metavar="RULE", help="When its run has ended: queue (default), reject.")
]
TtlOption = Annotated[int | None, typer.Option("--ttl-ms", metavar="MS", help="How long it may wait in the queue.")]
RunTimeoutOption = Annotated[int | None, typer.Option("--run-timeout-ms", metavar="MS", help="Deadline of the run.")]
AttemptsOption = Annotated[
    int | None, typer.Option("--max-attempts", metavar="N", help="How many workers may lose the run before it fails.")
]
ExpectedRunOption = Annotated[
    str | None,
    typer.Option("--expected-run", metavar="RUN", help="Steer only if this run is the active one; else --if-missed."),
]
RecoveryOption = Annotated[
    str | None,
    typer.Option(
        "--recovery",
        metavar="RULE",
        help="When the run loses its worker: resume (default), rerun (from the prompt and all steers), fail.",
    ),
]
ErasableOption = Annotated[
    bool,
    typer.Option("--erasable", help="Store the content as an object; only pointer and digest enter the log."),
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the verdict and exit by it.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Then follow the run to its end and exit by that.")]


def content_fields(
    settings: Settings, argument: str, as_json: bool, media_type: str | None, erasable: bool
) -> dict[str, Any]:
    """The members that carry the content. Raises `Invalid` naming the field."""
    bytes_max = RECORD_BYTES_MAX
    if settings.objects_root is not None:
        from onepen.streams.objects import OBJECT_BYTES_MAX

        bytes_max = OBJECT_BYTES_MAX
    kept = {"erasable": True} if erasable else {}
    if media_type is None:
        return {"content": read_content(argument, as_json=as_json, bytes_max=bytes_max)} | kept
    if as_json:
        raise Failure("media_type: --json and --media-type contradict each other", ExitCode.USAGE)
    return {"content": read_bytes(argument, bytes_max=bytes_max), "media_type": media_type} | kept


def origin_fields(
    mode: str,
    session: str,
    source: str,
    tenant: int | None,
    user: int | None,
    input_id: str | None,
    issued_at: int | None,
) -> dict[str, Any]:
    """Who asks for what: mode, session, source, tenant, user, and the id of a repeat."""
    if (input_id is None) != (issued_at is None) and issued_at is not None:
        raise Failure("issued_at: --issued-at repeats an input and needs its --input-id", ExitCode.USAGE)
    return {
        "mode": mode,
        "session_id": session,
        "source": source,
        "tenant_id": tenant,
        "user_id": user,
        "input_id": input_id,
        "issued_at_ms": issued_at,
    }
