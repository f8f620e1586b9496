"""Which verdicts would differ under another policy: recorded inputs decided twice, side by side.

Rule: one re-execution under the recorded policies, one under the document, which holds for the tenant from the start.
What is on the topic is taken as it is: where runs would have gone another way, records of workers and timers that no
longer fit are refused or ignored as `decide` says, and none are made up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from onepen.processors.rules import Keys
from onepen.schemas.errors import Invalid
from onepen.schemas.ids import INT64_MAX
from onepen.schemas.inputs import Input
from onepen.schemas.policies import Policy
from onepen.schemas.statuses import Reason
from onepen.schemas.worker_records import WorkerHead
from onepen.streams.outside_reader import RawRecord
from onepen.streams.reexecution import Decided, Reexecution, Undecidable, verdict_of
from onepen.streams.settings import Settings
from onepen.streams.verifying import Inputs, Progress, Topics, checked_archive, token_keys

__all__ = ["Difference", "Simulation", "simulate"]

IMPOSED_VERSION: Final = INT64_MAX
"""A version that no recorded policy has."""

LISTED_MAX: Final = 10_000
Verdict = tuple[str, str | None]


@dataclass(frozen=True)
class Difference:
    """An input that would have got another verdict."""

    input_id: str
    session_id: str
    mode: str
    partition: int
    offset: int
    at_ms: int
    before: Verdict
    after: Verdict

    def shown(self) -> dict[str, Any]:
        """As JSON members."""
        return {
            "inputId": self.input_id,
            "sessionId": self.session_id,
            "mode": self.mode,
            "position": {"partition": self.partition, "offset": self.offset},
            "at": self.at_ms,
            "before": {"verdict": self.before[0], "reason": self.before[1]},
            "after": {"verdict": self.after[0], "reason": self.after[1]},
        }


@dataclass
class Simulation:
    """What was compared. At most LISTED_MAX differences are kept; all are counted."""

    inputs: int = 0
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    """`before -> after`, and how often."""
    differences: list[Difference] = field(default_factory=list)
    unfit_worker_records: int = 0
    """Records of workers that were accepted and would not have been."""

    @property
    def differing(self) -> int:
        return self.changes.total()

    def compare(self, record: RawRecord, command: Input, before: Verdict, after: Verdict) -> None:
        """One input, its verdict and the other one."""
        self.inputs += 1
        self.before[_said(before)] += 1
        self.after[_said(after)] += 1
        if before == after:
            return
        self.changes[f"{_said(before)} -> {_said(after)}"] += 1
        if len(self.differences) < LISTED_MAX:
            place = record.partition, record.offset, record.at_ms
            named = command.input_id, command.session_id, command.mode
            self.differences.append(Difference(*named, *place, before, after))


def _said(verdict: Verdict) -> str:
    return verdict[0] if verdict[1] is None else f"{verdict[0]} {verdict[1]}"


def simulate(
    settings: Settings,
    policy: Policy,
    *,
    partition: int | None = None,
    since_ms: int = 0,
    archives: Mapping[int, Path] | None = None,
    progress: Progress = lambda *_: None,
) -> Simulation:
    """Compare the verdicts of the settings' tenant. Inputs before `since_ms` are decided, not compared.

    Raises like `verify`, and `Invalid` when the token key fits no worker record.
    """
    keys = token_keys(settings)
    with ExitStack() as stack:
        topics = Topics(settings, stack)
        count = topics.inputs.partitions()
        if partition is not None and partition >= count:
            raise Invalid(f"partition: there are {count}, the first is 0", field="partition")
        wanted = range(count) if partition is None else [partition]
        return simulate_on(topics, settings, keys, policy, wanted, since_ms, archives or {}, progress)


def simulate_on(
    topics: Topics,
    settings: Settings,
    keys: Keys,
    policy: Policy,
    partitions: Iterable[int],
    since_ms: int,
    archives: Mapping[int, Path],
    progress: Progress,
) -> Simulation:
    """`simulate` on topics that are open already."""
    result = Simulation()
    fits = Counter[bool]()
    count = topics.inputs.partitions()
    for number in partitions:
        path = archives.get(number)
        archive = None if path is None else checked_archive(path, settings, number, count)
        inputs = Inputs(topics, settings, number, None if archive is None else archive.header)
        records = {} if archive is None else archive.records
        pair = _Pair(number, count, keys, records, settings.tenant_id, policy)
        for record in inputs:
            pair.take(record, result, since_ms)
            progress(number, record.offset - inputs.start, inputs.until - inputs.start)
        fits[True] += pair.recorded.tokens_valid
        fits[False] += pair.recorded.tokens_invalid
    if fits[False] and not fits[True]:
        raise Invalid("token_key: fits no record of a worker; it is not the processor's", field="token_key")
    return result


class _Pair:
    """One partition, decided under the recorded policies and under the other one."""

    def __init__(
        self,
        partition: int,
        partitions: int,
        keys: Keys,
        records: Mapping[bytes, bytes],
        tenant_id: int,
        policy: Policy,
    ) -> None:
        self._tenant_id = tenant_id
        self.recorded = Reexecution(partition, partitions, keys, records)
        self._other = Reexecution(partition, partitions, keys, records)
        self._other.impose(tenant_id, msgspec.structs.replace(policy, version=IMPOSED_VERSION))

    def take(self, record: RawRecord, result: Simulation, since_ms: int) -> None:
        before, after = _decided(self.recorded, record), _decided(self._other, record)
        if before is None or after is None or before.command.tenant_id != self._tenant_id:
            return
        command = before.command
        if isinstance(command, WorkerHead):
            result.unfit_worker_records += _refused(after) and not _refused(before)
        first, second = verdict_of(before), verdict_of(after)
        if isinstance(command, Input) and first is not None and second is not None and record.at_ms >= since_ms:
            result.compare(record, command, first, second)


def _decided(again: Reexecution, record: RawRecord) -> Decided | None:
    try:
        return again.decide(record)
    except Undecidable:
        return None  # `verify` names it


def _refused(decided: Decided) -> bool:
    """True for a worker record that was answered with a reason."""
    views = decided.decision.views
    return any(view.record is not None and view.reason not in (None, Reason.RECORDED) for view in views)
