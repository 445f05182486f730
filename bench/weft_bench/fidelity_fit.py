"""Efficiencies from measured points: the likeliest under a prior, robust against points that no model explains.

All engines are fitted as one, then each beside it: an engine that was measured little stays near the others. Sources
(`Point.source`) count alike, however many points they have, up to `SOURCE_POINTS`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft_bench.fidelity_points import Array, Played, Point, play
from weft_sim.performance.roofline import Efficiency


@dataclass(frozen=True, slots=True)
class Prior:
    """A constant before any point is seen: its median, and how far it may be, as a logarithm."""

    median: float
    spread: float


# Kernels' own tables (H200, vLLM 0.24) give: weights 0.83 of the bandwidth, products 0.81 of the peak for long inputs,
# keys and values 0.70 (0.87 at the best tenth), attention of prompts 0.51 with half of that at about 1,000 tokens,
# a sum over ranks 4.5 us. Overheads: tens of microseconds a layer, as launches of a few kernels cost that.
PRIORS = {
    "weights_bandwidth": Prior(0.85, 0.06),
    "kv_bandwidth": Prior(0.78, 0.12),
    "bf16_compute": Prior(0.74, 0.08),
    "fp8_compute": Prior(0.6, 0.12),
    "attention_compute": Prior(0.6, 0.15),
    "short_tokens": Prior(1000.0, 0.2),
    "tile_waves": Prior(0.2, 0.3),
    "layer_us": Prior(30.0, 0.4),
    "step_us": Prior(500.0, 0.5),
    "row_us": Prior(12.0, 0.5),
    "prompt_us": Prior(200.0, 0.5),
    "reduce_us": Prior(8.0, 0.3),
    "reduce_bandwidth": Prior(0.5, 0.25),
    "activation_passes": Prior(20.0, 0.25),
    "request_ms": Prior(20.0, 0.7),
}
TOGETHER = Prior(3.0, 0.05)
PRIOR_WEIGHT = 3.0
SCALES = (0.4, 0.1, 0.1)  # residuals of TTFT, TPOT, end to end beyond which a point counts less and less
SOURCE_POINTS = 40


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants of an engine; `together` belongs to how points were measured, not to the engine."""

    efficiency: Efficiency
    together: float


def fit(points: Sequence[Point]) -> dict[str, Fitted]:
    """The constants of each engine that has points, and of an unknown one, `""`."""
    common = _likeliest(
        points, Fitted(Efficiency(**{name: one.median for name, one in PRIORS.items()}), TOGETHER.median)
    )
    engines = dict.fromkeys(point.backend for point in points)
    return {"": common} | {
        engine: _likeliest([one for one in points if one.backend == engine], common) for engine in engines
    }


def _likeliest(points: Sequence[Point], start: Fitted) -> Fitted:
    from scipy.optimize import least_squares  # here: half a second, which a fit alone needs

    played = play(points, start.efficiency)
    order = [one for group in played for one in group.points]
    counts = Counter(one.source for one in order)
    weights = np.array([min(1.0, SOURCE_POINTS / counts[one.source]) ** 0.5 for one in order])
    spreads = np.array([each.spread for each in (*PRIORS.values(), TOGETHER)])

    def residuals(moved: Array) -> Array:
        far = [
            weights * np.log(ratio) / scale
            for ratio, scale in zip(ratios(played, moved_by(moved)), SCALES, strict=True)
        ]
        return np.concatenate([*far, moved * PRIOR_WEIGHT])

    def moved_by(moved: Array) -> Fitted:
        factors = np.exp(moved * spreads)
        named = zip(PRIORS, factors, strict=False)
        values = {name: getattr(start.efficiency, name) * float(factor) for name, factor in named}
        return Fitted(replace(start.efficiency, **values), start.together * float(factors[-1]))

    found = least_squares(residuals, np.zeros(len(spreads)), loss="soft_l1", max_nfev=30)
    return moved_by(found.x)


def ratios(played: Sequence[Played], fitted: Fitted) -> tuple[Array, Array, Array]:
    """Predicted over measured TTFT, TPOT and end to end, in the order of the groups."""
    order = [one for group in played for one in group.points]
    times = [group.times(fitted.efficiency, fitted.together) for group in played]
    ttft, tpot = (np.concatenate([each[i] for each in times]) for i in (0, 1))
    gaps = np.array([one.mean_gaps for one in order])
    return (
        ttft / np.array([one.ttft_s for one in order]),
        tpot / np.array([one.tpot_s for one in order]),
        (ttft + tpot * gaps) / np.array([one.e2e_s for one in order]),
    )


def toml(fitted: Mapping[str, Efficiency], command: str, about: Sequence[str]) -> str:
    """The constants as a file: four digits, engines by name."""
    lines = [f"# Written by `{command}`.", *(f"# {line}" for line in about)]
    for engine, one in fitted.items():
        lines += ["", f"[engines.{engine}]", *(f"{name} = {getattr(one, name):.4g}" for name in PRIORS)]
    return "\n".join(lines) + "\n"
