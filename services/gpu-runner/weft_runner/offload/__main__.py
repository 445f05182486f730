"""`python -m weft_runner.offload < request.json > answer.json`: the search as a process of its own.

A runner that serves starts it once and never imports a solver. Asked is `{"ranks": {RANK: request}}`, of a pipeline or
of rank 0 alone; the answer is `{"plans": {RANK: plan}}`, or `{"error": NAME,
"message": ..., "tier": ..., "short_bytes": ...}` with exit code 1.
"""

import json
import sys

from weft_runner.errors import NoPolicyFits, OffloadError
from weft_runner.offload.plan import plan_json
from weft_runner.offload.search import find_plan, find_plans
from weft_runner.offload.solver import relax
from weft_runner.offload.wire import request_of


def main() -> int:
    try:
        asked = {int(rank): request_of(fields) for rank, fields in json.load(sys.stdin)["ranks"].items()}
        found = find_plans(asked, relax) if len(asked) > 1 else {0: find_plan(asked[0], relax)}
        answer: dict[str, object] = {"plans": {rank: plan_json(plan) for rank, plan in found.items()}}
    except (OffloadError, json.JSONDecodeError) as error:
        answer = {"error": type(error).__name__, "message": str(error)}
        if isinstance(error, NoPolicyFits):
            answer |= {"tier": error.tier, "short_bytes": error.short_bytes}
    json.dump(answer, sys.stdout)
    return "error" in answer


if __name__ == "__main__":
    sys.exit(main())
