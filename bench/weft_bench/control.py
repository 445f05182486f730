"""`weft bench control`: what the control plane costs for each change, however much exists beside what changes.

Each case drives the shipped cores and codecs of one process with the messages that its peers send, one core, no
network. CPU times are those of the measuring thread. *Reports*: runners with 64 sequences and 2,000 adapters in host
memory send 20 reports a second; with each report one sequence has ended, another one has begun, and all others have
grown. A core carries 1 / (20 x CPU of a report) runners, in the fastest round of all runners' reports; the CPU of gRPC
for the same messages stands beside. *Engine*: what an end, a start and their reports cost the thread that steps the
model. *One adapter more*: an adapter on demand is added to 100,000. *Table*: a gateway gets all of them, with the
collector of garbage at work. *Models*: `GET /v1/models` of a tenant with 1,000 of 100,000 adapters, without HTTP.
*Decisions*: one pool of 10,000 runners, 100,000 adapters, 640,000 requests running and 360,000 queued; an event is a
request's submission, its outcome, or a report of its end, and the latter two let a queued request start; 100 tenants,
`fcfs` and `calibrated` where nothing else is named. *Live*
(`--live N`): N adapters, copies of the quickstart's, are applied to a `weft up` of its own, left alone, listed and
deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft_bench import control_cases as cases
from weft_bench.cpu_context import Bar
from weft_stage.lines import Line, Origin


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much exists and how often it is measured. `QUICK` shows that everything works."""

    runners: int = 100  # whose reports alternate
    rounds: int = 40
    host_copies: int = 2_000
    adapters: int = 100_000
    fleet: int = 10_000
    decisions: int = 20_000
    messages: int = 20_000  # through gRPC


DECIDED = {  # what is named in the case: the pool, its tenants
    "": (cases.BASE_POOL, cases.TENANTS),
    ", 10,000 tenants": (cases.BASE_POOL, 10_000),
    ", shortest, pooled, 10,000 tenants": (replace(cases.BASE_POOL, queue="shortest", reservation="pooled"), 10_000),
}

QUICK = Amounts(4, 3, 50, 1_000, 40, 400, 1_000)


def reports(origin: Origin, amounts: Amounts, bar: Bar) -> Iterator[Line]:
    """Supervisor and scheduler: reports of busy runners."""
    with bar("reports", amounts.rounds + 1) as advance:
        supervisor, scheduler = cases.report_costs(amounts.runners, amounts.host_copies, amounts.rounds, advance)
    case = f"busy runners, {amounts.host_copies:,} adapters in host memory"
    for name, cost, target in (("supervisor", supervisor, 1500), ("scheduler", scheduler, 2000)):
        grpc_us = cases.grpc_us(cost.received_bytes, amounts.messages)
        rate = 1e6 / cases.REPORTS_A_SECOND
        yield origin.line(case, f"{name}: CPU of a report, codec and handler", cost.cpu_us, "us")
        yield origin.line(case, f"{name}: runners a core", rate / cost.cpu_us, "", target=f">= {target}")
        yield origin.line(case, f"{name}: CPU of gRPC for the message with a report", grpc_us, "us")
        yield origin.line(case, f"{name}: runners a core, with gRPC", rate / (cost.cpu_us + grpc_us), "")
        yield origin.line(case, f"{name}: bytes received of a report", cost.received_bytes, "B")


def engine(origin: Origin, amounts: Amounts, bar: Bar) -> Iterator[Line]:
    """The engine thread of a runner with many host copies."""
    with bar("engine", 1) as advance:
        milliseconds = cases.engine_report_ms(amounts.host_copies, 10 * amounts.rounds)
        advance(1)
    case = f"engine thread, {amounts.host_copies:,} host copies"
    yield origin.line(case, "a report", milliseconds, "ms", target="<= 0.2")


def adapter(origin: Origin, amounts: Amounts, bar: Bar) -> Iterator[Line]:
    """One adapter more, through scheduler and gateway."""
    with bar("one adapter more", amounts.rounds) as advance:
        found = cases.one_adapter_more(amounts.adapters, amounts.rounds, advance)
    case = f"one adapter more at {amounts.adapters:,}"
    yield origin.line(case, "scheduler, codec and handler", found.scheduler_ms, "ms", target="<= 5")
    yield origin.line(case, "stall of a gateway's loop", found.gateway_ms, "ms", target="<= 2")
    yield origin.line(case, "bytes to a gateway", found.gateway_bytes, "B")
    yield origin.line(case, "bytes to a runner that does not use it", found.runner_bytes, "B", target="<= 0")


def table(origin: Origin, amounts: Amounts, bar: Bar) -> Iterator[Line]:
    """A full route table, as a new stream brings it."""
    with bar("full table", 3) as advance:
        found = cases.full_table_cost(amounts.adapters, 3, advance)
    case = f"full table of {amounts.adapters:,} routes"
    yield origin.line(case, "a gateway's loop, in all", found.cpu_ms, "ms")
    yield origin.line(case, "longest stall of a gateway's loop", found.longest_ms, "ms", target="<= 10")


def models(origin: Origin, amounts: Amounts, bar: Bar) -> Iterator[Line]:
    """The models of one tenant among many."""
    tenants = max(amounts.adapters // 1_000, 1)
    with bar("models", 1) as advance:
        milliseconds = cases.models_ms(amounts.adapters, tenants, amounts.rounds)
        advance(1)
    case = f"GET /v1/models, {amounts.adapters // tenants:,} of {amounts.adapters:,} adapters"
    yield origin.line(case, "CPU", milliseconds, "ms", target="<= 10")


def decisions(origin: Origin, amounts: Amounts, bar: Bar) -> Iterator[Line]:
    """The scheduler with everything that it may have at once."""
    requests = amounts.fleet * 100
    for name, (pool, tenants) in DECIDED.items():
        with bar(f"decisions{name}", requests + amounts.decisions) as advance:
            found = cases.decision_us(
                amounts.fleet, amounts.adapters, requests, amounts.decisions, advance, pool=pool, tenants=tenants
            )
        case = f"{amounts.fleet:,} runners, {amounts.adapters:,} adapters, {requests:,} requests{name}"
        yield origin.line(case, "decision, p50", found.p50, "us")
        yield origin.line(case, "decision, p99", found.p99, "us", target="<= 300")
        for kind, p99 in found.p99_by_kind.items():
            yield origin.line(case, f"decision, p99: {kind}", p99, "us")
        if not name:  # the process's most: of the first
            yield origin.line(case, "memory", found.memory_mib, "MiB")


CASES: dict[str, Callable[[Origin, Amounts, Bar], Iterator[Line]]] = {
    "reports": reports,
    "engine": engine,
    "adapter": adapter,
    "table": table,
    "models": models,
    "decisions": decisions,
}


def figures(origin: Origin, chosen: Sequence[str], amounts: Amounts, bar: Bar) -> Iterator[Line]:
    """The lines of the chosen cases."""
    for name in chosen:
        yield from CASES[name](origin, amounts, bar)
