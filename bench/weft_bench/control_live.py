"""`weft bench control --live N`: N adapters on a `weft up` of its own."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench.cpu_context import Bar
from weft_stage.errors import NotInTime
from weft_stage.lines import Line, Origin
from weft_stage.process import cpu_s, resident_mb
from weft_stage.stack import CONTROLLER, Stack, is_ready, quickstart

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAMESPACE = "acme"
POLL_S = 1.0
SETTLE_S, REST_S = 5.0, 20.0
PATIENCE_EACH_S = 0.5  # an adapter, on a slow and busy machine
TARGETS = {1_000: ("<= 15", "<= 10"), 10_000: ("<= 150", None)}  # to Ready, deleted
MEMORY_OF = (CONTROLLER, "depot", "scheduler", "gateway")


def measure(origin: Origin, adapters: int, bar: Bar) -> Iterator[Line]:
    """Apply to all Ready, rest, list, delete. Each adapter has the weights of the quickstart's and its own digest."""
    case = f"live, {adapters:,} adapters"
    to_ready, to_deleted = TARGETS.get(adapters, (None, None))
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        folder = Path(scratch)
        shutil.copytree(quickstart(), folder / "quickstart")  # file: sources lie below what `weft up` is given
        manifests = copies(folder / "quickstart", adapters, folder / "adapters.yaml")
        with Stack(folder / "quickstart", folder / "data") as stack:
            stack.wait_for_models(timeout_s=60)
            before = len(_adapters(stack))
            patience_s = 60 + adapters * PATIENCE_EACH_S
            with bar(f"apply {adapters} adapters", adapters) as advance:
                start = time.perf_counter()
                stack.cli("apply", "-f", str(manifests), timeout_s=patience_s)
                accepted_s = time.perf_counter() - start
                count = _until(lambda: sum(map(is_ready, _adapters(stack))) - before, adapters, patience_s, advance)
                ready_s = time.perf_counter() - start
            yield origin.line(case, "weft apply returns", accepted_s, "s")
            yield origin.line(case, "all Ready", ready_s, "s", target=to_ready)
            assert count == adapters
            time.sleep(SETTLE_S)
            with bar("rest", 1):
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
            with bar(f"delete {adapters} adapters", adapters) as advance:
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
