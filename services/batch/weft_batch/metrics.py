"""The batch service's metrics. Labels: a handful of fixed values."""

from dataclasses import astuple

from prometheus_client import Counter, Gauge

from weft_batch.core.batches import Batches, LineCounters

BATCHES = Gauge("weft_batch_open_batches", "Batches that have not ended")
GATEWAYS = Gauge("weft_batch_gateways", "Gateways with an open stream of lines")
LINES = Gauge("weft_batch_lines", "Unfinished lines of batches whose input is read", ["state"])
GIVEN = Counter("weft_batch_lines_given_total", "Lines sent to gateways")
RETRIED = Counter("weft_batch_lines_retried_total", "Answers of 429 or 5xx that are tried again")
RELEASED = Counter("weft_batch_lines_released_total", "Lines that gateways gave back")
LOST = Counter("weft_batch_lines_lost_total", "Lines at gateways whose stream ended")
RESULTS = Counter("weft_batch_results_total", "Results that were stored", ["result"])
ENDED = Counter("weft_batch_ended_total", "Batches that ended", ["status"])
UPLOADED_BYTES = Counter("weft_batch_uploaded_bytes_total", "Bytes of uploads, also of those that broke off")
STORE_FAILURES = Counter("weft_batch_store_failures_total", "Transactions and file operations that are tried again")


def update(machine: Batches, before: LineCounters) -> LineCounters:
    """Set the gauges from the core; add what its counters grew by since `before`. Returns the counters now."""
    BATCHES.set(machine.open_batches())
    GATEWAYS.set(machine.gateways())
    for state, lines in machine.lines().items():
        LINES.labels(state).set(lines)
    now = LineCounters(*astuple(machine.counters))
    for counter, value, old in zip((GIVEN, RETRIED, RELEASED, LOST), astuple(now), astuple(before), strict=True):
        counter.inc(value - old)
    return now
