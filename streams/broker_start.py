"""Runs a single broker in the foreground: `python -m onepen.streams.broker_start SETTINGS JAVA [ARGUMENT ...]`.

It becomes the Java process; before that, when the broker was not ended in order, its former self is declared dead.

Why: after SIGKILL the cluster's metadata still says that the broker lives and leads. Kafka 4.3 then begins at
once to write the markers of transactions that were ending; a moment later the broker registers anew, its partitions
have no leader for an instant, and markers that meet this instant are dropped as if their topics were deleted
(KAFKA-20734). What was written in such a transaction hangs for ever: readers with read_committed never pass it, and the
group's offsets are never stable again. A broker whose metadata already says that it is dead begins only when it leads.

How: the controller alone, on the same metadata, with a session so short that the former broker is fenced at once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from onepen.streams.child_process import ChildProcess, launch
from onepen.streams.deadline import Deadline

__all__ = ["ended_uncleanly", "fence_former_broker", "fenced_for_good"]

LIMIT_MS: Final = 30_000
FENCED_ALREADY_MS: Final = 3_000
END_LIMIT_MS: Final = 10_000
POLL_S: Final = 0.02
BROKER_ONLY: Final = frozenset({"advertised.listeners", "inter.broker.listener.name"})
SESSION: Final = {"broker.session.timeout.ms": "300", "broker.heartbeat.interval.ms": "100"}
LOGGING: Final = (
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.controller=info",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.controller.QuorumController=debug",
)
ACTIVE: Final = "Activated periodic tasks"
FENCED: Final = "Fencing broker"
WRITTEN: Final = re.compile(r"maybeFenceStaleBroker\S* will be completed when the log reaches offset (\d+)")
COMMITTED: Final = re.compile(r"Completing purgatory items up to offset (\d+)")


def ended_uncleanly(log_dir: Path) -> bool:
    """Whether a broker used `log_dir` before and did not end in order (Kafka leaves a mark when it does)."""
    return (log_dir / "__cluster_metadata-0").is_dir() and not (log_dir / ".kafka_cleanshutdown").exists()


def fence_former_broker(settings_path: Path, java: Sequence[str]) -> bool:
    """Run the controller until the former broker is fenced. `settings_path` are the broker's settings, `java` the
    command without the class's arguments; the broker must not run.

    False when the controller ended early or said nothing in time; its log lies beside the settings."""
    settings = read_settings(settings_path)
    only = {name: value for name, value in settings.items() if name not in BROKER_ONLY}
    listener = next(part for part in settings["listeners"].split(",") if part.startswith("CONTROLLER:"))
    only |= SESSION | {"process.roles": "controller", "listeners": listener}
    path, log_path = settings_path.with_name("controller.properties"), settings_path.with_name("controller.log")
    path.write_text("".join(f"{name}={value}\n" for name, value in sorted(only.items())), "utf-8")
    log_path.unlink(missing_ok=True)
    program, *arguments = java
    process = launch([program, *LOGGING, *arguments, str(path)], log_path=log_path)
    try:
        return _wait_fenced(process, log_path)
    finally:
        process.end(signal.SIGTERM, END_LIMIT_MS)


def read_settings(path: Path) -> dict[str, str]:
    """A file of `name=value` lines."""
    lines = path.read_text("utf-8").splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _wait_fenced(process: ChildProcess, log_path: Path) -> bool:
    deadline, active_until = Deadline(LIMIT_MS), None
    while not deadline.expired and process.poll() is None:
        text = log_path.read_text("utf-8", errors="replace") if log_path.exists() else ""
        if fenced_for_good(text):
            return True
        if active_until is None and ACTIVE in text and FENCED not in text:
            # Killed before it was ever in service: it is fenced already, and nothing more will be said of it.
            active_until = Deadline(FENCED_ALREADY_MS)
        if active_until is not None and active_until.expired and FENCED not in text:
            return True
        time.sleep(POLL_S)
    return False


def fenced_for_good(log_text: str) -> bool:
    """Whether the controller's log tells that a broker was fenced and that this was committed. It tells of the first
    before it is even written, and a controller that is ended then forgets it."""
    after = log_text.partition(FENCED)[2]
    written = WRITTEN.search(after)
    return written is not None and any(int(up_to) >= int(written[1]) for up_to in COMMITTED.findall(after))


def main(argv: Sequence[str]) -> NoReturn:
    settings_path, java = Path(argv[0]), list(argv[1:])
    log_dir = Path(read_settings(settings_path)["log.dirs"])
    if ended_uncleanly(log_dir):
        sys.stdout.write("The broker was not ended in order: declaring its former self dead.\n")
        sys.stdout.flush()
        if not fence_former_broker(settings_path, java):
            sys.exit(f"The controller could not do that; see {settings_path.with_name('controller.log')}.")
    os.execv(java[0], [*java, str(settings_path)])


if __name__ == "__main__":
    main(sys.argv[1:])
