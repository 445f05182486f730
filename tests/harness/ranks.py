"""A model on several ranks, for tests: real processes and real Gloo, or threads of this process and their group."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from harness.waiting import PATIENCE_S
from weft.artifacts.adapter_config import parse_adapter_config
from weft_runner.executors import ModelSource, make_executor
from weft_runner.executors import split as split_executors
from weft_runner.model import AdapterFiles, map_tensors, read_spec
from weft_runner.parallel import MultiProcessExecutor, PipelineParallelExecutor, ShardedAdapter, TensorParallelExecutor
from weft_runner.settings import FLAGS as OF_RUNNERS
from weft_runner.settings import RunnerSettings, parse_settings

T = TypeVar("T")
CHOSEN = {one.name for one in fields(RunnerSettings)} - {one.name for one in OF_RUNNERS}
NEVER_S = 1e6  # a patience of ranks for each other that does not run out: what ends a wait is what happened
FLAGS = {
    "listen": "127.0.0.1:1", "probes": "127.0.0.1:2", "supervisor": "127.0.0.1:3", "depot": "http://127.0.0.1:4",
    "data_dir": "/nowhere", "pool": "a/b", "base_digest": "sha256:" + "a" * 64, "executor": "reference",
}  # fmt: skip


def settings_of(**flags: object) -> RunnerSettings:
    """Return a runner's settings, `kv_pages=8` for `--kv-pages=8`, and what no flag says by its name."""
    chosen = {name: flags.pop(name) for name in CHOSEN & flags.keys()}
    return parse_settings(words_of(**FLAGS | flags), **chosen)


def words_of(**flags: object) -> list[str]:
    """Return a command's words, `--kv-pages=8` for `kv_pages=8`."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def base_of(files: dict[str, Path]) -> ModelSource:
    return ModelSource(read_spec(files["config.json"], files), files, 1, lambda: False)


@contextmanager
def split(
    files: dict[str, Path], ranks: int = 2, patience_s: float = NEVER_S, **flags: object
) -> Iterator[TensorParallelExecutor]:
    """Run a model on `ranks` processes, this one included; they have ended when the block is left."""
    executor = _patient(settings_of(tensor_parallel=ranks, **flags), files, patience_s)
    assert isinstance(executor, TensorParallelExecutor)
    try:
        yield executor
    finally:
        executor.close()


@contextmanager
def staged(
    files: dict[str, Path], stages: int = 2, patience_s: float = NEVER_S, **flags: object
) -> Iterator[PipelineParallelExecutor]:
    """Run a model cut into stages, this process the first; the others have ended when the block is left."""
    executor = _patient(settings_of(pipeline_parallel=stages, **flags), files, patience_s)
    assert isinstance(executor, PipelineParallelExecutor)
    try:
        yield executor
    finally:
        executor.close()


def _patient(settings: RunnerSettings, files: dict[str, Path], patience_s: float) -> Any:
    """What a runner makes, but for the patience of its ranks."""
    with mock.patch.object(split_executors, "PATIENCE_S", patience_s):
        return make_executor(settings, base_of(files))


def adapter_files(folder: Path) -> AdapterFiles:
    """Read an adapter's files as PEFT saves them."""
    scales = parse_adapter_config((folder / "adapter_config.json").read_bytes())
    return AdapterFiles(folder / "adapter_model.safetensors", scales)


def load(executor: MultiProcessExecutor, slot: int, folder: Path) -> ShardedAdapter:
    """Load an adapter into a slot, as the adapter pool does it."""
    files = adapter_files(folder)
    adapter = executor.adapters.build(map_tensors(files.tensors), files.scales)
    executor.adapters.put(slot, adapter)
    return adapter


def tcp_sent_bytes() -> int:
    """Return what the kernel says this process has sent over its TCP connections, without what it sent again."""
    total = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (numbers, not paths)
        try:
            end = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        if end.family == socket.AF_INET and end.type == socket.SOCK_STREAM:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, again = struct.unpack_from("<QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
            total += sent - again
        end.detach()
    return total


class ThreadGroup:
    """A rank of a group of threads, which meet at a barrier and read each other's tensors: no process, no wire."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: list[torch.Tensor]) -> None:
        self.rank, self._barrier, self._given, self.sent_bytes = rank, barrier, given, 0

    @property
    def size(self) -> int:
        return self._barrier.parties

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x).sum(dim=0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._given[self.rank] = x.clone()
        self._barrier.wait(PATIENCE_S)
        gathered = torch.stack(self._given)
        self._barrier.wait(PATIENCE_S)
        return gathered

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        gathered = self.all_gather(x)
        return None if self.rank else gathered

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x)[0]


def on_threads(size: int, act: Callable[[ThreadGroup], T]) -> list[T]:
    """Return what each of `size` ranks returns, all at the same time."""
    barrier, given = threading.Barrier(size), [torch.empty(0)] * size

    def rank(number: int) -> T:
        try:
            return act(ThreadGroup(number, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        return list(threads.map(rank, range(size)))
