"""Frequencies of rotary position embeddings: transformers' formulas (default, linear, llama3), for every executor.

They are computed in fp64 and rounded once, so that they follow from the configuration alone: transformers' fp32 rounds
at each step, and differs in the last bits with the version of torch and the CPU.
"""

import math

import numpy as np
import numpy.typing as npt

from weft.domain.model.config import ModelSpec, RopeSpec

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def inverse_frequencies(spec: ModelSpec) -> Floats:
    """[D / 2] in fp32."""
    rope, dim = spec.rope, spec.head_dim
    inverse: Doubles = rope.theta ** (-np.arange(0, dim, 2) / dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(inverse, rope)
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
