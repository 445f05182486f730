"""Run the cases of `weft bench operator` against an API server."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench import operator as figures
from weft_bench.audit_log import AuditLog
from weft_bench.operator_cases import Bar, Bench
from weft_stage.lines import Line
from weft_stage.machine import origin
from weft_stage.operator_stage import cluster, stage

PACKAGES = ("kopf", "kubernetes", "aiohttp")


async def measure(
    kubeconfig: Path, audit_log: Path | None, size: figures.Size, steady_s: float, bar: Bar
) -> list[Line]:
    """All cases, one after the other. `bar(label, length)` shows progress: call what it gives with each advance."""
    load, source = os.getloadavg()[0], origin(*PACKAGES)
    async with running(kubeconfig, audit_log, size, bar) as bench:
        lines = [figures.surroundings(source, size, load), *figures.converged(source, size, await bench.converge())]
        lines += figures.steady(source, size, await bench.rest(steady_s))
        lines += figures.restarted(source, size, await bench.restart())
        lines += figures.singles(source, size, "one edit", await bench.edits())
        lines += figures.singles(source, size, "one delete", await bench.deletes())
    return lines


@asynccontextmanager
async def running(kubeconfig: Path, audit_log: Path | None, size: figures.Size, bar: Bar) -> AsyncGenerator["Bench"]:
    """Everything started, nothing applied."""
    with TemporaryDirectory(prefix="weft-bench-") as folder:
        async with cluster(kubeconfig) as made, stage(made.namespace, kubeconfig, Path(folder)) as processes:
            log = AuditLog(audit_log, made.mark) if audit_log else None
            async with asyncio.TaskGroup() as tasks:
                bench = Bench(made, processes, log, size, bar, tasks)
                following = [tasks.create_task(work) for work in bench.follow()]
                try:
                    yield bench
                finally:
                    bench.close()
                    for task in following:
                        task.cancel()
