"""The pure core behind the few calls the engine makes, and the outputs of a decision as records of the log.

Rule: the engine knows records, bytes and offsets; what a record means is asked here. `SessionCore` is the product;
anything else that satisfies `Core` (a counter, say) runs under the same engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from onepen.processors import timers
from onepen.processors.attribution import attribute
from onepen.processors.decide import Decision, Moment, decide
from onepen.processors.glance import has_run
from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.schemas import codec
from onepen.schemas.ids import output_key
from onepen.schemas.partitioning import murmur2, partition_of
from onepen.schemas.policies import PolicyRecord
from onepen.schemas.statuses import TimerKind
from onepen.schemas.topics import Topics
from onepen.streams.log import Output, Record

log = logging.getLogger("onepen.processor")

S = TypeVar("S")
SessionKey = tuple[int, str]


class DueTimer(NamedTuple):
    """A deadline that has passed: the record to append (hashable, the same while the deadline is the same), and the
    full length that has to pass in addition: since publication (offers), takeover or unreachable brokers."""

    value: bytes
    length_ms: int
    is_offer: bool


class Core(Protocol[S]):
    """Pure: same arguments, same answer. `Poison` = dead letter, `Fatal` = the partition stops, anything else = bug."""

    def rules(self, policies: Mapping[bytes, bytes]) -> Any:
        """What holds on a partition with these policy records."""
        ...

    def read(self, record: Record) -> Any:
        """The command in a record, attributed to its session. Raises `Poison`."""
        ...

    def session_key(self, command: Any) -> SessionKey | None:
        """Whose command it is; None: it is for `admit`."""
        ...

    def admit(self, rules: Any, command: Any) -> tuple[Any, dict[bytes, bytes]]:
        """Changed rules and their state records."""
        ...

    def load(self, key: SessionKey, records: Mapping[bytes, bytes]) -> S: ...

    def decide(self, rules: Any, session: S, command: Any, record: Record, out: list[Output]) -> tuple[S, bool]:
        """The session afterwards, and whether an offer was made. Appends the outputs; raises before it does."""
        ...

    def changes(self, session: S) -> tuple[dict[bytes, bytes | None], int]:
        """Changed state records (None = tombstone) and the next deadline (0 = none)."""
        ...

    def settled(self, session: S) -> S: ...

    def active(self, session: S) -> bool:
        """Whether a run of the session is active. For what is shown only; nothing is decided by it."""
        ...

    def active_head(self, value: bytes) -> bool:
        """The same of a head record, at the cost of a glance."""
        ...

    def due(self, session: S, now_ms: int) -> tuple[Iterable[DueTimer], int]:
        """What has passed at `now_ms`, and the next deadline (0 = none)."""
        ...


class SessionCore:
    """`processors` as a `Core`. `partitions`: of every topic of the plan."""

    def __init__(self, keys: Keys, topics: Topics, partitions: int) -> None:
        self._start = Rules.start(keys)
        self._partitions = partitions
        self._inputs, self._events, self._receipts = topics.inputs, topics.events, topics.receipts
        self._offers, self._signals = topics.offers, topics.signals

    def rules(self, policies: Mapping[bytes, bytes]) -> Rules:
        return self._start.restored(policies)

    def read(self, record: Record) -> codec.InputsRecord:
        command = codec.decode_inputs(record.value)
        attribute(command, record.key, record.headers, record.partition, self._partitions)
        return command

    def session_key(self, command: codec.InputsRecord) -> SessionKey | None:
        if isinstance(command, PolicyRecord):
            return None
        return command.tenant_id, command.session_id

    def admit(self, rules: Rules, command: PolicyRecord) -> tuple[Rules, dict[bytes, bytes]]:
        return admit_policy(rules, command)

    def load(self, key: SessionKey, records: Mapping[bytes, bytes]) -> Session:
        return Session.load(key[0], key[1], records)

    def decide(
        self, rules: Rules, session: Session, command: Any, record: Record, out: list[Output]
    ) -> tuple[Session, bool]:
        decision = decide(rules, session, command, Moment(record.partition, record.offset, record.timestamp_ms))
        # Encoded in full before the first one is handed over: a failure leaves nothing of the record behind.
        out += self._outputs(session, decision, record.partition)
        return decision.session, bool(decision.offers)

    def _outputs(self, session: Session, decision: Decision, partition: int) -> list[Output]:
        key = output_key(session.tenant_id, session.session_id)
        found = [Output(self._events, partition, key, value) for value in decision.event_bytes]
        found += [Output(self._receipts, partition, key, codec.encode(receipt)) for receipt in decision.receipts]
        for offer in decision.offers:
            run = offer.run_id.encode()
            where = (murmur2(run) + offer.ordinal) % self._partitions
            found.append(Output(self._offers, where, run, codec.encode(offer)))
        for forward in decision.forwards:
            raw = forward.session_id.encode()
            where = partition_of(raw, self._partitions)
            found.append(Output(self._inputs, where, raw, codec.encode(forward)))
        for view in decision.views:
            if 0 <= view.inbox < self._partitions:
                found.append(Output(self._signals, view.inbox, view.worker_id.encode(), codec.encode(view)))
            else:
                # Views are level-triggered, so a lost one is harmless; a transaction that cannot be written is not.
                log.error("no inbox %d on %s: view for %s left out", view.inbox, self._signals, view.worker_id)
        return found

    def changes(self, session: Session) -> tuple[dict[bytes, bytes | None], int]:
        deadline_ms = timers.next_deadline_ms(session)
        return session.changes(deadline_ms), deadline_ms

    def settled(self, session: Session) -> Session:
        return session.settled()

    def active(self, session: Session) -> bool:
        return session.head.run is not None

    def active_head(self, value: bytes) -> bool:
        return has_run(value)

    def due(self, session: Session, now_ms: int) -> tuple[list[DueTimer], int]:
        armed = list(timers.armed(session))
        passed = [
            DueTimer(codec.encode(one.timer), one.length_ms, one.timer.kind == TimerKind.OFFER)
            for one in armed
            if one.timer.deadline_ms <= now_ms
        ]
        return passed, min((one.timer.deadline_ms for one in armed), default=0)
