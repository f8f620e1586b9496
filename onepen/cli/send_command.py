"""`onepen send`: inputs as JSON lines on stdin, one answer a line on stdout, in the order of the lines.

Rule: each line is judged before it is sent. A bad line is told by its number and its field on stderr; the lines after
it are still sent unless --stop-on-error says otherwise, and the exit code tells the worst that happened.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import IO, TYPE_CHECKING, Annotated

import typer

from onepen.cli.app_groups import add_command
from onepen.cli.exit_codes import ExitCode
from onepen.cli.failures import report
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
from onepen.cli.rendering import show_result, verdict_exit_code
from onepen.cli.submission import CLOSE_MS
from onepen.schemas.errors import Invalid, OnepenError
from onepen.schemas.limits import RECORD_BYTES_MAX

if TYPE_CHECKING:
    from onepen.streams.client import Client, Sent

# JSON may write every character as \uXXXX: six bytes for one.
LINE_BYTES_MAX = 6 * RECORD_BYTES_MAX
LINE_BYTES_MAX_WITH_STORE = 64 * 1024 * 1024
DEFAULT_SOURCE = "cli"

_WORST = (ExitCode.OK, ExitCode.REFUSED, ExitCode.NO_ANSWER, ExitCode.USAGE)


def register(app: typer.Typer) -> None:
    """Hang the command into the command tree."""
    add_command(app, send, "Send JSON lines from stdin, one answer a line.")


def send(
    in_flight: Annotated[
        int,
        typer.Option(
            "--in-flight", min=1, max=5_000, metavar="N", help="Inputs sent before the first answer must be there."
        ),
    ] = 1,
    stop_on_error: Annotated[
        bool, typer.Option("--stop-on-error", help="End at the first bad or refused line.")
    ] = False,
    tenant: TenantOption = None,
    user: UserOption = None,
    timeout_ms: TimeoutOption = DEFAULT_TIMEOUT_MS,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    output: FormatOption = Format.JSONL,
) -> int:
    """Send JSON lines from stdin and print one answer a line, in their order.

    A line is an object with the members of an input: mode, session_id, content, on_busy, retry_of, erasable and so on
    (input_id and issued_at_ms to repeat one). One after the other by default; --in-flight sends ahead. Exit code: 2
    when a line was bad, else 4 when an answer did not come, else 3 when an input was refused.

    \b
    Examples:
      echo '{"mode": "prompt", "session_id": "session-42", "content": "Hello"}' | onepen send
      onepen send --in-flight 100 < inputs.jsonl > answers.jsonl
      echo '{"mode": "abort", "session_id": "session-42", "target_kind": "active"}' | onepen send
    """
    stream = _stdin()
    settings = settings_of(data_dir=data_dir, bootstrap=bootstrap, tenant=tenant, user=user)
    from onepen.streams.client import Client

    client = Client(settings=settings)
    try:
        line_max = LINE_BYTES_MAX if settings.objects_root is None else LINE_BYTES_MAX_WITH_STORE
        return _Sending(client, timeout_ms, output, stop_on_error, line_max).run(stream, in_flight)
    finally:
        client.close(CLOSE_MS)


def _stdin() -> IO[bytes]:
    if sys.stdin is None or sys.stdin.isatty():
        raise Invalid(
            "stdin: JSON lines are read from stdin, and stdin is a terminal: pipe something into it", field="stdin"
        )
    return sys.stdin.buffer


class _Sending:
    """One pass over stdin."""

    def __init__(
        self, client: Client, timeout_ms: int, output: Format, stop_on_error: bool, line_bytes_max: int
    ) -> None:
        self._client = client
        self._line_bytes_max = line_bytes_max
        self._timeout_ms = timeout_ms
        self._output = Format.JSONL if output is Format.JSON else output
        self._stop_on_error = stop_on_error
        self._waiting: deque[tuple[int, Sent]] = deque()
        self._worst = 0

    def run(self, stream: IO[bytes], in_flight: int) -> ExitCode:
        number = 0
        while not self._stopped and (line := stream.readline(self._line_bytes_max + 1)):
            number += 1
            if len(line) > self._line_bytes_max:
                self._tell(number, Invalid(f"longer than {self._line_bytes_max // 1024} KiB", field="line"))
                break
            if line.strip():
                self._take(number, line)
            while len(self._waiting) >= in_flight:
                self._answer()
        while self._waiting:
            self._answer()
        return _WORST[self._worst]

    @property
    def _stopped(self) -> bool:
        return self._stop_on_error and self._worst > 0

    def _take(self, number: int, line: bytes) -> None:
        from onepen.schemas.edge import parse_request
        from onepen.schemas.strict_json import parse

        try:
            fields = parse(line, "json")
            if not isinstance(fields, dict):
                raise Invalid("json: must be an object with the members of an input", field="json")
            self._waiting.append((number, self._client.send(parse_request({"source": DEFAULT_SOURCE, **fields}))))
        except OnepenError as error:
            self._tell(number, error)

    def _answer(self) -> None:
        number, sent = self._waiting.popleft()
        try:
            result = sent.verdict(self._timeout_ms)
        except OnepenError as error:
            self._tell(number, error)
            return
        show_result(sent, result, self._output)
        self._note(verdict_exit_code(result))

    def _tell(self, number: int, error: OnepenError) -> None:
        self._note(report(error, where=f"line {number}"))

    def _note(self, code: ExitCode) -> None:
        self._worst = max(self._worst, _WORST.index(code) if code in _WORST else len(_WORST) - 1)
