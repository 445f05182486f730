"""Rotary position embeddings in torch."""

import torch


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
