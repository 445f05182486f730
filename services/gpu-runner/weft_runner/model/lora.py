"""An adapter's tensors as LoRA sites of the model: stacked by input, at their true ranks. Nothing is merged, ever."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.domain.model.adapter import LoraTensors, pair_tensors
from weft.domain.model.config import ModelSpec
from weft.domain.model.errors import Refused
from weft_runner.errors import AdapterInvalid
from weft_runner.model.arrays import BFLOAT16, FLOAT16, FLOAT32, Array

# site -> the projections that read its input, in the order of the stacked base matrix
SITES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
QKV, OUT, GATE_UP, DOWN = range(4)
DTYPES = {FLOAT32, FLOAT16, BFLOAT16}


class Scales(Protocol):
    """The part of an adapter's configuration that is not in its tensors."""

    def scale_of(self, module: str, rank: int, /) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, of a module such as `model.layers.0.self_attn.q_proj`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """One adapted projection, y += scale * B (A x), in the dtype the adapter is stored in.

    With tensor parallelism what one device has of it (`model.partition`): `a` may have some of the r rows alone.
    """

    projection: str
    a: Array  # [r, in]
    b: Array  # [out, r]
    scale: float
    n_in: int
    n_out: int
    rank: int
    out_start: int = 0  # where b's outputs begin in those of the base here


AdapterPairs = tuple[tuple[tuple[LoraPair, ...], ...], ...]  # [layer][site], projections in the order of `SITES`


def adapter_pairs(tensors: Mapping[str, Array], scales: Scales, spec: ModelSpec) -> AdapterPairs:
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


def _pair(pair: LoraTensors[Array], scales: Scales, spec: ModelSpec) -> LoraPair:
    a, b, module, rank = pair.a, pair.b, pair.module, pair.rank
    pair.check_shapes(spec)
    if strange := {a.dtype, b.dtype} - DTYPES:
        raise AdapterInvalid(f"{module} is {strange.pop()}; served are float32, float16 and bfloat16")
    return LoraPair(pair.projection, a, b, scale_of(scales, module, rank), *spec.projection(pair.projection), rank)


def scale_of(scales: Scales, module: str, rank: int) -> float:
    """Return the factor of a module's update. Raises AdapterInvalid where it is no number."""
    scale = scales.scale_of(module, rank)
    if not math.isfinite(scale):
        raise AdapterInvalid(f"{module} has the scale {scale}")
    return scale
