"""`weft bench operator`: what it costs the operator to reconcile many adapters and runner pods.

Operator, depot, scheduler and supervisor are real processes, against a real API server whose own controllers make the
pods; runner pods are played. docs/benchmarks/control-plane.md has the method.
"""

import asyncio
import os
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft_bench import cases
from weft_bench.audit_log import AuditLog, Writes
from weft_bench.run import Run
from weft_stage.errors import NotInTime
from weft_stage.following import Following, Object
from weft_stage.lines import Line
from weft_stage.operator_stage import (
    ADAPTERS,
    CONNECTIONS,
    GROUP,
    POOL,
    POOLS,
    VERSION,
    Cluster,
    Stage,
    cluster,
    leads,
    stage,
)
from weft_stage.played_runners import PlayedRunners
from weft_stage.scrape import Sample, quantile, total
from weft_stage.stack import is_ready

OPERATOR = "weft-operator"
SELECTOR = f"serving.weft.dev/pool={POOL}"
BASE = "weft-quickstart"
CONVERGE_S, CHANGE_S, QUIET_S, SETTLE_S = 300.0, 60.0, 2.0, 60.0
SINGLES = 5
MIB = 2**20
MIN_WRITES = 2  # a finalizer, and one status that says everything: no adapter comes to Ready with fewer writes
MAX_EDIT_S = 10  # that a new adapter may take
API_WRITE, WRITTEN = "weft_operator_api_write_seconds", "weft_operator_writes_total"
RECONCILE, RECONCILES = "weft_operator_reconcile_seconds", "weft_operator_reconciles_total"
CPU, RSS = "process_cpu_seconds_total", "process_resident_memory_bytes"


def figures(options: cases.Operator, run: Run) -> Iterator[Line]:
    """Measure all cases, one after the other. Raises CannotStart, NoResources, NotInTime, NotLogged."""
    yield from asyncio.run(measure(options, run))


async def measure(options: cases.Operator, run: Run) -> list[Line]:
    load = os.getloadavg()[0]
    async with running(options, run) as bench:
        lines = [bench.line("before the start", "load average", load, "tasks")]
        lines += await bench.converge()
        lines += await bench.rest(options.steady_seconds)
        lines += await bench.restart()
        lines += await bench.singles("one edit", bench.edit)
        lines += await bench.singles("one delete", bench.delete)
    return lines


@asynccontextmanager
async def running(options: cases.Operator, run: Run) -> "AsyncGenerator[Bench]":
    """Everything started, nothing applied."""
    with TemporaryDirectory(prefix="weft-bench-") as folder:
        async with (
            cluster(options.kubeconfig) as made,
            stage(made.namespace, options.kubeconfig, Path(folder)) as processes,
            asyncio.TaskGroup() as tasks,
        ):
            bench = Bench(made, processes, options, run, tasks)
            following = [tasks.create_task(work) for work in bench.follow()]
            try:
                yield bench
            finally:
                bench.close()
                for task in following:
                    task.cancel()


class Bench:
    """The cases, in the order in which they build on each other."""

    def __init__(
        self, made: Cluster, processes: Stage, options: cases.Operator, run: Run, tasks: asyncio.TaskGroup
    ) -> None:
        self._cluster, self._stage, self._options, self._run = made, processes, options, run
        self._log = AuditLog(options.audit_log, made.mark) if options.audit_log else None
        self._origin = run.origin("kopf", "kubernetes", "aiohttp")
        self._runners = PlayedRunners(made.core, processes.supervisor, tasks)
        listing = made.custom.list_namespaced_custom_object
        self._adapters = Following(listing, GROUP, VERSION, made.namespace, ADAPTERS)
        self._pools = Following(listing, GROUP, VERSION, made.namespace, POOLS)
        pods = made.core.list_namespaced_pod
        self._pods = Following(pods, made.namespace, listen=self._runners.hear, label_selector=SELECTOR)
        self._names = [f"adapter-{number:04}" for number in range(options.adapters)]
        self._counted: Counter[str] = Counter()  # the operator's own count of writes, as last read

    def follow(self) -> Iterable[Any]:
        """Return what has to run beside the cases."""
        return [following.run() for following in (self._adapters, self._pools, self._pods)]

    def close(self) -> None:
        self._runners.close()

    def line(self, case: str, metric: str, value: float | None, unit: str, **more: Any) -> Line:
        size = f"{self._options.adapters} adapters, {self._options.runners} runners"
        return self._origin.line(f"{size}: {case}", metric, value, unit, **more)

    # ------------------------------------------------------------------------------------------------------- cases

    async def converge(self) -> list[Line]:
        """Create everything at once. Times are since the first object was sent."""
        uris = [self._stage.make_source(number) for number in range(len(self._names))]
        for following in (self._adapters, self._pools, self._pods):
            await following.listed.wait()
        await self._wrote()
        before, start = await self._cpu(), time.perf_counter()
        with self._run.progress("adapters Ready", len(self._names)) as advance:
            ready = self._adapters.until(self._names, is_current, CONVERGE_S, advance)
            counted = self._pools.until([POOL], self._counts_runners, CONVERGE_S)
            final = self._adapters.until(self._names, self._is_final, CONVERGE_S)
            pool_final = self._pools.until([POOL], self._counts_everything, CONVERGE_S)
            (applied, creates_s), *times = await asyncio.gather(self._apply(uris), counted, ready, final, pool_final)
        counted_s, ready_s, *finals_s = (moment - start for moment in times)
        after, samples, final_s = await self._cpu(), await self._samples(), max(finals_s)
        wrote = await self._wrote_until_quiet()
        seconds = {
            "all objects accepted": applied - start, "every pod counted": counted_s, "every adapter Ready": ready_s,
            "every status final": final_s,
        }  # fmt: skip
        lines = [self.line("converge", metric, value, "s") for metric, value in seconds.items()]
        creates = statistics.quantiles(creates_s, n=100, method="inclusive")
        for percent in (50, 99):
            for name, metric in (("reconcile", RECONCILE), ("write of the operator", API_WRITE)):
                value = quantile(samples, metric, percent / 100)
                ms = None if value is None else 1e3 * value
                lines.append(self.line("converge", f"{name} p{percent}", ms, "ms"))
            lines.append(self.line("converge", f"create of the benchmark p{percent}", 1e3 * creates[percent - 1], "ms"))
        failed = total(samples, RECONCILES, result="failed")
        lines.append(self.line("converge", "reconciles", total(samples, RECONCILES), ""))
        lines.append(self.line("converge", "failed reconciles", failed, ""))
        for name in before:
            cpu_s = after[name] - before[name]
            lines.append(self.line("converge", f"CPU of {name}", cpu_s, "s", bound_fraction=cpu_s / final_s))
        lines.append(self.line("converge", "memory of the operator", total(samples, RSS) / MIB, "MiB"))
        lines.append(self.line("converge", "API writes", wrote.total, ""))
        lines.append(self.line("converge", "API writes: refused", wrote.refused, ""))
        each = wrote.total / len(self._names)
        lines.append(self.line("converge", "API writes for each adapter", each, "", baseline=MIN_WRITES))
        return [*lines, *self._by_kind("converge", wrote, 1)]

    async def rest(self, seconds: float) -> list[Line]:
        """Let nothing change."""
        before, start = await self._cpu(), time.perf_counter()
        with self._run.progress("nothing changes, seconds", round(seconds)) as advance:
            for _ in range(round(seconds)):
                await asyncio.sleep(1.0)
                advance(1)
        wall_s, after = time.perf_counter() - start, await self._cpu()
        wrote, samples, case = await self._wrote(), await self._samples(), f"steady {wall_s:.0f} s"
        return [
            self.line(case, "API writes", wrote.total, "", target="<= 0"),
            *(self.line(case, f"CPU of {name}", (after[name] - before[name]) / wall_s, "cores") for name in before),
            self.line(case, "memory of the operator", total(samples, RSS) / MIB, "MiB"),
        ]

    async def restart(self) -> list[Line]:
        """Start another operator, which finds everything done. Times are since its start."""
        with self._run.progress("restart", 1) as advance:
            operator = await self._stage.restart_operator()
            self._counted.clear()
            everything = len(self._names) + 1
            times = {
                "ready": await operator.until(operator.ready, "is ready"),
                "leading": await operator.until(lambda: leads(operator.samples()), "leads"),
                "everything planned": await operator.until(
                    lambda: total(operator.samples(), RECONCILES) >= everything, "plans everything"
                ),
            }
            advance(1)
        await asyncio.sleep(QUIET_S)  # what it would still write, it writes now
        lines = [self.line("restart", metric, time_ - operator.started_at, "s") for metric, time_ in times.items()]
        return [*lines, self.line("restart", "API writes", (await self._wrote()).total, "", target="<= 0")]

    async def singles(self, case: str, change: Callable[[int], Any]) -> list[Line]:
        """Change one adapter after the other."""
        seconds = list[float]()
        names = range(min(SINGLES, len(self._names)))
        with self._run.progress(case, len(names)) as advance:
            for number in names:
                start = time.perf_counter()
                seconds.append(await change(number) - start)
                advance(1)
        await asyncio.sleep(QUIET_S)
        wrote, count = await self._wrote(), len(seconds)
        return [
            self.line(case, "median", statistics.median(seconds), "s"),
            self.line(case, f"longest of {count}", max(seconds), "s", target=f"<= {MAX_EDIT_S}"),
            self.line(case, "API writes", wrote.total / count, ""),
            *self._by_kind(case, wrote, count),
        ]

    def _by_kind(self, case: str, wrote: Writes, count: int) -> Iterator[Line]:
        for kind, of_kind in wrote.by.most_common():
            yield self.line(case, f"API writes: {kind}", of_kind / count, "")

    # ------------------------------------------------------------------------------------------------------- steps

    async def edit(self, number: int) -> float:
        name, uri = self._names[number], self._stage.make_source(len(self._names) + number)
        before = self._adapters.objects[name]["status"]["digest"]
        generation = await self._cluster.edit(ADAPTERS, name, {"source": {"uri": uri}})

        def is_edited(obj: Object) -> bool:
            current = obj["metadata"]["generation"] >= generation and obj["status"]["digest"] != before
            return current and self._is_final(obj)

        return await self._adapters.until([name], is_edited, CHANGE_S)

    async def delete(self, number: int) -> float:
        await self._cluster.delete(ADAPTERS, self._names[number])
        return await self._adapters.until_gone(self._names[number], CHANGE_S)

    async def _apply(self, uris: list[str]) -> tuple[float, list[float]]:
        """When everything was accepted, and the seconds that each create took."""
        model = {"name": BASE, "uri": "file:model"}
        permits = asyncio.Semaphore(CONNECTIONS)

        async def apply(kind: str, plural: str, name: str, spec: Mapping[str, Any]) -> float:
            async with permits:
                start = time.perf_counter()
                await self._cluster.create(kind, plural, name, spec)
                return time.perf_counter() - start

        pool = {"model": model, "replicas": self._options.runners, "lora": {"maxRank": 32}}
        of_pool = await apply("ServingPool", POOLS, POOL, pool)
        specs = ({"poolRef": {"name": POOL}, "source": {"uri": uri}} for uri in uris)
        named = zip(self._names, specs, strict=True)
        of_adapters = await asyncio.gather(*(apply("LoRAAdapter", ADAPTERS, *one) for one in named))
        return time.perf_counter(), [of_pool, *of_adapters]

    def _is_final(self, adapter: Object) -> bool:
        return is_current(adapter) and adapter["status"]["unavailableRunners"] == 0

    def _counts_runners(self, pool: Object) -> bool:
        status = pool.get("status", {})
        return status.get("readyReplicas") == status.get("replicas") == self._options.runners

    def _counts_everything(self, pool: Object) -> bool:
        return self._counts_runners(pool) and pool["status"]["adapters"]["ready"] == len(self._names)

    # -------------------------------------------------------------------------------------------------- what it cost

    async def _samples(self) -> list[Sample]:
        return await asyncio.to_thread(self._stage.operator.samples)

    async def _cpu(self) -> Mapping[str, float]:
        """CPU seconds so far, by process; ours is the played runners and the watches."""
        others = {process.name: await asyncio.to_thread(process.samples) for process in self._stage.others}
        spent = {f"the {name}": total(samples, CPU) for name, samples in others.items()}
        return {"the operator": total(await self._samples(), CPU), **spent, "this benchmark": time.process_time()}

    async def _wrote_until_quiet(self) -> Writes:
        """Since the last call, until the last Event of it is out. Raises NotInTime when the operator writes on."""
        wrote = await self._wrote()
        with in_time(f"the operator still writes {SETTLE_S:.0f} s after every status was final"):
            async with asyncio.timeout(SETTLE_S):
                while True:
                    await asyncio.sleep(QUIET_S)
                    if not (more := await self._wrote()).total:
                        return wrote
                    wrote += more

    async def _wrote(self) -> Writes:
        """Since the last call."""
        counted = _own_count(await self._samples())
        since, self._counted = counted - self._counted, counted
        if self._log is None:
            return Writes(since, None)
        return await self._log.writes(OPERATOR, self._cluster.namespace)


@contextmanager
def in_time(otherwise: str) -> Generator[None]:
    """Raises NotInTime with these words in the place of a TimeoutError."""
    try:
        yield
    except TimeoutError as error:
        raise NotInTime(otherwise) from error


def is_current(adapter: Object) -> bool:
    """Ready, and the status is of the present spec."""
    generation: Any = adapter["metadata"]["generation"]
    return is_ready(adapter) and adapter["status"].get("observedGeneration") == generation


def _own_count(samples: Iterable[Sample]) -> Counter[str]:
    return Counter({s.labels["action"]: round(s.value) for s in samples if s.name == WRITTEN})
