"""Choices on the device: the same tokens as `model.sampling` on the host, and only they have to be copied back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.domain.request import TokenLogprob
from weft_kernels.triton import sampling as device
from weft_runner.core.sampling import SampledToken
from weft_runner.model.cuda.device import device_errors
from weft_runner.model.sampling import SamplingArgs, random_bits


class GpuSampler:
    """For up to `rows` rows of logits fp32 [rows, V]. Owned by the executor."""

    def __init__(self, rows: int, vocab: int, at: torch.device) -> None:
        self._at = at
        self._sampler = device.DeviceSampler(rows, vocab, at)
        self._tokens = torch.empty(rows, dtype=torch.int32, device=at)
        self._peaks = torch.empty(rows, dtype=torch.float32, device=at)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, -1 where there is none: int32, valid until the next sampling."""
        tokens = self._tokens[: len(logits)]
        device.argmax(logits, tokens, self._peaks[: len(logits)])
        return tokens

    def tokens(
        self, logits: torch.Tensor, draws: Sequence[SamplingArgs], likeliest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each row's token, on the device: int32 [rows], -1 where it has none. Valid until the next sampling.

        `likeliest`: each row's likeliest token, where that is known already.
        """
        if not draws:
            return self._tokens[:0]  # no kernel is launched on nothing
        if all(draw.is_plain for draw in draws):
            return self.likeliest(logits) if likeliest is None else likeliest[: len(draws)]
        return self._draw(logits, draws)

    def _draw(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> torch.Tensor:
        tokens = self._tokens[: len(draws)]
        bits = [random_bits(d.sampling.seed, d.sampling.choice, d.position) for d in draws]
        self._sampler.draw(
            self._shifted(logits, draws), tokens, self._upload(bits, np.int64),
            self._upload([d.sampling.temperature for d in draws], np.float64),
            self._upload([d.sampling.top_p for d in draws], np.float64),
            nucleus=any(d.sampling.top_p < 1.0 for d in draws),
        )  # fmt: skip
        return tokens

    def _shifted(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> torch.Tensor:
        """Logits with biases and penalties, in a copy: log probabilities are of the raw ones."""
        shifts = [(row, s) for row, draw in enumerate(draws) if (s := draw.shifts) is not None and len(s.tokens)]
        if not shifts:
            return logits
        rows = np.concatenate([np.full(len(s.tokens), row, np.int32) for row, s in shifts])
        tokens = np.concatenate([np.frombuffer(s.tokens, np.int32) for _, s in shifts])
        values = np.concatenate([np.frombuffer(s.values, np.float64) for _, s in shifts])
        shifted = torch.empty_like(logits)
        device.shift(shifted, logits, *(self._upload(part, part.dtype) for part in (rows, tokens, values)))
        return shifted

    def _upload(self, values: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
        host = torch.from_numpy(np.array(values, dtype))
        return host.to(self._at, non_blocking=True)


LogprobOf = Callable[
    [int, int, SamplingArgs], TokenLogprob | None
]  # row, token, draw -> its log probability, where one is wanted


@dataclass(frozen=True, slots=True, eq=False)
class GpuStepHandle:
    """`tokens`: int32 [rows] in pinned memory, valid after `landed` (None: at once); -1: the row has no token."""

    tokens: torch.Tensor
    landed: torch.cuda.Event | None
    draws: Sequence[SamplingArgs]
    logprob_of: LogprobOf

    def result(self) -> list[SampledToken | None]:
        if self.landed is not None:
            with device_errors():
                self.landed.synchronize()
        found = enumerate(zip(self.tokens.tolist(), self.draws, strict=True))
        return [
            None if token < 0 else SampledToken(token, self.logprob_of(i, token, draw)) for i, (token, draw) in found
        ]


def copy_to_host(tokens: torch.Tensor, draws: Sequence[SamplingArgs], logprob_of: LogprobOf) -> GpuStepHandle:
    """Copy tokens [rows] to the host behind what computes them. They may be overwritten by what is launched next."""
    if not tokens.is_cuda:
        return GpuStepHandle(tokens.clone(), None, draws, logprob_of)
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    return GpuStepHandle(host, landed, draws, logprob_of)
