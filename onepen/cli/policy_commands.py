"""`onepen policy put|show`: the tenant's rules, put in through the log, and those in force."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from onepen.cli.app_groups import CONTEXT, new_group
from onepen.cli.content import read_document
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.options import (
    DEFAULT_TIMEOUT_MS,
    BootstrapOption,
    DataDirOption,
    FormatOption,
    TenantOption,
    TimeoutOption,
    settings_of,
)
from onepen.cli.output import Format, note, show_record
from onepen.schemas.errors import Invalid
from onepen.schemas.ids import check_int64
from onepen.schemas.limits import RECORD_BYTES_MAX
from onepen.schemas.policies import DEFAULT_POLICY, Policy, PolicyRecord, parse_policy, policy_body
from onepen.schemas.strict_json import parse

group = new_group(
    "policy",
    """The rules of a tenant: put in through the log, and those in force.

    \b
    Examples:
      echo '{"version": 1, "leaseMs": 3000, "renewMs": 1000}' | onepen policy put -
      onepen policy show -o json
    """,
)


def register(app: typer.Typer) -> None:
    """Hang the group into the command tree."""
    app.add_typer(group, short_help="Put a policy in through the log; show the one in force.")


@group.command("put", context_settings=dict(CONTEXT))
def put(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A policy as JSON; - reads stdin.")],
    version: Annotated[
        int | None, typer.Option("--version", min=1, metavar="N", help="Version [the document's; else 1].")
    ] = None,
    tenant: TenantOption = None,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> int:
    """Judge a policy, append it to every partition, and wait until the processor has taken it.

    Members are those that `policy show` prints; what is left out keeps its default. A policy that contradicts itself
    is refused here (exit 2), one whose version is not newer than the one in force by the log (exit 5). Runs keep the
    policy under which they were started.

    \b
    Examples:
      onepen policy put policy.json
      echo '{"approvalActions": ["send_mail"]}' | onepen policy put - --tenant 7
      echo '{"onBusy": "interrupt", "autoSteers": ["ui"]}' | onepen policy put - --version 2
      echo '{"erasableContent": true}' | onepen policy put - --version 3
    """
    policy = _read_policy(file, version)
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant)
    if settings.tenant_id < 1:
        raise Invalid("tenant: must be 1 or higher", field="tenant")
    from onepen.streams.policy_log import put_policy

    record = PolicyRecord(tenant_id=settings.tenant_id, version=policy.version, body=policy_body(policy))
    fate = put_policy(settings, record, timeout_ms=timeout_ms)
    show_record(
        {
            "tenant": settings.tenant_id,
            "version": policy.version,
            "partitions": len(fate.taken) + len(fate.refused) + len(fate.unknown),
            "taken": len(fate.taken),
            "refused": len(fate.refused),
            "reason": next(iter(sorted(fate.refused.values())), None),
            "unknown": len(fate.unknown),
        },
        output,
    )
    if fate.refused:
        reason = next(iter(sorted(fate.refused.values())))
        code = ExitCode.CONFLICT if reason.startswith("policy_not_newer") else ExitCode.REFUSED
        raise Failure(f"the policy was refused on {len(fate.refused)} partitions: {reason}", code)
    if fate.unknown:
        note("onepen: the policy is in the log, but no processor has taken it yet on every partition; is one running?")
        return ExitCode.NO_ANSWER
    return ExitCode.OK


def _read_policy(file: str, version: int | None) -> Policy:
    data = read_document(file, "policy")
    if len(data) > RECORD_BYTES_MAX:
        raise Invalid(f"policy: more than {RECORD_BYTES_MAX // 1024} KiB", field="policy")
    document = parse(data, "policy")
    if not isinstance(document, dict):
        raise Invalid("policy: must be a JSON object", field="policy")
    named = version if version is not None else check_int64(document.get("version", 1), "version")
    return parse_policy(data, named)


@group.command("show", context_settings=dict(CONTEXT))
def show(
    tenant: TenantOption = None,
    timeout_ms: TimeoutOption = 60_000,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Print the policy in force for a tenant, as the processor has written it down; the defaults when none was put.

    \b
    Example:
      onepen policy show --tenant 7 -o json
    """
    from onepen.streams.outside_reader import end_offsets
    from onepen.streams.policy_log import policies_in_force

    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant)
    found = policies_in_force(settings, timeout_ms=timeout_ms).get(settings.tenant_id)
    policy = DEFAULT_POLICY if found is None else parse_policy(found.body, found.version)
    shown: dict[str, Any] = {"tenant": settings.tenant_id, **msgspec.to_builtins(policy)}
    show_record(shown, output)
    if found is None:
        note("onepen: no policy was put for this tenant: these are the defaults")
    elif len(found.partitions) < (count := len(end_offsets(settings, settings.topics.inputs))):
        note(f"onepen: only {len(found.partitions)} of {count} partitions have taken it so far")
