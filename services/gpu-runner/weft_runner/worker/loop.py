"""A rank of a model in a process of its own: what it does from its start to its end (`worker.__main__`).

Two threads: the main one runs the steps, the builder makes adapters beside them.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from weft.telemetry.logs import configure, kv
from weft.wire.tls import load_tls
from weft_runner.core.transfer.shards import shard_runner
from weft_runner.core.transfer.transfers import KvIdentity
from weft_runner.errors import RunnerError
from weft_runner.executors import ModelSource, make_rank
from weft_runner.model.adapter_store import DeviceAdapter
from weft_runner.model.checkpoint import Files
from weft_runner.model.executor import Executor, OffloadsStage
from weft_runner.model.step import StepInput
from weft_runner.model.tensor_parallel import ProcessGroup
from weft_runner.offload.stages import StageState, unreceived
from weft_runner.parallel.channel import Channel
from weft_runner.parallel.commands import BuiltShard, Layers, RankReady, RankStart
from weft_runner.parallel.messages import ChannelLost, MessageRefused
from weft_runner.parallel.pipeline_channel import PendingTensor, PipelineChannel
from weft_runner.parallel.process_group import RankFiles, RankMeeting, TorchRanks, device_of
from weft_runner.parallel.shared_tensors import FixedScales, Table, open_shared
from weft_runner.parallel.worker_group import RankChannels
from weft_runner.settings import RunnerSettings
from weft_runner.shell.kv_ranks import RankKv, rank_kv
from weft_runner.shell.kv_transfer import KvPlace, kv_address

log = logging.getLogger(__name__)
REPORT_S = 1.0
Act = Callable[[], None]


Meet = Callable[[RankStart], RankMeeting]  # by what START says


class LocalHostConfig(NamedTuple):
    """The flags, and the base's files, of a rank whose rank 0 is on another host."""

    settings: RunnerSettings
    files: Files


def serve_child(channels: Sequence[Channel], files: Sequence[int]) -> int:
    """Serve on the host of rank 0, with its files."""
    return serve(RankChannels(*channels), lambda _: RankFiles(files[0], files[1]))


def serve(channels: RankChannels, meet: Meet, config: LocalHostConfig | None = None) -> int:
    """Serve as the rank that START names, until the runner closes. Returns the exit code: 1 after a logged failure."""
    try:
        rank = _start(channels, meet, config)
        threading.Thread(target=rank.run_builds, args=(channels.loads,), name="builder", daemon=True).start()
        rank.run_steps(channels.steps)
    except (RunnerError, MessageRefused) as error:
        _refuse(channels.loads, error)
    except ChannelLost as error:
        log.info("rank 0 is gone", extra=kv(reason=error))
        return 0
    except BaseException:
        log.exception("a rank of the model has failed")
    return 1


def _refuse(loads: Channel, error: RunnerError | MessageRefused) -> None:
    """Tell both this process's log, which START may not have set up yet, and rank 0 why this rank ends."""
    log.error("this rank ends: %s: %s", type(error).__name__, error)
    with suppress(ChannelLost):
        loads.send(error)


def _start(channels: RankChannels, meet: Meet, config: LocalHostConfig | None) -> "WorkerLoop":
    """Load this rank's part of the model and meet the other ranks.

    The watch in `worker.__main__` ends a load whose runner has gone. Raises as loading does, ExecutorLost, ChannelLost.
    """
    loads = channels.loads
    loads.send(("hello", None))
    start: RankStart = loads.receive()
    settings = start.settings
    if config is not None:  # the disk that it measured
        offload = replace(settings.offload, path=config.settings.offload.path)
        settings = replace(settings, data_dir=config.settings.data_dir, offload=offload)
    configure(f"rank {start.rank}", level=settings.log_level, fmt=settings.log_format)
    torch.set_num_threads(start.threads)
    device = device_of(start.device, settings.gpu_of(start.rank))
    ranks = TorchRanks(start.grid, start.rank, device, meet(start), start.patience_s)
    base = ModelSource(start.spec, config.files if config else start.files, start.threads, policy=start.policy)
    ranks.join()
    executor = make_rank(settings, base, ranks)
    shard, address = _exchange_kv(start, config, executor, channels.events)
    offloads = executor.can.stage
    loads.send(("ready", RankReady(address, None if offloads is None else offloads.stage_state)))
    if offloads is not None:
        report = channels.events.send
        threading.Thread(target=_report, args=(offloads, report), name="progress", daemon=True).start()
    if ranks.grid.stages > 1:
        n_kept = None if offloads is None else unreceived(settings.hosts)
        work = StageWork(executor, PipelineChannel(ranks.stages, base.spec, n_kept), early=device.type == "cpu")
    else:
        work = TensorWork(executor, ranks.tensor, device)
    return WorkerLoop(executor, work, start.patience_s, shard)


def _report(stage: OffloadsStage, send: Callable[[StageState], None]) -> None:
    """Report to rank 0 while it computes: a pass may take minutes, and what it completes renews the runner's lease."""
    sent = None
    with suppress(ChannelLost):  # the other threads see that, too
        while True:
            time.sleep(REPORT_S)
            if (state := stage.stage_state) != sent:
                send(state)
                sent = state


def _exchange_kv(
    start: RankStart, config: LocalHostConfig | None, executor: Executor, events: Channel
) -> tuple["RankKv | None", str]:
    """Exchange KV with ranks of the same place in other runners, if rank 0 does. Return the address. Raises
    AddressInUse.
    """
    runner, memory, rank = start.runner, executor.kv_memory, start.rank
    settings = config.settings if config else start.settings
    if runner is None or not settings.kv_listen or memory is None:
        return None, ""
    identity = KvIdentity(shard_runner(runner, rank), settings.pool, settings.base_digest, memory.layout)
    tls = load_tls(settings.tls_dir, "runner")
    place = KvPlace(settings.kv_listen, identity.runner, settings.pool, start.settings.page_tokens, tls)
    made = rank_kv(rank, identity, place, memory, events.send, waits_for=rank - settings.ranks_here[0])
    return made, kv_address(f":{made.port}", settings.advertise)


class TensorWork:
    """A step on a rank that has a part of each layer."""

    def __init__(self, executor: Executor, group: ProcessGroup, device: torch.device) -> None:
        self._executor, self._group, self._device = executor, group, device

    def begin(self, step: StepInput, layers: Layers) -> Act:
        """Decide the action for a command in its turn, while an earlier command may run."""
        return partial(self.run, step, layers)

    def run(self, step: StepInput, layers: Layers) -> None:
        hidden = None
        if layers.hidden:
            hidden = torch.empty(len(step.tokens), self._executor.spec.hidden_size, device=self._device)
            self._group.broadcast(hidden)
        self._executor.run(step, first=layers.first, last=layers.last, hidden=hidden)


class StageWork:
    """A step on a stage that has some of the layers.

    `early`: it begins to receive as soon as it gets the command of the step, while it computes another. Between GPUs
    a receive would take multiprocessors from what computes, as long as nothing arrives: there it begins in its turn.
    """

    def __init__(self, executor: Executor, channel: PipelineChannel, *, early: bool) -> None:
        self._executor, self._channel, self._early = executor, channel, early

    def begin(self, step: StepInput, layers: Layers) -> Act:
        return partial(self.run, step, layers, self._hidden(step) if self._early else None)

    def run(self, step: StepInput, layers: Layers, hidden: PendingTensor | None = None) -> None:
        del layers  # its own
        hidden = hidden or self._hidden(step)
        self._channel.send_next(self._executor.run(step, hidden=None if hidden is None else hidden.wait()))

    def _hidden(self, step: StepInput) -> PendingTensor | None:
        return None if self._channel.begins else self._channel.hidden(len(step.tokens))


class WorkerLoop:
    """The work of a rank. `run_builds` is the builder's thread, all else the main one's."""

    def __init__(
        self, executor: Executor, work: TensorWork | StageWork, patience_s: float, shard: RankKv | None = None
    ) -> None:
        self._executor, self._work, self._patience_s, self._shard = executor, work, patience_s, shard
        self._built: dict[int, DeviceAdapter] = {}
        self._step: StepInput | None = None
        self._allocations, self._allocated = 0, threading.Condition()

    def run_steps(self, steps: Channel) -> NoReturn:
        """Run commands in their order; those that are here already are read before the first of them is acted on.

        Rank 0 has a few steps in flight at the most, and sends few commands between two of them.
        """
        pending: deque[Act] = deque()
        while True:
            while not pending or steps.has_data(0.0):
                pending.append(self.act_of(steps.receive()))
            pending.popleft()()

    def act_of(self, command: tuple[Any, ...]) -> Act:
        """Return the action for a command in its turn."""
        executor = self._executor
        match command:
            case "run", step, layers:
                return partial(self._run, step, self._work.begin(step, layers))
            case "again", tokens, positions, layers:
                return partial(self._again, tokens, positions, layers)
            case "put", slot, number, released:
                return partial(self._put, slot, number, released)
            case "clear", slot:
                return partial(executor.adapters.clear, slot)
            case "clear_pages", pages:
                return partial(executor.clear_pages, pages)
            case "allocate_pages", pages:
                return partial(self._allocate, pages)
            case "kv", order:
                assert self._shard is not None, "a rank that exchanges no KV"
                return partial(self._shard.order, order)
            case _:
                raise AssertionError(f"no command: {command}")

    def _run(self, step: StepInput, act: Act) -> None:
        self._step = step
        act()

    def _again(self, tokens: list[int], positions: list[int], layers: Layers) -> None:
        assert self._step is not None
        self._step.advance(tokens, positions)
        self._work.run(self._step, layers)

    def _put(self, slot: int, number: int, released: list[int]) -> None:
        self._executor.adapters.put(slot, self._built.pop(number))
        for adapter in released:
            self._built.pop(adapter, None)

    def _allocate(self, pages: list[int]) -> None:
        self._executor.allocate_adapter_pages(pages)
        with self._allocated:
            self._allocations += 1
            self._allocated.notify()

    # ---- the builder's thread

    def run_builds(self, loads: Channel) -> None:
        """Build adapters. An unnamed failure ends the process, as in the main thread."""
        torch.set_num_threads(1)
        try:
            while True:
                command = loads.receive()
                try:
                    reply = self.build(loads.receive_file(), *command)
                except RunnerError as error:
                    reply = error
                loads.send(reply)
        except MessageRefused as error:
            _refuse(loads, error)
            os._exit(1)
        except ChannelLost as error:
            log.info("rank 0 is gone", extra=kv(reason=error))
            os._exit(0)
        except BaseException:
            log.exception("the builder of a rank has failed")
            os._exit(1)

    def build(
        self, file: int, name: str, table: Table, scales: dict[str, float], number: int = 0, pages: Sequence[int] = (),
        allocations: int = 0,
    ) -> BuiltShard:  # fmt: skip
        """Answer `name`, "device_bytes" or "build". Earlier steps run before this allocation."""
        tensors, adapters = open_shared(file, table), self._executor.adapters
        if name == "device_bytes":
            return BuiltShard(self._pages(adapters.device_bytes(tensors, FixedScales(scales))))
        with self._allocated:  # they may write to these pages
            if not self._allocated.wait_for(lambda: self._allocations >= allocations, self._patience_s):
                seen, seconds = self._allocations, self._patience_s
                raise TimeoutError(f"pages were allocated {allocations} times, and {seen} times within {seconds} s")
        adapter = self._built[number] = adapters.build(tensors, FixedScales(scales), pages)
        return BuiltShard(self._pages(adapter.n_bytes), adapter.rank, adapter.site_rank)

    def _pages(self, n_bytes: int) -> int:
        return -(-n_bytes // self._executor.page_bytes)
