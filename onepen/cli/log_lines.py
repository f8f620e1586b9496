"""The two forms of a log line: text for people, one JSON object a line for machines.

Rule: what is logged is the same; only the form differs. Partition and offset are taken from the arguments of messages
that begin with them, so that a query needs no parsing. Ids of sessions are logged at DEBUG only, in either form.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import orjson

TEXT_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# The beginnings of messages whose first arguments are a partition, or a partition and an offset.
_PARTITION = re.compile(r"(?:ALARM \w+: )?partition %[ds]")
_INPUT = re.compile(r"(?:ALARM \w+: )?input %d-%d")
_ALARM = re.compile(r"ALARM:? ?(\w*)")


class LogFormat(StrEnum):
    """`text` for people, `json` one object a line."""

    TEXT = "text"
    JSON = "json"


LOG_NAME_VARIABLE = "ONEPEN_LOG_NAME"
"""Set for processes whose lines go to one place: each line then names the process."""


class JsonLines(logging.Formatter):
    """ts (UTC, RFC 3339, ms), level, logger, msg; partition, offset, alarm and exception where there are any; process
    where several write to one place."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "ts": at.removesuffix("+00:00") + "Z",
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        line |= self._process | _places(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def _places(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = {}
    message, args = str(record.msg), record.args
    alarm = _ALARM.match(message)
    if alarm is not None:
        found["alarm"] = alarm[1] or "alarm"
    if isinstance(args, tuple) and args and isinstance(args[0], int):
        if _INPUT.match(message) and isinstance(args[1], int):
            found |= {"partition": args[0], "offset": args[1]}
        elif _PARTITION.match(message):
            found["partition"] = args[0]
    return found


def format_of_environment() -> LogFormat:
    """What ONEPEN_LOG_FORMAT says, for commands without the option; a word that is none of the forms is text."""
    return LogFormat.JSON if os.environ.get("ONEPEN_LOG_FORMAT") == LogFormat.JSON else LogFormat.TEXT


def log_to_stderr(form: LogFormat | None = None) -> None:
    """Lines for a log file or its collector, from INFO on; in the form of the environment when none is given."""
    form = form or format_of_environment()
    name = os.environ.get(LOG_NAME_VARIABLE, "")
    text_form = TEXT_FORM.replace("%(name)s", f"{name} %(name)s") if name and "%" not in name else TEXT_FORM
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(name) if form is LogFormat.JSON else logging.Formatter(text_form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
