"""The gateway's metrics (`weft_gateway_*`). Labels are bounded: the first models have their own, others share one.

One has vLLM's name: requests that no runner has. Those that runners have are in the runners' own.
"""

from collections import Counter as Counts
from collections.abc import Callable, Iterator
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
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.domain.request import Priority
from weft.telemetry.invariants import VIOLATIONS
from weft.telemetry.labels import OTHER, BoundedLabels
from weft.wire.errors import PEER_ERRORS
from weft_gateway.core.events import Finish
from weft_gateway.core.gateway import Gateway

SECONDS_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
MAX_MODELS = 200  # with labels of their own; more share one, so that a scrape stays small
MAX_TIMED = 100  # models with a histogram of their own
SECONDS_IN_ALL = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
NO_MODEL = "-"
_PROCESS_COLLECTORS = (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR, VIOLATIONS, PEER_ERRORS)


class _Counts:
    """Counters of answers and tokens by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.requests = counter("weft_gateway_requests", "Requests by model and HTTP status.", ["model", "status"])
        self.prompt_tokens = counter("weft_gateway_prompt_tokens", "Prompt tokens.", ["model"])
        self.tokens = counter("weft_gateway_tokens", "Tokens streamed and billed.", ["model"])


class GatewayMetrics:
    """One set of metrics on one registry; `in_flight` and `held` are read when scraped.

    A second registry has the samples without the name of a model or pool: to read it costs the same for any number of
    models.
    """

    def __init__(self, gateway: Gateway, registry: CollectorRegistry) -> None:
        self._registry, self._unnamed = registry, CollectorRegistry()
        self._models, self._timed = BoundedLabels(MAX_MODELS), BoundedLabels(min(MAX_MODELS, MAX_TIMED))
        self._counts, self._unnamed_counts = _Counts(registry), _Counts(self._unnamed)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, labelnames=["pool"], registry=registry)
        self.ttft = Histogram(
            "weft_gateway_ttft_seconds", "Arrival to first token.", ["pool", "model"], buckets=SECONDS_TO_FIRST,
            registry=registry,
        )  # fmt: skip
        mean = "Mean time of a token after the first, per request."
        self.per_token = histogram("weft_gateway_time_per_output_token_seconds", mean, buckets=SECONDS_PER_TOKEN)
        self.total = histogram("weft_gateway_e2e_seconds", "Arrival to the last byte.", buckets=SECONDS_IN_ALL)
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
            ("weft_gateway_held", "Requests without a runner.", lambda: gateway.held),
            ("weft_gateway_outcomes_unacked", "Outcomes not stored yet.", lambda: len(gateway.outcomes)),
        )
        for name, text, read in gauges:
            gauge = Gauge(name, text, registry=registry)
            gauge.set_function(read)
            self._unnamed.register(gauge)
        counters = self.migrations, self.overruns, self.predict_failures, self.outcomes_dropped, self.corrupt_artifacts
        for collector in (*counters, *_PROCESS_COLLECTORS):
            self._unnamed.register(collector)
        registry.register(_Waiting(gateway))

    def count_request(self, model: str | None, status: int) -> None:
        """One answer; 499: the client went away. Without a known model the label is "-"."""
        label = self._models.of(model) if model else NO_MODEL
        for counts in self._counts_of(label):
            counts.requests.labels(label, str(status)).inc()

    def count_finish(self, finish: Finish) -> None:
        """An answer that has ended. Times are those of interactive ones: nobody waits for a line of a batch."""
        outcome, tokens = finish.outcome, finish.outcome.completion_tokens
        label = self._models.of(outcome.model_name)
        for counts in self._counts_of(label):
            if outcome.choice == 0:  # the answers of a request have one prompt
                counts.prompt_tokens.labels(label).inc(outcome.prompt_tokens)
            counts.tokens.labels(label).inc(tokens)
        self.migrations.inc(outcome.migrations)
        self.overruns.inc(outcome.doublings > 0)
        if finish.priority is Priority.BATCH:
            return
        self.total.labels(outcome.pool).observe(finish.total_s)
        if finish.ttft_s is not None:
            self.ttft.labels(outcome.pool, self._timed.of(outcome.model_name)).observe(finish.ttft_s)
            if tokens > 1:
                self.per_token.labels(outcome.pool).observe((finish.total_s - finish.ttft_s) / (tokens - 1))

    def exposition(self, shown: frozenset[str] | None) -> bytes:
        """Prometheus' text. Samples of models and pools that are not `shown` are left out; None shows every one."""
        if shown is None:
            return generate_latest(self._registry)
        if not shown:
            return generate_latest(self._unnamed)
        visible = CollectorRegistry()
        visible.register(_Shown(self._registry, shown | {NO_MODEL, OTHER}))
        return generate_latest(visible)

    def _counts_of(self, label: str) -> tuple[_Counts, ...]:
        return (self._counts, self._unnamed_counts) if label in (NO_MODEL, OTHER) else (self._counts,)


class _Waiting(Collector):
    """Requests without a runner by base model: beside the runners' metric of this name they are all that wait."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("vllm:num_requests_waiting", "Requests without a runner.", labels=["model_name"])
        requests = self._gateway.requests.values()
        waiting = Counts(active.pool for active in requests if active.running is None)
        for pool in self._gateway.routes.pools.values():
            family.add_metric([pool.base_model_name or pool.name], waiting[pool.name])
        yield family


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
