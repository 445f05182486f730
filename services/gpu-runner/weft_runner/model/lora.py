"""An adapter's tensors as LoRA sites of the model: stacked by input, at their true ranks. Nothing is merged, ever."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.domain.model.adapter import LoraTensors, pair_tensors
from weft.domain.model.errors import Refused
from weft.domain.model.families import Family
from weft.domain.model.spec import ModelSpec
from weft_runner.errors import AdapterInvalid
from weft_runner.model.arrays import BFLOAT16, FLOAT16, FLOAT32, Array

DTYPES = {FLOAT32, FLOAT16, BFLOAT16}
# site -> the projections that read its input, in the order of the stacked base matrix
SITES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
QKV, OUT, GATE_UP, DOWN = range(4)


def sites_of(family: Family) -> tuple[tuple[str, ...], ...]:
    """Name the projections of each site that a family has."""
    return tuple(tuple(name for name in names if name in family.projections) for names in SITES)


class Scales(Protocol):
    """The part of an adapter's configuration that is not in its tensors."""

    def scale_of(self, module: str, rank: int, /) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, of a module such as `model.layers.0.self_attn.q_proj`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """One adapted projection, y += scale * B (A x), in the dtype the adapter is stored in.

    With tensor parallelism what one device has of it (`model.partition`): `a` may have some of the r rows alone.
    `module`: the name by which its configuration has its scale.
    """

    projection: str
    a: Array  # [r, in]
    b: Array  # [out, r]
    scale: float
    n_in: int
    n_out: int
    rank: int
    out_start: int = 0  # where b's outputs begin in those of the base here
    module: str = ""


AdapterPairs = tuple[tuple[tuple[LoraPair, ...], ...], ...]  # [layer][site], projections in the order of `SITES`


def adapter_pairs(tensors: Mapping[str, Array], scales: Scales, spec: ModelSpec) -> AdapterPairs:
    """PEFT's tensors -> what each site of each layer gets: what any executor packs, each in its own way.

    Raises AdapterInvalid: no tensors, unknown or unpaired ones, shapes, ranks, dtypes, scales that are no numbers.
    """
    try:
        pairs = [made for pair in pair_tensors(tensors, spec) for made in _pairs(pair, scales, spec)]
        found = {(layer, made.projection): made for layer, made in pairs}
    except Refused as error:
        raise AdapterInvalid(error.message) from error

    def site(layer: int, names: tuple[str, ...]) -> tuple[LoraPair, ...]:
        return tuple(pair for name in names if (pair := found.get((layer, name))) is not None)

    return tuple(tuple(site(layer, names) for names in sites_of(spec.family)) for layer in range(spec.layers))


def _pairs(pair: LoraTensors[Array], scales: Scales, spec: ModelSpec) -> Iterator[tuple[int, LoraPair]]:
    """Yield (layer, pair) of each projection that a module holds: one A for all, B's rows one behind the other."""
    a, b, module, rank = pair.a, pair.b, pair.module, pair.rank
    pair.check_shapes(spec)
    if strange := {a.dtype, b.dtype} - DTYPES:
        raise AdapterInvalid(f"{module} is {strange.pop()}; served are float32, float16 and bfloat16")
    scale, first = scale_of(scales, pair.trained, rank), 0
    for name in pair.projections:
        n_in, n_out = spec.projection(name)
        own = b[first : first + n_out]
        yield pair.layer, LoraPair(name, a, own, scale, n_in, n_out, rank, module=pair.trained)
        first += n_out


def scale_of(scales: Scales, module: str, rank: int) -> float:
    """Return the factor of a module's update. Raises AdapterInvalid if it is no number."""
    scale = scales.scale_of(module, rank)
    if not math.isfinite(scale):
        raise AdapterInvalid(f"{module} has the scale {scale}")
    return scale
