"""Sampling a token for each row of logits: the rule, and two samplers that follow it to the bit.

**The rule**, in vLLM's order. The row's logits are shifted (`core.sampling`: `logit_bias` is added, tokens that bad
words or `min_tokens` forbid become -inf, then the repetition penalty scales, frequency and presence penalties are taken
off, and the result is rounded to float) and masked (`core.token_mask`: what may not come becomes -inf). At temperature
0 the largest wins, the lowest id among equals. Otherwise tokens are put in order of their shifted logits, largest
first, the lower id first among equals, and their probabilities are softmax(shifted / temperature). `min_p` keeps those
that are at least so likely, measured by the likeliest; `top_k` the first k of them; `top_p` the smallest number of
these that reaches it as a share of their sum; one draw from (seed, choice, absolute position) picks among what is left.
The draw is a counter-based hash (three rounds of SplitMix64's finalizer, Steele et al. 2014): no generator state has to
move with a sequence. Log probabilities are log softmax of the raw logits: before shifts, masks and temperature. A row's
token depends on that row alone; a row that holds a NaN, or whose largest logit is not finite, has none.

**How, exactly.** Probabilities are whole numbers: round(2^b * exp((logit - largest) / temperature)), where b is as
large as keeps the sum over a vocabulary below 2^63 (47 for 49,152 tokens), with an exp made of IEEE multiplications and
additions alone. So sums are exact in any order, the same tokens come out of numpy and of native code at any vector
width, and native code needs no sort. The rounding moves less than vocabulary * 2^-(b+1) of the probability (2^-32 for
49,152 tokens); a token below 2^-(b+1) of the likeliest is never drawn.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.domain.request import Sampling, TokenLogprob
from weft_kernels.cpu.sampling import SAMPLING_ARGS, Sampler
from weft_runner.core.sampling import LogitAdjustments, SampledToken
from weft_runner.core.token_mask import TokenMask, words_of

_MASK, _MAX_INT32 = (1 << 64) - 1, (1 << 31) - 1
_LOG2E = float.fromhex("0x1.71547652b82fep+0")
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
_TAYLOR = [1.0 / math.factorial(n) for n in range(12, -1, -1)]
_FLOOR = -64.0  # exponents below are far below half a unit
_SHARPEST = 1e300  # largest 1 / temperature: finite

Floats = npt.NDArray[np.float32]
Masses = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
_FULL = np.uint32(0xFFFFFFFF)


class SamplingArgs(NamedTuple):
    """How one row's token is sampled. `position`: the absolute one of that token; `shifts`, `mask`: the sequence's.

    `given`: the token is one of the prompt, and its log probability alone is asked for, with `prompt_logprobs` others.
    """

    sampling: Sampling
    position: int
    shifts: LogitAdjustments | None = None
    mask: TokenMask | None = None
    given: int | None = None

    @property
    def n_top(self) -> int | None:
        """Alternatives beside the token's log probability; None: none of them."""
        return self.sampling.top_logprobs if self.given is None else self.sampling.prompt_logprobs

    @property
    def pools(self) -> bool:
        """The row's hidden state is asked for, and no token."""
        return self.sampling.pooling and self.given is None

    @property
    def is_plain(self) -> bool:
        """The likeliest token, and nothing else is asked."""
        raw = self.shifts is None and self.mask is None
        return raw and self.sampling.temperature == 0.0 and self.n_top is None

    @property
    def cuts(self) -> bool:
        """min_p or top_k may keep less than all tokens."""
        return self.sampling.top_k > 0 or self.sampling.min_p > 0.0


def sample(logits: Floats, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
    """A token for each row of logits [rows, V], in numpy; None if the row has no finite maximum."""
    peaks, tokens = logits.max(axis=-1, initial=-math.inf).tolist(), logits.argmax(axis=-1).tolist()
    masks = masks_of(draws, logits.shape[1])
    return [
        None
        if not math.isfinite(peak)
        else SampledToken(token)
        if draw.is_plain
        else _sample_row(logits[i], draw, masks.get(i))
        for i, (peak, token, draw) in enumerate(zip(peaks, tokens, draws, strict=True))
    ]


_sampled = partial(tuple.__new__, SampledToken)  # for every token: its own constructor is a Python function


class NativeSampler:
    """The same tokens from the native library. Owned by the executor's thread."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, logits: Floats, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
        """A token for each row of logits [rows, V], float32 with unit stride inside a row."""
        if not draws:  # numpy gives no rows any stride
            return []
        assert logits.dtype == np.float32, logits.dtype
        assert logits.strides[1] == 4, logits.strides
        stride = logits.strides[0] // 4 if len(logits) > 1 else logits.shape[1]  # numpy gives one row any stride
        whence = logits.ctypes.data, stride, logits.shape[1], len(draws)
        if all(draw.is_plain for draw in draws):
            likeliest = self._sampler.sample(*whence)["token"].tolist()
            return [None if token < 0 else _sampled((token, None, b"")) for token in likeliest]
        masks = masks_of(draws, logits.shape[1])
        rows = np.array([_draw_of(draw, masks.get(row)) for row, draw in enumerate(draws)], SAMPLING_ARGS)
        sampled = self._sampler.sample(*whence, rows)
        asked = any(draw.n_top is not None for draw in draws)
        logprobs = _logprobs_of(sampled) if asked else [None] * len(draws)
        return [
            None if token < 0 else SampledToken(token, logprob if draw.n_top is not None else None)
            for token, logprob, draw in zip(sampled["token"].tolist(), logprobs, draws, strict=True)
        ]


def random_bits(seed: int, choice: int, position: int) -> int:
    """The 53 random bits of a draw, a pure function of its arguments."""
    return _mix(_mix(_mix(seed & _MASK) ^ (choice & _MASK)) ^ (position & _MASK)) >> 11


def masks_of(
    draws: Sequence[SamplingArgs], vocab: int, computing: Callable[[], bool] = lambda: False
) -> dict[int, Words]:
    """The masks of rows that have one: uint32 [ceil(vocab / 32)], rows of one array. One that is late allows nothing.

    It is called once the step's model has been launched: a device computes meanwhile, as far as `computing` says so.
    """
    rows = [(row, draw.mask) for row, draw in enumerate(draws) if draw.mask is not None]
    if not rows:
        return {}
    words = np.full((len(rows), words_of(vocab)), _FULL, np.uint32)
    states = [(mask.grammar, i) for i, (_, mask) in enumerate(rows) if mask.grammar is not None]
    if states:
        states[0][0].fill(states, words.ctypes.data, words.strides[0], computing)
    for i, (_, mask) in enumerate(rows):
        if mask.allowed is not None:
            words[i] &= np.frombuffer(mask.allowed, np.uint32)
    return {row: words[i] for i, (row, _) in enumerate(rows)}


# ---- one row in numpy


def _sample_row(row: Floats, draw: SamplingArgs, mask: Words | None) -> SampledToken | None:
    if draw.given is not None:
        return SampledToken(draw.given, logprob(row, draw.given, draw.n_top or 0))
    shifted = row if draw.shifts is None else _shift(row, draw.shifts)
    if mask is not None:
        possible = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little").astype(bool)
        shifted = np.where(possible, shifted, np.float32(-math.inf))
    if not math.isfinite(shifted.max()):
        return None
    sampling = draw.sampling
    token = int(shifted.argmax()) if sampling.temperature == 0.0 else _drawn(shifted, sampling, draw.position)
    n_top = sampling.top_logprobs
    return SampledToken(token, None if n_top is None else logprob(row, token, n_top))


def _shift(row: Floats, shifts: LogitAdjustments) -> Floats:
    shifted = row.copy()
    tokens = np.frombuffer(shifts.tokens, np.int32)
    inside = (tokens >= 0) & (tokens < len(row))
    tokens = tokens[inside]
    logits = row[tokens].astype(np.float64)
    if shifts.biases is not None and shifts.scales is not None:
        logits, scales = logits + np.frombuffer(shifts.biases)[inside], np.frombuffer(shifts.scales)[inside]
        logits = np.where(logits > 0.0, logits / scales, logits * scales)
    with np.errstate(over="ignore"):  # what is no float leaves the row without a finite maximum, or a token out
        shifted[tokens] = logits + np.frombuffer(shifts.values)[inside]
    return shifted


def _drawn(row: Floats, sampling: Sampling, position: int) -> int:
    """Nucleus sampling (Holtzman et al. 2020, section 3.1) as a full stable sort states it."""
    order = np.argsort(-row, kind="stable")
    mass = np.cumsum(masses(row, 1.0 / sampling.temperature)[order[: _first(row, sampling)]])
    total = int(mass[-1])
    needed = total if sampling.top_p >= 1.0 else min(math.ceil(sampling.top_p * float(total)), total)
    kept = int(mass[np.searchsorted(mass, needed)])
    target = (random_bits(sampling.seed, sampling.choice, position) * kept) >> 53
    return int(order[np.searchsorted(mass, target, side="right")])


def _first(row: Floats, sampling: Sampling) -> int:
    """How many of the likeliest tokens min_p and top_k keep."""
    kept = len(row)
    if sampling.min_p > 0.0:
        exponents = (row.astype(np.float64) - _largest(row)) * min(1.0 / sampling.temperature, _SHARPEST)
        kept = int(np.count_nonzero(exponents >= math.log(sampling.min_p)))
    return min(kept, sampling.top_k or kept)


def logprob(row: Floats, token: int, n_top: int) -> TokenLogprob:
    """Return a token's log probability in a row of raw logits: log softmax in double, returned as float.

    `top` has the n likeliest tokens; those of probability zero are left out.
    """
    spread = math.log(float(masses(row, 1.0).sum()) * 2.0 ** -mass_bits(len(row)))
    logprobs = ((row.astype(np.float64) - _largest(row)) - spread).astype(np.float32)
    top = tuple((t, float(logprobs[t])) for t in _likeliest(row, n_top) if row[t] != -math.inf)
    return TokenLogprob(float(logprobs[token]), top)


def _likeliest(row: Floats, n: int) -> list[int]:
    """The first n of a stable sort, likeliest first, without sorting the whole row."""
    if not n:
        return []
    last = max(0, len(row) - n)
    among = np.flatnonzero(row >= np.partition(row, last)[last])
    return among[np.argsort(-row[among], kind="stable")][:n].tolist()


def mass_bits(vocab: int) -> int:
    """b of this module's text: the likeliest token's mass is 2^b, and a whole vocabulary's is below 2^63."""
    return min(51, 63 - vocab.bit_length())


def masses(row: Floats, inverse_temperature: float) -> Masses:
    """round(2^b * exp((x - largest) * inverse_temperature)) for each x of the row; the largest is finite.

    exp by Cody and Waite's reduction and Taylor's polynomial of degree 12: the operations of `sampling.cpp`, in order.
    """
    y = np.maximum((row.astype(np.float64) - _largest(row)) * min(inverse_temperature, _SHARPEST), _FLOOR)
    k = np.rint(y * _LOG2E)
    r = (y - k * _LN2_HIGH) - k * _LN2_LOW
    p = np.full_like(r, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        p = p * r + coefficient
    return np.rint(np.ldexp(p, k.astype(np.int32) + mass_bits(len(row)))).astype(np.int64)


def _largest(row: Floats) -> float:
    return float(row.max()) + 0.0  # not -0.0: the sign of a zero maximum is not defined


# ---- to and from the native library


def _draw_of(draw: SamplingArgs, mask: Words | None) -> tuple[int | float, ...]:
    """The fields of SAMPLING_ARGS, in its order. The addresses are those of the sequence's own arrays and of `mask`."""
    sampling, n_top = draw.sampling, draw.n_top
    *shifted, n_shifted = (0, 0, 0, 0, 0) if draw.shifts is None else _addresses(draw.shifts)
    whence = sampling.seed & _MASK, sampling.choice & _MASK, draw.position
    kept = sampling.temperature, sampling.top_p, sampling.min_p
    bits = 0 if mask is None else mask.ctypes.data
    last = -1 if n_top is None else n_top, min(sampling.top_k, _MAX_INT32), 0 if draw.given is None else draw.given + 1
    return (*whence, *kept, *shifted, bits, n_shifted, *last)


def _addresses(shifts: LogitAdjustments) -> tuple[int, int, int, int, int]:
    tokens, n_shifted = shifts.tokens.buffer_info()
    biases, scales = (0 if array is None else array.buffer_info()[0] for array in (shifts.biases, shifts.scales))
    return tokens, shifts.values.buffer_info()[0], biases, scales, n_shifted


def _logprobs_of(sampled: npt.NDArray[np.void]) -> list[TokenLogprob | None]:
    columns = (sampled[name].tolist() for name in ("logprob", "n_top", "top_token", "top_logprob"))
    return [
        TokenLogprob(logprob, tuple(zip(tokens[:n], logprobs[:n], strict=True)))
        for logprob, n, tokens, logprobs in zip(*columns, strict=True)
    ]


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
