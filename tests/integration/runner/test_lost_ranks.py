"""Ranks that die, hang, or cannot start; runners that die: it has a name, it takes bounded time, nobody is left.

Ranks have a patience that does not run out, unless it is what a test is about: whatever ends a wait here has happened.
"""

import gc
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.ports import free_ports
from harness.processes import started
from harness.ranks import NEVER_S, base_of, settings_of, split, staged, words_of
from harness.waiting import PATIENCE_S, wait_until
from weft.domain.request import Sampling
from weft_kernels.plan import SegmentPlan
from weft_runner.errors import ExecutorLost, StoppedAtStart, WeightsInvalid
from weft_runner.executors import ModelSource, make_executor
from weft_runner.model import StepInput, StepRow

SHORT_S = 3.0  # a patience that runs out; a hundred times what the ranks of this model need to meet
STEP = StepInput([1, 2, 3], (StepRow(0, 3, 0, (0,), True),), SegmentPlan(3, ()))
HOW = {"tensor_parallel": split, "pipeline_parallel": staged}


@pytest.fixture
def files(tmp_path: Path, new_world: Any, small_config: dict[str, Any]) -> dict[str, Path]:
    """A model of sizes that two native ranks share, and of a layer for each of three stages."""
    sizes = {"vocab_size": 64, "head_dim": 16, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    world = new_world(tmp_path / "even", small_config | sizes)
    world.write_base()
    return {path.name: path for path in world.base.iterdir()}


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture(autouse=True)
def nobody_is_left(ports: list[int]) -> Iterator[None]:
    """Neither a process nor a descriptor of ours: those that reserve ports stay, and are there before."""
    del ports
    before = descriptors()
    yield
    gc.collect()  # an error that a test has caught holds on to the group
    assert children() == []

    def are_closed() -> bool:
        """Collect each time: a thread that ends now leaves its last descriptor in a cycle of garbage."""
        gc.collect()
        return descriptors() <= before

    wait_until(are_closed, "a descriptor of a rank to be closed by the thread that used it last")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "weft_runner.worker" in child.cmdline()]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # its new parent's to bury
    except psutil.NoSuchProcess:
        return True


# ---- at start


@pytest.mark.slow
def test_what_is_wrong_with_a_part_is_told_by_its_name(files):
    tensors = load_file(files["model.safetensors"])
    tensors["model.layers.1.mlp.up_proj.weight"][-1, 5] = torch.nan  # the last outputs are rank 1's
    save_file(tensors, files["model.safetensors"])
    with pytest.raises(
        WeightsInvalid, match=r"rank 1: up_proj of layer 1, part 1 of 2 is NaN or infinite at \[31, 5\]"
    ):
        make_executor(settings_of(tensor_parallel=2), base_of(files))


@pytest.mark.parametrize("how", HOW)
def test_a_runner_that_is_told_to_stop_does_not_wait_for_its_ranks(files, how):
    base = base_of(files)
    with pytest.raises(StoppedAtStart, match="before rank 1 was ready"):
        make_executor(settings_of(**{how: 2}), ModelSource(base.spec, base.files, 1, lambda: True))


# ---- while it serves


@contextmanager
def engine_on(executor: Any, drive: Any) -> Iterator[Any]:
    """The driver of an engine that has begun a few answers. Drivers outlive the test, ranks do not."""
    driver = drive(make_executor=lambda *_: executor)
    driver.post(*(driver.request(f"r{i}", [3, 4 + i], 100, sampling=Sampling(ignore_eos=True)) for i in range(4)))
    driver.beat(6)
    try:
        yield driver
    finally:
        driver.engine.executor = driver.engine.steps = None


@pytest.fixture
def killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped does not end by itself, however long one waits for that."""
    monkeypatch.setattr("weft_runner.parallel.worker_group.END_S", 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_is_killed_is_told_at_once_and_ends_the_engine(files, drive, how):
    """Nobody's request is tried again here, they go on elsewhere."""
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with HOW[how](files) as ranks, engine_on(ranks, drive) as driver:
        ranks.watch(lambda error: lost.put(str(error)))  # an error that is kept holds on to the group
        os.kill(ranks.others.pids[0], signal.SIGKILL)
        assert "rank 1 of the model" in lost.get(timeout=PATIENCE_S)
        with pytest.raises(ExecutorLost):
            driver.finish()


@pytest.mark.slow
def test_an_engine_whose_stage_fails_ends(files, drive):
    with staged(files) as stages, engine_on(stages, drive) as driver:
        stages.workers.broadcast("hello")  # no command: a bug of ours
        with pytest.raises(ExecutorLost):
            driver.finish()


@pytest.mark.slow
@pytest.mark.usefixtures("killed_at_the_end")
def test_a_native_rank_that_waits_for_one_that_is_killed_ends_at_once(files):
    """A rank waits in memory that they share, where nothing says that the other is gone: the watch does."""
    with split(files, executor="cpu") as ranks, ThreadPoolExecutor(1) as thread:
        ranks.run(STEP)
        os.kill(ranks.workers.pids[0], signal.SIGSTOP)
        step = thread.submit(ranks.run, STEP)
        os.kill(ranks.workers.pids[0], signal.SIGKILL)
        with pytest.raises(ExecutorLost):
            step.result(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.usefixtures("killed_at_the_end")
@pytest.mark.parametrize(("kind", "why"), [("cpu", "another rank is lost"), ("reference", None)])
def test_a_rank_that_hangs_is_waited_for_so_long_and_then_killed(files, kind, why):
    with split(files, patience_s=SHORT_S, executor=kind) as ranks:
        ranks.run(STEP)
        os.kill(ranks.workers.pids[0], signal.SIGSTOP)
        with pytest.raises(ExecutorLost, match=why):
            ranks.run(STEP)


@pytest.mark.slow
@pytest.mark.usefixtures("killed_at_the_end")
def test_a_stage_that_hangs_is_waited_for_so_long_and_then_killed(files):
    """In the middle: the one behind it hears of the step and gets nothing, the one before it hears nothing."""
    with staged(files, 3, patience_s=SHORT_S) as stages:
        stages.run(STEP)
        os.kill(stages.workers.pids[0], signal.SIGSTOP)
        flights = [stages.launch(STEP, []) for _ in range(3)]  # told all the same
        with pytest.raises(ExecutorLost, match="logits"):
            flights[0].result()


# ---- the whole process

PATIENT = f"""
import sys
from weft_runner.parallel import worker_group
worker_group.PATIENCE_S = {NEVER_S}
from weft_runner.main import main
sys.exit(main(profile=False))
"""


@contextmanager
def runner_of(
    depot: Any, files: dict[str, Path], data: Path, how: str, ports: list[int]
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A runner that serves, and the process of its rank 1. There is no supervisor; it does not mind."""
    port = ports[0]

    def serves() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    with started(sys.executable, "-c", PATIENT, *flags_of(depot, files, data, how, ports)) as runner:
        wait_until(serves, "the runner listens")
        (child,) = psutil.Process(runner.pid).children()
        yield runner, child.pid


def flags_of(depot: Any, files: dict[str, Path], data: Path, how: str, ports: list[int]) -> list[str]:
    port, probes = ports
    return words_of(
        listen=f"127.0.0.1:{port}", probes=f"127.0.0.1:{probes}", supervisor="127.0.0.1:1", depot=depot.url,
        data_dir=data, pool="a/b", executor="reference",
        base_digest=depot.publish("model", files["config.json"].parent), **{how: 2},
    )  # fmt: skip


# What becomes of rank 1 while rank 0 waits to meet it, and what is told then. The runner is as patient as above.
UNMET = {
    "it is killed": (
        """
import psutil
from weft_runner.parallel import process_group
join = process_group.TorchRanks.join
def without_rank_1(ranks):
    psutil.Process().children()[0].kill()
    join(ranks)
process_group.TorchRanks.join = without_rank_1
""",
        ('failed  error=ExecutorLost detail="rank 1 of the model',),
    ),
    "it is killed once others know its address": (
        """
import psutil
from weft_runner.parallel import process_group
def refused(ranks):
    psutil.Process().children()[0].kill()
    raise RuntimeError("Connection refused")
process_group.TorchRanks._join = refused
""",
        ('failed  error=ExecutorLost detail="rank 1 of the model',),
    ),
    "it refuses what it gets": (
        """
from weft_runner.parallel import channel
channel.pack_message = lambda message: b'["another message"]'
""",
        ('failed  error=ExecutorLost detail="rank 1 of the model', "this rank ends: MessageRefused: a message with"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", UNMET)
def test_a_rank_that_does_not_come_to_meet_the_others_ends_the_runner_at_once(depot, files, tmp_path, ports, what):
    before, reasons = UNMET[what]
    flags = flags_of(depot, files, tmp_path / "data", "tensor_parallel", ports)
    with started(sys.executable, "-c", before + PATIENT, *flags, stderr=subprocess.PIPE) as runner:
        _, told = runner.communicate(timeout=PATIENCE_S)
        assert runner.returncode == 1
    for reason in reasons:
        assert reason in told.decode()


ENDS = {
    "its rank is killed": ("pipeline_parallel", "rank", signal.SIGKILL, 1),
    "it is killed": ("tensor_parallel", "runner", signal.SIGKILL, -signal.SIGKILL),
    "it is told to stop": ("pipeline_parallel", "runner", signal.SIGTERM, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_runner_and_its_ranks_end_together(depot, files, tmp_path, ports, end):
    how, struck, signum, code = ENDS[end]
    with runner_of(depot, files, tmp_path / "data", how, ports) as (runner, rank):
        os.kill(rank if struck == "rank" else runner.pid, signum)
        assert runner.wait(PATIENCE_S) == code
        wait_until(lambda: gone(rank), "its rank ends too")
