"""`weft bench control`: what the control plane costs for each change, however much exists beside what changes.

Each case drives the shipped cores and codecs of one process with the messages that its peers send, one core, no
network (`control_cases.py`). `--live N`: N adapters, copies of the quickstart's, are applied to a stack, left alone,
listed and deleted. docs/benchmarks/control-plane.md has the method.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench import control_cases
from weft_bench.cases import Control
from weft_bench.control_cases import DECIDED, QUICK, TABLES, Advance, Amounts
from weft_bench.run import Run
from weft_stage.errors import NotInTime
from weft_stage.lines import Line, Origin
from weft_stage.process import cpu_s, resident_mb
from weft_stage.stack import CONTROLLER, Stack, copy_adapter, is_ready, quickstart

POLL_S, SETTLE_S, REST_S = 1.0, 5.0, 20.0
PATIENCE_EACH_S = 0.5  # an adapter, on a slow and busy machine
LIVE_TARGETS = {1_000: ("<= 15", "<= 10"), 10_000: ("<= 150", None)}  # to Ready, deleted
MEMORY_OF = (CONTROLLER, "depot", "scheduler", "gateway")
Case = Callable[[Origin, Amounts, Advance], Iterator[Line]]
CASES: Mapping[str, tuple[Case, Callable[[Amounts], int]]] = {  # what measures a case, and its steps
    "reports": (control_cases.reports, lambda amounts: amounts.rounds + 1),
    "engine": (control_cases.engine, lambda _: 1),
    "adapter": (control_cases.adapter, lambda amounts: amounts.rounds),
    "table": (control_cases.table, lambda _: TABLES),
    "models": (control_cases.models, lambda _: 1),
    "decisions": (control_cases.decisions, lambda amounts: len(DECIDED) * (amounts.requests + amounts.decisions)),
}


def figures(options: Control, run: Run) -> Iterator[Line]:
    """Measure the chosen cases. Raises StackFailed, NotInTime."""
    origin = run.origin("protobuf")
    for name in options.cases:
        yield from case_figures(name, origin, QUICK if options.quick else Amounts(), run)
    if options.live:
        yield from live(origin, options.live, run)


def case_figures(name: str, origin: Origin, amounts: Amounts, run: Run) -> Iterator[Line]:
    measure, steps = CASES[name]
    with run.progress(name, steps(amounts)) as advance:
        yield from measure(origin, amounts, advance)


def live(origin: Origin, adapters: int, run: Run) -> Iterator[Line]:
    """Apply to all Ready, rest, list, delete. Each adapter has the weights of the quickstart's and its own digest."""
    case = f"live, {adapters:,} adapters"
    to_ready, to_deleted = LIVE_TARGETS.get(adapters, (None, None))
    patience_s = 60 + adapters * PATIENCE_EACH_S
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        folder = Path(scratch)
        shutil.copytree(quickstart(), folder / "quickstart")  # file: sources lie below what `weft up` is given
        manifests = copies(folder / "quickstart", adapters, folder / "adapters.yaml")
        with Stack(folder / "quickstart", folder / "data") as stack:
            stack.wait_for_models(timeout_s=60)
            before = len(_adapters(stack))
            with run.progress(f"apply {adapters} adapters", adapters) as advance:
                start = time.perf_counter()
                stack.cli("apply", "-f", str(manifests), timeout_s=patience_s)
                accepted_s = time.perf_counter() - start
                _until(lambda: sum(map(is_ready, _adapters(stack))) - before, adapters, patience_s, advance)
                ready_s = time.perf_counter() - start
            yield origin.line(case, "weft apply returns", accepted_s, "s")
            yield origin.line(case, "all Ready", ready_s, "s", target=to_ready)
            yield from _at_rest(origin, case, stack, "<= 200" if adapters >= 10_000 else None)
            start = time.perf_counter()
            stack.cli("get", "lora", "-A")
            target = "<= 0.4" if adapters == 1_000 else None
            yield origin.line(case, "weft get lora -A", time.perf_counter() - start, "s", target=target)
            with run.progress(f"delete {adapters} adapters", adapters) as advance:
                start = time.perf_counter()
                stack.cli("delete", "-f", str(manifests), timeout_s=patience_s)
                _until(lambda: adapters + before - len(_adapters(stack)), adapters, patience_s, advance)
            yield origin.line(case, "deleted", time.perf_counter() - start, "s", target=to_deleted)


def _at_rest(origin: Origin, case: str, stack: Stack, memory_target: str | None) -> Iterator[Line]:
    """Let nothing change for a while."""
    time.sleep(SETTLE_S)
    before = _cpu_s(stack)
    time.sleep(REST_S)
    cores = {name: (seconds - before.get(name, 0.0)) / REST_S for name, seconds in _cpu_s(stack).items()}
    yield origin.line(case, "CPU of all processes at rest", sum(cores.values()), "cores", target="<= 0.01")
    for name, value in cores.items():
        yield origin.line(case, f"CPU at rest: {name}", value, "cores")
    for name in MEMORY_OF:
        yield origin.line(case, f"memory of {name}", resident_mb(stack.pid(name)), "MiB", target=memory_target)


def copies(folder: Path, adapters: int, manifest: Path) -> Path:
    """Write a manifest of that many adapters, each a copy of one of the quickstart's."""
    originals, documents = sorted((folder / "adapters").iterdir()), list[str]()
    for number in range(adapters):
        name = f"copy-{number}"
        copy_adapter(originals[number % len(originals)], folder / "adapters" / name, f"copy {number}")
        documents.append(
            "apiVersion: serving.weft.dev/v1alpha1\nkind: LoRAAdapter\n"
            f"metadata: {{name: {name}, namespace: acme}}\n"
            "spec:\n  poolRef: {name: quickstart, namespace: weft-system}\n"
            f'  source: {{uri: "file:adapters/{name}"}}\n'
        )
    manifest.write_text("---\n".join(documents))
    return manifest


def _adapters(stack: Stack) -> list[dict[str, object]]:
    return json.loads(stack.cli("get", "lora", "-A", "-o", "json").stdout)["items"]


def _until(count: Callable[[], int], adapters: int, patience_s: float, advance: Callable[[int], None]) -> None:
    """Poll until the count is reached; each look costs a process of a second, so there is a pause between two."""
    deadline, seen = time.monotonic() + patience_s, 0
    while (now := count()) < adapters:
        advance(now - seen)
        seen = now
        if time.monotonic() > deadline:
            raise NotInTime(f"only {now} of {adapters} adapters came to it within {patience_s:.0f} s")
        time.sleep(POLL_S)
    advance(now - seen)


def _cpu_s(stack: Stack) -> dict[str, float]:
    """Return the CPU seconds of every component so far."""
    return {name: cpu_s(stack.pid(name)) for name in (CONTROLLER, *stack.components())}
