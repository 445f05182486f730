"""Frequencies of rotary position embeddings: transformers' formulas (default, linear, llama3, YaRN, LongRoPE).

They are computed in fp64 and rounded once, so that they follow from the configuration alone: transformers' fp32 rounds
at each step, and differs in the last bits with the version of torch and the CPU.
"""

import math

import numpy as np
import numpy.typing as npt

from weft.domain.model.spec import RopeSpec

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def inverse_frequencies(rope: RopeSpec, head_dim: int, *, long: bool = False) -> Floats:
    """[R / 2] in fp32, where R numbers of a head are rotated; `long`: by LongRoPE's factors of long texts."""
    size = rope.rotated_size(head_dim)
    inverse: Doubles = rope.theta ** (-np.arange(0, size, 2) / size)
    match rope.kind:
        case "linear":
            inverse = inverse / rope.factor
        case "llama3":
            inverse = _llama3(inverse, rope)
        case "yarn":
            inverse = _yarn(inverse, rope, size)
        case "longrope":
            inverse = inverse / np.array(rope.long if long else rope.short)
        case _:
            pass
    return inverse.astype(np.float32)


def _llama3(inverse: Doubles, rope: RopeSpec) -> Doubles:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended (Llama 3.1)."""
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    stretched = np.where(wavelength > low_wavelength, inverse / rope.factor, inverse)
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return np.where(between, blended, stretched)


def _yarn(inverse: Doubles, rope: RopeSpec, size: int) -> Doubles:
    """NTK by parts (YaRN, arXiv 2309.00071, section 3.2).

    Frequencies that turn more than `beta_fast` times within the original length stay, those that turn fewer than
    `beta_slow` times are stretched by `factor`, between them a ramp over their numbers.
    """

    def number(turns: float) -> float:
        return size * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = number(rope.beta_fast), number(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0.0
    stretched = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)
