"""`python -m weft_runner.offload < pools.json > answers.json`: the search as a process of its own.

A runner that serves starts it once and never imports a solver. Asked is `{"pools": [{RANK: request}, ...]}`, of
pipelines or of rank 0 alone; the answer is `{"answers": [...]}` with `{"plans": {RANK: plan}}` of each, or where no
policy fits `{"message": ..., "tier": ..., "short_bytes": ...}`, which ends the answers if it is the first. What is no
question is answered by `{"error": NAME, "message": ...}` with exit code 1.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from weft_runner.errors import NoPolicyFits, OffloadError
from weft_runner.offload.search import find_plan, find_plans
from weft_runner.offload.solver import relax
from weft_runner.offload.wire import request_of


def main() -> int:
    try:
        answer: dict[str, Any] = {"answers": list(_answers(json.load(sys.stdin)["pools"]))}
    except (OffloadError, json.JSONDecodeError) as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    json.dump(answer, sys.stdout)
    return "error" in answer


def _answers(pools: Sequence[Mapping[str, Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The first pool is what the others are compared with: without a policy for it theirs say nothing."""
    for place, ranks in enumerate(pools):
        asked = {int(rank): request_of(fields) for rank, fields in ranks.items()}
        try:
            found = find_plans(asked, relax) if len(asked) > 1 else {0: find_plan(asked[0], relax)}
        except NoPolicyFits as error:
            yield {"message": str(error), "tier": error.tier, "short_bytes": error.short_bytes}
            if not place:
                return
        else:
            yield {"plans": {rank: asdict(plan) for rank, plan in found.items()}}


if __name__ == "__main__":
    sys.exit(main())
