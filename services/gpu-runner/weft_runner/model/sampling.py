"""Choosing a token: greedy, or one draw from (seed, choice, absolute position), so that a replay chooses the same.

The draw is a counter-based hash (three rounds of SplitMix64's finalizer, Steele et al. 2014): no generator state has to
move with a sequence, and neither batch-mates nor the order of rows can change a draw.
"""

import math

import torch

from weft_runner.core.sequence import Sampling

_MASK = (1 << 64) - 1


def choose_tokens(logits: torch.Tensor, rows: list[tuple[Sampling, int]]) -> list[int | None]:
    """A token for each row of logits [rows, V]; None where the row has no finite maximum (NaN or infinite logits).

    `rows[i]` is (sampling, absolute position of the token to choose).
    """
    best = logits.max(dim=-1)
    peaks, tokens = best.values.tolist(), best.indices.tolist()
    return [
        None
        if not math.isfinite(peaks[i])
        else int(tokens[i])
        if sampling.temperature == 0.0
        else _draw(logits[i], sampling, uniform(sampling.seed, sampling.choice, position))
        for i, (sampling, position) in enumerate(rows)
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments."""
    mixed = _mix(_mix(_mix(seed & _MASK) ^ (choice & _MASK)) ^ (position & _MASK))
    return (mixed >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, sampling: Sampling, draw: float) -> int:
    """Nucleus sampling: the smallest set of likeliest tokens whose mass reaches top_p, then one draw within it."""
    scaled = (logits.double() - logits.max().double()) / sampling.temperature
    ordered = torch.sort(torch.softmax(scaled, dim=-1), descending=True, stable=True)
    mass = torch.cumsum(ordered.values, dim=-1)
    kept = 1 if sampling.top_p <= 0.0 else int(torch.searchsorted(mass, min(sampling.top_p, 1.0) * mass[-1]).item()) + 1
    kept = min(kept, mass.numel())
    index = int(torch.searchsorted(mass[:kept], draw * mass[kept - 1], right=True).item())
    return int(ordered.indices[min(index, kept - 1)].item())


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
