"""Puts dead letters back on the inputs topic, each at most once unless it is asked for again.

Rule: the input and the note that its letter was redriven are written in one transaction under one transactional id of
the prefix. So there is never one without the other, and a second redriver that begins meanwhile fences the first
before it reads the notes: two at once cannot redrive a letter twice. The bytes are those of the record, untouched; its
headers say which letter it was and where it first stood.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from onepen.schemas.errors import Fatal, Fenced, Retryable, UnknownOutcome
from onepen.schemas.partitioning import partition_of
from onepen.streams import kafka_clients
from onepen.streams.dead_letters_reading import REDRIVEN, Letter, LetterId
from onepen.streams.deadline import Deadline
from onepen.streams.kafka_config import SAFE_WRITES, check_properties
from onepen.streams.kafka_errors import kafka_exception
from onepen.streams.outside_reader import end_offsets
from onepen.streams.settings import ANSWER_TIMEOUT_MS, Settings

__all__ = ["ORIGIN", "Redriven", "plan_redrive", "redrive"]

log = logging.getLogger("onepen.deadletters")

ORIGIN: Final = "onepen-origin"
"""On a redriven input: `<topic>/<partition>/<offset>`, where its bytes first stood."""
LETTERS_MAX: Final = 1_000
BYTES_MAX: Final = 16 * 1024 * 1024
INIT_LIMIT_MS: Final = 15_000
FLUSH_LIMIT_S: Final = 8.0
COMMIT_LIMIT_MS: Final = 9_000
"""Below the time-out of the socket, or EndTxn is repeated silently within it."""
TRANSACTION_TIMEOUT_MS: Final = 10_000
"""An open transaction holds every reader of the partitions it wrote to."""

assert COMMIT_LIMIT_MS < ANSWER_TIMEOUT_MS <= TRANSACTION_TIMEOUT_MS, "librdkafka asks for the second"

_FENCED: Final = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED, KafkaError._FATAL}
)

Action = Literal["redrive", "redriven", "skipped", "left"]


@dataclass(frozen=True, slots=True)
class Redriven:
    """What becomes of one letter. `partition`, `offset`: its place on the inputs topic (-1: not there, or not known).

    `redrive`: it would be put back; `redriven`: it was; `skipped`: `why` says what stood against it; `left`: it did not
    fit in this transaction, the next call takes it.
    """

    id: LetterId
    action: Action
    partition: int = -1
    offset: int = -1
    why: str = ""


def plan_redrive(settings: Settings, letters: Sequence[Letter], partitions: int, *, again: bool) -> list[Redriven]:
    """What `redrive` would do with these letters now. Asks no broker."""
    planned: list[Redriven] = []
    taken = size_bytes = 0
    for letter in letters:
        against = _against(settings, letter, partitions, again=again)
        if against:
            planned.append(Redriven(letter.id, "skipped", why=against))
        elif taken >= LETTERS_MAX or (taken and size_bytes + letter.size_bytes > BYTES_MAX):
            planned.append(Redriven(letter.id, "left", why="too much for one transaction: run it again"))
        else:
            taken += 1
            size_bytes += letter.size_bytes
            planned.append(Redriven(letter.id, "redrive", _target(letter, partitions)))
    return planned


def _against(settings: Settings, letter: Letter, partitions: int, *, again: bool) -> str:
    if letter.topic != settings.topics.inputs:
        where = letter.topic or "an unknown topic"
        return f"it came from {where}; only records of {settings.topics.inputs} can be put back"
    if letter.redriven_ms and not again:
        return "it was redriven before (--again does it once more)"
    if not 0 <= _target(letter, partitions) < partitions:
        return f"partition {letter.partition} of {settings.topics.inputs} does not exist"
    return ""


def _target(letter: Letter, partitions: int) -> int:
    """Its own partition; what stood on a wrong one goes where its key belongs."""
    if letter.reason == "wrong_partition" and letter.key:
        return partition_of(letter.key, partitions)
    return letter.partition


def redrive(
    settings: Settings, read: Callable[[], Sequence[Letter]], *, again: bool = False
) -> tuple[list[Redriven], Sequence[Letter]]:
    """Put back what `read` answers, and those letters. `read` is called once, behind the fence, and must
    read the notes.

    Raises `Retryable` (nothing was written), `Fenced` (another redriver took over, nothing was written), `Fatal` (a
    record is refused, nothing was written) and `UnknownOutcome` (call again: what was written is skipped).
    """
    check_properties(settings.kafka)
    partitions = len(end_offsets(settings, settings.topics.inputs))
    producer = _begin(settings)
    letters = read()
    planned = plan_redrive(settings, letters, partitions, again=again)
    if not any(one.action == "redrive" for one in planned):
        return planned, letters
    offsets = _write(settings, producer, letters, planned)
    done = [
        Redriven(one.id, "redriven", one.partition, offsets.get(one.id, -1)) if one.action == "redrive" else one
        for one in planned
    ]
    return done, letters


def _begin(settings: Settings) -> Producer:
    producer = kafka_clients.producer(
        {
            "linger.ms": 5,
            "message.max.bytes": 2_000_000,
            **settings.kafka_client(),
            "transactional.id": f"{settings.prefix}.redrive",
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            **SAFE_WRITES,
        },
        logger=log,
    )
    deadline = Deadline(INIT_LIMIT_MS)
    while True:
        try:
            producer.init_transactions(max(0.1, deadline.remaining_s()))
            return producer
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if deadline.expired or not cause.retriable():
                raise Retryable(f"the redrive could not begin: Kafka at {settings.bootstrap}: {cause.str()}") from None


def _write(
    settings: Settings, producer: Producer, letters: Sequence[Letter], planned: Sequence[Redriven]
) -> Mapping[LetterId, int]:
    offsets: dict[LetterId, int] = {}
    refused: list[KafkaError] = []

    def noting(wanted: LetterId | None) -> Callable[[KafkaError | None, Message], None]:
        def delivered(error: KafkaError | None, message: Message) -> None:
            offset = message.offset()
            if error is not None:
                refused.append(error)
            elif wanted is not None and offset is not None:
                offsets[wanted] = offset

        return delivered

    try:
        producer.begin_transaction()
        for letter, one in zip(letters, planned, strict=True):
            if one.action != "redrive":
                continue
            origin = f"{letter.topic}/{letter.partition}/{letter.offset}".encode()
            mark = (REDRIVEN, str(letter.id).encode())
            producer.produce(
                settings.topics.inputs, letter.value, letter.key, one.partition, noting(letter.id),
                headers=[mark, (ORIGIN, origin)],
            )  # fmt: skip
            producer.produce(
                settings.topics.deadletters, b"", letter.key, letter.id.partition, noting(None), headers=[mark]
            )
            producer.poll(0)
        # Before the commit: an error here tells for certain that nothing was written.
        left = producer.flush(FLUSH_LIMIT_S)
    except (KafkaException, BufferError, SystemError) as error:
        cause = None if isinstance(error, BufferError) else kafka_exception(error).args[0]
        raise _given_up(producer, cause) from None
    if left or refused:
        raise _given_up(producer, refused[0] if refused else None)
    _commit(producer)
    return offsets


def _commit(producer: Producer) -> None:
    deadline = Deadline(COMMIT_LIMIT_MS)
    while True:
        try:
            producer.commit_transaction(max(0.1, deadline.remaining_s()))
            return
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.txn_requires_abort():
                raise _given_up(producer, cause) from None
            # Also a fence is no answer here: the first copy of the request may have been carried out.
            if deadline.expired or cause.fatal() or not cause.retriable():
                raise UnknownOutcome(
                    f"whether the letters were redriven is not known: {cause.str()}; "
                    "run it again: what was redriven is skipped"
                ) from None
            time.sleep(0.05)


def _given_up(producer: Producer, cause: KafkaError | None) -> Exception:
    """End the transaction; what to tell. It is also ended by the next redriver, or by its time-out."""
    try:
        producer.abort_transaction(2.0)
    except KafkaException as error:
        log.info("the transaction of a redrive was not aborted: %s", error.args[0].str())
    if cause is None:
        return Retryable("nothing was redriven: the brokers did not take the records in time")
    if cause.code() in _FENCED:
        return Fenced("nothing was redriven: another redrive has begun meanwhile")
    if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return Fatal("nothing was redriven: a record is too large for the inputs topic with its headers of origin")
    return Retryable(f"nothing was redriven: {cause.str()}")
