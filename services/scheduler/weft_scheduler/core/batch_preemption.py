"""The preemption of batch requests for interactive ones that wait (`policy/priority`)."""

from collections.abc import Callable, Iterable

from weft.domain.ids import BASE
from weft.domain.runner import RunnerRole
from weft_scheduler.core.effects import BatchPreempted
from weft_scheduler.core.model.request import Phase, Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.priority.claims import Claim
from weft_scheduler.core.policy.priority.victims import BatchSequence, Capacity, Need, select_preempted
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import preempt
from weft_scheduler.core.state import State

MayRun = Callable[[Request, RunnerAccount], bool]


def preempt_batch(state: State, pool: Pool, waiting: Iterable[Request], may_run: MayRun) -> None:
    """Preempt batch requests for waiting interactive requests, and assign the room to the interactive requests.

    `may_run`: as in `batch_victims`.
    """
    victims, claims = batch_victims(state, pool, waiting, may_run)
    for uuid, request_ids in victims.items():
        for request_id in request_ids:
            preempt(state, state.requests[request_id])
        state.emit(BatchPreempted(pool.name, state.runners[uuid].id, tuple(request_ids)))
    old_claims, runners = pool.waiting.claims.by_request, pool.fleet.runners
    pool.waiting.claims.assign(claims)
    changed = pool.waiting.claims.take_released()
    changed |= {claim.uuid for name, claim in claims.items() if old_claims.get(name) != claim}
    if changed := {uuid for uuid in changed if uuid in runners and runners[uuid].accounts.free_tokens}:
        state.mark_schedulable(pool.name, changed)


def batch_victims(
    state: State, pool: Pool, waiting: Iterable[Request], may_run: MayRun
) -> tuple[dict[str, list[str]], dict[str, Claim]]:
    """Return by runner the batch requests to remove, so that as many of `waiting` as possible can be placed.

    Return also the claims: the room that each interactive request has, or is about to have. `may_run`: whether a
    request could be placed on that runner if it were empty.
    """
    having = [pool.fleet.runners[uuid] for uuid in pool.fleet.batch_runners if uuid in pool.fleet.runners]
    runners = {
        account.id.uuid: account for account in having if account.placeable and account.role is not RunnerRole.PROMPT
    }
    if not runners:
        return {}, {}
    requests = _in_turn(state, pool, waiting)
    needs = [_need(pool, request, runners, may_run) for request in requests]
    selected, claims = select_preempted(needs, [_capacity(state, pool, runner) for runner in runners.values()])
    victims: dict[str, list[str]] = {}
    for uuid, request_id in selected:
        victims.setdefault(uuid, []).append(request_id)
    return victims, {request.id: claim for request, claim in zip(requests, claims, strict=True) if claim is not None}


def _in_turn(state: State, pool: Pool, waiting: Iterable[Request]) -> list[Request]:
    """Return the waiting requests in their order of placement.

    Requests that were overtaken too often come first, then requests with a claim. Requests of a tenant that has to
    yield are left out.
    """
    starved, claiming = pool.waiting.overtaking.starved.values(), pool.waiting.claims.by_request
    first = [*sorted(starved, key=lambda request: request.order), *(state.requests[name] for name in claiming)]
    turn = {request.id: request for request in (*(first if state.config.starvation_bound else ()), *waiting)}
    yields = {tenant: pool.waiting.shares.must_yield(tenant) for tenant in {one.tenant for one in turn.values()}}
    return [request for request in turn.values() if not yields[request.tenant]]


def _need(pool: Pool, request: Request, runners: dict[str, RunnerAccount], may_run: MayRun) -> Need:
    n_bytes, tokens = pool.adapters.size(request.adapter)[1], request.waiting.tokens
    on = {
        uuid: (tokens, runner.shape.tokens_with_adapter(tokens, n_bytes))
        for uuid, runner in runners.items()
        if may_run(request, runner)
    }
    claim = pool.waiting.claims.by_request.get(request.id)
    return Need(request.adapter, on, claim.uuid if claim is not None else "")


def _capacity(state: State, pool: Pool, runner: RunnerAccount) -> Capacity:
    """Return the capacity of a runner, free now or soon: its report still includes ended and removed requests."""
    spec = runner.spec
    assert spec is not None, runner.id
    page_tokens, in_kv = spec.page_tokens, dict(runner.report.in_kv())
    stays, ended_tokens, ended, leaving_adapters = list[BatchSequence](), 0, 0, set[str]()
    shared = {*pool.adapters.pinned[: max(0, spec.max_adapters - 1)], BASE}
    ids = dict.fromkeys((*runner.report.sequences, *runner.accounts.unacked))
    for request_id in ids:
        request = state.requests.get(request_id) if request_id in runner.accounts.owned else None
        sequence, assign = runner.report.sequences.get(request_id), runner.accounts.unacked.get(request_id)
        pages = (sequence.reserved_pages if sequence is not None else 0) + (assign.pages if assign is not None else 0)
        if request is None or request.phase is Phase.STOPPING:
            ended_tokens, ended = ended_tokens + pages * page_tokens, ended + 1
            leaving_adapters.update(holder.adapter for holder in (sequence, assign) if holder is not None)
        elif request.batch and request.runner == runner.id:  # not where its prompt alone is computed
            computed = in_kv.get(request_id, 0)
            stays.append(BatchSequence(request_id, request.adapter, pages * page_tokens, computed, request.order[0]))
        else:
            shared.add(request.adapter)
    batch_adapters = {line.adapter for line in stays} - shared
    in_use = len(shared - {BASE}) + len(batch_adapters)
    return Capacity(
        uuid=runner.id.uuid,
        free_tokens=runner.accounts.spare_tokens + ended_tokens,
        free_sequences=spec.max_sequences - len(ids) + ended,
        free_interactive=runner.accounts.max_sequences - (len(ids) - ended - len(stays)),
        free_adapters=spec.max_adapters - in_use,
        shared=shared,
        lines=stays,
        leaving_adapters=leaving_adapters,
    )
