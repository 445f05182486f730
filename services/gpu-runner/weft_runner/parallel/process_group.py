"""The ranks of one model, and what they do together: every rank calls the same operations in the same order.

A group counts what it puts on the wire, as ring algorithms do it (those of Gloo and NCCL): of n bytes on each of N
ranks an all-reduce sends 2 (N - 1) / N * n from each, an all-gather (N - 1) * n, a gather n from all but rank 0, a
broadcast n from rank 0; from one rank to another n. The transport's own headers (Gloo: 50 to 600 bytes an operation)
are not counted.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from weft_runner.errors import ExecutorLost


class Transfer:
    """A tensor on its way between two ranks. It is not to be written to, or read, before `wait` has returned."""

    def __init__(self, x: torch.Tensor, work: dist.Work, timeout_s: float) -> None:
        self._x, self._work, self._timeout_s = x, work, timeout_s

    def wait(self) -> torch.Tensor:
        """What was sent, or what came. Raises RuntimeError: not within the timeout, or the other rank is gone.

        Between GPUs it is the device that waits, before whatever is launched next, and NCCL's own watch that keeps
        the time; Gloo has no limit here but the one that is passed.
        """
        if self._x.is_cuda:
            self._work.wait()
        else:
            self._work.wait(timedelta(seconds=self._timeout_s))
        return self._x


class TorchProcessGroup:
    """`torch.distributed`'s default group of this process, on one host: Gloo between CPUs, NCCL between GPUs."""

    def __init__(self, rank: int, size: int, device: torch.device, meeting_fd: int, timeout_s: float) -> None:
        """`device`: of the tensors. `meeting_fd`: a file that only the ranks have open, closed by `close`.

        An operation that lasts longer than `timeout_s`, or whose peer is gone, raises RuntimeError.
        """
        self.device = device
        self.rank, self.size, self.sent_bytes = rank, size, 0
        self._meeting_fd, self._timeout_s, self._joined = meeting_fd, timeout_s, False
        self._down: dist.ProcessGroup | None = None

    def join(self, *, pipelined: bool = False) -> None:
        """Wait for the others. `pipelined`: they will send each other tensors too. Raises ExecutorLost."""
        try:
            self._join()
            if pipelined:
                self._open_way_down()
        except RuntimeError as error:
            raise ExecutorLost(f"the {self.size} ranks of the model did not meet: {error}") from error
        self._joined = True

    def _join(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else Gloo listens wherever the host's name points to
        path = f"/proc/self/fd/{self._meeting_fd}"
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.FileStore(path, self.size),  # pyright: ignore[reportPrivateImportUsage]
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self._timeout_s),
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        self.sent_bytes += 2 * (self.size - 1) * x.nbytes // self.size
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        self.sent_bytes += (self.size - 1) * x.nbytes
        return out.view(self.size, *x.shape)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.rank:
            dist.gather(x.contiguous(), dst=0)
            self.sent_bytes += x.nbytes
            return None
        out = x.new_empty(self.size, *x.shape)
        dist.gather(x.contiguous(), list(out.unbind()), dst=0)
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.broadcast(x, src=0)
        self.sent_bytes += 0 if self.rank else x.nbytes
        return x

    # ---- from one rank to another, beside what all do together

    def _open_way_down(self) -> None:
        """From higher ranks to lower ones: NCCL would carry out what two ranks send each other, both ways, in turn.

        A stage that sends its next hidden rows before it takes logits, beside one that does the opposite, would wait
        for ever.
        """
        down = dist.new_group(timeout=timedelta(seconds=self._timeout_s))
        assert isinstance(down, dist.ProcessGroup), "this process is no rank of the group"
        self._down = down

    def send(self, x: torch.Tensor, to: int) -> Transfer:
        """Begin to."""
        x = x.contiguous()
        self.sent_bytes += x.nbytes
        return Transfer(x, _begun(dist.isend(x, to, group=self._way(self.rank, to))), self._timeout_s)

    def receive(self, shape: tuple[int, ...], source: int) -> Transfer:
        """Begin to; fp32. Several from one rank arrive in the order in which they were sent."""
        x = torch.empty(shape, device=self.device)
        return Transfer(x, _begun(dist.irecv(x, source, group=self._way(source, self.rank))), self._timeout_s)

    def _way(self, source: int, to: int) -> dist.ProcessGroup | None:
        return None if source < to else self._down

    def close(self) -> None:
        """This process may join another group afterwards."""
        self._down = None
        if self._joined:
            dist.destroy_process_group()
        os.close(self._meeting_fd)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is no rank of the group"
    return work


def device_of(kind: str, rank: int) -> torch.device:
    """`cpu`, or the GPU of this rank."""
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
