"""Places for tenants within their share, where others run more than theirs (`policy/queue`, Tenants).

A request that finds no room is assigned beside sequences of the tenant that is farthest beyond its share. Its Start
names them, and the runner parks them, latest first, in one step with admitting the request
(`weft_runner.core.preempt`): nothing waits for a report, and nothing is computed again.
"""

from collections.abc import Sequence
from itertools import islice

from weft.domain.ids import BASE
from weft.domain.request import MAX_PARKS
from weft.domain.runner import RunnerRole
from weft_scheduler.core.model.request import Phase, Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.placement.policy import Choice
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.state import State
from weft_scheduler.core.view import PoolView

MAX_TRIED = 32  # latest sequences of a tenant, whose runners are tried


def place_beside(state: State, pool: Pool, view: PoolView, request: Request) -> tuple[Choice, tuple[str, ...]] | None:
    """Return the runner for a request and the sequences to park for it, as few as possible. None: parking makes no
    room.

    Its tenant stays within its share with it; the one that makes room keeps its own. While lines of batches run it is
    those that leave (`policy/priority`). A runner for which another request waits that was overtaken too often is left
    to that one.
    """
    shares = pool.waiting.shares
    if request.batch or pool.fleet.batch_runners or pool.declared.split or not shares.is_within(request.tenant):
        return None
    if (tenant := shares.farthest_beyond()) is None:
        return None
    # 1. the latest sequences of that tenant, by runner
    by_runner: dict[str, list[str]] = {}
    for request_id in islice(reversed(shares.running[tenant]), MAX_TRIED):
        resumed = state.requests[request_id]
        runner = state.runners.present(resumed.runner)
        if resumed.phase is Phase.RUNNING and runner is not None and _may_park(runner, resumed):
            by_runner.setdefault(runner.id.uuid, []).append(request_id)
    # 2. the first runner on which some of them leave room
    max_parks = min(shares.excess(tenant), MAX_PARKS)
    starved = [starving for starving in pool.waiting.overtaking.starved.values() if starving is not request]
    for uuid, request_ids in by_runner.items():
        runner = state.runners[uuid]
        takes = runner.placeable and runner.role is not RunnerRole.PROMPT and view.could_run(request, runner)
        if takes and not any(view.could_run(starving, runner) for starving in starved):
            parks = _fewest(pool, runner, request, request_ids[:max_parks])
            if parks is not None:
                return Choice(uuid), tuple(parks)
    return None


def _may_park(runner: RunnerAccount, request: Request) -> bool:
    return runner.accounts.parked.may_park(runner.report.sequences, request.id, request.epoch)


def _fewest(pool: Pool, runner: RunnerAccount, request: Request, request_ids: Sequence[str]) -> Sequence[str] | None:
    """Return as few of those sequences as make room for a request on their runner; None: all of them make none.

    None at all where it lacks the pages alone that parked sequences hold.
    """
    spec, accounts, tokens = runner.spec, runner.accounts, request.waiting.tokens
    assert spec is not None, runner.id
    busy = accounts.busy_adapters(pool.adapters.pinned)
    if request.adapter not in (BASE, *busy):
        if len(busy) >= spec.max_adapters:
            return None
        tokens = runner.shape.tokens_with_adapter(tokens, pool.adapters.size(request.adapter)[1])
    lacking = accounts.working_set + 1 - accounts.max_sequences  # no line of a batch runs in the pool
    short = tokens - accounts.free_tokens
    pages = [0] * len(request_ids)
    if short > 0 and spec.swaps:  # the runner takes the pages of who is parked already, then those of these
        sequences = runner.report.sequences
        short -= spec.page_tokens * sum(sequences[request_id].reserved_pages for request_id in accounts.parked.ids)
        pages = [sequences[request_id].reserved_pages for request_id in request_ids]
    for fewest in range(max(0, lacking), len(pages) + 1):
        if short <= spec.page_tokens * sum(pages[:fewest]) and len(accounts.parked.ids) + fewest <= spec.max_sequences:
            return request_ids[:fewest]
    return None
