"""How many KV pages a runner has that was given no number: what a share of the memory holds beside all else.

As vLLM's `gpu_memory_utilization`: the share is of all the memory, and what weights, tables of adapters, steps and
others take of it is not for pages. Nothing is loaded yet, so that a share that is too small ends the start at once.
"""

from collections.abc import Callable

from weft_runner.errors import KvCacheTooSmall
from weft_runner.model.memory_estimate import GIB, MemoryEstimate, MemoryLimit

MOST_PAGES = 1 << 20
ROUND_BITS = 6  # of a number of pages: runners that differ by a few megabytes are of one shape for the scheduler
HOST_SHARE = 4  # a quarter of a container may be copies of KV and adapters beside the pages, if they may be so many

Needs = Callable[[int], MemoryEstimate]  # what serving takes with so many pages; never less with more


def fitting_pages(
    needs: Needs, available: MemoryLimit, fraction: float, *, context: int, page_tokens: int, most: int = MOST_PAGES,
    host_bytes: int = 0,
) -> int:  # fmt: skip
    """The most pages that fit, up to `most`, but no fewer than a sequence of `context` tokens takes.

    `host_bytes`: of copies in the same memory. Raises KvCacheTooSmall.
    """
    beside = max(int((1 - fraction) * available.of_bytes), min(host_bytes, available.of_bytes // HOST_SHARE))
    budget, least = available.n_bytes - beside, -(-context // page_tokens)
    pages = _largest(lambda count: needs(count).total <= budget, max(most, least))
    if pages < least:
        raise KvCacheTooSmall(
            f"--kv-memory-fraction {fraction:g}: a sequence of the model's {context} tokens takes {least} KV pages of "
            f"{page_tokens}, and {pages} fit. With one sequence serving needs {needs(least).by_part()}, and of "
            f"{available.limit} {max(0, budget) / GIB:.2f} GiB may be taken ({available.n_bytes / GIB:.2f} GiB are "
            f"left, {beside / GIB:.2f} GiB of which are kept free). Give it more memory, a larger "
            "memory.fraction, or a number of advanced.kvPages, which then bounds the context"
        )
    return max(least, _rounded(pages))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if all below it do; 0: none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _rounded(pages: int) -> int:
    """Down to ROUND_BITS significant bits: at most a thirty-second less."""
    shift = max(0, pages.bit_length() - ROUND_BITS)
    return pages >> shift << shift
