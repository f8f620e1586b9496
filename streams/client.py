"""The client: send inputs, learn their verdicts.

Rule: the handle with its `input_id` exists before any I/O and no sending call waits for the broker; errors of
sending are raised by `verdict` and `disposition`. An outcome that cannot be known is `errors.UnknownOutcome`;
then `resend` is safe, because a decided input that is repeated is a duplicate.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
from confluent_kafka import KafkaError, Message

from onepen.schemas.edge import Request
from onepen.schemas.errors import OnepenError, Retryable, UnknownOutcome
from onepen.schemas.inputs import Input
from onepen.schemas.partitioning import partition_of
from onepen.schemas.receipts import Receipt
from onepen.schemas.statuses import Disposition, Reason, Verdict
from onepen.streams.client_calls import Calls, Handle
from onepen.streams.deadline import Deadline
from onepen.streams.objects import ObjectStore, object_store
from onepen.streams.plain_producer import Headers, PlainProducer
from onepen.streams.receipts_reader import ReceiptsReader, Watched
from onepen.streams.sealing import Sealed, seal
from onepen.streams.settings import Settings, load_settings

__all__ = ["Client", "InputResult", "Sent"]

log = logging.getLogger("onepen.client")

VERDICT_TIMEOUT_MS: Final = 5_000
DISPOSITION_TIMEOUT_MS: Final = 60_000
UNSENT_MAX: Final = 10_000
START_TRY_MS: Final = 3_000
SEND_WITHIN_MS: Final = 30_000
CLOSE_MS: Final = 10_000
RETRY_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class InputResult:
    """What the log decided about one input record. `disposition` is None until it is known.

    `reason` is the one of the receipt that answered; `detail` its further members (for a duplicate the first
    verdict and run); `partition` and `offset` the position of the input record, `at_ms` the log's time.
    """

    input_id: str
    verdict: Verdict
    disposition: Disposition | None
    reason: str | None
    run_id: str | None
    run_no: int | None
    detail: dict[str, Any] | None
    partition: int
    offset: int
    at_ms: int

    @property
    def accepted(self) -> bool:
        """False for a refusal and for a duplicate: this record changed nothing."""
        return self.verdict not in (Verdict.REFUSED, Verdict.DUPLICATE)


class Sent(Handle):
    """The handle of one input. It is there before anything was sent; keep it as long as an answer matters."""

    def __init__(self, sealed: Sealed, watched: Watched, traceparent: str | None) -> None:
        super().__init__(sealed.record)
        self._sealed = sealed
        self._watched = watched
        self._traceparent = traceparent
        self._positions: list[tuple[int, int]] = []
        self._lost_sight = False
        self._deadline = Deadline(SEND_WITHIN_MS)

    @property
    def position(self) -> tuple[int, int] | None:
        """(partition, offset) on the inputs topic as the broker acknowledged it; None before that."""
        return self._positions[-1] if self._positions else None

    def verdict(self, timeout_ms: int = VERDICT_TIMEOUT_MS) -> InputResult:
        """Wait for the verdict. Raises `UnknownOutcome` when none came in time (sending again is safe), and
        `Retryable` or `Invalid` when it is certain that nothing was written."""
        return self._wait(self._verdict, timeout_ms, "verdict")

    def disposition(self, timeout_ms: int = DISPOSITION_TIMEOUT_MS) -> InputResult:
        """Wait for the final disposition (for a prompt: the end of its run). Raises like `verdict`."""
        return self._wait(self._disposition, timeout_ms, "disposition")

    def _wait(self, find: Callable[[list[Receipt]], InputResult | None], timeout_ms: int, what: str) -> InputResult:
        found = self._watched.wait(find, Deadline(timeout_ms))
        if found is None:
            raise self._unknown(what, timeout_ms)
        return found

    def _verdict(self, receipts: list[Receipt]) -> InputResult | None:
        return verdict_of(self._mine(receipts))

    def _disposition(self, receipts: list[Receipt]) -> InputResult | None:
        return disposition_of(self._mine(receipts))

    def _mine(self, receipts: list[Receipt]) -> list[Receipt]:
        """Those of the records that this handle sent. Where a sending has no known position it may be any record
        of this id, but for one of another content."""
        return [
            receipt
            for receipt in receipts
            if (receipt.partition, receipt.offset) in self._positions
            or (self._lost_sight and receipt.reason != Reason.INPUT_ID_REUSED)
        ]

    def _unknown(self, what: str, timeout_ms: int) -> UnknownOutcome:
        where = (
            "not acknowledged by the broker"
            if self.position is None
            else f"written at {self.position[0]}:{self.position[1]}"
        )
        return UnknownOutcome(
            f"input {self.input_id}: no {what} within {timeout_ms} ms ({where}); sending it again is safe"
        )

    def __repr__(self) -> str:
        return f"Sent({self.record.mode} {self.input_id} for {self.record.session_id})"


def verdict_of(receipts: list[Receipt]) -> InputResult | None:
    """The verdict of the first of these records: a repeat's `duplicate` only if nothing else is known."""
    first = _first_verdict(receipts)
    return None if first is None else _result(first, first)


def disposition_of(receipts: list[Receipt]) -> InputResult | None:
    """The final disposition of the record whose verdict `verdict_of` reports."""
    first = _first_verdict(receipts)
    if first is None:
        return None
    for receipt in receipts:
        same = (receipt.partition, receipt.offset) == (first.partition, first.offset)
        if same and receipt.disposition is not None:
            return _result(first, receipt)
    return None


def _first_verdict(receipts: list[Receipt]) -> Receipt | None:
    decided = [receipt for receipt in receipts if receipt.verdict is not None]
    return min(decided, key=lambda receipt: receipt.offset, default=None)


def _result(first: Receipt, last: Receipt) -> InputResult:
    assert first.verdict is not None
    detail = last.detail or first.detail
    return InputResult(
        input_id=first.input_id or "",
        verdict=Verdict(first.verdict),
        disposition=Disposition(last.disposition) if last.disposition is not None else None,
        reason=last.reason,
        run_id=last.run_id or first.run_id,
        run_no=last.run_no or first.run_no,
        detail=orjson.loads(detail) if detail else None,
        partition=first.partition,
        offset=first.offset,
        at_ms=last.at_ms,
    )


class Client(Calls[Sent]):
    """Sends inputs of one tenant and user (each call may name others). Thread-safe; close it, or use `with`.

    `bootstrap`, `prefix`, `tenant_id` and `user_id` win over the environment and a local stack's addresses
    (see `streams.settings`); `settings` replaces all of them.
    """

    def __init__(
        self,
        bootstrap: str | None = None,
        *,
        tenant_id: int | None = None,
        user_id: int | None = None,
        prefix: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._settings = settings or load_settings(
            bootstrap=bootstrap, tenant_id=tenant_id, user_id=user_id, prefix=prefix
        )
        self._store = object_store(self._settings)
        self._sender = _Sender(self._settings, self._store)
        # Records handed over are sent even when a short script just ends.
        self._finalizer = weakref.finalize(self, _Sender.close, self._sender, CLOSE_MS)

    def send(self, request: Request, *, traceparent: str | None = None) -> Sent:
        """Send a request; answers its handle at once. Raises `Invalid` (size), `Retryable` (10,000 unsent).

        Content that is too large for a record, or asked to be erasable, becomes a pointer; it is stored before the
        record is sent.
        """
        record = request.to_input(tenant_id=self._settings.tenant_id, user_id=self._settings.user_id)
        erasable = self._settings.erasable_content if request.erasable is None else request.erasable
        sealed = seal(record, self._store, erasable=erasable)
        sent = Sent(sealed, self._sender.watch(record), traceparent)
        self._sender.hand_over(sent)
        return sent

    def resend(self, sent: Sent) -> Sent:
        self._sender.hand_over(sent)
        return sent

    def flush(self, timeout_ms: int = CLOSE_MS) -> bool:
        """Wait until the broker has answered for everything handed over; False if not."""
        return self._sender.flush(Deadline(timeout_ms))

    def close(self, timeout_ms: int = CLOSE_MS) -> None:
        """Flush and stop. Handles stay readable for what has already arrived."""
        if self._finalizer.detach() is not None:
            self._sender.close(timeout_ms)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Sender:
    """One thread: starts the receipts reader, then hands records to the producer in the callers' order."""

    def __init__(self, settings: Settings, store: ObjectStore | None) -> None:
        self._settings = settings
        self._store = store
        self._reader = ReceiptsReader.shared(settings)
        self._queue: queue.Queue[Sent | None] = queue.Queue(UNSENT_MAX)
        self._producer: PlainProducer | None = None
        self._idle = threading.Condition()
        self._open = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="onepen-client", daemon=True)
        self._thread.start()

    def watch(self, record: Input) -> Watched:
        return self._reader.watch(record.tenant_id, record.session_id, record.input_id)

    def hand_over(self, sent: Sent) -> None:
        if self._closing.is_set():
            raise Retryable("the client is closed; make a new one")
        sent._watched.fail(None)
        sent._deadline = Deadline(SEND_WITHIN_MS)
        with self._idle:
            self._open += 1
        try:
            self._queue.put_nowait(sent)
        except queue.Full:
            self._done()
            raise Retryable(f"{UNSENT_MAX} inputs are unsent; is the broker reachable?") from None

    def flush(self, deadline: Deadline) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self._open == 0, deadline.remaining_s())

    def close(self, timeout_ms: int) -> None:
        if self._closing.is_set():
            return
        deadline = Deadline(timeout_ms)
        done = self.flush(deadline)
        self._closing.set()
        if not done:
            log.warning("closed with %d inputs whose outcome is unknown", self._open)
        self._queue.put(None) if not self._queue.full() else None
        self._thread.join(max(1.0, deadline.remaining_s()))
        if self._producer is not None:
            self._producer.close(deadline.remaining_ms() if done else 0)
        self._reader.release()

    def _run(self) -> None:
        while True:
            sent = self._queue.get()
            if sent is None:
                return
            try:
                self._store_content(sent)
                self._send(sent, self._start(sent))
            except OnepenError as error:
                sent._watched.fail(error)
                self._done()
            except Exception as error:
                log.exception("sending failed")
                sent._watched.fail(UnknownOutcome(f"input {sent.input_id}: {error}"))
                self._done()
            del sent  # while this thread waits for the next one it keeps nobody's handle

    def _store_content(self, sent: Sent) -> None:
        """The object is durable before a record points to it."""
        content = sent._sealed.content
        if content is None:
            return
        assert self._store is not None
        try:
            self._store.put(sent.tenant_id, sent.session_id, content)
        except OSError as error:
            reason = f"input {sent.input_id}: its content could not be stored ({error}); nothing was sent"
            raise Retryable(reason) from None

    def _start(self, sent: Sent) -> PlainProducer:
        """The producer, once the receipts reader stands. Tries until the handle's time to be sent is over."""
        while True:
            try:
                self._reader.start(Deadline(START_TRY_MS), sent._watched)
                break
            except Retryable:
                if sent._deadline.expired or self._closing.wait(RETRY_S):
                    raise
        if self._producer is None:
            self._producer = PlainProducer(self._settings.kafka_client(), client_id="onepen-client")
        return self._producer

    def _send(self, sent: Sent, producer: PlainProducer) -> None:
        headers: Headers = [("ce_id", sent.input_id), ("ce_type", "onepen.input")]
        if sent._traceparent is not None:
            headers.append(("traceparent", sent._traceparent))
        key = sent.session_id.encode()

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None:
                sent._positions.append((message.partition() or 0, message.offset() or 0))
                sent._watched.touch()
            else:
                sent._lost_sight = True
                reason = f"input {sent.input_id}: {error.str()}; sending it again is safe"
                sent._watched.fail(UnknownOutcome(reason))
            self._done()

        producer.send(
            self._settings.topics.inputs,
            partition_of(key, self._reader.partitions),
            key=key,
            value=sent._sealed.data,
            headers=headers,
            on_delivery=delivered,
        )

    def _done(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()
