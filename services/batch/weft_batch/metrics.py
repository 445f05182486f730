"""The batch service's metrics. Labels are bounded: the first namespaces have a label each, the rest share a label."""

from collections import Counter as Counts
from collections.abc import Iterable
from dataclasses import asdict, astuple

from prometheus_client import Counter, Gauge

from weft.telemetry.labels import OTHER, BoundedLabels
from weft_batch.core.batches import Batches, LineCounters, NamespaceFigures

NAMESPACES = BoundedLabels(100)
BATCHES = Gauge("weft_batch_open_batches", "Batches that have not ended", ["namespace"])
GATEWAYS = Gauge("weft_batch_gateways", "Gateways with an open stream of lines")
LINES = Gauge("weft_batch_lines", "Unfinished lines of batches with a validated input", ["namespace", "state"])
GIVEN = Counter("weft_batch_lines_given_total", "Lines sent to gateways")
RETRIED = Counter("weft_batch_lines_retried_total", "Answers of 429 or 5xx followed by a retry")
RELEASED = Counter("weft_batch_lines_released_total", "Lines that gateways gave back")
LOST = Counter("weft_batch_lines_lost_total", "Lines at gateways at the end of their stream")
RESULTS = Counter("weft_batch_results_total", "Results that were stored", ["namespace", "result"])
ENDED = Counter("weft_batch_ended_total", "Batches that ended", ["namespace", "status"])
UPLOADED_BYTES = Counter("weft_batch_uploaded_bytes_total", "Bytes of uploads, including interrupted uploads")
STORE_FAILURES = Counter("weft_batch_store_failures_total", "Failed transactions and file operations, to be retried")


def label(namespace: str) -> str:
    """Return the label of a namespace; "-" for requests without keys."""
    return NAMESPACES.label_of(namespace or "-")


def stored(namespace: str, succeeded: Iterable[bool]) -> None:
    """Count results of a namespace's lines."""
    for ok, results in Counts(succeeded).items():
        RESULTS.labels(label(namespace), "succeeded" if ok else "failed").inc(results)


def update(machine: Batches, previous: LineCounters) -> LineCounters:
    """Set the gauges from the core. Add the growth of its counters since `previous`. Return the current counters."""
    GATEWAYS.set(machine.gateways())
    shown = {name: Counts(asdict(NamespaceFigures())) for name in (*NAMESPACES.names, OTHER)}
    for namespace, figures in machine.namespaces().items():
        shown.setdefault(label(namespace), Counts()).update(asdict(figures))
    for name, figures in shown.items():
        BATCHES.labels(name).set(figures.pop("batches"))
        for state, lines in figures.items():
            LINES.labels(name, state).set(lines)
    now = LineCounters(*astuple(machine.counters))
    for counter, value, old in zip((GIVEN, RETRIED, RELEASED, LOST), astuple(now), astuple(previous), strict=True):
        counter.inc(value - old)
    return now
