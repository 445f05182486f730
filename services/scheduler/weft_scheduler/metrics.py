"""The scheduler's metrics. Labels are bounded: reasons, results and pools."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from weft.domain.machine import Send
from weft.domain.request import Assign, Preempt, Reject
from weft.domain.runner import RunnerRole
from weft_scheduler.core import effects
from weft_scheduler.core.effects import Effect
from weft_scheduler.core.scaling import demand
from weft_scheduler.core.state import State

PLACEMENT_BUCKETS_S = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 20e-3, 0.1)
LEADER = Gauge("weft_scheduler_leader", "1 while this process acts, 0 while it stands by")  # a standby has no other one


class SchedulerMetrics:
    """Counts of effects as the shell performs them; gauges are read from the state once a second while it changes."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weft_scheduler_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"weft_scheduler_{name}", text, labels, registry=registry)

        self._decisions = counter("decisions_total", "Decisions on requests, by result", "result")
        self._migrations = counter("migrations_total", "Requests that left a runner and were queued again", "reason")
        self._resumed = counter("resumed_total", "Requests with tokens on a runner again, by numerics class", "classes")
        self._rejects = counter("rejects_total", "Requests refused or ended", "reason")
        self._preempts = counter("preempts_total", "Sequences ordered off their runners")
        self._consolidations = counter("consolidations_total", "Requests migrated by consolidation", "pool")
        self._hand_offs = counter(
            "hand_offs_total", "KV sent from prompt to token runners: in one numerics class, across, or lost", "result"
        )
        self._kv_migrations = counter("kv_migrations_total", "Running requests migrated with their KV", "reason")
        self._batch_preemptions = counter(
            "batch_preemptions_total", "Batch requests ordered off runners for interactive ones", "pool"
        )
        self._parked = counter("parked_total", "Sequences beyond a tenant's share that were parked for others", "pool")
        self._role_changes = counter("role_changes_total", "Roles that runners were ordered to take", "pool", "role")
        self._stale = counter("stale_total", "Events that changed nothing any more", "event")
        self._runners_lost = counter("runners_lost_total", "Runner incarnations that ended")
        self.placement = Histogram(
            "weft_scheduler_placement_seconds",
            "Time to handle one Submit, in the core",
            buckets=PLACEMENT_BUCKETS_S,
            registry=registry,
        )
        self._term = gauge("term", "The epoch term in force")
        self._of_pools = (
            gauge("queue_length", "Interactive requests waiting", "pool"),
            gauge("running", "Requests on runners", "pool"),
            gauge("batch_queue_length", "Batch requests waiting", "pool"),
            gauge("batch_running", "Batch requests on runners, of those running", "pool"),
            gauge("ready_runners", "Runners that are Ready", "pool"),
            gauge("wanted_runners", "Runners wanted, within the bounds of autoscaling", "pool"),
            gauge("demanded_runners", "Runners that all requests would fill, whatever the bounds", "pool"),
            gauge("victims", "Runners that take nothing new and should go", "pool"),
            gauge("waiting_tenants", "Namespaces whose requests wait", "pool"),
            gauge("fairness_spread_tokens", "Difference of the virtual token counters of waiting tenants", "pool"),
        )
        self._demanded_by_phase = gauge(
            "demanded_runners_by_phase", "demanded_runners of split pools, by what they would compute", "pool", "phase"
        )
        self._slo_requests = Counter(
            "weft_slo_requests_total",
            "Finished requests of pools with objectives, by whether the first token and the others came in time",
            ("pool", "ttft", "token_time"),
            registry=registry,
        )
        self._slo_attainment = Gauge(
            "weft_slo_attainment_ratio",
            "Share of the requests finished in about five minutes that met both objectives",
            ("pool",),
            registry=registry,
        )
        self._runners = gauge("runners", "Runners that take requests now or soon, by role", "pool", "role")
        self._gateways = gauge("gateways", "Gateways connected")
        self._supervisors = gauge("supervisors", "Supervisors connected")
        self._by_pool = (
            *self._of_pools, self._demanded_by_phase, self._runners, self._slo_requests, self._slo_attainment,
            self._consolidations, self._role_changes, self._batch_preemptions, self._parked,
        )  # fmt: skip
        self._pools = set[str]()  # that may have series

    def count(self, effect: Effect) -> None:
        """Count one effect."""
        match effect:
            case Send(message=Assign()):
                self._decisions.labels("placed").inc()
            case Send(message=Reject() as reject):
                self._decisions.labels("rejected").inc()
                self._rejects.labels(reject.reason.value).inc()
            case Send(message=Preempt()):
                self._preempts.inc()
            case effects.Queued():
                self._decisions.labels("queued").inc()
            case effects.Requeued():
                self._migrations.labels(effect.reason).inc()
            case effects.Resumed():
                self._resumed.labels("same" if effect.from_class == effect.to_class else "across").inc()
            case effects.Consolidated():
                self._of_pool(self._consolidations, effect.pool).inc(len(effect.request_ids))
            case effects.KvHandOff():
                self._hand_offs.labels(effect.result).inc()
            case effects.KvMigration():
                self._kv_migrations.labels(effect.reason).inc()
            case effects.RoleChanged():
                self._of_pool(self._role_changes, effect.pool, effect.role).inc()
            case effects.BatchPreempted():
                self._of_pool(self._batch_preemptions, effect.pool).inc(len(effect.request_ids))
            case effects.SequencesParked():
                self._of_pool(self._parked, effect.pool).inc(len(effect.parks))
            case effects.Judged():
                met = ("met" if effect.ttft_met else "missed", "met" if effect.token_time_met else "missed")
                self._of_pool(self._slo_requests, effect.pool, *met).inc()
            case effects.Stale():
                self._stale.labels(effect.event).inc()
            case effects.RunnerLost():
                self._runners_lost.inc()
            case _:
                pass

    def _of_pool(self, counter: Counter, pool: str, *labels: str) -> Counter:
        """Return a pool's counter. The counter ends with the pool."""
        self._pools.add(pool)
        return counter.labels(pool, *labels)

    def observe(self, state: State) -> None:
        """Bring the gauges up to date, and end the series of pools that are gone."""
        self._term.set(state.numbers.term)
        self._gateways.set(len(state.gateways))
        self._supervisors.set(len(state.supervisors))
        for name, pool in state.pools.items():
            wanted_runners, victims = pool.scaling.autoscaler.wanted_runners, len(pool.scaling.autoscaler.victims)
            counters = pool.waiting.queue.counters
            values = (
                len(pool.waiting.queue),
                pool.waiting.running,
                len(pool.waiting.batch.queue),
                pool.waiting.batch.running,
            )
            needed = demand(state, pool)
            values += (pool.fleet.ready.count, wanted_runners, sum(needed), victims)
            values += (len(counters), counters.spread)
            for gauge, value in zip(self._of_pools, values, strict=True):
                gauge.labels(name).set(value)
            if pool.declared.split:
                for phase, count in needed._asdict().items():
                    self._demanded_by_phase.labels(name, phase).set(count)
            of_role = pool.fleet.runners_of_roles()
            for role in RunnerRole:
                self._runners.labels(name, role.value).set(of_role[role])
            if pool.declared.has_slo and (attainment := pool.scaling.service_level.attainment.percents()) is not None:
                self._slo_attainment.labels(name).set(attainment.attained / 100)
        for name in self._pools - state.pools.keys():
            for metric in self._by_pool:
                metric.remove_by_labels({"pool": name})
        self._pools = set(state.pools)
