"""How much an iteration of a runner takes that was given no numbers: what the memory of its device has room for.

The most sequences are those that KV pages hold at a usual length; a scheduler gives a runner no more of them than its
measured steps are good for (`Profile.best_batch`). The most tokens are those whose activations take a small part of
what weights leave; a measured step keeps prompts within its time (`CHUNK_TIME_MS`). The ranges are those of vLLM's
defaults for its server.
"""

from collections.abc import Callable
from typing import NamedTuple

from weft_runner.model.memory_estimate import MemoryLimit
from weft_runner.settings import HOST_MIB, MAX_BATCH_TOKENS, MAX_PREFILLS, MAX_SEQUENCES

SEQUENCES = (256, 512, 1024)  # of a GPU
BATCH_TOKENS = (2048, 4096, 8192)
USUAL_TOKENS = 512  # of a sequence
STEP_SHARE = 16  # the part of what weights leave that a step's activations may take
HOST_SHARE = 4  # the part of a container's memory that copies of adapters and KV may take
MAX_HOST_MIB = 64 << 10


class StepLimits(NamedTuple):
    """`prefills`: prompts that an iteration works on."""

    sequences: int
    batch_tokens: int
    prefills: int


WITHOUT_GPU = StepLimits(MAX_SEQUENCES, MAX_BATCH_TOKENS, MAX_PREFILLS)


def gpu_step_limits(left: int, kv_token_bytes: int, step_bytes: Callable[[int], int]) -> StepLimits:
    """Choose for a GPU that has `left` bytes beside weights. `step_bytes`: what a step of that many tokens works on."""
    sequences = _largest(SEQUENCES, lambda most: most * USUAL_TOKENS * kv_token_bytes <= left)
    tokens = _largest(BATCH_TOKENS, lambda most: step_bytes(most) * STEP_SHARE <= left)
    return StepLimits(sequences, tokens, sequences)


def host_mib(memory: MemoryLimit, gpus: int) -> int:
    """Choose for a runner beside a GPU. `gpus`: runners of this machine, one a GPU; a container is of one runner."""
    share = memory.of_bytes // (HOST_SHARE if memory.own else HOST_SHARE * max(1, gpus))
    return max(HOST_MIB, min(share, memory.n_bytes // 2, MAX_HOST_MIB << 20) >> 20)


def _largest(sizes: tuple[int, ...], fits: Callable[[int], bool]) -> int:
    """The largest that fits; the smallest where none does."""
    return max(filter(fits, sizes), default=sizes[0])
