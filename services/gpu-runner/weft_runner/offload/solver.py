"""The linear program of one case, by HiGHS (scipy). Never imported by a runner that serves.

Unknowns: the shares on the host and on the disk of weights, activations and KV, and for each phase the longest stream
(an auxiliary variable above all of them). Minimised is the time of a block; a case has a fixed block, so that this is
T / bls (FlexGen, equation 1). Constraints: the bytes of each tier, and shares that sum to at most 1.
"""

import numpy as np
from scipy.optimize import linprog

from weft_runner.offload.costs import UNKNOWNS, Case, Linear, longest, memory, prompt_streams, token_streams
from weft_runner.offload.policy import Budgets, MemoryTier
from weft_runner.offload.rounding import Supports

SLACK = 1e-9  # relative: a bound that the solver's tolerance put above the truth would hide a policy
GIB = float(1 << 30)
N = len(UNKNOWNS)


def relax(case: Case, budgets: Budgets, supports: Supports) -> float | None:
    """Return the bound of a case (`search.Relax`)."""
    phases = ((prompt_streams(case), float(case.passes)), (token_streams(case), float(case.work.output - 1)))
    overlap = case.overlap
    goal, constant = np.zeros(N + 2), 0.0
    rows: list[np.ndarray] = []
    limits: list[float] = []
    for i, (streams, times) in enumerate(phases):
        goal[N + i] = overlap * times
        for stream in streams:
            goal[:N] += (1.0 - overlap) * times * np.array(stream.of)
            constant += (1.0 - overlap) * times * stream.constant
        for stream in longest(streams, case.machine.duplex):
            rows.append(_row(stream, auxiliary=i))
            limits.append(-stream.constant)
    for tier, parts in memory(case).items():
        whole = sum((np.array(part.of) for part in parts.values()), np.zeros(N)) / GIB
        rows.append(np.concatenate([whole, [0.0, 0.0]]))
        limits.append((budgets.of(tier) - sum(part.constant for part in parts.values())) / GIB)
    for at in range(0, N, 2):  # what is on the host and on the disk
        pair = np.zeros(N + 2)
        pair[at : at + 2] = 1.0
        rows.append(pair)
        limits.append(1.0)
    found = linprog(goal, np.array(rows), np.array(limits), bounds=_bounds(case, supports), method="highs")
    if not found.success:
        return None
    return (float(found.fun) + constant) * (1.0 - SLACK)


def _row(stream: Linear, auxiliary: int) -> np.ndarray:
    """`stream <= auxiliary variable`."""
    row = np.concatenate([stream.of, [0.0, 0.0]])
    row[N + auxiliary] = -1.0
    return row


def _bounds(case: Case, supports: Supports) -> list[tuple[float, float | None]]:
    """Bounds of each share: 0 if the executor cannot put it, and for the host where it has no memory of its own."""
    host, one = MemoryTier.HOST, case.machine.one_memory
    most = [0.0 if one else 1.0, 1.0]
    for tiers in (supports.activations, supports.kv):
        most += [float(host in tiers and not one), float(MemoryTier.DISK in tiers)]
    least = [0.0] * N
    for at, tiers in ((2, supports.activations), (4, supports.kv)):
        if MemoryTier.DEVICE not in tiers and sum(most[at : at + 2]) == 1.0:
            least[at : at + 2] = most[at : at + 2]
    return [*zip(least, most, strict=True), (0.0, None), (0.0, None)]
