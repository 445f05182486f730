"""Choices on the device: the same tokens as `model.sampling` on the host, and only they have to be copied back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from weft.domain.request import TokenLogprob
from weft_kernels.triton import sampling as device
from weft_runner.core.sampling import LogitAdjustments, SampledToken
from weft_runner.model.cuda.device import device_errors
from weft_runner.model.pooling import with_hidden
from weft_runner.model.sampling import SamplingArgs, logprob, masks_of, random_bits


class GpuSampler:
    """For up to `rows` rows of logits fp32 [rows, V]. Owned by the executor."""

    def __init__(self, rows: int, vocab: int, at: torch.device) -> None:
        self._at = at
        self._sampler = device.DeviceSampler(rows, vocab, at)
        self._tokens = torch.empty(rows, dtype=torch.int32, device=at)
        self._peaks = torch.empty(rows, dtype=torch.float32, device=at)

    def likeliest(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Write the likeliest token of each row to `tokens`, int32 [rows], which are returned; -1: there is none."""
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
            if likeliest is not None:
                return likeliest[: len(draws)]
            return self.likeliest(logits, self._tokens[: len(logits)])
        return self._draw(logits, draws)

    def _draw(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> torch.Tensor:
        tokens = self._tokens[: len(draws)]
        bits = [random_bits(d.sampling.seed, d.sampling.choice, d.position) for d in draws]
        self._sampler.draw(
            self._truncated(self._shifted(logits, draws), draws), tokens, self._upload(bits, np.int64),
            self._upload([d.sampling.temperature for d in draws], np.float64),
            self._upload([d.sampling.top_p for d in draws], np.float64),
            nucleus=any(d.sampling.top_p < 1.0 for d in draws),
        )  # fmt: skip
        return tokens

    def _shifted(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> torch.Tensor:
        """Logits with biases, penalties and masks, in a copy: log probabilities are of the raw ones."""
        shifts = [(row, s) for row, draw in enumerate(draws) if (s := draw.shifts) is not None and len(s.tokens)]
        masks = masks_of(draws, logits.shape[1], self._until_here(draws))
        if not shifts and not masks:
            return logits
        shifted = self._shift(logits, shifts) if shifts else logits.clone()
        if masks:
            words = np.stack(list(masks.values())).view(np.int32)
            device.mask(shifted, self._upload(list(masks), np.int32), self._upload(words, np.int32))
        return shifted

    def _until_here(self, draws: Sequence[SamplingArgs]) -> Callable[[], bool]:
        """Whether the device still computes what was launched before now."""
        if self._at.type != "cuda" or all(draw.mask is None for draw in draws):
            return lambda: False
        here = torch.cuda.Event()
        here.record()
        return lambda: not here.query()

    def _shift(self, logits: torch.Tensor, shifts: Sequence[tuple[int, LogitAdjustments]]) -> torch.Tensor:
        rows = np.concatenate([np.full(len(s.tokens), row, np.int32) for row, s in shifts])
        tokens = np.concatenate([np.frombuffer(s.tokens, np.int32) for _, s in shifts])
        values = np.concatenate([np.frombuffer(s.values, np.float64) for _, s in shifts])
        shifted, scaled = torch.empty_like(logits), None
        if any(s.scales is not None for _, s in shifts):
            terms = [_scaling(s) for _, s in shifts]
            biases, scales = (np.concatenate([term[i] for term in terms]) for i in range(2))
            scaled = self._upload(biases, np.float64), self._upload(scales, np.float64)
        device.shift(
            shifted, logits, *(self._upload(part, part.dtype) for part in (rows, tokens, values)), scaled=scaled
        )
        return shifted

    def _truncated(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> torch.Tensor:
        """Without what min_p and top_k do not keep, in a copy, if a row that draws has one of them."""
        vocab = logits.shape[1]
        cut = [i for i, draw in enumerate(draws) if draw.cuts and draw.sampling.temperature > 0.0]
        if not cut:
            return logits
        samplings, rows = [draws[i].sampling for i in cut], self._upload(cut, np.int64)
        least = top_k = None
        if any(s.min_p > 0.0 for s in samplings):
            least = self._upload([math.log(s.min_p) if s.min_p > 0.0 else -math.inf for s in samplings], np.float64)
        counts = [s.top_k if s.top_k < vocab else 0 for s in samplings]
        if any(counts):
            top_k = self._upload(counts, np.int64)
        temperature = self._upload([s.temperature for s in samplings], np.float64)
        truncated = device.truncate(logits[rows], temperature, least, top_k, max(counts))
        return logits.index_copy(0, rows, truncated)

    def _upload(self, values: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
        return upload(values, dtype, self._at)


def upload(values: npt.ArrayLike, dtype: npt.DTypeLike, at: torch.device) -> torch.Tensor:
    """Copy from pinned memory: what comes from elsewhere waits for all that was launched before."""
    host = torch.from_numpy(np.array(values, dtype))
    return (host.pin_memory() if at.type == "cuda" else host).to(at, non_blocking=True)


def _scaling(shifts: LogitAdjustments) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Biases before the repetition penalty, and its scales."""
    if shifts.biases is None or shifts.scales is None:
        return np.zeros(len(shifts.tokens)), np.ones(len(shifts.tokens))
    return np.frombuffer(shifts.biases, np.float64), np.frombuffer(shifts.scales, np.float64)


class PromptScores:
    """Log probabilities of given tokens, by the device: log softmax of raw logits in double precision.

    Where more tokens are equally likely than are reported, any of them are. `tokens`: int32 [B], the given ones, -1 for
    those without a finite largest logit and for the other rows.
    """

    def __init__(self, logits: torch.Tensor, draws: Sequence[SamplingArgs], given: Sequence[int]) -> None:
        at = logits.device
        rows, wanted = upload(given, np.int64, at), upload([draws[row].given or 0 for row in given], np.int64, at)
        self._tops = {row: draws[row].n_top or 0 for row in given}
        logprobs = torch.log_softmax(logits[rows].double(), -1)
        values, ids = logprobs.topk(min(max(self._tops.values()), logits.shape[1]))
        self._read = [_host(part) for part in (logprobs.gather(1, wanted[:, None])[:, 0], ids, values)]
        self.tokens = torch.full((len(draws),), -1, dtype=torch.int32, device=at)
        usable = logits[rows].max(-1).values.isfinite()
        self.tokens[rows] = torch.where(usable, wanted, -1).int()

    @cached_property
    def logprobs(self) -> dict[int, TokenLogprob]:
        """Log probabilities by row, once the step is done."""
        columns = zip(self._tops.items(), *(part.tolist() for part in self._read), strict=True)
        return {row: TokenLogprob(own, _top(ids[:n], values[:n])) for (row, n), own, ids, values in columns}


def _top(tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The likeliest first, the lower id first among equals; those of probability zero are left out."""
    possible = [one for one in zip(tokens, logprobs, strict=True) if one[1] > -math.inf]
    return tuple(sorted(possible, key=lambda one: (-one[1], one[0])))


@dataclass(frozen=True, slots=True, eq=False)
class GpuStepHandle:
    """What a step samples, in pinned memory, valid after `landed` (None: at once).

    `tokens`: int32 [rows], -1: the row has none. `read`: raw logits [V] of rows with log probabilities, which the host
    computes as few ask for them; hidden states [H] of those that pool. `scores`: of tokens of prompts.
    """

    tokens: torch.Tensor
    landed: torch.cuda.Event | None
    draws: Sequence[SamplingArgs]
    read: Mapping[int, torch.Tensor]
    scores: PromptScores | None

    def result(self) -> list[SampledToken | None]:
        if self.landed is not None:
            with device_errors():
                self.landed.synchronize()
        found = enumerate(zip(self.tokens.tolist(), self.draws, strict=True))
        tokens = [
            None if token < 0 else SampledToken(token, self._logprob_of(i, token, draw)) for i, (token, draw) in found
        ]
        return with_hidden(tokens, self.draws, lambda row: self.read[row].numpy())

    def _logprob_of(self, row: int, token: int, draw: SamplingArgs) -> TokenLogprob | None:
        if draw.given is not None and self.scores is not None:
            return self.scores.logprobs[row]
        n_top = draw.sampling.top_logprobs
        return None if n_top is None else logprob(self.read[row].numpy(), token, n_top)


def copy_to_host(
    tokens: torch.Tensor, draws: Sequence[SamplingArgs], read: Mapping[int, torch.Tensor], scores: PromptScores | None
) -> GpuStepHandle:
    """Copy to the host behind what computes them. Tokens and logits may be overwritten by what is launched next."""
    here, rows = _host(tokens), {row: _host(values) for row, values in read.items()}
    if not tokens.is_cuda:
        return GpuStepHandle(here, None, draws, rows, scores)
    landed = torch.cuda.Event()
    landed.record()
    return GpuStepHandle(here, landed, draws, rows, scores)


def _host(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, once what was launched before is done."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
