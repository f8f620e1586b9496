"""The nemesis: what goes wrong, drawn from the seed. `heal` ends all of it.

Every fault is one step. Which exist is listed in `FAULTS` with their weights, so that a new one is one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.whole_broker import Link

if TYPE_CHECKING:
    from tests.simulation.whole_processors import Processor
    from tests.simulation.whole_world import World

EVERY_MS = 180


class Nemesis:
    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.faults: list[tuple[int, Callable[[], None]]] = [
            (5, self.processor_request),
            (4, self.processor_commit),
            (4, self.processor_refused),
            (2, self.processor_killed),
            (2, self.processor_frozen),
            (2, self.processor_replaced),
            (2, self.processor_leaves),
            (2, self.rebalance_in_a_batch),
            (2, self.processor_cut_off),
            (2, self.processor_slow),
            (2, self.clocks_jump),
            (1, self.broker_away),
            (3, self.worker_frozen),
            (2, self.worker_killed),
            (1, self.worker_shut_down),
            (2, self.sink_frozen),
            (1, self.sink_killed),
            (2, self.sink_moved),
            (1, self.database_away),
            (2, self.state_compacted),
            (1, world.clients.garbage),
            (1, world.clients.new_policy),
        ]
        world.time.every(EVERY_MS, self.strike)

    def strike(self) -> None:
        if not self.world.faults:
            return
        weights = [weight for weight, _ in self.faults]
        [(_, fault)] = self.random.choices(self.faults, weights)
        self.world.time.steps["fault"] += 1
        self.world.facts[f"fault {fault.__name__}"] += 1
        fault()

    def _processor(self) -> Processor | None:
        up = [one for one in self.world.processors if one.up]
        return self.random.choice(up) if up else None

    # -- processors ------------------------------------------------------------------------------------------------

    def processor_request(self) -> None:
        one = self._processor()
        if one is not None:
            point = self.random.choice(Link.POINTS)
            kind = self.random.choice(["die", "freeze", "freeze", "lost"])
            nth = self.random.randrange(1, 6) if point == "write" else 1
            one.link.arm(point, nth, kind, self.random.choice([50, 600, 2_000, 7_000, 9_000]))

    def processor_commit(self) -> None:
        one = self._processor()
        if one is not None:
            kind = self.random.choice(["reply_lost", "in_flight", "repeated", "repeated", "lost", "die", "freeze"])
            one.link.arm("end", 1, kind, self.random.choice([50, 2_000, 7_000]))

    def processor_refused(self) -> None:
        """A transaction that has to be aborted though nobody was fenced and nothing was rebalanced."""
        one = self._processor()
        if one is not None:
            point, nth = self.random.choice([("write", self.random.randrange(1, 6)), ("offsets", 1)])
            one.link.arm(point, nth, "refused")
            if self.random.random() < 0.5:  # and what its time did not suffice for is in its hands meanwhile
                one.clock.cost_ms = 4.0

    def processor_killed(self) -> None:
        one = self._processor()
        if one is not None:
            one.kill()

    def processor_frozen(self) -> None:
        one = self._processor()
        if one is not None:
            one.freeze(self.random.choice([300, 2_000, 8_000, 15_000]))

    def processor_replaced(self) -> None:
        """Somebody starts the slot again elsewhere while its former process merely stands still."""
        one = self._processor()
        if one is not None:
            one.freeze(self.random.choice([500, 3_000, 9_000]))
            self.world.start_processor(one.slot)

    def processor_leaves(self) -> None:
        one = self._processor()
        if one is not None:
            one.leave()

    def rebalance_in_a_batch(self) -> None:
        """One stands still before it sends its offsets; while it does, another one leaves."""
        up = [one for one in self.world.processors if one.up]
        if len(up) < 2:
            return
        one, other = self.random.sample(up, 2)
        one.link.arm(self.random.choice(["write", "offsets"]), 1, "freeze", 800)

        def leave() -> None:
            if one.busy:
                other.leave()

        for late_ms in (100, 300, 600):
            self.world.time.after(late_ms, leave)

    def processor_cut_off(self) -> None:
        one = self._processor()
        if one is not None:
            one.link.cut = True

            def back() -> None:
                one.link.cut = False

            self.world.time.after(self.random.choice([200, 1_500, 9_000]), back)

    def processor_slow(self) -> None:
        one = self._processor()
        if one is not None:
            one.clock.cost_ms = self.random.choice([0.0, 1.0, 4.0])

    def clocks_jump(self) -> None:
        jump = (self.random.choice([0, 300, 4_000]), self.random.choice([-3_600_000, -500, 0, 500, 3_600_000]))
        one = self._processor()
        if one is not None and self.random.random() < 0.5:
            one.clock.jump(*jump)
        else:
            self.random.choice(self.world.workers).clock.jump(*jump)

    def broker_away(self) -> None:
        broker = self.world.broker
        broker.reachable = False

        def back() -> None:
            broker.reachable = True

        self.world.time.after(self.random.choice([100, 1_000, 4_000]), back)

    def state_compacted(self) -> None:
        for partition in range(self.world.partitions):
            if self.world.broker.compact(self.world.topics.state, partition):
                self.world.facts["state compacted"] += 1

    # -- workers ---------------------------------------------------------------------------------------------------

    def _busy_worker(self) -> int:
        workers = self.world.workers
        busy = [index for index, one in enumerate(workers) if any(agent.flying for agent in one.agents)]
        return self.random.choice(busy or list(range(len(workers))))

    def worker_frozen(self) -> None:
        self.world.workers[self._busy_worker()].freeze(self.random.choice([500, 2_500, 5_000, 9_000]))

    def worker_killed(self) -> None:
        self.world.workers[self._busy_worker()].kill()

    def worker_shut_down(self) -> None:
        one = self.random.choice(self.world.workers)
        if not one.still:
            one.shut_down()

    # -- sinks and database ----------------------------------------------------------------------------------------

    def sink_frozen(self) -> None:
        """Often long enough for the others to get its partitions."""
        one = self.random.choice(self.world.sinks)
        one.freeze(self.random.choice([500, 4_000, 10_000]))
        if self.random.random() < 0.6:
            for place in self.world.places_of(one.name):
                self.world.placing[place] = self.random.choice(self.world.sinks).name

    def sink_killed(self) -> None:
        self.random.choice(self.world.sinks).kill()

    def sink_moved(self) -> None:
        place = self.random.choice(sorted(self.world.placing))
        self.world.placing[place] = self.random.choice(self.world.sinks).name

    def database_away(self) -> None:
        database = self.world.database
        database.reachable = False

        def back() -> None:
            database.reachable = True

        self.world.time.after(self.random.choice([300, 3_000]), back)
