"""`onepen prompt|steer|follow-up|auto|retry`: one input each, its verdict on stdout, its meaning in the exit code.

Rule: arguments become one `edge.Request`, which judges the form; what is admitted is decided by the log alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.options import (
    DEFAULT_TIMEOUT_MS,
    BootstrapOption,
    DataDirOption,
    FormatOption,
    TenantOption,
    TimeoutOption,
    UserOption,
    settings_of,
)
from onepen.cli.output import Format
from onepen.cli.submission import Wish, submit
from onepen.cli.submit_options import (
    DEFAULT_SOURCE,
    AttemptsOption,
    ContentArgument,
    ErasableOption,
    ExpectedRunOption,
    FollowOption,
    IfMissedOption,
    InputIdOption,
    IssuedAtOption,
    JsonOption,
    MediaTypeOption,
    OnBusyOption,
    OptionalContentArgument,
    RecoveryOption,
    RunTimeoutOption,
    SessionArgument,
    SourceOption,
    TtlOption,
    WaitOption,
    content_fields,
    origin_fields,
)
from onepen.schemas.ids import check_id

if TYPE_CHECKING:
    from onepen.streams.settings import Settings


def register(app: typer.Typer) -> None:
    """Hang the commands into the command tree."""
    add_command(app, prompt, "Ask for a run of a session.")
    add_command(app, steer, "Hand something to the active run.")
    add_command(app, follow_up, "Ask for the run after the active one.", name="follow-up")
    add_command(app, auto, "One send button: start, steer or queue, by the source.")
    add_command(app, retry, "Repeat a session's last run after a time-out or a lost worker.")


def prompt(
    session: SessionArgument,
    content: OptionalContentArgument = None,
    as_json: JsonOption = False,
    media_type: MediaTypeOption = None,
    erasable: ErasableOption = False,
    on_busy: OnBusyOption = None,
    if_missed: IfMissedOption = None,
    expected_run: ExpectedRunOption = None,
    ttl_ms: TtlOption = None,
    run_timeout_ms: RunTimeoutOption = None,
    max_attempts: AttemptsOption = None,
    recovery: RecoveryOption = None,
    retry_of: Annotated[
        str | None, typer.Option("--retry-of", metavar="RUN", help="Repeat this run, without content of its own.")
    ] = None,
    source: SourceOption = DEFAULT_SOURCE,
    tenant: TenantOption = None,
    user: UserOption = None,
    input_id: InputIdOption = None,
    issued_at: IssuedAtOption = None,
    wait: WaitOption = True,
    follow: FollowOption = False,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Ask for a run of the session: it starts, or goes by --on-busy behind (or into, or before) the active one.

    \b
    Examples:
      onepen prompt session-42 "Summarise the incident"
      onepen prompt session-42 @question.txt --on-busy reject
      onepen prompt session-42 "Stop that, do this" --on-busy interrupt
      git log -5 | onepen prompt session-42 - --follow
      onepen prompt session-42 '{"ask": "status"}' --json -o json
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user)
    if content is None and retry_of is None:
        raise Failure("content: Missing argument 'CONTENT' (only --retry-of goes without)", ExitCode.USAGE)
    given = {} if content is None else content_fields(settings, content, as_json, media_type, erasable)
    fields = {
        "on_busy": on_busy,
        "if_missed": if_missed,
        "expected_run_id": expected_run,
        "ttl_ms": ttl_ms,
        "timeout_ms": run_timeout_ms,
        "max_attempts": max_attempts,
        "recovery": recovery,
        "retry_of": retry_of,
    }
    origin = origin_fields("prompt", session, source, tenant, user, input_id, issued_at)
    return submit(settings, origin | given | fields, Wish(wait, follow, timeout_ms, output))


def steer(
    session: SessionArgument,
    content: ContentArgument,
    as_json: JsonOption = False,
    media_type: MediaTypeOption = None,
    erasable: ErasableOption = False,
    if_missed: IfMissedOption = None,
    expected_run: ExpectedRunOption = None,
    ttl_ms: TtlOption = None,
    source: SourceOption = DEFAULT_SOURCE,
    tenant: TenantOption = None,
    user: UserOption = None,
    input_id: InputIdOption = None,
    issued_at: IssuedAtOption = None,
    wait: WaitOption = True,
    follow: FollowOption = False,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Hand something to the run that is active now; without one it is queued or refused, by --if-missed.

    \b
    Examples:
      onepen steer session-42 "Only the last hour, please"
      onepen steer session-42 @hint.md --if-missed reject
      onepen steer session-42 "For this run only" --expected-run run-9f27…
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user)
    given = content_fields(settings, content, as_json, media_type, erasable)
    fields = {
        "if_missed": if_missed,
        "expected_run_id": expected_run,
        "ttl_ms": ttl_ms,
    }
    origin = origin_fields("steer", session, source, tenant, user, input_id, issued_at)
    return submit(settings, origin | given | fields, Wish(wait, follow, timeout_ms, output))


def follow_up(
    session: SessionArgument,
    content: ContentArgument,
    as_json: JsonOption = False,
    media_type: MediaTypeOption = None,
    erasable: ErasableOption = False,
    ttl_ms: TtlOption = None,
    run_timeout_ms: RunTimeoutOption = None,
    max_attempts: AttemptsOption = None,
    recovery: RecoveryOption = None,
    source: SourceOption = DEFAULT_SOURCE,
    tenant: TenantOption = None,
    user: UserOption = None,
    input_id: InputIdOption = None,
    issued_at: IssuedAtOption = None,
    wait: WaitOption = True,
    follow: FollowOption = False,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Ask for the run after the active one; without an active one it starts at once.

    \b
    Examples:
      onepen follow-up session-42 "And then write the report"
      onepen follow-up session-42 "Later" --ttl-ms 60000 --no-wait
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user)
    given = content_fields(settings, content, as_json, media_type, erasable)
    fields = {
        "ttl_ms": ttl_ms,
        "timeout_ms": run_timeout_ms,
        "max_attempts": max_attempts,
        "recovery": recovery,
    }
    origin = origin_fields("follow_up", session, source, tenant, user, input_id, issued_at)
    return submit(settings, origin | given | fields, Wish(wait, follow, timeout_ms, output))


def auto(
    session: SessionArgument,
    content: ContentArgument,
    as_json: JsonOption = False,
    media_type: MediaTypeOption = None,
    erasable: ErasableOption = False,
    if_missed: IfMissedOption = None,
    expected_run: ExpectedRunOption = None,
    ttl_ms: TtlOption = None,
    run_timeout_ms: RunTimeoutOption = None,
    max_attempts: AttemptsOption = None,
    recovery: RecoveryOption = None,
    source: SourceOption = DEFAULT_SOURCE,
    tenant: TenantOption = None,
    user: UserOption = None,
    input_id: InputIdOption = None,
    issued_at: IssuedAtOption = None,
    wait: WaitOption = True,
    follow: FollowOption = False,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """One send button: without an active run it starts one; else the source decides.

    Sources ui and remote steer the active run, all others are queued behind it (a policy may name other sources).

    \b
    Examples:
      onepen auto session-42 "And the totals, please" --source ui
      onepen auto session-42 "Nightly check" --source scheduler
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user)
    given = content_fields(settings, content, as_json, media_type, erasable)
    fields = {
        "if_missed": if_missed,
        "expected_run_id": expected_run,
        "ttl_ms": ttl_ms,
        "timeout_ms": run_timeout_ms,
        "max_attempts": max_attempts,
        "recovery": recovery,
    }
    origin = origin_fields("auto", session, source, tenant, user, input_id, issued_at)
    return submit(settings, origin | given | fields, Wish(wait, follow, timeout_ms, output))


def retry(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run: its session's last one.")],
    session: Annotated[
        str | None, typer.Option("--session", metavar="SESSION", help="Its session [looked up by the run].")
    ] = None,
    run_timeout_ms: RunTimeoutOption = None,
    max_attempts: AttemptsOption = None,
    recovery: RecoveryOption = None,
    source: SourceOption = DEFAULT_SOURCE,
    tenant: TenantOption = None,
    user: UserOption = None,
    input_id: InputIdOption = None,
    issued_at: IssuedAtOption = None,
    wait: WaitOption = True,
    follow: FollowOption = False,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Repeat a session's last run that ended timed_out, or failed and retryable: same content, same action keys.

    What its actions have done is not done again. Any other run is refused not_retryable.

    \b
    Examples:
      onepen retry run-9f27…
      onepen retry run-9f27… --session session-42 --run-timeout-ms 600000 --follow
    """
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user)
    check_id(run, "run_id")
    home = session or _session_of(settings, run)
    fields: dict[str, Any] = {
        "retry_of": run,
        "timeout_ms": run_timeout_ms,
        "max_attempts": max_attempts,
        "recovery": recovery,
    }
    origin = origin_fields("prompt", home, source, tenant, user, input_id, issued_at)
    return submit(settings, origin | fields, Wish(wait, follow, timeout_ms, output))


def _session_of(settings: Settings, run_id: str) -> str:
    """From the tables where they can be asked, else from the log. Raises `Failure` when no run has this id."""
    from onepen.cli import event_log
    from onepen.streams import verifying

    found = event_log.session_of_run(settings, run_id)
    if found is None:
        found = verifying.session_of_run(settings, settings.tenant_id, run_id)
    if found is None:
        raise event_log.no_such_run(run_id)
    return found
