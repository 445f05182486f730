"""What Punica compared its operator with, on plain matrices: a loop over adapters; gather, then batched products."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

LOOP, GATHER = "Loop", "Gather-BMM"
Adding = Callable[[torch.Tensor, torch.Tensor], None]  # y, x -> y += what the adapters make of x


def baselines(a: torch.Tensor, b: torch.Tensor, rows: Sequence[int], scale: float) -> dict[str, Adding]:
    """Return both. `a` [adapters, rank, inputs], `b` [adapters, rank, outputs]; `rows`: the adapter of each, sorted."""
    index, segments, start = torch.tensor(rows, device=a.device), list[tuple[slice, int]](), 0
    for adapter, group in groupby(rows):
        end = start + len(list(group))
        segments.append((slice(start, end), adapter))
        start = end

    def loop(y: torch.Tensor, x: torch.Tensor) -> None:
        for part, adapter in segments:
            y[part].addmm_(x[part] @ a[adapter].t(), b[adapter], alpha=scale)

    def gather(y: torch.Tensor, x: torch.Tensor) -> None:
        v = torch.bmm(a[index], x[:, :, None]).transpose(1, 2)
        y.add_(torch.bmm(v, b[index]).squeeze(1), alpha=scale)

    return {LOOP: loop, GATHER: gather}
