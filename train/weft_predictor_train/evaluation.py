"""Honest figures of a length model: each beside the figure of knowing nothing, and of knowing everything.

S3's protocol for packing: reserve R output tokens; R doubles on every overrun until the answer fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.domain.prediction import Prediction
from weft_predictor.core import TARGET

Tokens = NDArray[np.int64]
BUCKETS = 10  # S3, section 3: ten equal buckets over the maximum length


@dataclass(frozen=True, slots=True)
class Packing:
    """The cost of a reservation. `initial`, `final`: tokens reserved over tokens used, before and after doublings. The
    rest is per request."""

    policy: str
    initial: float
    overrun: float
    final: float
    doublings: float


@dataclass(frozen=True, slots=True)
class Report:
    """Scores on held-out rows. `majority`: what always answering the commonest bucket scores."""

    rows: int
    bucket_accuracy: float
    majority: float
    kendall_tau: float
    r2_log: float
    mae_tokens: float
    mae_constant: float
    coverage: float
    pinball: float
    packings: tuple[Packing, ...]


def evaluate(predicted: Sequence[Prediction], used: Tokens, observed: Tokens, *, max_context_tokens: int) -> Report:
    """Compare predictions with the tokens really `used` [n]; `observed` [m]: the lengths that a constant is made of."""
    p50 = np.array([p.p50_tokens for p in predicted], dtype=np.int64)
    p90 = np.array([p.p90_tokens for p in predicted], dtype=np.int64)
    real = np.array([bucket(int(n), max_context_tokens) for n in used])
    policies = {
        f"max {max_context_tokens}": np.full_like(used, max_context_tokens),
        "best constant": np.full_like(used, best_constant(observed)),
        "this model, p90": p90,
        "oracle": used,
    }
    return Report(
        rows=len(used),
        bucket_accuracy=float(np.mean([bucket(int(n), max_context_tokens) for n in p50] == real)),
        majority=float(np.bincount(real).max() / len(real)),
        kendall_tau=_tau(p50, used),
        r2_log=_r2(np.log(p50), np.log(used)),
        mae_tokens=float(np.abs(p50 - used).mean()),
        mae_constant=float(np.abs(np.median(observed) - used).mean()),
        coverage=float(np.mean(used <= p90)),
        pinball=pinball(used, p90, TARGET),
        packings=tuple(packing(policy, reserved, used) for policy, reserved in policies.items()),
    )


def bucket(tokens: int, max_context_tokens: int) -> int:
    """The class of a length in S3: which tenth of the maximum it ends in, 0..9."""
    return min(tokens * BUCKETS // max_context_tokens, BUCKETS - 1)


def packing(policy: str, reserved: Tokens, used: Tokens) -> Packing:
    """Compute what reserving `reserved` [n] costs where `used` [n] >= 1 are needed."""
    final, doublings = np.maximum(reserved, 1), 0
    while (short := final < used).any():
        final = np.where(short, final * 2, final)
        doublings += int(short.sum())
    total = float(used.sum())
    overrun = float(np.mean(reserved < used))
    return Packing(policy, reserved.sum() / total, overrun, final.sum() / total, doublings / len(used))


def best_constant(observed: Tokens) -> int:
    """Find the one reservation that covers the target share of `observed`: a predictor has to beat this."""
    return int(np.quantile(observed, TARGET, method="higher"))


def pinball(used: Tokens, bound: Tokens, level: float) -> float:
    """Compute the mean quantile loss in tokens: what a `level` bound is scored by; lower is better."""
    short = used - bound
    return float(np.maximum(level * short, (level - 1) * short).mean())


def _tau(left: Tokens, right: Tokens) -> float:
    from scipy import stats  # here: half a second, which a measurement alone needs

    result: Any = stats.kendalltau(left, right)
    tau = float(result.statistic)
    return 0.0 if np.isnan(tau) else tau


def _r2(predicted: NDArray[np.float64], real: NDArray[np.float64]) -> float:
    total = float(((real - real.mean()) ** 2).sum())
    return 1.0 - float(((predicted - real) ** 2).sum()) / total if total else 0.0
