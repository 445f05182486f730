"""Sums and quantiles of scraped metrics."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from weft.telemetry.probes import Probes
from weft_stage.scrape import Sample, cumulative, quantile, scrape, total

EDGES = (0.1, 1.0, 10.0)


def histogram(observed: list[float]) -> list[Sample]:
    registry = CollectorRegistry()
    made = Histogram("seconds", "help", ["kind"], buckets=EDGES, registry=registry)
    for number, value in enumerate(observed):
        made.labels("even" if number % 2 == 0 else "odd").observe(value)
    return [Sample(s.name, s.labels, s.value) for family in registry.collect() for s in family.samples]


def test_a_process_is_read_through_its_probes() -> None:
    registry = CollectorRegistry()
    Counter("writes", "help", ["action"], registry=registry).labels("SetStatus").inc(3)
    probes = Probes("127.0.0.1:0", lambda: None, registry=registry)
    probes.start()
    try:
        samples = scrape(f"127.0.0.1:{probes.port}")
    finally:
        probes.close()
    assert total(samples, "writes_total") == total(samples, "writes_total", action="SetStatus") == 3
    assert total(samples, "writes_total", action="SetPodDeletionCost") == 0


def test_nothing_observed_and_beyond_the_last_edge_have_no_quantile() -> None:
    assert quantile(histogram([]), "seconds", 0.5) is None
    assert quantile(histogram([0.5, 99.0]), "seconds", 0.99) is None
    assert quantile([], "seconds", 0.5) is None


@given(st.lists(st.floats(0.001, 9.9), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_stands_for(observed: list[float], share: float) -> None:
    told = quantile(histogram(observed), "seconds", share)
    exact = sorted(observed)[max(0, -int(-share * len(observed) // 1) - 1)]
    low = max((edge for edge in (0.0, *EDGES) if edge < exact), default=0.0)
    high = min(edge for edge in EDGES if edge >= exact)
    assert told is not None
    assert low <= told <= high + 1e-9


@given(st.lists(st.floats(0.001, 20.0), max_size=60))
def test_buckets_count_everything_once(observed: list[float]) -> None:
    counts = [count for _, count in cumulative(histogram(observed), "seconds")]
    assert counts == sorted(counts)
    assert (counts[-1] if counts else 0) == len(observed)
