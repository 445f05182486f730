"""The cases of `weft bench operator`, against everything that was started for them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from weft_bench import operator as figures
from weft_bench.audit_log import AuditLog, Writes
from weft_stage.errors import NotInTime
from weft_stage.following import Following, Object
from weft_stage.operator_stage import ADAPTERS, CONNECTIONS, GROUP, POOL, POOLS, VERSION, Cluster, Stage, leads
from weft_stage.played_runners import PlayedRunners
from weft_stage.scrape import Sample, total
from weft_stage.stack import is_ready

OPERATOR = "weft-operator"
SELECTOR = f"serving.weft.dev/pool={POOL}"
BASE = "weft-quickstart"
CONVERGE_S, CHANGE_S, QUIET_S, SETTLE_S = 300.0, 60.0, 2.0, 60.0
SINGLES = 5

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class Bench:
    """The cases, in the order in which they build on each other."""

    def __init__(
        self,
        made: Cluster,
        processes: Stage,
        log: AuditLog | None,
        size: figures.Size,
        bar: Bar,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._cluster, self._stage, self._log, self._size, self._bar = made, processes, log, size, bar
        self._runners = PlayedRunners(made.core, processes.supervisor, tasks)
        listing = made.custom.list_namespaced_custom_object
        self._adapters = Following(listing, GROUP, VERSION, made.namespace, ADAPTERS)
        self._pools = Following(listing, GROUP, VERSION, made.namespace, POOLS)
        pods = made.core.list_namespaced_pod
        self._pods = Following(pods, made.namespace, listen=self._runners.hear, label_selector=SELECTOR)
        self._names = [f"adapter-{number:04}" for number in range(size.adapters)]
        self._counted: Counter[str] = Counter()  # the operator's own count of writes, as last read

    def follow(self) -> Iterable[Any]:
        """What has to run beside the cases."""
        return [following.run() for following in (self._adapters, self._pools, self._pods)]

    def close(self) -> None:
        self._runners.close()

    # ------------------------------------------------------------------------------------------------------- cases

    async def converge(self) -> figures.Converged:
        """Everything at once, from nothing."""
        uris = [self._stage.make_source(number) for number in range(self._size.adapters)]
        for following in (self._adapters, self._pools, self._pods):
            await following.listed.wait()
        await self._wrote()
        before, start = await self._cpu(), time.perf_counter()
        with self._bar("adapters Ready", len(self._names)) as advance:
            ready = self._adapters.until(self._names, is_current, CONVERGE_S, advance)
            counted = self._pools.until([POOL], self._counts_runners, CONVERGE_S)
            final = self._adapters.until(self._names, self._is_final, CONVERGE_S)
            pool_final = self._pools.until([POOL], self._counts_everything, CONVERGE_S)
            (applied, creates_s), *times = await asyncio.gather(self._apply(uris), counted, ready, final, pool_final)
        counted_s, ready_s, *final_s = (moment - start for moment in times)
        after, samples = await self._cpu(), await self._samples()
        return figures.Converged(
            applied_s=applied - start,
            creates_s=creates_s,
            counted_s=counted_s,
            ready_s=ready_s,
            final_s=max(final_s),
            cpu_s={name: after[name] - before[name] for name in before},
            samples=samples,
            wrote=await self._wrote_until_quiet(),
        )

    async def rest(self, seconds: float) -> figures.Steady:
        """Nothing changes."""
        before, start = await self._cpu(), time.perf_counter()
        with self._bar("nothing changes, seconds", round(seconds)) as advance:
            for _ in range(round(seconds)):
                await asyncio.sleep(1.0)
                advance(1)
        wall_s, after = time.perf_counter() - start, await self._cpu()
        cpu_s = {name: after[name] - before[name] for name in before}
        return figures.Steady(wall_s, cpu_s, await self._samples(), await self._wrote())

    async def restart(self) -> figures.Restarted:
        """Another operator, which finds everything done."""
        with self._bar("restart", 1) as advance:
            operator = await self._stage.restart_operator()
            self._counted.clear()
            everything = self._size.adapters + 1
            moments = [
                await operator.until(operator.ready, "is ready"),
                await operator.until(lambda: leads(operator.samples()), "leads"),
                await operator.until(
                    lambda: total(operator.samples(), figures.RECONCILES) >= everything, "plans everything"
                ),
            ]
            advance(1)
        await asyncio.sleep(QUIET_S)  # what it would still write, it writes now
        ready_s, leading_s, planned_s = (moment - operator.started_at for moment in moments)
        return figures.Restarted(ready_s, leading_s, planned_s, await self._wrote())

    async def edits(self) -> figures.Singles:
        """Other content for one adapter after the other."""
        return await self._singles("edits", self._edit)

    async def deletes(self) -> figures.Singles:
        """One adapter after the other."""
        return await self._singles("deletes", self._delete)

    # ------------------------------------------------------------------------------------------------------- steps

    async def _singles(self, label: str, change: Callable[[int], Any]) -> figures.Singles:
        seconds: list[float] = []
        names = range(min(SINGLES, self._size.adapters))
        with self._bar(label, len(names)) as advance:
            for number in names:
                start = time.perf_counter()
                seconds.append(await change(number) - start)
                advance(1)
        await asyncio.sleep(QUIET_S)
        return figures.Singles(seconds, await self._wrote())

    async def _edit(self, number: int) -> float:
        name, uri = self._names[number], self._stage.make_source(self._size.adapters + number)
        before = self._adapters.objects[name]["status"]["digest"]
        generation = await self._cluster.edit(ADAPTERS, name, {"source": {"uri": uri}})

        def is_edited(obj: Object) -> bool:
            current = obj["metadata"]["generation"] >= generation and obj["status"]["digest"] != before
            return current and self._is_final(obj)

        return await self._adapters.until([name], is_edited, CHANGE_S)

    async def _delete(self, number: int) -> float:
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

        pool = {"model": model, "replicas": self._size.runners, "lora": {"maxRank": 32}}
        of_pool = await apply("ServingPool", POOLS, POOL, pool)
        specs = ({"poolRef": {"name": POOL}, "source": {"uri": uri}} for uri in uris)
        named = zip(self._names, specs, strict=True)
        of_adapters = await asyncio.gather(*(apply("LoRAAdapter", ADAPTERS, *one) for one in named))
        return time.perf_counter(), [of_pool, *of_adapters]

    def _is_final(self, adapter: Object) -> bool:
        return is_current(adapter) and adapter["status"]["unavailableRunners"] == 0

    def _counts_runners(self, pool: Object) -> bool:
        status = pool.get("status", {})
        return status.get("readyReplicas") == status.get("replicas") == self._size.runners

    def _counts_everything(self, pool: Object) -> bool:
        return self._counts_runners(pool) and pool["status"]["adapters"]["ready"] == self._size.adapters

    # -------------------------------------------------------------------------------------------------- what it cost

    async def _samples(self) -> list[Sample]:
        return await asyncio.to_thread(self._stage.operator.samples)

    async def _cpu(self) -> Mapping[str, float]:
        """CPU seconds so far, by process; ours is the played runners and the watches."""
        others = {process.name: await asyncio.to_thread(process.samples) for process in self._stage.others}
        spent = {f"the {name}": total(samples, figures.CPU) for name, samples in others.items()}
        return {
            "the operator": total(await self._samples(), figures.CPU),
            **spent,
            "this benchmark": time.process_time(),
        }

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
    return Counter({s.labels["action"]: round(s.value) for s in samples if s.name == figures.WRITTEN})
