"""The gateway's metrics (`weft_gateway_*`). Labels are bounded: the first models have their own, others share one.

The series of a model or pool end when it is not served any more. Its last requests, which may run on, count as
those of `other` from then on.

Three have vLLM's names: requests that no runner has, and requests that a full queue has turned away. Requests that
runners have are in the runners' own.
"""

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.domain.request import Priority
from weft.telemetry.invariants import VIOLATIONS
from weft.telemetry.labels import OTHER, BoundedLabels, LabelledSeries
from weft.wire.errors import PEER_ERRORS
from weft_gateway.core.events import Finish
from weft_gateway.core.gateway import Gateway

SECONDS_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
MAX_MODELS = 200  # with labels of their own; more share one, so that a scrape stays small
MAX_TIMED = 100  # models with a histogram of their own
MAX_POOLS = 1000  # with histograms of their own
SECONDS_IN_ALL = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
NO_MODEL = "-"
QUEUE_LIMIT = "max_num_queued_reqs"  # vLLM's reason; it has another one, for a limit of tokens
_PROCESS_COLLECTORS = (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR, VIOLATIONS, PEER_ERRORS)


class _Counts:
    """Counters of answers and tokens by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> LabelledSeries[Counter]:
            return LabelledSeries(Counter(f"weft_gateway_{name}", text, labels, registry=registry))

        self.requests = counter("requests", "Requests by model and HTTP status.", "model", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.", "model")
        self.tokens = counter("tokens", "Tokens streamed and billed.", "model")


class GatewayMetrics:
    """One set of metrics on a registry. `in_flight` and `held` are read at each scrape.

    A second registry has the samples without the name of a model or pool: to read it costs the same for any number of
    models.
    """

    def __init__(self, gateway: Gateway, registry: CollectorRegistry) -> None:
        self._registry, self._unnamed = registry, CollectorRegistry()
        served = gateway.routes.routes
        self._models, self._timed = BoundedLabels(MAX_MODELS, served), BoundedLabels(min(MAX_MODELS, MAX_TIMED), served)
        self._pools = BoundedLabels(MAX_POOLS, gateway.routes.pools)
        self._counts, self._unnamed_counts = _Counts(registry), _Counts(self._unnamed)
        counter = partial(Counter, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> LabelledSeries[Histogram]:
            return LabelledSeries(Histogram(f"weft_gateway_{name}", text, labels, buckets=buckets, registry=registry))

        self._ttft = histogram("ttft_seconds", "Arrival to first token.", SECONDS_TO_FIRST, "pool", "model")
        mean = "Mean time of a token after the first, per request."
        self._per_token = histogram("time_per_output_token_seconds", mean, SECONDS_PER_TOKEN, "pool")
        self._total = histogram("e2e_seconds", "Arrival to the last byte.", SECONDS_IN_ALL, "pool")
        self.migrations = counter("weft_gateway_migrations", "Assignments beyond a request's first.")
        self.overruns = counter("weft_gateway_overrun_requests", "Requests whose reservation was doubled.")
        self.predict_failures = counter("weft_gateway_predict_failures", "Requests that went on without a prediction.")
        self.outcomes_dropped = counter(
            "weft_gateway_outcomes_dropped", "Outcomes forgotten because too many were unacknowledged."
        )
        self.corrupt_artifacts = counter(
            "weft_gateway_corrupt_artifacts", "Files of the disk cache that were damaged, and fetched again."
        )
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("weft_gateway_in_flight", "Requests now.", lambda: gateway.admission.in_flight),
            ("weft_gateway_batch_in_flight", "Lines of batches now, of these.", lambda: gateway.admission.batch),
            ("weft_gateway_held", "Requests without a runner.", lambda: gateway.n_held),
            ("weft_gateway_outcomes_unacked", "Outcomes not stored yet.", lambda: len(gateway.outcomes)),
        )
        for name, text, read in gauges:
            gauge = Gauge(name, text, registry=registry)
            gauge.set_function(read)
            self._unnamed.register(gauge)
        counters = self.migrations, self.overruns, self.predict_failures, self.outcomes_dropped, self.corrupt_artifacts
        for collector in (*counters, *_PROCESS_COLLECTORS):
            self._unnamed.register(collector)
        self._routes, self._queue = served, _Queue(gateway)
        registry.register(self._queue)

    def count_request(self, model: str | None, status: int, code: str = "") -> None:
        """One answer; 499: the client went away; `code`: of an error. Without a known model the label is "-"."""
        label = self._models.label_of(model) if model else NO_MODEL
        for counts in self._counts_of(label):
            counts.requests.child_of(label, str(status)).inc()
        if code == "queue_full" and (route := self._routes.get(model or "")):
            self._queue.rejections[route.pool] += 1

    def count_finish(self, finish: Finish) -> None:
        """Count an ended answer. Times are of interactive answers, since no client waits for lines of batches."""
        outcome, tokens = finish.outcome, finish.outcome.completion_tokens
        label = self._models.label_of(outcome.model_name)
        for counts in self._counts_of(label):
            if outcome.choice == 0:  # the answers of a request have one prompt
                counts.prompt_tokens.child_of(label).inc(outcome.prompt_tokens)
            counts.tokens.child_of(label).inc(tokens)
        self.migrations.inc(outcome.migrations)
        self.overruns.inc(outcome.doublings > 0)
        if finish.priority is Priority.BATCH:
            return
        pool = self._pools.label_of(outcome.pool)
        self._total.child_of(pool).observe(finish.total_s)
        if finish.ttft_s is not None:
            self._ttft.child_of(pool, self._timed.label_of(outcome.model_name)).observe(finish.ttft_s)
            if tokens > 1:
                self._per_token.child_of(pool).observe((finish.total_s - finish.ttft_s) / (tokens - 1))

    def on_routes(self) -> None:
        """End the series of the models and pools that the route table has no more."""
        for model in self._models.give_back():
            for series in (self._counts.requests, self._counts.prompt_tokens, self._counts.tokens):
                series.remove(model)
        for model in self._timed.give_back():
            self._ttft.remove(model, 1)
        for pool in self._pools.give_back():
            for times in (self._ttft, self._per_token, self._total):
                times.remove(pool)
        self._queue.end_series()

    def exposition(self, shown: frozenset[str] | None) -> bytes:
        """Return Prometheus' text. Samples of models and pools outside `shown` are left out; None shows all."""
        if shown is None:
            return generate_latest(self._registry)
        if not shown:
            return generate_latest(self._unnamed)
        visible = CollectorRegistry()
        visible.register(_Shown(self._registry, shown | {NO_MODEL, OTHER}))
        return generate_latest(visible)

    def _counts_of(self, label: str) -> tuple[_Counts, ...]:
        return (self._counts, self._unnamed_counts) if label in (NO_MODEL, OTHER) else (self._counts,)


class _Queue(Collector):
    """Requests without a runner, and requests refused by a full queue, by base model and by vLLM's names.

    Beside the runners' metric of that name the former are all that wait. This gateway's own bound counts without model.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.rejections = Counts[str]()  # by pool

    def end_series(self) -> None:
        """Forget the rejections of pools without a route, so that a new pool of this name counts from zero."""
        for pool in self.rejections.keys() - self._gateway.routes.pools.keys():
            del self.rejections[pool]

    def collect(self) -> Iterator[Metric]:
        text, name = "Requests without a runner", "vllm:num_requests_waiting"
        waiting = GaugeMetricFamily(name, f"{text}.", labels=["model_name"])
        by_reason = GaugeMetricFamily(f"{name}_by_reason", f"{text}, by reason.", labels=["model_name", "reason"])
        rejected = CounterMetricFamily(
            "vllm:admission_rejections", "Requests that a full queue has turned away.", labels=["model_name", "reason"]
        )
        requests = self._gateway.requests.values()
        unplaced = Counts(active.pool for active in requests if active.running is None)
        rejected.add_metric([NO_MODEL, QUEUE_LIMIT], self._gateway.admission.rejections)
        for pool in self._gateway.routes.pools.values():
            model = pool.base_model_name or pool.name
            waiting.add_metric([model], unplaced[pool.name])
            by_reason.add_metric([model, "capacity"], unplaced[pool.name])
            rejected.add_metric([model, QUEUE_LIMIT], self.rejections[pool.name])
        yield from (waiting, by_reason, rejected)


class _Shown(Collector):
    """The samples of another registry without those of hidden models and pools."""

    def __init__(self, registry: CollectorRegistry, shown: frozenset[str]) -> None:
        self._registry, self._shown = registry, shown

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            part = copy(family)
            part.samples = [sample for sample in family.samples if self._may(sample.labels)]
            yield part

    def _may(self, labels: dict[str, str]) -> bool:
        return {labels[name] for name in ("model", "pool", "model_name") if name in labels} <= self._shown
