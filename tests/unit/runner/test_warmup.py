"""Before the first request every kernel that a step can need has been compiled: each bucket was met."""

import pytest

from weft_kernels.plan import Segment, SegmentPlan
from weft_kernels.triton import chunks, lora
from weft_runner.model import check_step
from weft_runner.model.cuda.cuda_graphs import warm_up_steps

P = 16


def block_m(n_tokens: int) -> int:
    return 64 if n_tokens >= 128 else 16


@pytest.mark.parametrize("most", [1, 7, 64, 130, 512, 2048])
def test_every_number_of_chunks_falls_into_a_bucket_that_was_met(most):
    met = set()
    for step in warm_up_steps(most, block_m, P):
        check_step(step, P)
        block = block_m(len(step.tokens))
        met.add((block, lora.chunk_bucket(chunks.count_chunks(chunks.chunk_table(step.plan, block)))))
    for n_tokens in range(1, most + 1):
        block = block_m(n_tokens)
        fewest = chunks.count_chunks(chunks.chunk_table(SegmentPlan(n_tokens, (Segment(0, n_tokens, 0, 1),)), block))
        for n_chunks in {fewest, n_tokens, (fewest + n_tokens) // 2}:
            assert (block, lora.chunk_bucket(n_chunks)) in met, (n_tokens, n_chunks)
