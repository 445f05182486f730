"""What a launched step will choose: its tokens on their way to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft_runner.core.choice import Choice, TokenLogprob
from weft_runner.gpu import device_errors
from weft_runner.model.sampling import Draw

Told = Callable[[int, int, Draw], TokenLogprob | None]  # row, token, draw -> its log probability, where one is wanted


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFlight:
    """`tokens`: int32 [rows] in pinned memory, valid after `landed` (None: at once); -1: the row has no choice."""

    tokens: torch.Tensor
    landed: torch.cuda.Event | None
    draws: Sequence[Draw]
    told: Told

    def choices(self) -> list[Choice | None]:
        if self.landed is not None:
            with device_errors():
                self.landed.synchronize()
        found = enumerate(zip(self.tokens.tolist(), self.draws, strict=True))
        return [None if token < 0 else Choice(token, self.told(i, token, draw)) for i, (token, draw) in found]


def take_off(tokens: torch.Tensor, draws: Sequence[Draw], told: Told) -> DeviceFlight:
    """Copy tokens [rows] to the host behind what computes them. They may be overwritten by what is launched next."""
    if not tokens.is_cuda:
        return DeviceFlight(tokens.clone(), None, draws, told)
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    return DeviceFlight(host, landed, draws, told)
