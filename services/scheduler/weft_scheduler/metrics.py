"""The scheduler's metrics. Labels are bounded: reasons, results and pools."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from weft.domain.machine import Send
from weft.domain.request import Assign, Preempt, Reject
from weft_scheduler.core.effects import Effect, Queued, Requeued, Resumed, RunnerLost, Stale
from weft_scheduler.core.state import State

PLACEMENT_BUCKETS_S = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 20e-3, 0.1)


class SchedulerMetrics:
    """Counts effects as the shell performs them; gauges are read from the state once a second."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weft_scheduler_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"weft_scheduler_{name}", text, labels, registry=registry)

        self.decisions = counter("decisions_total", "Decisions on requests, by result", "result")
        self.migrations = counter("migrations_total", "Requests that left a runner and were queued again", "reason")
        self.resumed = counter("resumed_total", "Requests with tokens on a runner again, by numerics class", "classes")
        self.rejects = counter("rejects_total", "Requests refused or ended", "reason")
        self.preempts = counter("preempts_total", "Victims preempted")
        self.stale = counter("stale_total", "Events that changed nothing any more", "event")
        self.runners_lost = counter("runners_lost_total", "Runner incarnations that ended")
        self.placement = Histogram(
            "weft_scheduler_placement_seconds",
            "Time to handle one Submit, in the core",
            buckets=PLACEMENT_BUCKETS_S,
            registry=registry,
        )
        self.term = gauge("term", "The epoch term in force")
        self.of_pools = (
            gauge("queue_length", "Requests waiting", "pool"),
            gauge("running", "Requests on runners", "pool"),
            gauge("ready_runners", "Runners that are Ready", "pool"),
            gauge("wanted_runners", "Runners wanted", "pool"),
            gauge("victims", "Runners that take nothing new and should go", "pool"),
        )
        self.gateways = gauge("gateways", "Gateways connected")
        self.supervisors = gauge("supervisors", "Supervisors connected")
        self._pools: set[str] = set()

    def count(self, effect: Effect) -> None:
        """One effect."""
        match effect:
            case Send(message=Assign()):
                self.decisions.labels("placed").inc()
            case Send(message=Reject() as reject):
                self.decisions.labels("rejected").inc()
                self.rejects.labels(reject.reason.value).inc()
            case Send(message=Preempt()):
                self.preempts.inc()
            case Queued():
                self.decisions.labels("queued").inc()
            case Requeued():
                self.migrations.labels(effect.reason).inc()
            case Resumed():
                self.resumed.labels("same" if effect.from_class == effect.to_class else "across").inc()
            case Stale():
                self.stale.labels(effect.event).inc()
            case RunnerLost():
                self.runners_lost.inc()
            case _:
                pass

    def observe(self, state: State) -> None:
        """Bring the gauges up to date; pools that are gone lose theirs."""
        self.term.set(state.term)
        self.gateways.set(len(state.gateways))
        self.supervisors.set(len(state.supervisors))
        for name, pool in state.pools.items():
            wanted, victims = pool.autoscaler.wanted_runners, len(pool.autoscaler.victims)
            values = (len(pool.queue), pool.running, pool.ready_runners, wanted, victims)
            for gauge, value in zip(self.of_pools, values, strict=True):
                gauge.labels(name).set(value)
        for name in self._pools - state.pools.keys():
            for gauge in self.of_pools:
                gauge.remove(name)
        self._pools = set(state.pools)
