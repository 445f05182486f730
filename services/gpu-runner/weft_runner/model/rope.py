"""Rotary position embeddings, the same arithmetic as transformers in fp32 (default, linear, llama3)."""

import math

import torch

from weft.domain.model.config import ModelSpec, RopeSpec


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """[D / 2] in fp32."""
    rope, dim = spec.rope, spec.head_dim
    inverse = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim))
    match rope.kind:
        case "linear":
            return inverse / rope.factor
        case "llama3":
            return _llama3(inverse, rope)
        case _:
            return inverse


def _llama3(inverse: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended (Llama 3.1)."""
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > low_wavelength, inverse / rope.factor, inverse)
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(between, blended, stretched)


def cos_sin(positions: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] -> cos, sin [T, 1, D], to be shared by all heads and layers of a step."""
    angles = positions.to(torch.float32)[:, None] * inverse
    both = torch.cat((angles, angles), dim=-1)[:, None, :]
    return both.cos(), both.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] rotated by its position; halves are paired as in transformers, not neighbours."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, turned, sin)
