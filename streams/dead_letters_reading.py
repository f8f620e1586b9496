"""The dead letters as a person asks for them: found by id, reason and age, with where each stood and a safe preview.

Rule: a letter's id is its own place, `<partition>-<offset>` on the dead letters topic, so it names one letter for ever.
Values are streamed and dropped; only what is answered stays in memory. A note that a letter was redriven is a record
of the same topic without place headers (`dead_letters_redrive`), so every other reader of the topic passes over it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from onepen.schemas import codec
from onepen.schemas.errors import Invalid, OnepenError, Poison
from onepen.schemas.inputs import Content
from onepen.streams.dead_letters import NULL, OFFSET, PARTITION, REASON, TOPIC
from onepen.streams.outside_reader import RawRecord
from onepen.streams.settings import Settings
from onepen.streams.topic_scan import TopicScan

__all__ = ["REDRIVEN", "Letter", "LetterId", "NoSuchLetter", "Wanted", "find", "get", "pending", "preview"]

REDRIVEN: Final = "onepen-redriven"
"""On a note and on the redriven input: the id of the letter."""
PREVIEW_CHARS: Final = 240
_ID = re.compile(r"(\d{1,9})-(\d{1,18})")
_LONG_WORD = re.compile(r"[A-Za-z0-9_\-+/=.]{24,}")


class NoSuchLetter(OnepenError):
    """No dead letter has this id (any more: in production they are kept for 90 days)."""


class LetterId(NamedTuple):
    """A place on the dead letters topic."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> LetterId:
        """Raises `Invalid` for what `deadletters list` would not print."""
        found = _ID.fullmatch(text)
        if found is None:
            raise Invalid(f"id: {text!r} is not PARTITION-OFFSET, as `onepen deadletters list` shows it", field="id")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. `topic`, `partition`, `offset`: where the record stood; empty and -1 when it does not say.

    `value` and `key` are the record's own bytes; `redriven_ms` are the moments at which it was put back.
    """

    id: LetterId
    at_ms: int
    reason: str
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None = field(repr=False)
    size_bytes: int
    redriven_ms: tuple[int, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Everything but the value, as JSON members."""
        return {
            "id": str(self.id),
            "at": self.at_ms,
            "reason": self.reason,
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "key": None if self.key is None else self.key.decode("utf-8", "replace"),
            "sizeBytes": self.size_bytes,
            "redriven": len(self.redriven_ms),
            "redrivenAt": self.redriven_ms[-1] if self.redriven_ms else None,
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which letters are meant. `topic`: only those of records of this topic."""

    reason: str | None = None
    since_ms: int = 0
    topic: str | None = None

    def has(self, letter: Letter) -> bool:
        return (
            letter.at_ms >= self.since_ms
            and self.reason in (None, letter.reason)
            and self.topic in (None, letter.topic)
        )


def find(settings: Settings, wanted: Wanted, limit: int) -> tuple[list[Letter], int]:
    """The newest letters, oldest first and without their values, and how many there are in all.

    Raises `Retryable` when the brokers do not answer.
    """
    newest: list[tuple[int, LetterId, Letter]] = []
    notes: dict[LetterId, list[int]] = {}
    count = 0
    with TopicScan(settings, settings.topics.deadletters) as scan:
        for partition in range(scan.partitions()):
            for record in scan.read(partition, *scan.ends(partition)):
                noted = _noted(record)
                if noted is not None:
                    notes.setdefault(noted, []).append(record.at_ms)
                    continue
                letter = _letter(record, keep_value=False)
                if not wanted.has(letter):
                    continue
                count += 1
                entry = (letter.at_ms, letter.id, letter)
                if len(newest) < limit:
                    heapq.heappush(newest, entry)
                else:
                    heapq.heappushpop(newest, entry)
    newest.sort(key=lambda entry: entry[:2])
    return [replace(letter, redriven_ms=tuple(notes.get(letter.id, ()))) for _, _, letter in newest], count


def pending(settings: Settings, wanted: Wanted, limit: int) -> list[LetterId]:
    """The oldest letters that were not redriven yet, oldest first. Raises `Retryable` without an answer."""
    found: dict[LetterId, int] = {}
    with TopicScan(settings, settings.topics.deadletters) as scan:
        for partition in range(scan.partitions()):
            for record in scan.read(partition, *scan.ends(partition)):
                noted = _noted(record)
                if noted is not None:
                    # A note stands on the partition of its letter, so always behind it.
                    found.pop(noted, None)
                    continue
                letter = _letter(record, keep_value=False)
                if wanted.has(letter):
                    found[letter.id] = letter.at_ms
    return heapq.nsmallest(limit, found, key=lambda one: (found[one], one))


def get(settings: Settings, ids: Iterable[LetterId]) -> list[Letter]:
    """These letters, whole, in the order asked for. Raises `NoSuchLetter`, and `Retryable` without an answer."""
    wanted = list(ids)
    found: dict[LetterId, Letter] = {}
    with TopicScan(settings, settings.topics.deadletters) as scan:
        partitions = scan.partitions()
        for partition in {one.partition for one in wanted if one.partition < partitions}:
            first, end = scan.ends(partition)
            offsets = {one.offset for one in wanted if one.partition == partition and first <= one.offset < end}
            for record in scan.read(partition, min(offsets, default=end), end):
                noted = _noted(record)
                if noted in found:
                    letter = found[noted]
                    found[noted] = replace(letter, redriven_ms=(*letter.redriven_ms, record.at_ms))
                elif noted is None and record.offset in offsets:
                    letter = _letter(record, keep_value=True)
                    found[letter.id] = letter
        for one in wanted:
            if one not in found:
                raise NoSuchLetter(f"there is no dead letter {one} on {scan.topic}")
    return [found[one] for one in wanted]


def _noted(record: RawRecord) -> LetterId | None:
    """Which letter the record says was redriven; None: the record is a letter itself."""
    for name, value in record.headers:
        if name == REDRIVEN and value is not None and (found := _ID.fullmatch(value.decode("ascii", "replace"))):
            return LetterId(int(found[1]), int(found[2]))
    return None


def _letter(record: RawRecord, *, keep_value: bool) -> Letter:
    headers = dict(record.headers)

    def text(name: str) -> str:
        return (headers.get(name) or b"").decode("utf-8", "replace")

    def number(name: str) -> int:
        raw = headers.get(name) or b""
        return int(raw) if raw.isdigit() and len(raw) < 19 else -1

    value = None if NULL in headers else record.value
    return Letter(
        LetterId(record.partition, record.offset),
        record.at_ms,
        text(REASON),
        text(TOPIC),
        number(PARTITION),
        number(OFFSET),
        record.key,
        value if keep_value else None,
        len(value or b""),
    )


# -- what may be shown of a value ------------------------------------------------------------------------------------


def preview(value: bytes | None) -> dict[str, Any]:
    """What a value is, without its secrets: tokens are left out, and of text every long unbroken word is masked."""
    if value is None:
        return {"kind": "null"}
    try:
        record = codec.decode(value)
    except Poison as poison:
        return {"kind": "undecodable", "why": str(poison), "preview": masked(value)}
    return {"kind": type(record).__name__, **dict(_members(record))}


def _members(record: Any) -> Iterator[tuple[str, Any]]:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name == "token" or value is None:
            continue
        if isinstance(value, Content):
            yield name, _content(value)
        elif isinstance(value, bytes):
            yield name, masked(value)
        elif isinstance(value, tuple):
            yield name, [dict(_members(one)) if hasattr(one, "__struct_fields__") else one for one in value]
        elif hasattr(value, "__struct_fields__"):
            yield name, dict(_members(value))
        else:
            yield name, masked(value.encode()) if isinstance(value, str) and len(value) > PREVIEW_CHARS else value


def _content(content: Content) -> dict[str, Any]:
    shown: dict[str, Any] = {"mediaType": content.media_type}
    if content.data is not None:
        return shown | {"sizeBytes": len(content.data), "preview": masked(content.data)}
    return shown | {"sizeBytes": content.size_bytes, "digest": content.digest, "uri": content.uri}


def masked(data: bytes) -> str:
    """The beginning as text. Words of 24 and more characters without a space may be keys or tokens: only their length
    is told."""
    text = data[: 16 * PREVIEW_CHARS].decode("utf-8", "replace")
    text = _LONG_WORD.sub(lambda word: f"<{len(word[0])} characters>", text)
    shown = text[:PREVIEW_CHARS]
    return shown if len(shown) == len(text) and len(data) <= 16 * PREVIEW_CHARS else f"{shown}…"
