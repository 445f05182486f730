"""What a step is to the offload cost model."""

from collections.abc import Callable

import numpy as np

from weft_runner.model.step import StepInput
from weft_runner.offload.passes import PassWork
from weft_runner.offload.sizes import ModelSizes


def pass_work(step: StepInput, sizes: ModelSizes, slot_bytes: Callable[[int], int]) -> PassWork:
    """Sum up all layers of `sizes`: keys and pairs are the means over their windows. `slot_bytes`: of an adapter."""
    arrays = step.arrays
    counts = arrays.rows[:, 1] - arrays.rows[:, 0]
    contexts, single = arrays.rows[:, 2] + counts, counts == 1
    whole = np.iinfo(np.int32).max
    windows = np.array([window or whole for window in sizes.windows])
    # each query of a row at position p attends to p + 1 tokens; of a chunk the middle one stands for all
    keys = np.minimum(contexts - (counts - 1) / 2, windows[:, None]).mean(axis=0)
    slots = {*arrays.segments[:, 2].tolist()}
    return PassWork(
        tokens=len(arrays.tokens),
        sampled=len(arrays.sampled),
        keys=float(keys[single].sum()),
        pairs=float((keys * counts)[~single].sum()),
        adapter_bytes=sum(map(slot_bytes, slots)),
    )
