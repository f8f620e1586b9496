"""Processes join, leave, are killed and frozen under load, in an order that a seed chooses, in both group protocols.

From outside: one decision per input, the state as the events say. From the logs: a process that is given a partition
again which it had before reads only what others wrote meanwhile. How long partitions stood still is printed.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conformance.worlds import PARTITIONS
from tests.faults.outside import SESSIONS, Wrong
from tests.faults.team import Restored, Team
from tests.faults.trial import FREEZE_S
from tests.seeds import drawn_seed

SLOTS = ("s0", "s1", "s2")
PER_S = 200
JOIN, LEAVE, KILL, KILL_FOR_GOOD, FREEZE = "join", "leave", "kill and come back", "kill for good", "freeze"
ACTS = (JOIN, JOIN, LEAVE, LEAVE, KILL, KILL_FOR_GOOD, FREEZE)
OWN_RECORDS = 4 * (SESSIONS // PARTITIONS + 1)
"""A process reads its own last transaction again when its outcome was in doubt; it has a record for each session."""
MUCH = 500


class Elastic:
    """One team and the order of what happens to it."""

    def __init__(self, team: Team, seed: int) -> None:
        self._team = team
        self._random = random.Random(seed)
        self.story: list[str] = []

    def run(self) -> None:
        team = self._team
        for slot in SLOTS[:2]:
            team.join(slot)
        team.watch(team.shared, "both own partitions")
        left = list(ACTS)
        while left:
            # When too few are left for anything that is due, one more joins.
            act = self._random.choice([act for act in left if self._can(act)] or [JOIN])
            if act in left:
                left.remove(act)
            began_s = time.monotonic()
            slot = self._act(act)
            team.watch(team.goes_on(), f"work in every partition after {act} {slot}")
            self.story.append(f"{act} {slot} {time.monotonic() - began_s:.1f} s")
        team.judge()

    def _can(self, act: str) -> bool:
        if act == JOIN:
            return len(self._team.running) < len(SLOTS)
        return act == KILL or len(self._team.running) >= 2

    def _act(self, act: str) -> str:
        """Until the group is settled again; the slot that it happened to."""
        team = self._team
        running = sorted(team.running)
        slot = self._random.choice(sorted(set(SLOTS) - team.running) if act == JOIN else running)
        if act == JOIN:
            team.join(slot)
        elif act == LEAVE:
            team.leave(slot)
        else:
            owned = team.slots[slot].log.owns()
            self._strike(act, slot)
            team.watch(team.goes_on(), f"work in {owned} that {slot} had")
            if act == FREEZE:
                team.wake(slot)
        team.watch(team.shared, f"shared after {act} {slot}")
        return slot

    def _strike(self, act: str, slot: str) -> None:
        team = self._team
        if act != FREEZE:
            team.kill(slot)
            if act == KILL:
                team.join(slot)
            return
        team.freeze(slot)
        # Longer than its group session and its transaction last, and until the others own everything.
        end_s = time.monotonic() + FREEZE_S
        team.watch(lambda: time.monotonic() > end_s, "the freeze")
        team.watch(team.shared, "the others own everything")


def judge_parked(team: Team) -> str:
    """What a process reads of a partition that it had before is what others wrote since, and not the whole state."""
    again = [one for one in team.restored() if one.again]
    for one in again:
        foreign = decided_by_others(team, one)
        # An input changes at most a head and the partition record.
        if one.records > 2 * foreign + OWN_RECORDS:
            raise Wrong(f"{one} was read again although others decided only {foreign} inputs meanwhile")
    late = [one for one in again if one.next_input > MUCH]
    if not late:
        raise Wrong("no partition came back to a process that had it")
    return f"{len(again)} times state was parked and used again, reading {[one.records for one in again]} records"


def decided_by_others(team: Team, one: Restored) -> int:
    """Inputs before the place where it went on that others decided after its own last one."""
    before = [event for event in team.events.found[one.partition] if int(event.value.split()[2]) < one.next_input]
    foreign = 0
    for event in reversed(before):
        if event.slot == one.slot:
            break
        foreign += 1
    return foreign


def in_both_protocols(run: Callable[[str], str]) -> None:
    """At the same time; every failure is told."""

    def told(protocol: str) -> str:
        try:
            print(run(protocol), flush=True)
        except Exception:
            return f"{protocol}: {traceback.format_exc()}"
        return ""

    with ThreadPoolExecutor(2) as pool:
        failures = [failure for failure in pool.map(told, ("classic", "consumer")) if failure]
    assert not failures, "\n".join(failures)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_processes_come_and_go(kafka_bootstrap: str, tmp_path: Path) -> None:
    seed = drawn_seed()

    def run(protocol: str) -> str:
        team = Team(kafka_bootstrap, protocol, tmp_path / protocol, SLOTS, PER_S)
        elastic = Elastic(team, seed)
        try:
            elastic.run()
            parked = judge_parked(team)
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {elastic.story}: {error}\n{team.tails()}") from error
        finally:
            team.close()
        pauses = team.pauses_ms(1_000)
        ended = f"ended by themselves: {team.restarted}"
        return f"{protocol}, seed {seed}: {elastic.story}; {ended}; {parked}; pauses over 1 s: {pauses}"

    in_both_protocols(run)
