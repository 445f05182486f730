"""Fixed sequences of events for schedulers; prints every effect: `python -m tests.integration.scheduler.trace`.

One is a storm of the simulation (`tests/unit/scheduler/test_simulation.py`): gateways, runners and faults around one
pool. The other has many pools and follows no protocol, so that much happens at the same moment.
"""

import random

from tests.unit.scheduler.test_simulation import DIGESTS, World
from weft_scheduler.core import effects as ef
from weft_scheduler.core import events as ev
from weft_scheduler.core.scheduler import Scheduler
from weft_scheduler.core.values import AdapterSpec, Config, PoolSpec, RunnerId, RunnerReport, RunnerSpec

POOLS = tuple(f"ns{i}/pool" for i in range(8))
GATEWAYS = ("g0", "g1")


class TracedWorld(World):
    def execute(self, effects: list[ef.Effect]) -> None:
        print(*effects, sep="\n")
        super().execute(effects)


def storm(seed: int) -> None:
    world, chance = TracedWorld(seed), random.Random(seed)
    world.reconnect()
    for _ in range(60):
        world.submit(
            f"g{chance.randrange(2)}", chance.choice(DIGESTS), chance.randint(1, 40), chance.randint(1, 50),
            chance.randint(1, 50), chance.randint(0, 30),
        )  # fmt: skip
        world.one_round()
        match chance.randrange(12):
            case 0:
                world.crash_runner(chance.choice(sorted(world.runners)), back=True)
            case 1:
                world.boot()
            case 2:
                world.break_supervisor()
            case 3:
                world.break_gateway("g0")
            case _:
                pass
    world.quiesce()


class ManyPools:
    """A runner and adapters for each pool."""

    def __init__(self, seed: int) -> None:
        self.chance, self.core, self.now = random.Random(seed), Scheduler(Config(max_outcomes=5), 1), 0.0
        self.reports = self.requests = 0
        self.assigned: dict[str, ef.Assign] = {}
        self.registry(len(POOLS))
        self.handle(ev.SupervisorUp("s"))
        for gateway in GATEWAYS:
            self.gateway(gateway)
        for number in range(len(POOLS)):
            self.report(number)

    def handle(self, event: ev.Event) -> None:
        self.perform(self.core.handle(event, self.now))

    def perform(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            print(effect)
            if isinstance(effect, ef.Assign):
                self.assigned.pop(effect.request_id, None)
                self.assigned[effect.request_id] = effect

    def registry(self, pools: int) -> None:
        adapters = tuple(
            AdapterSpec(f"{pool}{i}", "acme", f"a{i}", f"{pool}/a{i}", pool, f"sha256:{pool}{i}", 8, pinned=i == 0)
            for pool in POOLS[:pools]
            for i in range(4)
        )
        specs = tuple(PoolSpec(pool, "b", pool, max_runners=2) for pool in POOLS[:pools])
        self.handle(ev.RegistryChange(True, specs, adapters))

    def gateway(self, gateway: str) -> None:
        self.handle(ev.GatewayUp(gateway))
        self.handle(ev.ResubmitComplete(gateway))

    def report(self, number: int) -> None:
        self.reports += 1
        spec = RunnerSpec("h:1", POOLS[number], 16, 200, 8, 2, 64, 2048, name=f"runner-{number}")
        state = RunnerReport(RunnerId(f"u{number}", "i"), spec, self.reports, self.chance.randrange(100, 200))
        self.handle(ev.ClusterReport("s", (state,)))

    def submit(self) -> None:
        self.requests += 1
        pool = self.chance.choice(POOLS)
        digest = self.chance.choice(("", *(f"sha256:{pool}{i}" for i in range(4))))
        gateway = self.chance.choice(GATEWAYS)
        self.handle(ev.Submit(gateway, f"r{self.requests}", pool, "acme", "m", digest, 20, 100, p90_tokens=40))

    def lose_sessions(self) -> None:
        """A gateway's network fails for a moment."""
        gateway = self.chance.choice(GATEWAYS)
        for last in [one for one in self.assigned.values() if one.gateway == gateway]:
            self.handle(ev.Failed(gateway, last.request_id, last.epoch, ev.FailReason.SESSION_LOST, 1))

    def one(self) -> None:
        """Something happens."""
        chance = self.chance
        self.now += chance.choice((0.0, 0.0, 0.0, 0.0, 0.01, 0.01, 0.3, 3.5))
        self.perform(self.core.tick(self.now))
        last = chance.choice([*self.assigned.values()][-12:]) if self.assigned else None
        match chance.randrange(15):
            case 0 | 1 | 2 | 3:
                self.submit()
            case 4 | 5 | 6 if last:
                reason = chance.choice([*ev.FailReason])
                self.handle(ev.Failed(last.gateway, last.request_id, last.epoch, reason, chance.randrange(9)))
            case 7 | 8:
                self.report(chance.randrange(len(POOLS)))
            case 9 if last:
                self.handle(ev.Started(last.gateway, last.request_id, last.epoch))
            case 10 if last:
                self.handle(ev.OutcomeReported(last.gateway, last.request_id, "p", "", 9, False, b""))
            case 11 if last:
                self.handle(ev.ClusterReport("s", lost=(last.runner,)))
            case 12 if not chance.randrange(4):
                self.registry(chance.randint(4, len(POOLS)))
            case 13 if not chance.randrange(4):
                self.gateway(chance.choice(GATEWAYS))
            case 14 if not chance.randrange(4):
                self.lose_sessions()
            case _:
                pass


def main() -> None:
    storm(1)
    many = ManyPools(2)
    for _ in range(600):
        many.one()


if __name__ == "__main__":
    main()
