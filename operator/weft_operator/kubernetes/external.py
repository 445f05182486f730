"""`external.metrics.k8s.io/v1beta1`: what pools need, for a HorizontalPodAutoscaler that drives `/scale`. Pure.

Every metric is of a pool, in the pool's namespace, with the label `pool`. The one to scale on is
`weft_pool_demand_runners` with the target `AverageValue: 1`: the sum over the selected pools is then the number of
runners that running and waiting requests would fill. Of pools that split phases the same is there for each phase.
Values come from the scheduler; they are not kept here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from weft.domain.routes import PhaseCounts
from weft_operator.kubernetes.selectors import parse_selector

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
ROOT = f"/apis/{GROUP}"


@dataclass(frozen=True, slots=True)
class Demand:
    """A pool just now, by the scheduler. Pages are those of its ready runners."""

    demand_runners: int = 0
    queued: int = 0
    running: int = 0
    total_pages: int = 0
    reserved_pages: int = 0
    phases: PhaseCounts | None = None  # of `demand_runners`; None: phases are not split


METRICS: Mapping[str, Callable[[Demand], float | None]] = {  # None: the pool has no such value
    "weft_pool_demand_runners": lambda pool: pool.demand_runners,
    "weft_pool_prompt_demand_runners": lambda pool: pool.phases.prompt if pool.phases else None,
    "weft_pool_token_demand_runners": lambda pool: pool.phases.token if pool.phases else None,
    "weft_pool_queued_requests": lambda pool: pool.queued,
    "weft_pool_running_requests": lambda pool: pool.running,
    "weft_pool_reserved_pages_ratio": lambda pool: pool.reserved_pages / pool.total_pages if pool.total_pages else 0.0,
}


class UnknownMetric(LookupError):
    """There is no metric of that name."""


def api_group() -> dict[str, Any]:
    """Discovery of the group."""
    version = {"groupVersion": API_VERSION, "version": VERSION}
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": GROUP,
        "versions": [version],
        "preferredVersion": version,
    }


def api_resources() -> dict[str, Any]:
    """Discovery of the metrics."""
    resources = [
        {"name": name, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
        for name in METRICS
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": API_VERSION, "resources": resources}


def values(
    metric: str, namespace: str, selector: str, pools: Iterable[tuple[str, Demand]], now: float
) -> dict[str, Any]:
    """The metric of every selected pool of a namespace. `pools` are ("namespace/name", demand).

    Raises UnknownMetric, BadSelector.
    """
    if metric not in METRICS:
        raise UnknownMetric(f"there is no metric {metric[:100]!r}; there are: {', '.join(METRICS)}")
    selected, of = parse_selector(selector), METRICS[metric]
    timestamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    items = [
        {"metricName": metric, "metricLabels": labels, "timestamp": timestamp, "value": quantity(value)}
        for labels, demand in _labelled(namespace, pools)
        if selected(labels) and (value := of(demand)) is not None
    ]
    return {"kind": "ExternalMetricValueList", "apiVersion": API_VERSION, "metadata": {}, "items": items}


def quantity(value: float) -> str:
    """A number as the API writes quantities: whole, or in thousandths."""
    return str(int(value)) if value == int(value) else f"{round(value * 1000)}m"


def _labelled(namespace: str, pools: Iterable[tuple[str, Demand]]) -> Iterable[tuple[dict[str, str], Demand]]:
    for ref, demand in sorted(pools, key=lambda pool: pool[0]):
        of_namespace, _, name = ref.partition("/")
        if of_namespace == namespace:
            yield {"pool": name}, demand
