"""The supervisor's metrics. Labels: pools, and a handful of fixed values."""

from prometheus_client import Counter, Gauge

from weft_supervisor.core.supervisor import Supervisor
from weft_supervisor.core.totals import Counters

RUNNERS = Gauge("weft_supervisor_runners", "Leased runners after their first report", ["pool"])
PAGES = Gauge("weft_supervisor_pages", "KV pages: total, free (in no reservation), reserved, used", ["pool", "state"])
SEQUENCES = Gauge("weft_supervisor_sequences", "Sequences on runners", ["pool"])
GROWN_PAGES = Counter("weft_supervisor_grown_pages_total", "Pages granted in place by runners")
PREEMPTS = Counter("weft_supervisor_preempts_total", "Sequences preempted for want of a page")
DOUBLINGS = Counter("weft_supervisor_doublings_total", "Reservations doubled by an overrun")
LOST = Counter("weft_supervisor_runners_lost_total", "Expired leases and replaced incarnations")
OUTCOMES = Counter("weft_supervisor_outcomes_total", "Outcomes received, by result", ["result"])
STORE_FAILURES = Counter("weft_supervisor_store_failures_total", "Failed transactions, tried again")
FEEDBACK_DROPPED = Counter(
    "weft_supervisor_feedback_dropped_total", "Outcomes dropped before the predictor acknowledged them"
)
FEEDBACK_PENDING = Gauge("weft_supervisor_feedback_pending", "Outcomes not acknowledged by the predictor")
TERM = Gauge("weft_supervisor_highest_term", "The highest scheduler term seen")


def update(supervisor: Supervisor, previous: Counters) -> Counters:
    """Set the gauges from the core, and add the growth of its counters since `previous`. Return the counters now."""
    for gauge in (RUNNERS, PAGES, SEQUENCES):
        gauge.clear()  # a removed pool leaves no stale figure
    for book in supervisor.live():
        RUNNERS.labels(book.spec.pool).inc()
    for pool, memory in supervisor.memory().items():
        SEQUENCES.labels(pool).set(memory.sequences)
        for name in ("total", "free", "reserved", "used"):
            PAGES.labels(pool, name).set(getattr(memory, f"{name}_pages"))
    now = supervisor.counters()
    for counter, value, old in zip((GROWN_PAGES, PREEMPTS, DOUBLINGS, LOST), now, previous, strict=True):
        counter.inc(max(value - old, 0))
    TERM.set(supervisor.highest_term)
    return now
