"""The preemption of batch requests for interactive ones that wait (`policy/priority`)."""

from collections.abc import Callable, Iterable

from weft.domain.ids import BASE
from weft.domain.runner import RunnerRole
from weft_scheduler.core.effects import BatchPreempted
from weft_scheduler.core.model.request import Phase, Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.priority.victims import BatchSequence, Capacity, Need, select_preempted
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import preempt
from weft_scheduler.core.state import State

MayRun = Callable[[Request, RunnerAccount], bool]


def preempt_batch(state: State, pool: Pool, waiting: Iterable[Request], may_run: MayRun) -> None:
    """Order off the batch requests whose capacity interactive ones wait for. `may_run`: as `batch_victims`."""
    for uuid, request_ids in batch_victims(state, pool, waiting, may_run).items():
        for request_id in request_ids:
            preempt(state, state.requests[request_id])
        state.emit(BatchPreempted(pool.name, state.runners[uuid].id, tuple(request_ids)))


def batch_victims(state: State, pool: Pool, waiting: Iterable[Request], may_run: MayRun) -> dict[str, list[str]]:
    """Return by runner the batch requests that have to leave so that as many of `waiting` as possible can be placed.

    `may_run`: whether a request could be placed on that runner if it were empty.
    """
    having = [pool.fleet.runners[uuid] for uuid in pool.fleet.batch_runners if uuid in pool.fleet.runners]
    runners = {one.id.uuid: one for one in having if one.placeable and one.role is not RunnerRole.PROMPT}
    if not runners:
        return {}
    needs = [_need(pool, request, runners, may_run) for request in waiting]
    victims: dict[str, list[str]] = {}
    for uuid, request_id in select_preempted(needs, [_capacity(state, pool, runner) for runner in runners.values()]):
        victims.setdefault(uuid, []).append(request_id)
    return victims


def _need(pool: Pool, request: Request, runners: dict[str, RunnerAccount], may_run: MayRun) -> Need:
    n_bytes, tokens = pool.adapters.size(request.adapter)[1], request.waiting.tokens
    on = {
        uuid: (tokens, runner.shape.tokens_with_adapter(tokens, n_bytes))
        for uuid, runner in runners.items()
        if may_run(request, runner)
    }
    return Need(request.adapter, on)


def _capacity(state: State, pool: Pool, runner: RunnerAccount) -> Capacity:
    """Return what is free on a runner or about to be: its report still has requests that ended or were ordered off."""
    spec = runner.spec
    assert spec is not None, runner.id
    page_tokens, in_kv = spec.page_tokens, dict(runner.report.in_kv())
    stays, ended_tokens, ended = list[BatchSequence](), 0, 0
    shared = {*pool.adapters.pinned, BASE}
    ids = dict.fromkeys((*runner.report.sequences, *runner.accounts.unacked))
    for request_id in ids:
        request = state.requests.get(request_id) if request_id in runner.accounts.owned else None
        sequence, assign = runner.report.sequences.get(request_id), runner.accounts.unacked.get(request_id)
        pages = (sequence.reserved_pages if sequence is not None else 0) + (assign.pages if assign is not None else 0)
        if request is None or request.phase is Phase.STOPPING:
            ended_tokens, ended = ended_tokens + pages * page_tokens, ended + 1
        elif request.batch and request.runner == runner.id:  # not where its prompt alone is computed
            computed = in_kv.get(request_id, 0)
            stays.append(BatchSequence(request_id, request.adapter, pages * page_tokens, computed, request.order[0]))
        else:
            shared.add(request.adapter)
    batch_adapters = {one.adapter for one in stays} - shared
    in_use = len(shared - {BASE}) + len(batch_adapters)
    return Capacity(
        uuid=runner.id.uuid,
        free_tokens=runner.accounts.free_tokens + ended_tokens,
        free_sequences=spec.max_sequences - len(ids) + ended,
        free_interactive=runner.accounts.max_sequences - (len(ids) - ended - len(stays)),
        free_adapters=max(0, spec.max_adapters - in_use),
        shared=shared,
        lines=stays,
    )
