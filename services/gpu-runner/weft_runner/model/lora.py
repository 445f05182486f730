"""An adapter's tensors as LoRA sites of the model: stacked by input, at their true ranks. Nothing is merged, ever."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from weft_kernels.lora import LoraSite, LoraSlice
from weft_runner.errors import AdapterInvalid
from weft_runner.model.spec import ModelSpec

# site -> the projections that read its input, in the order of the stacked base matrix
SITES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
QKV, OUT, GATE_UP, DOWN = range(4)
_KEY = re.compile(
    r"base_model\.model\.(model\.layers\.(\d{1,4})\.(?:self_attn|mlp)\.([a-z]+_proj))\.lora_([AB])\.weight", re.ASCII
)


class Scales(Protocol):
    """The part of an adapter's configuration that the tensors do not tell."""

    def scale_of(self, module: str, /) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, of a module such as `model.layers.0.self_attn.q_proj`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """`sites[layer][site]`, None where the adapter leaves a site alone.

    `rank` is the largest true rank, `site_rank` the largest sum of ranks at a stacked site.
    """

    sites: tuple[tuple[LoraSite | None, ...], ...]
    rank: int
    site_rank: int
    n_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scale: float


def build_adapter(
    tensors: Mapping[str, torch.Tensor], scales: Scales, spec: ModelSpec, dtype: torch.dtype = torch.float32
) -> AdapterWeights:
    """PEFT's tensors -> stacked sites. Raises AdapterInvalid: unknown or unpaired tensors, shapes, ranks."""
    pairs = _pairs(tensors, scales, spec, dtype)
    sites = tuple(tuple(_site(pairs, spec, layer, names) for names in SITES) for layer in range(spec.layers))
    present = [site for layer in sites for site in layer if site is not None]
    if not present:
        raise AdapterInvalid("the adapter has no tensors")
    return AdapterWeights(
        sites=sites,
        rank=max(pair.a.shape[0] for pair in pairs.values()),
        site_rank=max(site.a_t.shape[1] for site in present),
        n_bytes=sum(site.n_bytes for site in present),
    )


def _pairs(
    tensors: Mapping[str, torch.Tensor], scales: Scales, spec: ModelSpec, dtype: torch.dtype
) -> dict[tuple[int, str], _Pair]:
    halves: dict[tuple[int, str, str], dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or int(match[2]) >= spec.layers:
            raise AdapterInvalid(f"the model has no module for tensor {key[:200]}")
        halves.setdefault((int(match[2]), match[3], match[1]), {})[match[4]] = tensor
    return {(layer, name): _pair(module, name, ab, scales, spec, dtype) for (layer, name, module), ab in halves.items()}


def _pair(
    module: str, name: str, ab: Mapping[str, torch.Tensor], scales: Scales, spec: ModelSpec, dtype: torch.dtype
) -> _Pair:
    if set(ab) != {"A", "B"}:
        raise AdapterInvalid(f"{module} has no lora_{'B' if 'A' in ab else 'A'}")
    try:
        n_in, n_out = spec.projection(name)
    except KeyError as error:
        raise AdapterInvalid(f"the model has no projection {name}") from error
    a, b = ab["A"], ab["B"]
    rank = a.shape[0]
    if a.shape != (rank, n_in) or b.shape != (n_out, rank) or rank < 1:
        raise AdapterInvalid(f"{module}: A {tuple(a.shape)} and B {tuple(b.shape)} do not fit {n_in} -> {n_out}")
    return _Pair(a.to(dtype), b.to(dtype), scales.scale_of(module))


def _site(
    pairs: Mapping[tuple[int, str], _Pair], spec: ModelSpec, layer: int, names: tuple[str, ...]
) -> LoraSite | None:
    slices: list[LoraSlice] = []
    stacked: list[torch.Tensor] = []
    rank_start = out_start = 0
    for name in names:
        out_end = out_start + spec.projection(name)[1]
        if (pair := pairs.get((layer, name))) is not None:
            rank_end = rank_start + pair.a.shape[0]
            slices.append(LoraSlice(rank_start, rank_end, out_start, out_end, pair.b.t().contiguous(), pair.scale))
            stacked.append(pair.a)
            rank_start = rank_end
        out_start = out_end
    return LoraSite(torch.cat(stacked).t().contiguous(), tuple(slices)) if slices else None
