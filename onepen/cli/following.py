"""From a verdict to the end of the run it led to: the events as they come, and the exit code they mean.

Rule: the reader stands in the log before the input is sent, so that no event of its run is missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onepen.cli.event_log import EventLog
from onepen.cli.exit_codes import ExitCode
from onepen.cli.output import Format, note
from onepen.cli.rendering import show_event, terminal_status
from onepen.schemas.errors import UnknownOutcome
from onepen.schemas.events import RUN_FINISHED, RUN_STARTED, Event
from onepen.schemas.statuses import Disposition, Mode, RunStatus, Verdict
from onepen.schemas.strict_json import parse_object

if TYPE_CHECKING:
    from onepen.schemas.edge import Request
    from onepen.streams.client import InputResult, Sent
    from onepen.streams.settings import Settings

_NEVER_STARTS = frozenset({Disposition.WITHDRAWN, Disposition.DISCARDED, Disposition.EXPIRED, Disposition.REFUSED})
LOOK_MS = 1


class Follower:
    """Follows one input. A context manager, entered before the input is sent."""

    def __init__(self, settings: Settings, request: Request) -> None:
        tenant = request.tenant_id
        self._settings = settings if tenant is None else settings.model_copy(update={"tenant_id": tenant})
        self._session_id = request.session_id
        self._log = EventLog(self._settings, session_id=request.session_id, from_start=False)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.__exit__()

    def to_the_end(self, sent: Sent, form: Format) -> ExitCode:
        """Show the run that the input led to until it has ended; the exit code by how it ended."""
        result = sent.verdict()
        wanted = RunStatus.CANCELLED if sent.record.mode == Mode.ABORT else RunStatus.COMPLETED
        match result.verdict:
            case Verdict.WITHDRAWN | Verdict.ERASED:
                return ExitCode.OK
            case Verdict.DUPLICATE:
                return self._again(result, form, wanted)
            case Verdict.QUEUED:
                return self._queued(sent, form, wanted)
            case _:
                return self._run(str(result.run_id), form, wanted)

    def _again(self, result: InputResult, form: Format, wanted: RunStatus) -> ExitCode:
        """A repeat: its run may stand in the log already, as a whole or in part."""
        if result.run_id is None:
            return ExitCode.OK
        self._log.__exit__()
        self._log = EventLog(self._settings, session_id=self._session_id, from_start=True)
        return self._run(result.run_id, form, wanted)

    def _run(self, run_id: str, form: Format, wanted: RunStatus) -> ExitCode:
        for event in self._log.endless():
            if event.run_id == run_id:
                show_event(event, form)
                if event.type == RUN_FINISHED:
                    return _code_of(event, wanted)
        raise AssertionError("an endless reading has ended")

    def _queued(self, sent: Sent, form: Format, wanted: RunStatus) -> ExitCode:
        """Wait for the run that this input starts, or for the news that it starts none."""
        while True:
            event = self._log.poll()
            if event is not None and event.type == RUN_STARTED and _started_by(event, sent.input_id):
                show_event(event, form)
                return self._run(event.run_id, form, wanted)
            ended = _disposition(sent) if event is None else None
            if ended is not None and ended.disposition in _NEVER_STARTS:
                reason = f" ({ended.reason})" if ended.reason else ""
                note(f"onepen: input {sent.input_id} started no run: {ended.disposition}{reason}")
                return ExitCode.FINDING


def _started_by(event: Event, input_id: str) -> bool:
    payload = parse_object(event.payload)
    return payload is not None and payload.get("inputId") == input_id


def _disposition(sent: Sent) -> InputResult | None:
    try:
        return sent.disposition(LOOK_MS)
    except UnknownOutcome:
        return None


def _code_of(event: Event, wanted: RunStatus) -> ExitCode:
    status = terminal_status(event)
    if status == wanted:
        return ExitCode.OK
    note(f"onepen: run {event.run_id} ended as {status}")
    return ExitCode.FINDING
