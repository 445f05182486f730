"""The layers of a decoder-only model, once for all torch executors: what runs after what. How it runs is `Operators`.

Everything but attention works on a step's flattened tokens [T, ...] (ORCA, section 4.3). The residual stream belongs to
the operators: adding a projection's output to it and taking its norm is one operator, so that it can be one kernel.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from weft_runner.model.executor import LayerDone
from weft_runner.model.lora import DOWN, GATE_UP, OUT, QKV
from weft_runner.model.weights import LayerWeights


class Operators(Protocol):
    """Operators of one prepared step, which they hold, with its residual stream [T, H]. Names of sites: `model.lora`.

    With tensor parallelism each works on its rank's part of heads and inner features; what `project` returns at OUT and
    DOWN is summed over the ranks, so that the residual stream is whole, and the same, on every rank.
    """

    def add_norm(self, y: Tensor | None, weight: Tensor | None) -> Tensor:
        """The residual stream += y [T, H] (None: it stays); its norm [T, H]; `weight` None: as it is."""
        ...

    def norm(self, y: Tensor, weight: Tensor) -> Tensor:
        """The norm [T, H] of a projection's output."""
        ...

    def project(self, x: Tensor, weight: Tensor, layer: int, site: int, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times weight [out, in], with the adapters that the step's plan names: [T, out].

        Good for the consumer in `run_layers` alone, which may have to add the adapters' part itself.
        """
        ...

    def attention(self, qkv: Tensor, layer: int, weights: LayerWeights) -> Tensor:
        """[T, (heads + 2 kv_heads) * D]: q and k normed and rotated, k and v into their pages.

        Then q over each token's context, the layer's window of it: [T, heads * D].
        """
        ...

    def gate(self, gate_up: Tensor, layer: int) -> Tensor:
        """[T, 2 I] -> act(gate) * up [T, I]; of an MLP without a gate [T, I] -> act(up)."""
        ...

    def end(self, y: Tensor | None) -> Tensor:
        """The residual stream with the last layer's output (None: there was no layer): hidden [T, H]."""
        ...


class LayerSource(Protocol):
    """Weights by layer. What is in a context may be elsewhere, or gone, outside of it."""

    def layer(self, index: int) -> AbstractContextManager[LayerWeights]: ...


def run_layers(ops: Operators, weights: LayerSource, first: int, last: int, layer_done: LayerDone | None) -> Tensor:
    """Layers [first, last): hidden [T, H], not normed. The residual stream is what `first` reads."""
    y: Tensor | None = None
    for layer in range(first, last):
        with weights.layer(layer) as w:
            y = run_layer(ops, w, layer, y)
        if layer_done is not None:
            layer_done(layer)
    return ops.end(y)


def run_layer(ops: Operators, w: LayerWeights, layer: int, y: Tensor | None) -> Tensor:
    """What a layer adds to the residual stream [T, H], which has it later. `y`: of the layer before (None: none)."""
    qkv = ops.project(ops.add_norm(y, w.attention_norm), w.qkv, layer, QKV, w.qkv_bias)
    y = ops.project(ops.attention(qkv, layer, w), w.o, layer, OUT, w.o_bias)
    if w.attention_post_norm is not None:
        y = ops.norm(y, w.attention_post_norm)
    gate_up = ops.project(ops.add_norm(y, w.mlp_norm), w.gate_up, layer, GATE_UP, w.gate_up_bias)
    y = ops.project(ops.gate(gate_up, layer), w.down, layer, DOWN, w.down_bias)
    return y if w.mlp_post_norm is None else ops.norm(y, w.mlp_post_norm)


def cos_sin(positions: Tensor, inverse: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """positions [T] -> cos, sin [T, 1, R], times `factor`, to be shared by all heads of a step."""
    angles = positions.to(torch.float32)[:, None] * inverse
    both = torch.cat((angles, angles), dim=-1)[:, None, :]
    return both.cos() * factor, both.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], of which cos and sin have the first numbers, rotated by its position.

    Halves are paired as in transformers, not neighbours.
    """
    size = cos.shape[-1]
    first, rest, half = x[..., :size], x[..., size:], size // 2
    turned = torch.cat((-first[..., half:], first[..., :half]), dim=-1)
    rotated = torch.addcmul(first * cos, turned, sin)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
