"""State in which many sessions each have a run whose lease has ended: what a processor finds after an outage.

Rule: the real core decides a prompt and a claim of every session, at times in the past that spread the ends of the
leases over `SPREAD_MS`; events, state and policy are written as the engine writes them. The partition records stand at
input 0, and the inputs topic is empty: as if everything before had reached its retention.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from infra.bench.core import input_of
from infra.bench.writing import Written, write_all
from onepen.processors import state_keys, timers
from onepen.processors.decide import Moment, decide
from onepen.processors.rules import Keys, Rules, admit_policy
from onepen.processors.session import Session
from onepen.schemas.ids import output_key, run_id
from onepen.schemas.inputs import Content, Input
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.schemas.partitioning import partition_of
from onepen.schemas.policies import Policy, PolicyRecord, policy_body
from onepen.schemas.worker_records import Claim
from onepen.streams.engine_settings import EngineSettings
from onepen.streams.store import MARK_FORMAT, Mark

SPREAD_MS: Final = 60_000
OFFER_MS: Final = 60_000
"""The offer after a lost lease waits so long for a worker: the second wave, of offers nobody takes, comes later."""


def lease_policy(tenant_id: int, lease_ms: int) -> PolicyRecord:
    policy = Policy(version=1, offer_ms=OFFER_MS, offer_max_ms=OFFER_MS, lease_ms=lease_ms, renew_ms=lease_ms // 3)
    return PolicyRecord(tenant_id=tenant_id, version=1, body=policy_body(policy))


def put_leases(settings: EngineSettings, keys: Keys, tenant_id: int, names: Sequence[str], lease_ms: int) -> None:
    """Write the state to the topics, which must be empty. The last lease has ended before this is called."""
    write_all(settings.bootstrap, _records(settings, keys, tenant_id, names, lease_ms))


def _records(
    settings: EngineSettings, keys: Keys, tenant_id: int, names: Sequence[str], lease_ms: int
) -> Iterator[Written]:
    topics, partitions = settings.topics, settings.partitions
    rules, policies = admit_policy(Rules.start(keys), lease_policy(tenant_id, lease_ms))
    for partition in range(partitions):
        yield from (Written(topics.state, key, value, partition) for key, value in policies.items())
    first_ms = time.time_ns() // 1_000_000 - lease_ms - SPREAD_MS
    for number, name in enumerate(names):
        partition = partition_of(name.encode(), partitions)
        claimed_ms = first_ms + number * SPREAD_MS // len(names)
        yield from _session(settings, rules, tenant_id, name, Moment(partition, number, claimed_ms))
    mark = Mark(MARK_FORMAT, 0, PROTOCOL_VERSION, partitions, settings.slot, settings.transactional_ids)
    for partition in range(partitions):
        yield Written(topics.state, state_keys.PARTITION_KEY, mark.encode(), partition)


def _session(settings: EngineSettings, rules: Rules, tenant_id: int, name: str, moment: Moment) -> Iterator[Written]:
    session = Session.load(tenant_id, name, {})
    key = output_key(tenant_id, name)
    for command in _commands(rules.keys, tenant_id, name, moment):
        decision = decide(rules, session, command, moment)
        session = decision.session
        for event in decision.event_bytes:
            yield Written(settings.topics.events, key, event, moment.partition)
    if session.head.run is None or not session.head.run.owner:
        raise ValueError(f"{name} has no lease: what is measured would not be")
    for record, value in session.changes(timers.next_deadline_ms(session)).items():
        yield Written(settings.topics.state, record, value, moment.partition)


def _commands(keys: Keys, tenant_id: int, name: str, moment: Moment) -> Iterator[Input | Claim]:
    content = Content(data=b"hello")
    yield input_of(tenant_id, name, f"input-{name}", moment.at_ms, mode="prompt", content=content)
    run = run_id(tenant_id, name, 1)
    yield Claim(
        tenant_id=tenant_id,
        session_id=name,
        run_id=run,
        generation=1,
        token=keys.token(tenant_id, name, run, 1),
        worker_id="worker-1",
        inbox=0,
    )
