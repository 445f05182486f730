"""`weft bench operator`: what it costs the operator to reconcile many adapters and runner pods.

Operator, depot, scheduler and supervisor are real processes, against a real API server whose own controllers make the
pods; runner pods are played. docs/benchmarks/control-plane.md has the method.
"""

import asyncio
import os
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft_bench import cases
from weft_bench.run import Run
from weft_stage import operator_stage
from weft_stage.audit import AuditLog, Write
from weft_stage.errors import NotInTime, NotLogged
from weft_stage.following import Following, Object
from weft_stage.lines import Line
from weft_stage.operator_stage import ADAPTERS, CONNECTIONS, GROUP, POOL, POOLS, VERSION
from weft_stage.played_runners import PlayedRunners
from weft_stage.scrape import Sample, quantile, total
from weft_stage.stack import is_ready

OPERATOR = "weft-operator"
SELECTOR = f"serving.weft.dev/pool={POOL}"
BASE = "weft-quickstart"
CONVERGE_S, CHANGE_S, QUIET_S, SETTLE_S = 300.0, 60.0, 2.0, 60.0
LOGGED_S, LOG_POLL_S = 15.0, 0.05
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
    """Start everything, and let the cases build on each other."""
    load = os.getloadavg()[0]
    with TemporaryDirectory(prefix="weft-bench-") as folder:
        async with (
            operator_stage.cluster(options.kubeconfig) as made,
            operator_stage.stage(made.namespace, options.kubeconfig, Path(folder)) as processes,
            asyncio.TaskGroup() as tasks,
        ):
            bench = Bench(made, processes, options, run, PlayedRunners(made.core, processes.supervisor, tasks))
            following = [tasks.create_task(each.run()) for each in bench.followed]
            try:
                lines = [bench.line("before the start", "load average", load, "tasks")]
                lines += await bench.converge()
                lines += await bench.rest(options.steady_seconds)
                lines += await bench.restart()
                lines += await bench.singles("one edit", bench.edit)
                return lines + await bench.singles("one delete", bench.delete)
            finally:
                bench.runners.close()
                for task in following:
                    task.cancel()


@dataclass(frozen=True, slots=True)
class Writes:
    """The writes of the operator. `by` counts requests by kind, refused requests included.

    `refused`: how many of them were answered with 4xx or 5xx; None if nobody tells.
    """

    by: Counter[str]
    refused: int | None

    @property
    def total(self) -> int:
        return self.by.total()

    def __add__(self, later: "Writes") -> "Writes":
        refused = None if self.refused is None or later.refused is None else self.refused + later.refused
        return Writes(self.by + later.by, refused)


class Bench:
    """The cases, in the order in which they build on each other."""

    def __init__(
        self, made: operator_stage.Cluster, processes: operator_stage.Stage, options: cases.Operator, run: Run,
        runners: PlayedRunners,
    ) -> None:  # fmt: skip
        self._cluster, self._stage, self._options, self._run, self.runners = made, processes, options, run, runners
        self._log = AuditLog(options.audit_log) if options.audit_log else None
        self._logged_to = self._log.mark() if self._log else 0
        self._counted: Counter[str] = Counter()  # the operator's own count of writes, as last read
        self._origin = run.origin("kopf", "kubernetes", "aiohttp")
        listing = made.custom.list_namespaced_custom_object
        self._adapters = Following(listing, GROUP, VERSION, made.namespace, ADAPTERS)
        self._pools = Following(listing, GROUP, VERSION, made.namespace, POOLS)
        pods = made.core.list_namespaced_pod
        self.followed = [
            self._adapters, self._pools, Following(pods, made.namespace, listen=runners.hear, label_selector=SELECTOR),
        ]  # fmt: skip
        self._names = [f"adapter-{number:04}" for number in range(options.adapters)]

    def line(self, case: str, metric: str, value: float | None, unit: str, **more: Any) -> Line:
        size = f"{self._options.adapters} adapters, {self._options.runners} runners"
        return self._origin.line(f"{size}: {case}", metric, value, unit, **more)

    async def converge(self) -> list[Line]:
        """Create everything at once. Times are since the first object was sent."""
        uris = [self._stage.make_source(number) for number in range(len(self._names))]
        for following in self.followed:
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
        lines.append(self.line("converge", "API writes: refused", wrote.refused, ""))
        each = wrote.total / len(self._names)
        lines.append(self.line("converge", "API writes for each adapter", each, "", baseline=MIN_WRITES))
        return [*lines, *self._writes("converge", wrote)]

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
                "leading": await operator.until(lambda: operator_stage.leads(operator.samples()), "leads"),
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
        return [
            self.line(case, "median", statistics.median(seconds), "s"),
            self.line(case, f"longest of {len(seconds)}", max(seconds), "s", target=f"<= {MAX_EDIT_S}"),
            *self._writes(case, await self._wrote(), len(seconds)),
        ]

    def _writes(self, case: str, wrote: Writes, changes: int = 1) -> Iterator[Line]:
        """Yield the writes for each change."""
        yield self.line(case, "API writes", wrote.total / changes, "")
        for kind, count in wrote.by.most_common():
            yield self.line(case, f"API writes: {kind}", count / changes, "")

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

    async def _samples(self) -> list[Sample]:
        return await asyncio.to_thread(self._stage.operator.samples)

    async def _cpu(self) -> Mapping[str, float]:
        """CPU seconds so far, by process; ours is the played runners and the watches."""
        others = {process.name: await asyncio.to_thread(process.samples) for process in self._stage.others}
        spent = {f"the {name}": total(samples, CPU) for name, samples in others.items()}
        return {"the operator": total(await self._samples(), CPU), **spent, "this benchmark": time.process_time()}

    async def _wrote_until_quiet(self) -> Writes:
        """Since the last call, until the last Event of it is out. Raises NotInTime when the operator writes on."""
        wrote, end = await self._wrote(), time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            await asyncio.sleep(QUIET_S)
            if not (more := await self._wrote()).total:
                return wrote
            wrote += more
        raise NotInTime(f"the operator still writes {SETTLE_S:.0f} s after every status was final")

    async def _wrote(self) -> Writes:
        """Return what the operator wrote since the last call, Leases aside: who renews one changes nothing."""
        samples = await self._samples()
        counted = Counter({each.labels["action"]: round(each.value) for each in samples if each.name == WRITTEN})
        since, self._counted = counted - self._counted, counted
        if self._log is None:
            return Writes(since, None)
        await self._cluster.mark(mark := f"weft-bench-{secrets.token_hex(8)}")
        writes = [
            each
            for each in await self._logged(self._log, mark)
            if (each.agent, each.namespace) == (OPERATOR, self._cluster.namespace) and each.resource != "leases"
        ]
        kinds = (f"{each.verb} {each.resource}/{each.subresource}".rstrip("/") for each in writes)
        return Writes(Counter(kinds), sum(each.code >= 400 for each in writes))

    async def _logged(self, log: AuditLog, mark: str) -> list[Write]:
        """Return the writes of everybody before that of our mark; the next call goes on behind it. Raises NotLogged."""
        end = time.monotonic() + LOGGED_S
        while time.monotonic() < end:
            writes = list(log.since(self._logged_to))
            for number, write in enumerate(writes):
                if write.manager == mark:
                    self._logged_to = write.end
                    return writes[:number]
            await asyncio.sleep(LOG_POLL_S)
        raise NotLogged(f"{log.path} has no write of ours after {LOGGED_S:.0f} s: is it this API server's audit log?")


def is_current(adapter: Object) -> bool:
    """Ready, and the status is of the present spec."""
    generation: Any = adapter["metadata"]["generation"]
    return is_ready(adapter) and adapter["status"].get("observedGeneration") == generation
