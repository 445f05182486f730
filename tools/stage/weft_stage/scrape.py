"""What our processes count, read from their `/metrics`."""

import urllib.request
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 30.0


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def scrape(address: str) -> list[Sample]:
    """Every sample of the process that answers probes at HOST:PORT. Raises OSError while nobody listens."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return [Sample(s.name, s.labels, s.value) for family in families for s in family.samples]


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """The sum of a metric over the samples that have these labels."""
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def quantile(samples: Sequence[Sample], name: str, share: float) -> float | None:
    """A quantile of a histogram (0 < share <= 1), over all its labels; linear inside a bucket, as Prometheus does.

    None: nothing was observed, or the quantile lies above the last bucket's edge.
    """
    counts = cumulative(samples, name)
    if not counts or not counts[-1][1]:
        return None
    wanted = share * counts[-1][1]
    for (low, before), (high, upto) in pairwise([(0.0, 0.0), *counts]):
        if upto >= wanted:
            return None if high == inf else low + (high - low) * (wanted - before) / (upto - before)
    return None


def cumulative(samples: Iterable[Sample], name: str) -> list[tuple[float, float]]:
    """(upper edge, observations up to it) of a histogram's buckets, summed over its other labels, lowest first."""
    buckets: dict[float, float] = {}
    for sample in samples:
        if sample.name == f"{name}_bucket":
            edge = float(sample.labels["le"])
            buckets[edge] = buckets.get(edge, 0.0) + sample.value
    return sorted(buckets.items())
