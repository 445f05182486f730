"""Fixed sequences of events for schedulers; prints every effect: `python -m tests.integration.scheduler.trace`.

One is a scenario of the simulator, with faults. The other has many pools and follows no protocol, so that much happens
at the same moment.
"""

import random

from weft.domain.ids import RunnerId
from weft.domain.machine import TICK, Connected, Kind, Peer, Received, Send
from weft.domain.request import Assign, Failed, FailReason, OutcomeReport, ResubmitComplete, Started, Submit
from weft.domain.routes import AdapterSpec, PoolSpec, RegistryChange
from weft.domain.runner import ClusterReport, ReportedRunner, RunnerFigures, RunnerReport, RunnerSpec
from weft_scheduler.core import Scheduler, SchedulerConfig
from weft_scheduler.core.effects import Effect, Event
from weft_sim.scenario import Run

POOLS = tuple(f"ns{i}/pool" for i in range(8))
GATEWAYS = ("g0", "g1")
REGISTRY, SUPERVISOR = Peer(Kind.REGISTRY, "r"), Peer(Kind.SUPERVISOR, "s")


def storm(seed: int) -> None:
    run = Run(seed)
    run.world.scheduler.on_effects = lambda _, __, effects: print(*effects, sep="\n")
    run.run()


class ManyPools:
    """A runner and adapters for each pool."""

    def __init__(self, seed: int) -> None:
        self.chance, self.core, self.now = random.Random(seed), Scheduler(SchedulerConfig(max_outcomes=5), 1), 0.0
        self.reports = self.requests = 0
        self.assigned: dict[str, tuple[str, Assign]] = {}
        self.handle(Connected(REGISTRY))
        self.registry(len(POOLS))
        self.handle(Connected(SUPERVISOR))
        for gateway in GATEWAYS:
            self.gateway(gateway)
        for number in range(len(POOLS)):
            self.report(number)

    def sends(self, gateway: str, message: object) -> None:
        self.handle(Received(Peer(Kind.GATEWAY, gateway), message))

    def handle(self, event: Event) -> None:
        self.perform(self.core.handle(event, self.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            print(effect)
            if isinstance(effect, Send) and isinstance(effect.message, Assign):
                self.assigned.pop(effect.message.request_id, None)
                self.assigned[effect.message.request_id] = (effect.peer.name, effect.message)

    def registry(self, pools: int) -> None:
        adapters = tuple(
            AdapterSpec(f"{pool}/a{i}", "acme", pool, f"sha256:{pool}{i}", 8, f"{pool}{i}", pinned=i == 0)
            for pool in POOLS[:pools]
            for i in range(4)
        )
        specs = tuple(PoolSpec(pool, "b", pool, max_runners=2) for pool in POOLS[:pools])
        self.handle(Received(REGISTRY, RegistryChange(True, specs, adapters)))

    def gateway(self, gateway: str) -> None:
        self.handle(Connected(Peer(Kind.GATEWAY, gateway)))
        self.sends(gateway, ResubmitComplete())

    def report(self, number: int) -> None:
        self.reports += 1
        runner = RunnerId(f"u{number}", "i")
        spec = RunnerSpec(runner, "h:1", POOLS[number], 16, 200, 8, 2, 64, 2048, name=f"runner-{number}")
        report = RunnerReport(self.reports, True, RunnerFigures(self.chance.randrange(100, 200)))
        self.handle(Received(SUPERVISOR, ClusterReport((ReportedRunner(runner, report, spec),))))

    def submit(self) -> None:
        self.requests += 1
        pool = self.chance.choice(POOLS)
        digest = self.chance.choice(("", *(f"sha256:{pool}{i}" for i in range(4))))
        gateway = self.chance.choice(GATEWAYS)
        self.sends(gateway, Submit(f"r{self.requests}", pool, "acme", "m", digest, 20, 100, p90_tokens=40))

    def lose_sessions(self) -> None:
        """A gateway's network fails for a moment."""
        gateway = self.chance.choice(GATEWAYS)
        for last in [assign for name, assign in self.assigned.values() if name == gateway]:
            self.sends(gateway, Failed(last.request_id, last.epoch, FailReason.SESSION_LOST, 1))

    def one(self) -> None:
        """Something happens."""
        chance = self.chance
        self.now += chance.choice((0.0, 0.0, 0.0, 0.0, 0.01, 0.01, 0.3, 3.5))
        self.handle(TICK)
        gateway, last = chance.choice([*self.assigned.values()][-12:]) if self.assigned else ("", None)
        match chance.randrange(15):
            case 0 | 1 | 2 | 3:
                self.submit()
            case 4 | 5 | 6 if last:
                reason = chance.choice([*FailReason])
                self.sends(gateway, Failed(last.request_id, last.epoch, reason, chance.randrange(9)))
            case 7 | 8:
                self.report(chance.randrange(len(POOLS)))
            case 9 if last:
                self.sends(gateway, Started(last.request_id, last.epoch))
            case 10 if last:
                self.sends(gateway, OutcomeReport(last.request_id, "p", "", 9, False, b""))
            case 11 if last:
                self.handle(Received(SUPERVISOR, ClusterReport(lost=(last.runner,))))
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
