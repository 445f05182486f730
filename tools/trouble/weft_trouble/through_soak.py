"""Run `weft bench soak` on a stack of our own."""

import asyncio
import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc.aio
import yaml

from weft.wire.v1.supervisor_pb2_grpc import AdminStub
from weft_stage.lines import Line, Origin
from weft_stage.process import resident_mb, status
from weft_stage.reports import books, listed
from weft_stage.stack import CONTROLLER, Stack, quickstart
from weft_trouble.soak import DESCRIPTORS, HOUR_S, RESIDENT, THREADS, Done, Sample, lines
from weft_trouble.soak_activities import CONTENTS, NAMESPACE, PLATFORM, POOL, SPARE_POOL, Activities, spare_pool

STREAMS, EVERY_S, IDLE_S, POLL_S = 6, 10.0, 120.0, 0.1
MANIFESTS = ("00-namespaces.yaml", "01-pool.yaml", f"{NAMESPACE}.yaml")


async def measure(
    folder: Path, origin: Origin, seed: int, *, minutes: float, warm_minutes: float, advance: Callable[[int], None],
    say: Callable[[str], None],
) -> list[Line]:  # fmt: skip
    """Soak for `minutes`. `advance` is called with the seconds since it was last. Raises StackFailed."""
    made = manifests(folder / "manifests")
    with Stack(made, folder / "data", "--auth") as stack:
        stack.key = await asyncio.to_thread(stack.create_key, NAMESPACE)
        await asyncio.to_thread(stack.wait_for_models)
        async with grpc.aio.insecure_channel(stack.address("supervisor")) as channel:
            admin = AdminStub(channel)
            activities = Activities(stack, admin, made, seed)
            await activities.record()
            samples, grown = await _soak(stack, activities, minutes * 60, warm_minutes * 60, advance, say)
            unbalanced = await _unbalanced(admin)
    done = Done(activities.right, activities.wrong, unbalanced)
    return list(lines(origin, samples, done, grown, warm_s=warm_minutes * 60))


async def _soak(
    stack: Stack, activities: Activities, seconds: float, warm_s: float, advance: Callable[[int], None],
    say: Callable[[str], None],
) -> tuple[list[Sample], dict[str, float]]:  # fmt: skip
    """Samples of every process, and what the stack as a whole gained an hour after the warm-up."""
    begun, over, told, shown_s = time.monotonic(), asyncio.Event(), 0, 0
    samples = list[Sample]()
    at_warm: tuple[float, Mapping[str, float]] | None = None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(activities.run(STREAMS, over))
        while (at_s := time.monotonic() - begun) < seconds:
            samples += await asyncio.to_thread(_looked_at, stack, at_s)
            if at_warm is None and at_s >= warm_s:
                at_warm = at_s, await asyncio.to_thread(_kept, stack)
            for sentence in activities.wrong[told:]:
                say(f"wrong, minute {at_s / 60:.1f}: {sentence}")
            told = len(activities.wrong)
            advance(round(at_s) - shown_s)
            shown_s = round(at_s)
            await asyncio.sleep(EVERY_S)
        kept, at_s = await asyncio.to_thread(_kept, stack), time.monotonic() - begun
        over.set()
    if at_warm is None:
        return samples, {}
    since, before = at_warm
    return samples, {what: (count - before.get(what, 0.0)) * HOUR_S / (at_s - since) for what, count in kept.items()}


def _looked_at(stack: Stack, at_s: float) -> list[Sample]:
    """Every process of the stack, those left out that end meanwhile."""
    found = list[Sample]()
    running = {name: one["pid"] for name, one in stack.components().items() if one["pid"] is not None}
    for name, pid in {CONTROLLER: stack.pid(CONTROLLER), **running}.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):
            proc = Path("/proc") / str(pid)
            needs = {
                RESIDENT: resident_mb(pid),
                DESCRIPTORS: float(len(list((proc / "fd").iterdir()))),
                THREADS: float(status(pid)["Threads"]),
            }
            found.append(Sample(at_s, (name, pid), needs))
    return found


def _kept(stack: Stack) -> dict[str, float]:
    """What is on the disk: megabytes by component, and the rows of the store's tables."""
    found = dict[str, float]()
    for folder in sorted(path for path in stack.data_dir.iterdir() if path.is_dir()):
        with contextlib.suppress(FileNotFoundError):  # a file goes while the folder is read
            found[f"MB of {folder.name}"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6
    path = stack.data_dir / "supervisor" / "weft.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=IDLE_S)) as store:
        tables = [name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            found[f"rows of {table}"] = store.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
    return found


async def _unbalanced(admin: AdminStub) -> list[str]:
    """Runners whose pages are not all free within a while, though nothing is asked any more."""
    end = time.monotonic() + IDLE_S
    while True:
        found = books(await listed(admin))
        left = [b for b in found if b.sequences or b.figures.free_pages != b.spec.total_pages]
        if not left or time.monotonic() > end:
            return [f"{b.spec.name}: {b.figures.free_pages} of {b.spec.total_pages} pages free" for b in left]
        await asyncio.sleep(POLL_S)


def manifests(folder: Path) -> Path:
    """The quickstart with the adapters of one tenant, and a pool that is at zero."""
    folder.mkdir(parents=True)
    for name in MANIFESTS:
        shutil.copy(quickstart() / name, folder)
    shutil.copytree(quickstart() / "model", folder / "model")
    for content in CONTENTS:
        shutil.copytree(quickstart() / "adapters" / content, folder / "adapters" / content)
    pool = {**POOL, "metadata": {"name": SPARE_POOL, "namespace": PLATFORM}, "spec": spare_pool(0)}
    (folder / "02-spare.yaml").write_text(yaml.safe_dump(pool))
    return folder
