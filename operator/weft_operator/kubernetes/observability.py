"""Metrics, liveness and readiness of a running operator, at its probes' address."""

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from weft.telemetry.probes import Probes, Ready
from weft_operator.core.resources import Kind

DURATIONS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """The operator's metrics; labels are bounded by the kinds of resources and of actions."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.leader = Gauge("weft_operator_leader", "1 while this process leads", registry=registry)
        self.term = Gauge("weft_operator_term", "term of this process's leadership", registry=registry)
        self.objects = Gauge("weft_operator_objects", "known objects, by kind", ["kind"], registry=registry)
        self.audits = Counter("weft_operator_audits", "completed audits of the watches", registry=registry)
        self.late = Counter(
            "weft_operator_watch_late_objects",
            "objects not reported by a watch, by resource",
            ["resource"],
            registry=registry,
        )
        self.missing_fields = Gauge(
            "weft_operator_crd_missing_fields",
            "fields of this version missing from the cluster's CustomResourceDefinitions",
            registry=registry,
        )
        self.writes = Counter(
            "weft_operator_writes", "writes to the API server, by action", ["action"], registry=registry
        )
        self.reconciles = Counter(
            "weft_operator_reconciles", "objects planned, by kind and result", ["kind", "result"], registry=registry
        )
        self.reconcile_seconds = Histogram(
            "weft_operator_reconcile_seconds",
            "from the planning of an object to the end of its last action",
            ["kind"],
            buckets=DURATIONS_S,
            registry=registry,
        )

        self.api_write_seconds = Histogram(
            "weft_operator_api_write_seconds",
            "seconds of the API server for a write, by HTTP method, including refused writes",
            ["method"],
            buckets=DURATIONS_S,
            registry=registry,
        )

    def reconciled(self, kind: Kind, seconds: float, *, failed: bool) -> None:
        """Count a planned object, and whether its actions were carried out."""
        self.reconciles.labels(kind, "failed" if failed else "done").inc()
        self.reconcile_seconds.labels(kind).observe(seconds)

    def wrote(self, action: str) -> None:
        """Count a write accepted by the API server."""
        self.writes.labels(action).inc()

    def api_wrote(self, method: str, seconds: float) -> None:
        """Count the time of a write, whether the API server has answered it or not."""
        self.api_write_seconds.labels(method).observe(seconds)

    def count_objects(self, kind: str, count: Callable[[], int]) -> None:
        """Count the known objects of a kind at each scrape."""
        self.objects.labels(kind).set_function(count)


Trouble = Callable[[], str | None]


class OperatorProbes(Probes):
    """The operator's probes. `trouble` says why the process should be started anew; None: it should not."""

    def __init__(self, listen: str, ready: Ready, trouble: Trouble) -> None:
        super().__init__(listen, ready)
        self._trouble = trouble

    def answer(self, path: str, authorization: str | None = None) -> tuple[int, str, bytes]:
        """Answer a probe path as `Probes` does; liveness also asks for trouble."""
        trouble = self._trouble() if path == "/healthz" else None
        if trouble is not None:
            return 503, "text/plain; charset=utf-8", trouble.encode() + b"\n"
        return super().answer(path, authorization)
