"""Re-executes recorded inputs and holds what follows against the events and receipts on the topics (`onepen verify`).

Rule: works beside a live system. How far a partition has been decided is read from its partition record first; only
inputs below are decided, and only what follows from them is judged. The topics are streamed: memory is bounded by the
state of the sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onepen.processors.rules import Keys
from onepen.schemas import codec
from onepen.schemas.errors import OnepenError, Poison
from onepen.schemas.events import RUN_FINISHED, Event
from onepen.schemas.ids import output_key
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.schemas.partitioning import partition_of
from onepen.schemas.receipts import Receipt
from onepen.streams.archive import Archive, ArchiveHeader, ArchiveRefused, read_archive
from onepen.streams.comparing import Alignment, Chain, Expected, Findings, Mismatch
from onepen.streams.dead_letters import OFFSET, PARTITION, TOPIC
from onepen.streams.outside_reader import RawRecord
from onepen.streams.partition_mark import read_mark
from onepen.streams.reexecution import Decided, Reexecution, SessionKey, Undecidable
from onepen.streams.settings import Settings
from onepen.streams.topic_scan import TopicScan

__all__ = ["Inputs", "NotVerifiable", "Progress", "Target", "session_of_run", "token_keys", "verify"]

Progress = Callable[[int, int, int], None]
"""Called with (partition, inputs passed, inputs in all), often."""

POLICY_FRAME: Final = b"\x00" + codec.IDS["PolicyRecord"].to_bytes(4, "big")
PROGRESS_RECORDS: Final = 256


class NotVerifiable(OnepenError):
    """The inputs do not reach back far enough, or fit no archive: nothing can be said. The message says what helps."""


@dataclass(frozen=True)
class Target:
    """What is verified: everything, one session, or one run of it (up to its end, with all that led to it)."""

    session: SessionKey | None = None
    run_id: str | None = None


def token_keys(settings: Settings) -> Keys:
    """The key of the workers' tokens. Raises `Invalid` when none is named."""
    return Keys(settings.token_key_name, settings.require_token_key())


def verify(
    settings: Settings,
    target: Target,
    archives: Mapping[int, Path] | None = None,
    *,
    progress: Progress = lambda *_: None,
) -> tuple[Findings, bool]:
    """The findings, and whether the run of the target was met (True without one).

    With `archives` a partition begins at its archived state; those that have none begin at the first offset. Raises
    `NotVerifiable`, `ArchiveRefused`, `Invalid` (no token key), `Retryable` (unreachable), `Fatal` (a newer release).
    """
    keys = token_keys(settings)
    with ExitStack() as stack:
        return verify_topics(Topics(settings, stack), settings, keys, target, archives or {}, progress)


def verify_topics(
    topics: Topics, settings: Settings, keys: Keys, target: Target, archives: Mapping[int, Path], progress: Progress
) -> tuple[Findings, bool]:
    """`verify` on topics that are open already."""
    findings = Findings()
    count = topics.inputs.partitions()
    wanted = range(count)
    if target.session is not None:
        home = partition_of(target.session[1].encode(), count)
        wanted = range(home, home + 1)
    met = target.run_id is None
    for partition in wanted:
        path = archives.get(partition)
        archive = None if path is None else checked_archive(path, settings, partition, count)
        met = _Partition(topics, settings, keys, partition, count, archive, target, findings).run(progress) or met
    return findings, met


def checked_archive(path: Path, settings: Settings, partition: int, partitions: int) -> Archive:
    """The archive of a partition of these topics. Raises `ArchiveRefused`."""
    archive = read_archive(path, prefix=settings.prefix, partition=partition)
    header = archive.header
    if header.partitions != partitions:
        raise ArchiveRefused(path, f"is of {header.partitions} partitions, the topics have {partitions}")
    if header.protocol > PROTOCOL_VERSION:
        raise ArchiveRefused(path, f"was written under protocol {header.protocol}; upgrade before going on")
    return archive


class Topics:
    """One reader for each topic that is read beside the others."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        topics = settings.topics

        def scan(topic: str, *, log_append_time: bool = False) -> TopicScan:
            return stack.enter_context(TopicScan(settings, topic, log_append_time=log_append_time))

        self.inputs = scan(topics.inputs, log_append_time=True)
        self.events = scan(topics.events)
        self.receipts = scan(topics.receipts)
        self.state = scan(topics.state)
        self.dead_letters = scan(topics.deadletters)


class DeadOffsets:
    """Which inputs of a partition have a dead letter; asked in rising order, read as far as asked."""

    def __init__(self, letters: Iterator[RawRecord], topic: str, partition: int) -> None:
        self._offsets = (o for letter in letters if (o := dead_offset(letter, topic, partition)) is not None)
        self._next = next(self._offsets, None)

    def has(self, offset: int) -> bool:
        while self._next is not None and self._next < offset:
            self._next = next(self._offsets, None)
        return self._next == offset


def dead_offset(letter: RawRecord, topic: str, partition: int) -> int | None:
    """Offset of the input whose dead letter this is; None when it is that of another topic or partition."""
    headers = dict(letter.headers)
    if headers.get(TOPIC) != topic.encode() or headers.get(PARTITION) != str(partition).encode():
        return None
    offset = headers.get(OFFSET) or b""
    return int(offset) if offset.isdigit() else None


class Inputs:
    """The decided inputs of a partition that are to be decided again, in order, and how far they reach."""

    def __init__(
        self,
        topics: Topics,
        settings: Settings,
        partition: int,
        header: ArchiveHeader | None,
        *,
        only_session: str | None = None,
    ) -> None:
        """Raises `NotVerifiable` when the topic does not hold every input from the start on."""
        mark = read_mark(topics.state, partition)
        first, end = topics.inputs.ends(partition)
        self.partition = partition
        self.until = 0 if mark is None else mark.next_input_offset
        self.start = 0 if header is None else header.next_input_offset
        where = f"{settings.topics.inputs}-{partition}"
        if header is not None and self.start > self.until:
            raise NotVerifiable(f"{where}: the archive is at offset {self.start}, decided are {self.until} only")
        if self.until > end:
            raise NotVerifiable(f"{where}: decided are {self.until} inputs, but it ends at {end}. Another topic?")
        if self.start < first and self.start < self.until:
            what = "the first offset" if header is None else f"offset {self.start} of the archive"
            raise NotVerifiable(
                f"{where} begins at offset {first}: the inputs from {what} on are not kept any more. "
                "Start from an archived state: --from ARCHIVE (onepen archive writes one)"
            )
        self._topics, self._topic = topics, settings.topics.inputs
        self._session = None if only_session is None else only_session.encode()

    def __iter__(self) -> Iterator[RawRecord]:
        """Records without a dead letter; of one session only, with all policies, when that was asked for."""
        dead = DeadOffsets(self._dead_letters(), self._topic, self.partition)
        for record in self._topics.inputs.read(self.partition, self.start, self.until):
            if self._session is not None and record.key != self._session and not _is_policy(record):
                continue
            if not dead.has(record.offset):
                yield record

    def _dead_letters(self) -> Iterator[RawRecord]:
        letters = self._topics.dead_letters
        partition = self.partition % letters.partitions()
        return letters.read(partition, *letters.ends(partition))


def _is_policy(record: RawRecord) -> bool:
    return record.value is not None and record.value.startswith(POLICY_FRAME)


class _Partition:
    """One partition: inputs, events and receipts side by side."""

    def __init__(
        self,
        topics: Topics,
        settings: Settings,
        keys: Keys,
        partition: int,
        partitions: int,
        archive: Archive | None,
        target: Target,
        findings: Findings,
    ) -> None:
        header = None if archive is None else archive.header
        self._topics, self._settings = topics, settings
        self._partition, self._target, self._findings = partition, target, findings
        session = target.session
        self._inputs = Inputs(topics, settings, partition, header, only_session=session and session[1])
        self._key = None if session is None else output_key(*session)
        self._again = Reexecution(partition, partitions, keys, None if archive is None else archive.records)
        chain = Chain(self._again.start_hash, findings.breaks)
        self._events = Alignment(
            settings.topics.events, partition, self._found_events(header), findings.differs, self._event_taken(chain)
        )
        self._receipts = Alignment(
            settings.topics.receipts,
            partition,
            self._found_receipts(header),
            findings.differs,
            self._receipt_taken,
            lenient_below=0 if header is None else header.receipts_until,
        )

    def run(self, progress: Progress) -> bool:
        """Verify; True when the run of the target was met."""
        inputs, met = self._inputs, False
        until = inputs.until
        progress(self._partition, 0, until - inputs.start)
        for number, record in enumerate(inputs):
            decided = self._decide(record)
            if decided is not None and self._ends_target(decided):
                met, until = True, record.offset + 1
                break
            if number % PROGRESS_RECORDS == 0:
                progress(self._partition, record.offset - inputs.start, inputs.until - inputs.start)
        self._events.finish()
        self._receipts.finish()
        self._judge_rest(until)
        self._findings.tokens_valid += self._again.tokens_valid
        self._findings.tokens_invalid += self._again.tokens_invalid
        progress(self._partition, inputs.until - inputs.start, inputs.until - inputs.start)
        return met

    def _decide(self, record: RawRecord) -> Decided | None:
        try:
            decided = self._again.decide(record)
        except Undecidable as error:
            where = self._settings.topics.inputs
            self._findings.inputs += 1
            self._findings.differs(Mismatch(where, self._partition, record.offset, record.offset, str(error)))
            return None
        if decided is None:
            # A policy holds for all sessions; it counts where everything is verified.
            self._findings.inputs += self._target.session is None
            return None
        who = decided.command.tenant_id, decided.command.session_id
        if self._target.session not in (None, who):
            return None  # another tenant's session of the same name
        self._findings.inputs += 1
        key = output_key(*who)
        for data in decided.decision.event_bytes:
            self._events.expect(Expected(record.offset, key, data))
        for receipt in decided.decision.receipts:
            self._receipts.expect(Expected(record.offset, key, codec.encode(receipt)))
        return decided

    def _ends_target(self, decided: Decided) -> bool:
        run_id = self._target.run_id
        return run_id is not None and any(
            event.run_id == run_id and event.type == RUN_FINISHED for event in decided.decision.events
        )

    def _found_events(self, header: ArchiveHeader | None) -> Iterator[RawRecord]:
        scan, start = self._topics.events, self._inputs.start
        first, end = scan.ends(self._partition)
        for record in scan.read(self._partition, max(first, header.events_from if header else 0), end):
            if self._concerns(record) and not (start and (_cause_offset(record) or 0) < start):
                yield record

    def _found_receipts(self, header: ArchiveHeader | None) -> Iterator[RawRecord]:
        scan = self._topics.receipts
        first, end = scan.ends(self._partition)
        for record in scan.read(self._partition, max(first, header.receipts_from if header else 0), end):
            if self._concerns(record):
                yield record

    def _concerns(self, record: RawRecord) -> bool:
        return self._key is None or record.key == self._key

    def _event_taken(self, chain: Chain) -> Callable[[RawRecord], None]:
        def taken(record: RawRecord) -> None:
            self._findings.events += 1
            chain.follow(record)

        return taken

    def _receipt_taken(self, _: RawRecord) -> None:
        self._findings.receipts += 1

    def _judge_rest(self, until: int) -> None:
        """What is left on the topics follows from inputs that were not decided here, or from none.

        An event names its cause. A receipt does not; so what is left is judged only while nothing new was decided.
        """
        for record in self._events.rest():
            cause = _cause_offset(record)
            if cause is not None and cause >= until:
                break
            self._events.surplus(record)
        quiet = until == self._inputs.until
        for record in self._receipts.rest():
            about = _about_offset(record)
            if about is not None and about >= until:
                break
            if quiet and self._still_at(until):
                self._receipts.surplus(record)
            else:
                break

    def _still_at(self, until: int) -> bool:
        mark = read_mark(self._topics.state, self._partition)
        return mark is not None and mark.next_input_offset == until


def _cause_offset(record: RawRecord) -> int | None:
    try:
        return codec.decode_as(Event, record.value).cause.offset
    except Poison:
        return None


def _about_offset(record: RawRecord) -> int | None:
    try:
        return codec.decode_as(Receipt, record.value).offset
    except Poison:
        return None


def session_of_run(settings: Settings, tenant_id: int, run_id: str) -> str | None:
    """The session of a run, looked for in the events of every partition; None when no event has it."""
    wanted = run_id.encode()
    with TopicScan(settings, settings.topics.events) as events:
        for partition in range(events.partitions()):
            for record in events.read(partition, *events.ends(partition)):
                if record.value is None or wanted not in record.value:
                    continue
                event = codec.decode_as(Event, record.value)
                if (event.tenant_id, event.run_id) == (tenant_id, run_id):
                    return event.session_id
    return None
