"""The steps of every request: into the queue, onto runners, off them, over. All other modules use these steps."""

from weft.domain.ids import BASE
from weft.domain.machine import Kind, Peer
from weft.domain.request import Allotment, Assign, Preempt, Reject, RejectReason, TokenRunner
from weft_scheduler.core.effects import KvHandOff, Resumed
from weft_scheduler.core.model.request import Phase, Placement, Request
from weft_scheduler.core.model.runner import RunnerAccount, UnackedAssign, pages_of
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind

LOAD_BYTES_PER_S = 1 << 30  # rate of a cold adapter's load, as its tenant is charged: a disk or a network of 10 Gbit/s


def take_in(state: State, pool: Pool, request: Request) -> None:
    """Know a request from now on."""
    state.requests[request.id] = request
    state.gateways[request.gateway].add(request.id, pool.name)
    pool.waiting.add(request)


def enqueue(state: State, pool: Pool, request: Request) -> None:
    """Put a request into its pool's queue, in its place by age."""
    request.enqueue(state.now, state.config.same_class_s)
    if request.waiting.lane:
        state.timers.set(Timer(TimerKind.CLASS_WAIT, request.id), request.classes.awaited_until)
    pool.waiting.enqueue(request, pool.work_per_s if pool.waiting.queue.policy.ages else 0.0)
    state.mark_schedulable(pool.name, ())


def charge(pool: Pool, request: Request, runner: RunnerAccount) -> None:
    """Charge a request's tenant for what it is expected to cost on a runner, and for a cold load there."""
    load_tokens = 0.0
    if not runner.accounts.has_adapter(request.adapter):
        load_s = pool.adapters.size(request.adapter)[1] / LOAD_BYTES_PER_S
        load_tokens = load_s * pool.scaling.autoscaler.throughput.per_s()
    pool.waiting.charge(request, load_tokens)


def migrate(state: State, pool: Pool, request: Request, target: RunnerAccount) -> None:
    """Let a running request go on at another runner, with its KV, under a new epoch."""
    assert target.spec is not None
    request.classes.keep()
    release(state, request)
    request.assign(state.numbers.next_epoch(), Placement(target.id))
    add_to_runners(state, pool, request)
    send_assign(state, pool, request, kv_address=target.spec.kv_address)


def send_assign(
    state: State, pool: Pool, request: Request, *, delay_s: float = 0.0, kv_address: str = "",
    parks: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Send a gateway the new runner of a request. `kv_address`: the target of the present runner's KV.

    `parks`: sequences that make room for it.
    """
    placement, reserved, (rank, size) = request.placement, request.reservation, pool.adapters.size(request.adapter)
    assert placement is not None
    runner, last = state.runners[placement.prompt.uuid], state.runners[placement.last.uuid]
    spec, token = runner.spec, last.spec
    assert spec is not None
    assert token is not None
    described = TokenRunner(last.id, token.address, token.kv_address, token.numerics_class)
    message = Assign(
        request_id=request.id,
        epoch=request.epoch,
        runner=runner.id,
        address=spec.address,
        reservation_tokens=reserved.output_tokens,
        numerics_class=spec.numerics_class,
        allotment=Allotment(rank, size, delay_s, reserved.by_page, reserved.leaves, reserved.stays, parks),
        token_runner=described if placement.token is not None else None,
        kv_address=kv_address,
    )
    state.timers.set(Timer(TimerKind.ASSIGN_TIMEOUT, request.id), state.now + state.config.assign_s)
    state.send(state.gateways[request.gateway].peer, message)
    if request.classes.latest:
        state.emit(Resumed(request.id, pool.name, last.id, request.classes.latest, last.shape.numerics_class))


def add_to_runners(state: State, pool: Pool, request: Request, parks: tuple[str, ...] = ()) -> None:
    """Enter a placed request in its runners' accounts. `parks`: sequences that make room for it."""
    assert request.placement is not None
    for runner_id in request.placement.runners:
        runner = state.runners.present(runner_id)
        if runner is not None:
            account(runner, request, pool, parks)
            if parks:
                count_parked(state, runner)
            if runner.spec is not None:
                state.pool(runner.spec.pool).fleet.update(runner)
    runner = state.runners.present(request.runner)
    request.classes.assign(runner.spec.numerics_class if runner is not None and runner.spec is not None else "")
    pool.waiting.count_running(request, 1)
    if runner is not None and request.id in runner.accounts.parked.ids and not request.batch:
        pool.waiting.shares.park(request.tenant, request.id, parked=True)
    state.mark_dirty(pool.name)


def count_parked(state: State, runner: RunnerAccount) -> bool:
    """Count the requests that a runner parks, or parks no more, in their pools' shares. True if there are any."""
    parked = runner.accounts.parked
    changed = parked.take_changed()
    for request_id in changed:
        request = state.requests.get(request_id)
        if request is not None and request.placed and request.runner == runner.id and not request.batch:
            shares = state.pool(request.pool).waiting.shares
            shares.park(request.tenant, request_id, parked=request_id in parked.ids)
    return bool(changed)


def account(runner: RunnerAccount, request: Request, pool: Pool, parks: tuple[str, ...] = ()) -> None:
    """Count a request's pages on a runner, and its adapter's, unless the runner's last report counts this epoch.

    A prompt runner has the prompt and the first token until the token runner has taken over.
    """
    placement = request.placement
    assert placement is not None
    hands_off = placement.token is not None and runner.id == placement.prompt
    pages = with_adapter = 0
    if runner.spec is not None:
        first_tokens, adapter = min(request.tokens.prefill + 1, request.tokens.context), request.adapter
        tokens = first_tokens if hands_off else request.reservation.held_tokens
        pages = with_adapter = pages_of(tokens, runner.spec.page_tokens)
        if adapter != BASE and adapter not in runner.accounts.busy_adapters(pool.adapters.pinned):
            total_tokens = runner.shape.tokens_with_adapter(tokens, pool.adapters.size(adapter)[1])
            with_adapter = pages_of(total_tokens, runner.spec.page_tokens)
    computed = request.tokens.prefill if runner.id == placement.prompt else 0
    assign = UnackedAssign(request.epoch, pages, request.adapter, with_adapter - pages, computed, request.batch, parks)
    runner.accounts.own(request.id, assign)
    runner.accounts.expect(request.id, None if hands_off else request.reservation.forecast, request.tokens.emitted)


def hand_off(state: State, request: Request) -> None:
    """Leave a request to its token runner: the prompt runner has nothing of it any more, whatever it last reported."""
    prompt = request.hand_off()
    if prompt is None:
        return
    runner, is_same_runner = state.runners.present(prompt), True
    if runner is None and request.phase is Phase.STOPPING and state.runners.present(request.runner) is not None:
        request.keep()  # it was stopped for the loss of a runner that it did not need any more
        state.timers.clear(Timer(TimerKind.ASSIGN_TIMEOUT, request.id))
    if runner is not None:
        is_same_runner = runner.shape.numerics_class == request.classes.assigned
        runner.accounts.disown(request.id)
        state.update_runner(runner)
    state.pool(request.pool).scaling.roles.handed_off()
    state.emit(KvHandOff(request.id, request.pool, "same" if is_same_runner else "across"))


def acknowledge(state: State, request: Request) -> None:
    """Record that a request has started, or is in a report."""
    if request.acknowledge():
        state.timers.clear(Timer(TimerKind.ASSIGN_TIMEOUT, request.id))


def stop(state: State, request: Request) -> None:
    """End a request's epoch: await the gateway's Failed, which has the exact number of emitted tokens."""
    request.stop()
    state.timers.set(Timer(TimerKind.ASSIGN_TIMEOUT, request.id), state.now + state.config.assign_s)


def preempt(state: State, request: Request) -> None:
    """Order a request off its runner. The order counts at once, because the gateway's answer may never come."""
    request.reservation.preempt(state.config.max_preemptions)
    order_off(state, request)


def order_off(state: State, request: Request) -> None:
    """Order a request off: its runner stops it, and its gateway says so."""
    stop(state, request)
    state.send(state.gateways[request.gateway].peer, Preempt(request.id, request.epoch))


def release(state: State, request: Request) -> None:
    """Take a request off its runners. Reported sequences stay counted until the next reports."""
    state.timers.clear(Timer(TimerKind.ASSIGN_TIMEOUT, request.id))
    state.pool(request.pool).waiting.count_running(request, -1)
    for runner_id in request.release().runners:
        runner = state.runners.present(runner_id)
        if runner is not None:
            runner.accounts.disown(request.id)
            state.update_runner(runner)


def overran(pool: Pool, request: Request) -> None:
    """Count a request that has lost its memory, only for the first time."""
    if request.reservation.lose_memory() and request.reservation.forecast is not None:
        pool.fleet.margin.overran()


def drop(state: State, request: Request, output_tokens: int = 0) -> None:
    """Forget an ended request, or a request of a lost gateway. Only reports of its runners remain.

    `output_tokens`: tokens of its answer, where its gateway has sent them.
    """
    pool = state.pool(request.pool)
    pool.waiting.settle(request, max(output_tokens, request.tokens.emitted))
    if request.phase is Phase.WAITING:
        pool.waiting.dequeue(request)
    if request.placed:
        release(state, request)
    for kind in (TimerKind.AVOIDANCE, TimerKind.CLASS_WAIT):
        state.timers.clear(Timer(kind, request.id))
    draining = pool.adapters.draining.get(request.adapter) if pool.waiting.remove(request) else None
    if draining is not None and request.adapter != BASE:
        timer = Timer(TimerKind.ADAPTER_DRAIN, pool.name, request.adapter)
        state.timers.set(timer, draining.grace_until)
    del state.requests[request.id]
    state.gateways[request.gateway].remove(request.id, pool.name)
    state.mark_schedulable(pool.name, () if request.batch or request.tenant in pool.waiting.shares.tenants else None)


def reject(state: State, request: Request, reason: RejectReason, message: str, retry_after_ms: int = 0) -> None:
    """Reject a request. A running request is stopped on its runner first."""
    gateway = Peer(Kind.GATEWAY, request.gateway)
    if request.placed:
        state.send(gateway, Preempt(request.id, request.epoch))
    state.send(gateway, Reject(request.id, reason, message, retry_after_ms))
    drop(state, request)
