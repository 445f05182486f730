"""The ridge's batch fit: w = argmin |X w + b - y|^2 + RIDGE |w|^2, by LSQR on the sparse X (0.5 s for 6,000 prompts).

Apart from `ridge.py` because serving does not need scipy, which takes longer to import than everything else together.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import lsqr

from weft_predictor.core.features import Features
from weft_predictor.core.ridge import RIDGE, VARIANCE_FLOOR, Ridge


def fit_ridge(rows: Sequence[Features], target: NDArray[np.float64], dim: int) -> Ridge:
    """Fit `target` [n]. The variances say what n rows taught, so online learning continues from here."""
    matrix, base = _matrix(rows, dim), float(np.mean(target))
    weight = lsqr(matrix, target - base, damp=RIDGE**0.5, atol=1e-5, btol=1e-5, iter_lim=100)[0]
    mass = np.asarray(matrix.multiply(matrix).sum(axis=0)).ravel()
    variance = np.maximum(1.0 / (RIDGE + mass), VARIANCE_FLOOR)
    return Ridge(weight.astype(np.float32), variance.astype(np.float32), base)


def _matrix(rows: Sequence[Features], dim: int) -> "sparse.csr_matrix":
    starts = np.cumsum([0, *(len(row.index) for row in rows)])
    index = np.concatenate([row.index for row in rows])
    value = np.concatenate([row.value for row in rows])
    return sparse.csr_matrix((value, index, starts), shape=(len(rows), dim))
