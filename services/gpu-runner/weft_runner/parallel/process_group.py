"""The ranks of one model, and what they do together: the ranks of a group call the same operations in the same order.

A group counts what it puts on the wire, as ring algorithms do it (those of Gloo and NCCL): of n bytes on each of N
ranks an all-reduce sends 2 (N - 1) / N * n from each, an all-gather (N - 1) * n, a gather n from all but rank 0, a
broadcast n from rank 0; from one rank to another n. The transport's own headers (Gloo: 50 to 600 bytes an operation)
are not counted.
"""

import ctypes
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]

from weft_kernels.cpu.ranks import SharedSlots, slots_bytes
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import Rows
from weft_runner.model.partition import RankGrid
from weft_runner.model.tensor_parallel import ProcessGroup, SingleProcessGroup


class Transfer:
    """A tensor on its way between two ranks. It is not to be written to, or read, before `wait` has returned."""

    def __init__(self, x: torch.Tensor, work: dist.Work, timeout_s: float) -> None:
        self._x, self._work, self._timeout_s = x, work, timeout_s

    def wait(self) -> torch.Tensor:
        """Wait for the transfer and return its tensor.

        Between GPUs the device waits, before whatever is launched next, and NCCL's own watch keeps the time; Gloo has
        only the limit that is passed. Raises RuntimeError: not within the timeout, or the other rank is gone.
        """
        if self._x.is_cuda:
            self._work.wait()
        else:
            self._work.wait(timedelta(seconds=self._timeout_s))
        return self._x


class RankMeeting(Protocol):
    """How the ranks find each other, and what carries the slots of native tensor ranks."""

    @property
    def interface(self) -> str:
        """The network interface that Gloo and NCCL listen on."""
        ...

    def open_store(self, size: int) -> Store: ...

    def slots(self, native: ctypes.CDLL, tensor: "TensorGroup", stage: int, slot_bytes: int, patience_s: float) -> Any:
        """Make the slots of this rank in its stage: `RankSlots` of the cpu executor, with `end`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankFiles:
    """A RankMeeting on one host, by descriptors of memory files open only in the ranks of a runner.

    `meeting`: where they find each other. `shared`: what native tensor ranks exchange (`weft_kernels.cpu.ranks`).
    """

    meeting: int
    shared: int
    interface: str = "lo"  # else Gloo listens wherever the host's name points to

    @classmethod
    def made(cls) -> "RankFiles":
        return cls(os.memfd_create("weft-ranks"), os.memfd_create("weft-slots"))

    @property
    def all(self) -> tuple[int, int]:
        return self.meeting, self.shared

    def open_store(self, size: int) -> Store:
        path = f"/proc/self/fd/{self.meeting}"
        return FileStore(path, size)

    def slots(
        self, native: ctypes.CDLL, tensor: "TensorGroup", stage: int, slot_bytes: int, patience_s: float
    ) -> SharedSlots:
        return SharedSlots(
            native, self.shared, stage * slots_bytes(tensor.size, slot_bytes), rank=tensor.rank, size=tensor.size,
            slot_bytes=slot_bytes, patience_s=patience_s,
        )  # fmt: skip

    def close(self) -> None:
        for file in self.all:
            os.close(file)


class TorchRanks:
    """This process's place among the ranks of a model: Gloo between CPUs, NCCL between GPUs.

    `tensor`: those of its stage. `stages`: those of its place in the other stages. Both are there once it has joined.
    """

    def __init__(self, grid: RankGrid, rank: int, device: torch.device, meeting: RankMeeting, timeout_s: float) -> None:
        """`device`: of the tensors. `meeting` is closed by `close`.

        An operation that lasts longer than `timeout_s`, or whose peer is gone, raises RuntimeError.
        """
        self.grid, self.rank, self.device = grid, rank, device
        self._meeting, self._timeout_s = meeting, timeout_s
        self._lock, self._joining, self._joined, self._closed = threading.Lock(), False, False, False
        self._slots: Any = None
        self.tensor: ProcessGroup = SingleProcessGroup()
        self.stages = StagePeers(grid, rank, device, timeout_s)

    @property
    def sent_bytes(self) -> int:
        """The number of bytes sent by this rank to all others."""
        return self.tensor.sent_bytes + self.stages.sent_bytes

    def join(self) -> None:
        """Wait until all ranks have joined. Raises ExecutorLost."""
        self._joining = True
        try:
            self._join()
            self._joined = True
        except RuntimeError as error:
            raise ExecutorLost(f"the {self.grid.size} ranks of the model did not meet: {error}") from error
        finally:
            with self._lock:
                self._joining, closed = False, self._closed
            if closed:
                self._leave()

    def _join(self) -> None:
        grid = self.grid
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = self._meeting.interface
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo", store=self._meeting.open_store(grid.size), rank=self.rank,
            world_size=grid.size, timeout=timedelta(seconds=self._timeout_s),
        )  # fmt: skip
        if grid.tensor > 1:
            self.tensor = TensorGroup(self._group_of_stage(), grid.tensor_rank_of(self.rank), grid.tensor)
        if grid.stages > 1:
            self.stages.open(self._group(None))

    def _group_of_stage(self) -> dist.ProcessGroup | None:
        if self.grid.stages == 1:
            return None
        groups = [self._group(self.grid.ranks_of_stage(stage)) for stage in range(self.grid.stages)]
        return groups[self.grid.stage_of(self.rank)]

    def _group(self, ranks: list[int] | None) -> dist.ProcessGroup | None:
        """Make a group; every rank makes each, in the same order. None: of all ranks. It is good for its members."""
        group = dist.new_group(ranks, timeout=timedelta(seconds=self._timeout_s))
        return group if isinstance(group, dist.ProcessGroup) else None

    def native_slots(self, native: ctypes.CDLL, slot_bytes: int) -> Any:
        """Make the slots, of `slot_bytes` at most, that native steps of this rank's stage exchange (`RankMeeting`)."""
        assert isinstance(self.tensor, TensorGroup), "one rank has nothing to exchange"
        stage = self.grid.stage_of(self.rank)
        self._slots = self._meeting.slots(native, self.tensor, stage, slot_bytes, self._timeout_s)
        return self._slots

    def end_waits(self) -> None:
        """Stop waiting for others inside a native step: a rank is lost. Any thread."""
        if self._slots is not None:
            self._slots.end()

    def close(self) -> None:
        """Leave the group, to be free for a new group. If a thread is joining it, leave afterwards."""
        with self._lock:
            joining, self._closed = self._joining, True
        if not joining:
            self._leave()

    def _leave(self) -> None:
        self.tensor, self._slots = SingleProcessGroup(), None
        self.stages.close()
        if self._joined:
            dist.destroy_process_group()
        self._meeting.close()


class TensorGroup:
    """A ProcessGroup of the ranks of one stage (`model.tensor_parallel`). `group`: None for all ranks."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._group, self.rank, self.size, self.sent_bytes = group, rank, size, 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        self.sent_bytes += 2 * (self.size - 1) * x.nbytes // self.size
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        self.sent_bytes += (self.size - 1) * x.nbytes
        return out.view(self.size, *x.shape)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.rank:
            dist.gather(x.contiguous(), group=self._group, group_dst=0)
            self.sent_bytes += x.nbytes
            return None
        out = x.new_empty(self.size, *x.shape)
        dist.gather(x.contiguous(), list(out.unbind()), group=self._group, group_dst=0)
        return out

    def broadcast(self, x: Rows) -> torch.Tensor:
        x = torch.as_tensor(x).contiguous()
        dist.broadcast(x, group=self._group, group_src=0)
        self.sent_bytes += 0 if self.rank else x.nbytes
        return x

    def fetch_slots(self, slots: list[int], n_bytes: int, to_root: bool) -> None:
        """Fetch the first bytes of the other ranks' slots, at these addresses, for native steps (`FetchedSlots`).

        Raises RuntimeError.
        """
        views = [
            torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=torch.uint8) for address in slots
        ]
        local = views[self.rank]
        if not to_root:
            dist.all_gather(views, local.clone(), group=self._group)
            self.sent_bytes += (self.size - 1) * n_bytes
        elif self.rank:
            dist.gather(local, group=self._group, group_dst=0)
            self.sent_bytes += n_bytes
        else:
            dist.gather(local.clone(), views, group=self._group, group_dst=0)


class StagePeers:
    """The Peers of a pipeline channel: the ranks of this place in every stage.

    Up and down are two groups: NCCL would carry out what two ranks send each other, both ways, in turn. A stage that
    sends its next hidden rows before it takes logits, beside one that does the opposite, would wait for ever.
    """

    def __init__(self, grid: RankGrid, rank: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size, self.sent_bytes = grid.stage_of(rank), grid.stages, 0
        self.tensor_rank = grid.tensor_rank_of(rank)
        self._grid, self._device, self._timeout_s = grid, device, timeout_s
        self._down: dist.ProcessGroup | None = None

    def open(self, down: dist.ProcessGroup | None) -> None:
        self._down = down

    def send(self, x: Rows, receiver: int) -> Transfer:
        """Begin to send a tensor."""
        x = torch.as_tensor(x).contiguous()
        self.sent_bytes += x.nbytes
        work = dist.isend(x, self._peer(receiver), group=self._way(self.rank, receiver))
        return Transfer(x, _begun(work), self._timeout_s)

    def receive(self, shape: tuple[int, ...], source: int) -> Transfer:
        """Begin to receive a tensor, fp32. Several from one rank arrive in the order in which they were sent."""
        x = torch.empty(shape, device=self._device)
        work = dist.irecv(x, self._peer(source), group=self._way(source, self.rank))
        return Transfer(x, _begun(work), self._timeout_s)

    def close(self) -> None:
        self._down = None

    def _peer(self, stage: int) -> int:
        return self._grid.rank_of(stage, self.tensor_rank)

    def _way(self, source: int, receiver: int) -> dist.ProcessGroup | None:
        return None if source < receiver else self._down


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is no rank of the group"
    return work


def device_of(kind: str, rank: int) -> torch.device:
    """Return `cpu`, or the GPU of this rank."""
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
