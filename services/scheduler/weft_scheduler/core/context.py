"""What the handlers of one machine share: state, clock, deadlines, and the effects of the event at hand."""

from collections.abc import Callable

from weft_scheduler.core.alarms import Alarm, Alarms, Kind
from weft_scheduler.core.effects import Effect, RaiseTerm, TellTerm
from weft_scheduler.core.lengths import Lengths
from weft_scheduler.core.outcomes import Ledger
from weft_scheduler.core.room import reindex
from weft_scheduler.core.state import Pool, Runner, State
from weft_scheduler.core.told import Told
from weft_scheduler.core.values import Config, Epoch, RunnerId


class Context:
    """One per scheduler. `now` is the time of the event at hand."""

    def __init__(self, config: Config, term: int) -> None:
        self.config, self.now = config, 0.0
        self.state = State(term)
        self.alarms = Alarms()
        self.lengths = Lengths(config.quantile, config.default_output_tokens, config.length_adapters)
        self.outcomes = Ledger(config.max_outcomes)
        self.told = Told()
        self._effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def take(self) -> list[Effect]:
        """The effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def to_gateways(self, effect: Callable[[str], Effect]) -> None:
        for gateway in self.state.gateways:
            self.emit(effect(gateway))

    def look_at(self, pool: str) -> None:
        """Something changed there: its queue may move, its status may differ."""
        self.state.look[pool] = None
        self.touch(pool)

    def touch(self, pool: str) -> None:
        """Its numbers may differ from what the registry was told."""
        self.state.touched.add(pool)
        if Alarm(Kind.STATUS) not in self.alarms:
            self.alarms.set(Alarm(Kind.STATUS), self.now + self.config.status_s)

    def shelve(self, runner: Runner) -> None:
        """After a change of a runner's accounts that frees nothing."""
        if runner.spec is not None:
            reindex(self.pool_of(runner), runner, placeable(runner))

    def reindex(self, runner: Runner) -> None:
        """After any other change of a runner's accounts: somebody may fit now."""
        if runner.spec is not None:
            self.shelve(runner)
            self.look_at(runner.spec.pool)

    def pool_of(self, runner: Runner) -> Pool:
        assert runner.spec is not None
        return self.state.pool(runner.spec.pool)

    def next_epoch(self) -> Epoch:
        """Above every epoch this machine has given or heard of."""
        self.state.counter += 1
        return Epoch(self.state.term, self.state.counter)

    # What raises the term: the file, what supervisors have stored of it, gateways' epochs. Never what runners say: who
    # chooses what runs in one could use the terms up. All that runs there is known to its gateway.

    def heed_term(self, term: int) -> None:
        """Stay above a term a supervisor has stored. Our own is foreign too while we have given no epoch under it."""
        if term > self.state.term or (term == self.state.term and not self.state.counter):
            self._raise_above(term)

    def heed(self, epoch: Epoch) -> None:
        """Stay above an epoch that a gateway has."""
        if epoch > (self.state.term, self.state.counter):
            self._raise_above(epoch.term)

    def _raise_above(self, term: int) -> None:
        self.state.term, self.state.counter = term + 1, 0
        self.emit(RaiseTerm(self.state.term))
        for pool in self.state.pools.values():
            pool.desired.renumber(self.state.version())
        for supervisor in self.state.supervisors:
            self.emit(TellTerm(supervisor, self.state.term))


def placeable(runner: Runner) -> bool:
    """Whether anything new may land there: nothing before its first full report on this stream, nor on a victim."""
    able = runner.confirmed and runner.serving and not runner.cordoned
    return able and runner.report is not None and not runner.report.draining


def avoided(avoid: dict[RunnerId, float], now: float) -> dict[RunnerId, float]:
    """What is still to be avoided, expired entries taken out in place."""
    for runner_id in [r for r, until in avoid.items() if until <= now]:
        del avoid[runner_id]
    return avoid
