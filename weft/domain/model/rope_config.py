"""Rotary embeddings of config.json -> RopeSpec, in transformers' words of any version.

Fields are put together as its configuration classes do it: `rope_scaling` wins over `rope_parameters`, what is in them
over what is beside them, but for the length before scaling. Families whose layers with windows rotate by themselves
have an object for each kind of layer in `rope_parameters`, and `rope_scaling` is of full layers.
"""

import math
from typing import Any, cast

from weft.domain.model.config_fields import flag, integer, invalid, positive, unsupported
from weft.domain.model.families import FULL, SLIDING, Family
from weft.domain.model.spec import RopeSpec
from weft.domain.strict_json import JsonObject
from weft.domain.text import quoted

_LAYERS = {FULL, SLIDING, "attention"}
MAX_BASE = 1e12
MAX_FACTOR = 1 << 20  # of frequencies, and of cos and sin: numbers stay far from the ends of fp32
MAX_LENGTH = 1 << 30
_PARAMETERS, _SCALING, _SHARE = "rope_parameters", "rope_scaling", "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_NUMBERS = ("rope_theta", _SHARE, "factor", "low_freq_factor", "high_freq_factor")
_USUAL_WHERE_NULL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_LONG = ("short_factor", "long_factor")
_NEEDED: dict[object, tuple[str, ...]] = {
    "linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": _LONG, "su": (*_LONG, _ORIGINAL),
}  # fmt: skip
_NEEDS = {"dynamic": ", whose frequencies change with the length of each text"}
_NAMES_OF_LONGROPE = ("longrope", "su", "yarn")  # the latter two in early configurations of its family


def parse_ropes(config: JsonObject, family: Family, head_dim: int, max_positions: int) -> tuple[RopeSpec, ...]:
    """Read the model's rotations: of full layers first, then, if it is another one, of those with windows.

    Raises Refused: ConfigInvalid, UnsupportedModel.
    """
    for name in (_PARAMETERS, _SCALING):
        if not isinstance(config.get(name), dict | None):
            raise invalid(f"{name} is no object")
    if family.sliding_theta is None:
        name = _SCALING if config.get(_SCALING) else _PARAMETERS
        rope = _with_defaults(config.get(name) or {}, config, "rope_theta", family.rope_theta)
        if family.partial:
            rope.setdefault(_SHARE, config.get(_SHARE, 1.0))
        before = _original(config) if _ORIGINAL in config else 0
        return (_rope(name, rope, family, head_dim, max_positions, before),)
    theta, field = family.sliding_theta
    full, own = _by_kind(config)
    full = _with_defaults(full, config, "rope_theta", family.rope_theta)
    own = _with_defaults(own, config, field, theta)
    return tuple(_rope(_PARAMETERS, rope, family, head_dim, max_positions, 0) for rope in (full, own))


def _with_defaults(rope: JsonObject, config: JsonObject, field: str, theta: float) -> JsonObject:
    beside = {_SHARE: config[_SHARE]} if config.get(_SHARE) is not None else {}
    return {"rope_theta": config.get(field, theta) if field else theta} | beside | rope


def _by_kind(config: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Find the objects of full layers and of those with windows."""
    parameters: Any = config.get(_PARAMETERS)
    by_kind = cast("JsonObject", {FULL: {"rope_type": "default"}} if parameters is None else parameters)
    for name, value in by_kind.items():
        if name not in (FULL, SLIDING):
            raise unsupported(f"{_PARAMETERS} has {quoted(name)} for all layers; served are: {FULL}, {SLIDING}")
        if not isinstance(value, dict | None):
            raise invalid(f"{name} is {quoted(value)}, not an object")
        if value and "truncate" in value:
            raise unsupported(f"truncate stands in {name}, where transformers does not read it")
    full, scaling = by_kind.get(FULL), config.get(_SCALING)
    if scaling is not None and full is None:
        raise invalid(f"{_SCALING} scales {FULL}, which {_PARAMETERS} does not have")
    default = {"rope_type": "default"}
    full, own = (default if rope is None else rope for rope in (full, by_kind.get(SLIDING)))
    return full | (scaling or {}), own


def _original(fields: JsonObject) -> int:
    return integer(fields, _ORIGINAL, 1, MAX_LENGTH)


def _rope(
    name: str, rope: JsonObject, family: Family, head_dim: int, max_positions: int, before: int
) -> RopeSpec:  # fmt: skip
    """`before`: the length before scaling, if it stands beside the scaling; 0: it is in it, or the model's."""
    kind = _check(name, rope, family)
    before = before or (_original(rope) if _ORIGINAL in rope else max_positions)
    share = _number(rope, _SHARE, 1.0)
    if share > 1 or (share < 1 and not family.partial):
        raise unsupported(f"{_SHARE} is {share:g}; {family.architecture} rotates whole heads")
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise invalid(f"{_SHARE} is {share:g}: {rotated} of {head_dim} numbers of a head do not pair")
    factor = _number(rope, "factor", 1.0)
    short, long = (_factors(rope, which, rotated // 2) for which in _LONG) if family.partial else ((), ())
    made = RopeSpec(
        theta=positive(rope, "rope_theta"),
        kind=kind,
        factor=factor,
        low_freq_factor=_number(rope, "low_freq_factor", 1.0),
        high_freq_factor=_number(rope, "high_freq_factor", 4.0),
        original_max_positions=before,
        attention_factor=_attention_factor(rope, kind, factor, max_positions, before),
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", absent=True),
        share=share,
        short=short if kind == "longrope" else (),
        long=long if kind == "longrope" else (),
        query_growth=_growth(rope, kind) if family.grows else 0.0,
    )
    if kind in ("yarn", "longrope") and (made.theta == 1 or made.theta > MAX_BASE or before < 2):
        raise invalid(f"rope_theta {made.theta:g} and {_ORIGINAL} {before} have no logarithm to divide by")
    return made


def _growth(rope: JsonObject, kind: str) -> float:
    """Read by how much queries grow, which takes a length before scaling."""
    if kind not in ("yarn", "llama3") and _ORIGINAL not in rope:
        raise invalid(f"{_ORIGINAL} is not there, by whose multiples queries grow")
    return positive(rope, "llama_4_scaling_beta")


def _number(rope: JsonObject, name: str, absent: float) -> float:
    """Read a number above 0, or what it usually is where it is left out; some may be null."""
    missing = rope.get(name) is None if name in _USUAL_WHERE_NULL else name not in rope
    return absent if missing else positive(rope, name)


def _attention_factor(rope: JsonObject, kind: str, factor: float, max_positions: int, before: int) -> float:
    """Factor of cos and sin: YaRN's (arXiv 2309.00071, equation 22), LongRoPE's (arXiv 2402.13753)."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope":
        scale = _number(rope, "factor", max_positions / before)
        usual = 1.0 if scale <= 1 or before <= 1 else math.sqrt(1 + math.log(scale) / math.log(before))
    else:
        both = rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None
        usual = _yarn_scale(factor, positive(rope, "mscale") if both else 1.0)
        usual /= _yarn_scale(factor, positive(rope, "mscale_all_dim")) if both else 1.0
    found = _number(rope, "attention_factor", usual)
    if not 1 / MAX_FACTOR <= found <= MAX_FACTOR:
        raise invalid(f"attention_factor is {found:g}, not a number from 1 / {MAX_FACTOR} to {MAX_FACTOR}")
    return found


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _factors(rope: JsonObject, name: str, count: int) -> tuple[float, ...]:
    """Read a list of LongRoPE, which has its length whether it is used or not; (): there is none."""
    if rope.get(name) is None:
        return ()
    values = cast("list[object]", rope[name]) if isinstance(rope[name], list) else []
    if len(values) != count:
        raise invalid(f"{name} is no list of {count} numbers, one for each frequency")
    return tuple(positive({name: value}, name) for value in values)


def _check(name: str, rope: JsonObject, family: Family) -> str:
    """Check all that an object holds, and return its kind."""
    if rope.keys() & _LAYERS or any(isinstance(value, dict) for value in rope.values()):
        raise unsupported(f"{name} differs from layer to layer; {family.architecture} has one rotation for all layers")
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    named = "longrope" if "longrope" in family.rope_kinds and kind in _NAMES_OF_LONGROPE else kind
    if named not in family.rope_kinds:
        served, needs = ", ".join(family.rope_kinds), _NEEDS.get(str(kind), "")
        raise unsupported(f"{name} has the type {quoted(kind)}{needs}; served in {family.architecture} are: {served}")
    for needed in _NEEDED.get("longrope" if named == "longrope" and kind != "su" else kind, ()):
        if rope.get(needed) is None:
            raise invalid(f"{name} is of the type {kind} and has no {needed}")
    for number in (*_NUMBERS, *_USUAL_WHERE_NULL):
        _number(rope, number, 1.0)
    if named == "llama3" and positive(rope, "low_freq_factor") >= positive(rope, "high_freq_factor"):
        raise invalid(f"{name}: low_freq_factor is not below high_freq_factor")
    return named
