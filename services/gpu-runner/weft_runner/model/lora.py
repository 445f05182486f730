"""An adapter's tensors as LoRA sites of the model: stacked by input, at their true ranks. Nothing is merged, ever."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.domain.model.adapter import LoraTensors, pair_tensors
from weft.domain.model.config import ModelSpec
from weft.domain.model.errors import Refused
from weft_kernels.lora import LoraSite, LoraSlice
from weft_runner.errors import AdapterInvalid

# site -> the projections that read its input, in the order of the stacked base matrix
SITES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
QKV, OUT, GATE_UP, DOWN = range(4)
DTYPES = {torch.float32, torch.float16, torch.bfloat16}


class Scales(Protocol):
    """The part of an adapter's configuration that is not in its tensors."""

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
class LoraPair:
    """One adapted projection, y += scale * B (A x), in the dtype the adapter is stored in.

    With tensor parallelism what one device has of it (`model.partition`): `a` may have some of the r rows alone.
    """

    projection: str
    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scale: float
    n_in: int
    n_out: int
    rank: int
    out_start: int = 0  # where b's outputs begin in those of the base here


AdapterPairs = tuple[tuple[tuple[LoraPair, ...], ...], ...]  # [layer][site], projections in the order of `SITES`


def adapter_pairs(tensors: Mapping[str, torch.Tensor], scales: Scales, spec: ModelSpec) -> AdapterPairs:
    """PEFT's tensors -> what each site of each layer gets: what any executor packs, each in its own way.

    Raises AdapterInvalid: no tensors, unknown or unpaired ones, shapes, ranks, dtypes, scales that are no numbers.
    """
    try:
        found = {(pair.layer, pair.projection): _pair(pair, scales, spec) for pair in pair_tensors(tensors, spec)}
    except Refused as error:
        raise AdapterInvalid(error.message) from error

    def site(layer: int, names: tuple[str, ...]) -> tuple[LoraPair, ...]:
        return tuple(pair for name in names if (pair := found.get((layer, name))) is not None)

    return tuple(tuple(site(layer, names) for names in SITES) for layer in range(spec.layers))


def stack_adapter(pairs: AdapterPairs, spec: ModelSpec) -> AdapterWeights:
    """Pairs -> stacked sites in fp32, of one device's part or whole. A stage may have none: then its ranks are 0."""
    sites = tuple(tuple(_site(site, names, spec) for site, names in zip(layer, SITES, strict=True)) for layer in pairs)
    present = [site for layer in sites for site in layer if site is not None]
    return AdapterWeights(
        sites=sites,
        rank=max((pair.rank for layer in pairs for site in layer for pair in site), default=0),
        site_rank=max((site.slices[-1].rank_end for site in present), default=0),
        n_bytes=sum(site.n_bytes for site in present),
    )


def _pair(pair: LoraTensors[torch.Tensor], scales: Scales, spec: ModelSpec) -> LoraPair:
    a, b, module = pair.a, pair.b, pair.module
    rank = max(1, a.shape[0] if a.dim() else 0)
    pair.check_shapes(spec, rank)
    if strange := {a.dtype, b.dtype} - DTYPES:
        raise AdapterInvalid(f"{module} is {strange.pop()}; served are float32, float16 and bfloat16")
    return LoraPair(pair.projection, a, b, scale_of(scales, module), *spec.projection(pair.projection), rank)


def scale_of(scales: Scales, module: str) -> float:
    """Raises AdapterInvalid where it is no number."""
    scale = scales.scale_of(module)
    if not math.isfinite(scale):
        raise AdapterInvalid(f"{module} has the scale {scale}")
    return scale


def _site(pairs: tuple[LoraPair, ...], names: tuple[str, ...], spec: ModelSpec) -> LoraSite | None:
    by_name = {pair.projection: pair for pair in pairs}
    slices: list[LoraSlice] = []
    rank_start = out_start = 0
    for name in names:
        if (pair := by_name.get(name)) is not None:
            b_t, begin = pair.b.float().t().contiguous(), out_start + pair.out_start
            slices.append(LoraSlice(rank_start, rank_start + pair.rank, begin, begin + pair.n_out, b_t, pair.scale))
            rank_start += pair.rank
        out_start += spec.projection(name)[1]
    if not slices:
        return None
    return LoraSite(torch.cat([pair.a.float() for pair in pairs]).t().contiguous(), tuple(slices))
