"""Sending one input and saying what became of it.

Rule: the form is judged before a connection is made. An unknown outcome is told with the two values that repeat it
safely; it is never taken for success or for refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import Failure
from onepen.cli.output import Format, note, write_data
from onepen.cli.rendering import show_result, verdict_exit_code
from onepen.cli.terminal_text import json_text, printable
from onepen.schemas.errors import UnknownOutcome
from onepen.schemas.statuses import Mode, Reason

if TYPE_CHECKING:
    from onepen.schemas.edge import Request
    from onepen.streams.client import Client, Sent
    from onepen.streams.settings import Settings

CLOSE_MS = 2_000
DONE_WITHIN_MS = 900_000
"""Longer than any cancel deadline may be."""


@dataclass(frozen=True)
class Wish:
    """How long the command stays: until it is written, until the verdict, or until the run has ended."""

    wait: bool
    follow: bool
    timeout_ms: int
    output: Format


def submit(settings: Settings, fields: dict[str, Any], wish: Wish) -> int:
    """Judge, send, and wait as wished; the exit code. Raises `Invalid`, `UnknownOutcome`, `Retryable`."""
    from onepen.schemas.edge import parse_request
    from onepen.streams.client import Client
    from onepen.streams.objects import object_store
    from onepen.streams.sealing import seal

    if wish.follow and not wish.wait:
        raise Failure("--follow and --no-wait contradict each other", ExitCode.USAGE)
    if wish.follow and wish.output is Format.JSON:
        # A verdict and events are more than one document.
        wish = replace(wish, output=Format.JSONL)
    request = parse_request({name: value for name, value in fields.items() if value is not None})
    # Judged here as well, so that too large an input is refused without a connection.
    record = request.to_input(tenant_id=settings.tenant_id, user_id=settings.user_id)
    erasable = settings.erasable_content if request.erasable is None else request.erasable
    seal(record, object_store(settings), erasable=erasable)
    client = Client(settings=settings)
    try:
        return _sent(settings, client, request, wish)
    finally:
        client.close(CLOSE_MS)


def _sent(settings: Settings, client: Client, request: Request, wish: Wish) -> int:
    if not wish.follow:
        return _answered(client, client.send(request), wish)
    if request.mode == Mode.ERASE.value:
        return _erased(client, client.send(request), wish)
    from onepen.cli.following import Follower

    # The reader stands before the input is sent: no event can be missed.
    with Follower(settings, request) as follower:
        sent = client.send(request)
        code = _answered(client, sent, wish)
        return code if code is not ExitCode.OK else follower.to_the_end(sent, wish.output)


def _erased(client: Client, sent: Sent, wish: Wish) -> ExitCode:
    """Follow an erase: it is done after the end of the run that it cancelled."""
    code = _answered(client, sent, wish)
    if code is ExitCode.OK and sent.verdict(wish.timeout_ms).disposition is None:
        show_result(sent, sent.disposition(max(wish.timeout_ms, DONE_WITHIN_MS)), wish.output)
    return code


def _answered(client: Client, sent: Sent, wish: Wish) -> ExitCode:
    if not wish.wait:
        return _written(client, sent, wish)
    try:
        result = sent.verdict(wish.timeout_ms)
    except UnknownOutcome as error:
        raise UnknownOutcome(
            f"{error}; to ask again, with everything else as it was:"
            f" --input-id {sent.input_id} --issued-at {sent.issued_at_ms}"
        ) from None
    show_result(sent, result, wish.output)
    if result.reason == Reason.INVALID and (result.detail or {}).get("field") == "content":
        # What else may be wrong with content was judged before it was sent.
        note("onepen: this tenant's content must be erasable: send it with --erasable")
    return verdict_exit_code(result)


def _written(client: Client, sent: Sent, wish: Wish) -> ExitCode:
    """Without a verdict: that the broker has it, and the values that name it."""
    if not client.flush(wish.timeout_ms) or sent.position is None:
        raise UnknownOutcome(
            f"input {sent.input_id}: not acknowledged within {wish.timeout_ms} ms; to send it again: "
            f"--input-id {sent.input_id} --issued-at {sent.issued_at_ms}"
        )
    partition, offset = sent.position
    fields = {
        "sessionId": sent.session_id,
        "inputId": sent.input_id,
        "issuedAt": sent.issued_at_ms,
        "mode": sent.record.mode,
        "position": {"partition": partition, "offset": offset},
    }
    if wish.output is Format.TEXT:
        write_data(f"written  input {printable(sent.input_id)} at {partition}:{offset}, issued at {sent.issued_at_ms}")
    else:
        write_data(json_text(fields, indent=wish.output is Format.JSON))
    return ExitCode.OK
