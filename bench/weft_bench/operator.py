"""`weft bench operator`: what it costs the operator to reconcile many adapters and runner pods.

Operator, depot, scheduler and supervisor are real processes on the machine below, against a real API server whose own
controllers make the pods. Runner pods are simulated: their status is patched to Ready, and each speaks to the
supervisor as a runner without requests does. Adapters are copies of the quickstart's, each with a digest of its own.

- *converge*: one pool and all adapters are created at once. A status is final when it says Ready and counts every
  runner. `of bound` of a CPU time is its share of one core. Reconciles are timed by the operator itself, from planning
  an object to the end of its last write; percentiles are interpolated in its histogram. Beside them stand the time of
  one write of the operator, and of one create by the benchmark's 16 connections: what the API server itself takes.
- *steady*: nothing changes. Any write except the Lease's is one too many. What the CPU still does is ask the depot
  whether sources were edited, and renew leases.
- *restart*: SIGTERM, then a new operator, from its start. It finds everything as it should be and writes nothing.
- *one edit*, *one delete*: one adapter after the other among all the others. An edit names another source; it ends when
  the status says so and every runner was told the new digest. A delete ends when the object is gone; 5 s of it are the
  time for which gateways with an older route table may still use the digest.

Writes are counted in the API server's audit log, refused ones too; without one the operator's own count stands in.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft_bench.audit_log import Writes
from weft_stage.lines import Line, Origin
from weft_stage.scrape import Sample, quantile, total

MIB = 2**20
# A finalizer, and one status that says everything: an adapter cannot be brought to Ready with fewer writes.
MIN_WRITES = 2
EDIT_S = 10.0  # the longest that a new adapter may take

API_WRITE = "weft_operator_api_write_seconds"
RECONCILE, RECONCILES = "weft_operator_reconcile_seconds", "weft_operator_reconciles_total"
WRITTEN = "weft_operator_writes_total"
CPU, RSS = "process_cpu_seconds_total", "process_resident_memory_bytes"


@dataclass(frozen=True, slots=True)
class Size:
    adapters: int
    runners: int

    def __str__(self) -> str:
        return f"{self.adapters} adapters, {self.runners} runners"


@dataclass(frozen=True, slots=True)
class Converged:
    """Seconds since the first object was sent. `creates_s`: what each create of the benchmark took; `cpu_s` by process;
    `samples`: the operator's metrics at the end. `wrote`: until the operator wrote no more."""

    applied_s: float
    creates_s: Sequence[float]
    ready_s: float
    counted_s: float
    final_s: float
    cpu_s: Mapping[str, float]
    samples: Sequence[Sample]
    wrote: Writes


@dataclass(frozen=True, slots=True)
class Steady:
    wall_s: float
    cpu_s: Mapping[str, float]
    samples: Sequence[Sample]
    wrote: Writes


@dataclass(frozen=True, slots=True)
class Restarted:
    """Seconds since the new process was started."""

    ready_s: float
    leading_s: float
    planned_s: float
    wrote: Writes


@dataclass(frozen=True, slots=True)
class Singles:
    """Seconds that each of several single changes took, one after the other, and what the operator wrote for all."""

    seconds: Sequence[float]
    wrote: Writes


def converged(origin: Origin, size: Size, seen: Converged) -> Iterator[Line]:
    case = f"{size}: converge"
    yield origin.line(case, "all objects accepted", seen.applied_s, "s")
    yield origin.line(case, "every pod counted", seen.counted_s, "s")
    yield origin.line(case, "every adapter Ready", seen.ready_s, "s")
    yield origin.line(case, "every status final", seen.final_s, "s")
    for name, metric in (("reconcile", RECONCILE), ("write of the operator", API_WRITE)):
        for percent in (50, 99):
            seconds = quantile(seen.samples, metric, percent / 100)
            yield origin.line(case, f"{name} p{percent}", None if seconds is None else seconds * 1000, "ms")
    creates_s = statistics.quantiles(seen.creates_s, n=100, method="inclusive")
    for percent in (50, 99):
        yield origin.line(case, f"create of the benchmark p{percent}", creates_s[percent - 1] * 1000, "ms")
    yield origin.line(case, "reconciles", total(seen.samples, RECONCILES), "")
    yield origin.line(case, "failed reconciles", total(seen.samples, RECONCILES, result="failed"), "")
    for name, cpu_s in seen.cpu_s.items():
        yield origin.line(case, f"CPU of {name}", cpu_s, "s", bound_fraction=cpu_s / seen.final_s)
    yield origin.line(case, "memory of the operator", total(seen.samples, RSS) / MIB, "MiB")
    yield from _writes(origin, case, seen.wrote)
    yield origin.line(case, "API writes for each adapter", seen.wrote.total / size.adapters, "", baseline=MIN_WRITES)


def steady(origin: Origin, size: Size, seen: Steady) -> Iterator[Line]:
    case = f"{size}: steady {seen.wall_s:.0f} s"
    yield origin.line(case, "API writes", seen.wrote.total, "", target="<= 0")
    for name, cpu_s in seen.cpu_s.items():
        yield origin.line(case, f"CPU of {name}", cpu_s / seen.wall_s, "cores")
    yield origin.line(case, "memory of the operator", total(seen.samples, RSS) / MIB, "MiB")


def restarted(origin: Origin, size: Size, seen: Restarted) -> Iterator[Line]:
    case = f"{size}: restart"
    yield origin.line(case, "ready", seen.ready_s, "s")
    yield origin.line(case, "leading", seen.leading_s, "s")
    yield origin.line(case, "everything planned", seen.planned_s, "s")
    yield origin.line(case, "API writes", seen.wrote.total, "", target="<= 0")


def singles(origin: Origin, size: Size, name: str, seen: Singles) -> Iterator[Line]:
    """Yield the figures of single edits or deletes."""
    case, count = f"{size}: {name}", len(seen.seconds)
    yield origin.line(case, "median", statistics.median(seen.seconds), "s")
    yield origin.line(case, f"longest of {count}", max(seen.seconds), "s", target=f"<= {EDIT_S:.0f}")
    yield origin.line(case, "API writes", seen.wrote.total / count, "")
    for what, of_all in seen.wrote.by.most_common():
        yield origin.line(case, f"API writes: {what}", of_all / count, "")


def surroundings(origin: Origin, size: Size, load: float) -> Line:
    """Make a line of what else the machine did: tasks that ran or waited to run, over the minute before the start."""
    return origin.line(f"{size}: before the start", "load average", load, "tasks")


def _writes(origin: Origin, case: str, wrote: Writes) -> Iterator[Line]:
    yield origin.line(case, "API writes", wrote.total, "")
    yield origin.line(case, "API writes: refused", wrote.refused, "")
    for what, count in wrote.by.most_common():
        yield origin.line(case, f"API writes: {what}", count, "")
