"""`weft bench control`: what the control plane costs for each change, however much exists beside what changes.

Each case drives the shipped cores and codecs of one process with the messages that its peers send, one core, no
network (`control_cases.py`). `--live N`: N adapters, copies of the quickstart's, are applied to a stack, left alone,
listed and deleted. docs/benchmarks/control-plane.md has the method.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench import control_cases as cases
from weft_bench.cases import Control
from weft_bench.run import Run
from weft_stage.errors import NotInTime
from weft_stage.lines import Line, Origin
from weft_stage.process import cpu_s, resident_mb
from weft_stage.stack import CONTROLLER, Stack, is_ready, quickstart

WEIGHTS, CONFIG, NAMESPACE = "adapter_model.safetensors", "adapter_config.json", "acme"
POLL_S, SETTLE_S, REST_S = 1.0, 5.0, 20.0
PATIENCE_EACH_S = 0.5  # an adapter, on a slow and busy machine
LIVE_TARGETS = {1_000: ("<= 15", "<= 10"), 10_000: ("<= 150", None)}  # to Ready, deleted
MEMORY_OF = (CONTROLLER, "depot", "scheduler", "gateway")


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
Case = Callable[[Origin, Amounts, Run], Iterator[Line]]


def figures(options: Control, run: Run) -> Iterator[Line]:
    """Measure the chosen cases. Raises StackFailed, NotInTime."""
    origin = run.origin("protobuf")
    for name in options.cases:
        yield from CASES[name](origin, QUICK if options.quick else Amounts(), run)
    if options.live:
        yield from live(origin, options.live, run)


def reports(origin: Origin, amounts: Amounts, run: Run) -> Iterator[Line]:
    """Supervisor and scheduler: reports of busy runners."""
    with run.progress("reports", amounts.rounds + 1) as advance:
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


def engine(origin: Origin, amounts: Amounts, run: Run) -> Iterator[Line]:
    """The engine thread of a runner with many host copies."""
    with run.progress("engine", 1) as advance:
        milliseconds = cases.engine_report_ms(amounts.host_copies, 10 * amounts.rounds)
        advance(1)
    case = f"engine thread, {amounts.host_copies:,} host copies"
    yield origin.line(case, "a report", milliseconds, "ms", target="<= 0.2")


def adapter(origin: Origin, amounts: Amounts, run: Run) -> Iterator[Line]:
    """One adapter more, through scheduler and gateway."""
    with run.progress("one adapter more", amounts.rounds) as advance:
        found = cases.one_adapter_more(amounts.adapters, amounts.rounds, advance)
    case = f"one adapter more at {amounts.adapters:,}"
    yield origin.line(case, "scheduler, codec and handler", found.scheduler_ms, "ms", target="<= 5")
    yield origin.line(case, "stall of a gateway's loop", found.gateway_ms, "ms", target="<= 2")
    yield origin.line(case, "bytes to a gateway", found.gateway_bytes, "B")
    yield origin.line(case, "bytes to a runner that does not use it", found.runner_bytes, "B", target="<= 0")


def table(origin: Origin, amounts: Amounts, run: Run) -> Iterator[Line]:
    """A full route table, as a new stream brings it."""
    with run.progress("full table", 3) as advance:
        found = cases.full_table_cost(amounts.adapters, 3, advance)
    case = f"full table of {amounts.adapters:,} routes"
    yield origin.line(case, "a gateway's loop, in all", found.cpu_ms, "ms")
    yield origin.line(case, "longest stall of a gateway's loop", found.longest_ms, "ms", target="<= 10")


def models(origin: Origin, amounts: Amounts, run: Run) -> Iterator[Line]:
    """The models of one tenant among many."""
    tenants = max(amounts.adapters // 1_000, 1)
    with run.progress("models", 1) as advance:
        milliseconds = cases.models_ms(amounts.adapters, tenants, amounts.rounds)
        advance(1)
    case = f"GET /v1/models, {amounts.adapters // tenants:,} of {amounts.adapters:,} adapters"
    yield origin.line(case, "CPU", milliseconds, "ms", target="<= 10")


def decisions(origin: Origin, amounts: Amounts, run: Run) -> Iterator[Line]:
    """The scheduler with everything that it may have at once."""
    requests = amounts.fleet * 100
    for name, (pool, tenants) in DECIDED.items():
        with run.progress(f"decisions{name}", requests + amounts.decisions) as advance:
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


CASES: Mapping[str, Case] = {
    "reports": reports, "engine": engine, "adapter": adapter, "table": table, "models": models, "decisions": decisions,
}  # fmt: skip


def live(origin: Origin, adapters: int, run: Run) -> Iterator[Line]:
    """Apply to all Ready, rest, list, delete. Each adapter has the weights of the quickstart's and its own digest."""
    case = f"live, {adapters:,} adapters"
    to_ready, to_deleted = LIVE_TARGETS.get(adapters, (None, None))
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        folder = Path(scratch)
        shutil.copytree(quickstart(), folder / "quickstart")  # file: sources lie below what `weft up` is given
        manifests = copies(folder / "quickstart", adapters, folder / "adapters.yaml")
        with Stack(folder / "quickstart", folder / "data") as stack:
            stack.wait_for_models(timeout_s=60)
            before = len(_adapters(stack))
            patience_s = 60 + adapters * PATIENCE_EACH_S
            with run.progress(f"apply {adapters} adapters", adapters) as advance:
                start = time.perf_counter()
                stack.cli("apply", "-f", str(manifests), timeout_s=patience_s)
                accepted_s = time.perf_counter() - start
                count = _until(lambda: sum(map(is_ready, _adapters(stack))) - before, adapters, patience_s, advance)
                ready_s = time.perf_counter() - start
            yield origin.line(case, "weft apply returns", accepted_s, "s")
            yield origin.line(case, "all Ready", ready_s, "s", target=to_ready)
            assert count == adapters
            time.sleep(SETTLE_S)
            with run.progress("rest", 1):
                used = _cpu_s(stack)
                time.sleep(REST_S)
                used = {name: seconds - used.get(name, 0.0) for name, seconds in _cpu_s(stack).items()}
            yield origin.line(
                case, "CPU of all processes at rest", sum(used.values()) / REST_S, "cores", target="<= 0.01"
            )
            for name, seconds in used.items():
                yield origin.line(case, f"CPU at rest: {name}", seconds / REST_S, "cores")
            for name in MEMORY_OF:
                target = "<= 200" if adapters >= 10_000 else None
                yield origin.line(case, f"memory of {name}", resident_mb(stack.pid(name)), "MiB", target=target)
            start = time.perf_counter()
            stack.cli("get", "lora", "-A")
            target = "<= 0.4" if adapters == 1_000 else None
            yield origin.line(case, "weft get lora -A", time.perf_counter() - start, "s", target=target)
            with run.progress(f"delete {adapters} adapters", adapters) as advance:
                start = time.perf_counter()
                stack.cli("delete", "-f", str(manifests), timeout_s=patience_s)
                _until(lambda: adapters + before - len(_adapters(stack)), adapters, patience_s, advance)
            yield origin.line(case, "deleted", time.perf_counter() - start, "s", target=to_deleted)


def copies(folder: Path, adapters: int, manifest: Path) -> Path:
    """A manifest of that many adapters; the weights are the quickstart's, the configuration is each one's own."""
    originals = sorted((folder / "adapters").iterdir())
    configs = [json.loads((original / CONFIG).read_text()) for original in originals]
    documents: list[str] = []
    for number in range(adapters):
        original, config = originals[number % len(originals)], configs[number % len(originals)]
        (copy := folder / "adapters" / f"copy-{number}").mkdir()
        (copy / WEIGHTS).hardlink_to(original / WEIGHTS)
        (copy / CONFIG).write_text(json.dumps({**config, "revision": f"copy {number}"}))
        documents.append(
            "apiVersion: serving.weft.dev/v1alpha1\nkind: LoRAAdapter\n"
            f"metadata: {{name: copy-{number}, namespace: {NAMESPACE}}}\n"
            "spec:\n  poolRef: {name: quickstart, namespace: weft-system}\n"
            f'  source: {{uri: "file:adapters/{copy.name}"}}\n'
        )
    manifest.write_text("---\n".join(documents))
    return manifest


def _adapters(stack: Stack) -> list[dict[str, object]]:
    return json.loads(stack.cli("get", "lora", "-A", "-o", "json").stdout)["items"]


def _until(count: Callable[[], int], wanted: int, patience_s: float, advance: Callable[[int], None]) -> int:
    """Poll until as many are there; each look costs a process of a second, so there is a pause between two."""
    deadline, seen = time.monotonic() + patience_s, 0
    while (now := count()) < wanted:
        advance(now - seen)
        seen = now
        if time.monotonic() > deadline:
            raise NotInTime(f"only {now} of {wanted} adapters came to it within {patience_s:.0f} s")
        time.sleep(POLL_S)
    advance(now - seen)
    return now


def _cpu_s(stack: Stack) -> dict[str, float]:
    """CPU seconds of every component so far."""
    return {name: cpu_s(stack.pid(name)) for name in (CONTROLLER, *stack.components())}
