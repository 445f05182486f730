"""Ranks that die, hang, or cannot start; runners that die: it has a name, it takes bounded time, nobody is left."""

import asyncio
import gc
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from ranks import base_of, settings_of, split, staged
from waiting import eventually
from weft_kernels.plan import SegmentPlan
from weft_runner.core.sequence import Sampling
from weft_runner.errors import ExecutorLost, StoppedAtStart, WeightsInvalid
from weft_runner.executors import Base, make_executor, make_part
from weft_runner.model.step import Step, StepRow
from weft_runner.parallel.commands import Kind
from weft_runner.parallel.executor import start_sharded
from weft_runner.settings import told

pytestmark = pytest.mark.integration
AT_ONCE_S = 5.0  # far below the patience of ranks for each other
STEP = Step([1, 2, 3], (StepRow(0, 3, 0, (0,), True),), SegmentPlan(3, ()))
HOW = {"tensor_parallel": split, "pipeline_parallel": staged}


@pytest.fixture
def files(tmp_path: Path, new_world: Any, small_config: dict[str, Any]) -> dict[str, Path]:
    """The small model, with a vocabulary that two ranks share, and a layer for each of three stages."""
    world = new_world(tmp_path / "even", small_config | {"vocab_size": 64, "num_hidden_layers": 3})
    world.write_base()
    return {path.name: path for path in world.base.iterdir()}


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """Neither a process nor a descriptor of ours."""
    before = descriptors()
    yield
    gc.collect()  # an error that a test has caught holds on to the group
    assert children() == []
    assert descriptors() <= before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "weft_runner.parallel.follower" in child.cmdline()]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # its new parent's to bury
    except psutil.NoSuchProcess:
        return True


# ---- at start


def test_what_is_wrong_with_a_stage_is_told_by_its_name(files):
    tensors = load_file(files["model.safetensors"])
    tensors["model.layers.2.mlp.up_proj.weight"][7, 5] = torch.nan  # stage 1's
    save_file(tensors, files["model.safetensors"])
    with pytest.raises(WeightsInvalid, match=r"rank 1: up_proj of layer 2 is NaN or infinite at \[7, 5\]"):
        make_executor(settings_of(pipeline_parallel=2), base_of(files))


def test_what_is_wrong_with_a_part_is_told_by_its_name(files):
    tensors = load_file(files["model.safetensors"])
    tensors["model.layers.1.mlp.up_proj.weight"][-1, 5] = torch.nan  # the last outputs are rank 1's
    save_file(tensors, files["model.safetensors"])
    with pytest.raises(
        WeightsInvalid, match=r"rank 1: up_proj of layer 1, part 1 of 2 is NaN or infinite at \[23, 5\]"
    ):
        make_executor(settings_of(tensor_parallel=2), base_of(files))


@pytest.mark.parametrize("how", HOW)
def test_a_runner_that_is_told_to_stop_does_not_wait_for_its_ranks(files, how):
    base = base_of(files)
    with pytest.raises(StoppedAtStart, match="before rank 1 was ready"):
        make_executor(settings_of(**{how: 2}), Base(base.spec, base.files, 1, lambda: True))


# ---- while it serves


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_is_killed_is_told_at_once_and_ends_the_step_that_needs_it(files, how):
    lost: queue.SimpleQueue[ExecutorLost] = queue.SimpleQueue()
    with HOW[how](files) as ranks:
        ranks.watch(lost.put)
        ranks.run(STEP)
        os.kill(ranks.followers[0], signal.SIGKILL)
        assert "rank 1 of the model" in str(lost.get(timeout=AT_ONCE_S))
        began = time.monotonic()
        with pytest.raises(ExecutorLost):
            ranks.run(STEP)
        assert time.monotonic() - began < AT_ONCE_S


def test_a_rank_that_hangs_is_waited_for_so_long_and_then_killed(files):
    settings, base = settings_of(tensor_parallel=2), base_of(files)
    start = {"settings": told(settings), "files": {n: str(p) for n, p in files.items()}, "threads": 1, "device": "cpu"}
    own = partial(make_part, settings, base)
    ranks = start_sharded(base.spec, 2, start, own, base.stopping, patience_s=1.0)
    try:
        ranks.run(STEP)
        os.kill(ranks.followers[0], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ExecutorLost):
            ranks.run(STEP)
        assert time.monotonic() - began < AT_ONCE_S
    finally:
        ranks.close()


def test_a_stage_that_hangs_is_waited_for_so_long_and_then_killed(files):
    """In the middle: the one behind it hears of the step and gets nothing, the one before it hears nothing."""
    with staged(files, 3, patience_s=1.0) as stages:
        stages.run(STEP)
        os.kill(stages.followers[0], signal.SIGSTOP)
        flights = [stages.launch(STEP, []) for _ in range(3)]  # told all the same
        began = time.monotonic()
        with pytest.raises(ExecutorLost, match="logits"):
            flights[0].choices()
        assert time.monotonic() - began < AT_ONCE_S


def test_stages_are_ended_whatever_is_in_flight(files):
    with staged(files) as stages:
        os.kill(stages.followers[0], signal.SIGSTOP)
        flights = [stages.launch(STEP, []) for _ in range(2)]
    assert all(flight.logits is not None for flight in flights)


@pytest.mark.parametrize("killed", [True, False])
def test_an_engine_whose_stage_is_lost_ends(files, drive, killed):
    """Killed or failed: nobody's request is tried again here, they go on elsewhere."""
    with staged(files) as stages:
        driver = drive(make_executor=lambda *_: stages)
        driver.post(*(driver.request(f"r{i}", [3, 4 + i], 100, sampling=Sampling(ignore_eos=True)) for i in range(4)))
        driver.beat(6)
        if killed:
            os.kill(stages.followers[0], signal.SIGKILL)
        else:
            stages._followers.tell(Kind.HELLO)  # no command: a bug of ours
        with pytest.raises(ExecutorLost):
            driver.finish()
        driver.engine.executor = driver.engine._pipeline = driver.engine._steps = None  # drivers outlive this test


# ---- the whole process


async def runner_of(
    depot: Any, files: dict[str, Path], data: Path, port: Callable[[], int], how: str
) -> tuple[Any, int]:
    """A runner that serves, and the process of its rank 1. There is no supervisor; it does not mind."""
    flags = {"listen": f"127.0.0.1:{port()}", "probes": f"127.0.0.1:{port()}", "supervisor": "127.0.0.1:1"}
    flags |= {"depot": depot.url, "data-dir": str(data), "pool": "a/b", "executor": "reference", "profile": "off"}
    flags |= {"base-digest": depot.publish("model", files["config.json"].parent), how.replace("_", "-"): "2"}
    command = [sys.executable, "-m", "weft_runner", *(f"--{name}={value}" for name, value in flags.items())]
    runner = await asyncio.create_subprocess_exec(*command)
    host, _, number = flags["listen"].rpartition(":")

    async def serves() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(number))
        except OSError:
            return False
        writer.close()
        return True

    await eventually(serves, timeout_s=60)
    (child,) = psutil.Process(runner.pid).children()
    return runner, child.pid


ENDS = {
    "its rank is killed": ("tensor_parallel", "rank", signal.SIGKILL, 1),
    "its stage is killed": ("pipeline_parallel", "rank", signal.SIGKILL, 1),
    "it is killed": ("tensor_parallel", "runner", signal.SIGKILL, -signal.SIGKILL),
    "it is told to stop": ("pipeline_parallel", "runner", signal.SIGTERM, 0),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_runner_and_its_ranks_end_together(depot, files, tmp_path, free_port, end):
    how, struck, signum, code = ENDS[end]
    runner, rank = await runner_of(depot, files, tmp_path / "data", free_port, how)
    try:
        os.kill(rank if struck == "rank" else runner.pid, signum)
        async with asyncio.timeout(4 * AT_ONCE_S):  # an idle runner, a drain: neither waits for a patience
            assert await runner.wait() == code

        async def ended() -> bool:
            return gone(rank)

        await eventually(ended, timeout_s=AT_ONCE_S)
    finally:
        if runner.returncode is None:
            runner.kill()
            await runner.wait()
