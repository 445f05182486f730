"""Between a runner's settings and the search: what it asks for a pool, and what its limits are by the plans. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from weft_runner.offload.costs import BlockWork
from weft_runner.offload.plan import OffloadPlan
from weft_runner.offload.policy import MemoryTier
from weft_runner.offload.search import PolicySearch

# Of a block's sequences where nobody says: FlexGen's own, and many tenants.
PROMPT, OUTPUT, ADAPTERS, RANK = 512, 32, 16, 16
MOST_BATCH_TOKENS, MOST_PAGES = 65_536, 1 << 20  # of a pool


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """A runner's: KV pages, sequences at a time, and tokens of a pass."""

    pages: int
    sequences: int
    batch_tokens: int


def usual_work(
    most_positions: int, *, most_adapters: int, most_rank: int, batch_tokens: int, page_tokens: int, pages: int
) -> BlockWork:
    """What a policy is found for. `most_positions`: of the model; `pages`: KV pages that are set (0: none are)."""
    output = max(2, min(OUTPUT, most_positions // 2))
    prompt = max(1, min(PROMPT, most_positions - output))
    return BlockWork(
        prompt, output, min(ADAPTERS, most_adapters), min(RANK, most_rank), batch_tokens=batch_tokens,
        page_tokens=page_tokens, pages=pages,
    )  # fmt: skip


def serving_limits(plans: Mapping[int, tuple[PolicySearch, OffloadPlan]]) -> ServingLimits:
    """With which the ranks do what their plans say. Blocks are sequences, and adapters are in KV pages, too."""
    pages, sequences, tokens = 0, 0, MOST_BATCH_TOKENS
    for search, plan in plans.values():
        work, block = search.work, plan.policy.block
        page_bytes = work.page_tokens * search.sizes.kv_token
        of_adapters = math.ceil(plan.usage[MemoryTier.DEVICE].adapters / page_bytes)
        sequences = block * work.in_flight
        needed = sequences * math.ceil((work.prompt + work.output) / work.page_tokens) + of_adapters
        pages = max(pages, work.pages or needed)
        together = block // plan.prompt_passes  # each rank has chosen its own: the least fits all
        tokens = min(tokens, together * work.prompt + sequences, search.most_tokens)
    return ServingLimits(min(pages, MOST_PAGES), sequences, tokens)
