"""Steps that compute nothing of interest: for compiling kernels before the first request needs them."""

from collections.abc import Callable, Iterator

from weft_kernels.plan import Segment, SegmentPlan
from weft_kernels.triton.lora import chunk_bucket
from weft_runner.model.step import Step, StepRow


def blank_steps(tokens: int, block_m: Callable[[int], int], page_tokens: int) -> Iterator[Step]:
    """For each size of chunks and each bucket of their number that steps of up to `tokens` tokens can have, one.

    All tokens but one are a prompt's. They name slot 0, and lie on page 0.
    """
    seen: set[tuple[int, int]] = set()
    powers = [1 << i for i in range(tokens.bit_length())]
    for n_tokens in sorted({*powers, *(power - 1 for power in powers[1:]), tokens}):
        block = block_m(n_tokens)
        for bucket in {chunk_bucket(n) for n in range(-(-n_tokens // block), n_tokens + 1)}:
            if (block, bucket) not in seen:
                seen.add((block, bucket))
                yield _blank_step(n_tokens, bucket // 4 + 1, page_tokens)


def _blank_step(n_tokens: int, segments: int, page_tokens: int) -> Step:
    """`segments`: at least so many chunks, if there are so many tokens."""
    ends = sorted({*range(1, min(segments, n_tokens)), n_tokens})
    plan = SegmentPlan(n_tokens, tuple(Segment(a, b, 0, 1) for a, b in zip([0, *ends], ends, strict=False)))
    pages = (0,) * -(-n_tokens // page_tokens)
    bounds = [(0, n_tokens - 1), (n_tokens - 1, n_tokens)] if n_tokens > 1 else [(0, 1)]
    rows = tuple(StepRow(start, end, 0, pages, samples=end == n_tokens) for start, end in bounds)
    return Step([0] * n_tokens, rows, plan)
